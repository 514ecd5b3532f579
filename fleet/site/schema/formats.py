"""The grammars of an inventory's texts. Each function raises ValueError, which says what is wrong with the text."""

from __future__ import annotations

import base64
import getopt
import ipaddress
import re
import shlex
import string
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from trainer.core.settings.formats import NO_URL, URL

MAX_HOST_NAME = 64
MAX_PATH = 200  # systemd's name of a mount, in which a dash takes four characters, has room for 255
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
_LOCAL_NAME = re.compile(
    r"(.+\.)?localhost(\.localdomain|6|4)?|localhost[46]\.localdomain[46]|ip6-(localhost|loopback)"
)

# Directories of the system: what is in them is not the cluster's either.
SYSTEM_TREES = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/efi",
        "/etc",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/lost+found",
        "/proc",
        "/run",
        "/sbin",
    ),
    *(
        "/snap",
        "/sys",
        "/usr",
        "/var/backups",
        "/var/cache",
        "/var/crash",
        "/var/lib",
        "/var/lock",
        "/var/log",
        "/var/mail",
    ),
    *("/var/run", "/var/spool", "/var/www"),
)
# They hold others' directories, and a directory of the cluster's own may lie in them.
SYSTEM_PLACES = ("/", "/media", "/mnt", "/opt", "/srv", "/var", "/var/local", "/var/opt", "/var/lib/trainer")
# What the tasks' units hide from them (ProtectHome, PrivateTmp) or leave in memory.
HIDDEN_TREES = ("/home", "/root", "/tmp", "/var/tmp")
RELEASES = "/opt/trainer"
# Options of OpenSSH that say where or as whom to connect. Paramiko can't follow them from Ansible's variables, and
# leaving them out would reach another host than Ansible does.
ROUTE_OPTIONS = (
    *("hostkeyalias", "hostname", "identityfile", "port", "proxycommand", "proxyjump", "user"),
    *("-J", "-i", "-l", "-p", "-F", "-W"),
)
# Those with which ssh logs in and does something else than it is asked to, or doesn't log in.
OTHER_OPTIONS = (
    *("forkafterauthentication", "include", "localcommand", "remotecommand", "requesttty", "sessiontype", "stdinnull"),
    *("-f", "-G", "-n", "-N", "-O", "-Q", "-s", "-t", "-V"),
)
# All of ssh(1)'s flags, with a colon after those that take a value.
_SSH_FLAGS = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"
OWN_TREE = "/var/lib/trainer"


def address(text: str) -> str:
    """Return an address in its one spelling: IPv4, IPv6, or a name of RFC 1123 in lower case.

    A loopback address is one: `is_loopback` tells. Raises ValueError for anything else that no other host can reach.
    """
    if not text or text != text.strip() or any(character.isspace() for character in text):
        raise ValueError("it has blanks" if text.strip() else "it is empty")
    if "{{" in text or "{%" in text:
        raise ValueError("a template or a fact would render a smaller cluster when a run is limited to some hosts")
    if "://" in text:
        raise ValueError("it is a URL: leave out all but the address")
    if "%" in text:
        raise ValueError("an address with a zone holds on one host alone")
    if "/" in text:
        raise ValueError("it is a network: leave out the slash and what follows")
    if text.startswith("-"):
        raise ValueError("a program would take it for an option")
    if text.startswith("[") or text.endswith("]"):
        raise ValueError("leave out the brackets")
    if "@" in text:
        raise ValueError("leave out the login; ansible_user names it")
    if ":" in text:
        return _ip(_ipv6(text))
    # The kernel's reader of addresses takes 10.1, 0x0a000001 and 010.0.0.1; what it makes of them is never meant.
    if all(re.fullmatch("[0-9]*|0[xX][0-9a-fA-F]*", label) for label in text.split(".")):
        try:
            return _ip(ipaddress.IPv4Address(text))
        except ipaddress.AddressValueError as error:
            raise ValueError("it is no IPv4 address: four numbers from 0 to 255, without zeros before them") from error
    return _name(text)


def host_address(text: str) -> str:
    """Return a host's own address, which it must have again after its next start."""
    found = address(text)
    if re.fullmatch(r"169\.254\.[0-9.]+", found):
        raise ValueError("a link-local address holds on one link: a machine gives itself one where it was given none")
    return found


def _ipv6(text: str) -> ipaddress.IPv6Address:
    try:
        return ipaddress.IPv6Address(text)
    except ipaddress.AddressValueError as error:
        host, _, port = text.rpartition(":")
        if port.isdigit() and ":" not in host:
            raise ValueError("leave out the port; ansible_port and worker_port are for that") from error
        raise ValueError("it is no IPv6 address") from error


def _ip(found: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped:
            raise ValueError(f"write it as {found.ipv4_mapped}")
        if found.is_link_local:
            raise ValueError("a link-local address holds on one link, and needs a zone")
    if found.is_unspecified or (isinstance(found, ipaddress.IPv4Address) and str(found).startswith("0.")):
        raise ValueError("it stands for no host")
    if found.is_multicast:
        raise ValueError("it is a multicast address")
    if isinstance(found, ipaddress.IPv4Address) and found.is_reserved:
        raise ValueError("it is a broadcast address" if str(found) == "255.255.255.255" else "it is reserved")
    return str(found)


def _name(text: str) -> str:
    if "*" in text or "?" in text:
        raise ValueError("a wildcard names no host")
    if text.endswith("."):
        raise ValueError("leave out the dot at its end")
    if not text.isascii():
        raise ValueError("a host's name has letters from a to z; write another alphabet's as xn--")
    labels = text.split(".")
    wrong = next((label for label in labels if not _LABEL.fullmatch(label)), None)
    if wrong is not None or len(text) > 253:
        raise ValueError(
            "a host's name has parts of 1 to 63 letters, digits and dashes, none at a part's end, with dots between, "
            "and 253 characters at most"
        )
    if labels[-1].isdigit():
        raise ValueError("the last part of a host's name is no number")
    return text.lower()


def is_loopback(text: str) -> bool:
    """Whether an address, in its one spelling, means the host that asks."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return _LOCAL_NAME.fullmatch(text) is not None


def host_name(text: str) -> str:
    """Return a host's name in the inventory, which becomes part of files' names and of shell scripts."""
    if not text.isascii() or not _HOST_NAME.fullmatch(text) or ".." in text:
        raise ValueError(
            "it may have letters from a to z, digits, dots, dashes and underscores, none of them at an end"
        )
    if len(text) > MAX_HOST_NAME:
        raise ValueError(f"it is {len(text)} characters long; {MAX_HOST_NAME} are the most")
    if text in ("all", "ungrouped"):
        raise ValueError("Ansible has a group of this name")
    return text


def own_directory(text: str) -> str:
    """Return the absolute path of a directory of the cluster's own, which needs no quotes anywhere."""
    if URL.fullmatch(text):
        raise ValueError(NO_URL)
    if not text.startswith("/"):
        raise ValueError("it is a server's export: mount it, and name where" if ":/" in text else "it is not absolute")
    if text != "/" and (not _PATH.fullmatch(text) or any(part in (".", "..") for part in text.split("/"))):
        raise ValueError("it has other characters than letters, digits, dots and dashes, or is not normalised")
    if text.startswith("/."):
        raise ValueError("systemd's name of a mount has no dot at its beginning")
    if len(text) > MAX_PATH:
        raise ValueError(f"it is {len(text)} characters long; {MAX_PATH} are the most")
    if hidden := next((tree for tree in HIDDEN_TREES if is_within(text, tree)), None):
        raise ValueError(f"the tasks' units have no access to {hidden}")
    if is_within(text, RELEASES):
        raise ValueError(f"{RELEASES} has the releases")
    if text in SYSTEM_PLACES:
        raise ValueError(f"it is a directory of the system. Take one below it: {text.rstrip('/')}/trainer")
    if not is_within(text, OWN_TREE) and (tree := next((t for t in SYSTEM_TREES if is_within(text, t)), None)):
        raise ValueError(f"{tree} is the system's")
    return text


def is_within(path: str, tree: str) -> bool:
    """Whether a path is a directory or lies below it; both are normalised."""
    return PurePosixPath(path).is_relative_to(tree)


def control_path(text: str) -> str:
    """Return a path of the control machine, where it is no option and fits into one line."""
    if text.startswith("-"):
        raise ValueError("a program would take it for an option; write ./ before it")
    if any(not character.isprintable() for character in text):
        raise ValueError("it has characters that can't be printed")
    if "{{" in text or "{%" in text:
        raise ValueError("it is a template that was not rendered")
    if text != text.strip():
        raise ValueError("it has blanks at an end")
    if len(text) > 4000:
        raise ValueError("it is longer than 4000 characters")
    if any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError("a part of it is longer than 255 bytes, and no file has such a name")
    return text


def network(text: str) -> str:
    """Return a network as chrony and exports(5) take it."""
    if "%" in text:  # Python takes any text behind it for a zone
        raise ValueError("a network with a zone holds on one host alone")
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(str(error) if "host bits" in str(error) else "it is no network") from error


def tunnel_network(text: str) -> str:
    """Return a network of private addresses with room for hosts."""
    found = ipaddress.ip_network(network(text))
    unusable = found.is_loopback or found.is_link_local or found.is_multicast or found.is_reserved
    if not found.is_private or unusable or str(found).startswith("0."):
        raise ValueError("it is no private network, so its addresses belong to others")
    if found.max_prefixlen - found.prefixlen < 2:
        raise ValueError("it has no room for hosts")
    return str(found)


def ip_address(text: str) -> str:
    """Return a host's address of numbers."""
    found = host_address(text)
    try:
        return str(ipaddress.ip_address(found))
    except ValueError as error:
        raise ValueError("it is a name") from error


def url(text: str) -> str:
    """Return the http or https address of an archive of packages."""
    if not re.fullmatch(r"https?://[A-Za-z0-9._~:/@%+,=-]{1,500}", text):
        raise ValueError(
            "it has other characters than an archive's address, or does not begin with http:// or https://"
        )
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError("leave out the login: everybody on the host may read it")
    if not parts.hostname:
        raise ValueError("it names no host")
    address(parts.hostname)
    try:
        assert parts.port != 0
    except (ValueError, AssertionError) as error:
        raise ValueError("its port is none from 1 to 65535") from error
    return text


def port_text(text: str) -> str:
    """Return a port that is written as text, as INI files and tags have it."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text) or int(text) > 65535:
        raise ValueError("it is no port")
    return text


def port_range(text: str) -> str:
    """Return a row of ports, by the first and the last."""
    match = re.fullmatch("([1-9][0-9]{0,4})-([1-9][0-9]{0,4})", text)
    if not match or not int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError("it is no row of ports, the first and the last with a dash between")
    return text


def command_template(text: str) -> str:
    """Return a command in one line, in which {host} and {address} alone are filled in."""
    if any(not character.isprintable() for character in text):
        raise ValueError("it has characters that can't be printed")
    for _, name, form, conversion in string.Formatter().parse(text):
        if name is not None and (name not in ("host", "address") or form or conversion):
            raise ValueError(f"it has {{{name}{'!' if conversion else ':' if form else ''}")
    if not _words(text):
        raise ValueError("it is blank")
    return text


def ssh_arguments(text: str) -> str:
    """Return arguments for ssh, none of which changes the way to the host, or has ssh do something else there."""
    for option in ssh_options(text):
        if option in OTHER_OPTIONS:
            raise ValueError(f"with {option} ssh would not run what it is given")
        if option in ROUTE_OPTIONS:
            raise ValueError(f"{option} changes the way to the host: put it into ~/.ssh/config")
    return text


def ssh_options(text: str) -> dict[str, str]:
    """Read OpenSSH's `-o Name=value` and its flags for a route: {name in lower case, or flag: value}."""
    try:
        flags, rest = getopt.getopt(_words(text), _SSH_FLAGS)
    except getopt.GetoptError as error:
        raise ValueError(f"ssh would refuse it: {error}") from error
    if rest:
        raise ValueError(f"ssh would take {rest[0][:60]} for the host's name")
    options: dict[str, str] = {}
    for flag, value in flags:
        if flag in (*ROUTE_OPTIONS, *OTHER_OPTIONS):
            options[flag] = value
        if flag == "-o":
            name, *words = re.split(r"\s*=\s*|\s+", value.strip(), maxsplit=1)
            options.setdefault(name.strip('"').lower(), "".join(words))
    return options


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError("a quotation mark in it has no other") from error


def mount_options(text: str) -> str:
    """Return the options of an NFS mount of psfleet's server, on which a write that failed must not count as done."""
    for each in text.split(","):
        name, _, value = each.partition("=")
        if name in ("soft", "softerr"):
            raise ValueError(
                f"with {each} a server that is away for long makes writes fail, and what was written may be lost in "
                "silence; write hard"
            )
        if name == "ro":
            raise ValueError("with ro no task could write a checkpoint; leave it out")
        if name in ("vers", "nfsvers") and value not in ("4", "4.2"):
            raise ValueError(f"psfleet's server speaks no other version of NFS than 4.2; write {name}=4.2")
        if name == "port" and value != "2049":
            raise ValueError("psfleet's server listens on 2049; leave port out")
    return text


def export_options(text: str) -> str:
    """Return the options of an export whose answer to a client means that the data is on the disk."""
    options = text.split(",")
    if "async" in options:
        raise ValueError("with async a server that loses its power loses checkpoints that count as saved; write sync")
    if "ro" in options:
        raise ValueError("with ro no task could write a checkpoint; write rw")
    return text


def public_key(text: str) -> str:
    """Return a public SSH key, a line of a .pub file."""
    if "PRIVATE KEY" in text:
        raise ValueError("it is a private key, which stays where it is: the .pub file beside it is meant")
    if not re.fullmatch(r"(ssh|sk|ecdsa)-[\w.@-]+ [A-Za-z0-9+/]+=*( [^\n]*)?", text):
        raise ValueError("it is no line of a .pub file")
    kind, content, *comment = text.split(" ", 2)
    try:
        key = base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError("its second word is no whole key: copy the line again") from error
    if not key.startswith(len(kind).to_bytes(4, "big") + kind.encode()) or len(key) < len(kind) + 36:
        raise ValueError(f"its second word is no key of {kind}, or a part of one: copy the line again")
    if not "".join(comment).isprintable():
        raise ValueError("its comment has characters that can't be printed")
    return text


FORMATS = {
    "address": address,
    "command-template": command_template,
    "control-path": control_path,
    "export-options": export_options,
    "host-address": host_address,
    "ip-address": ip_address,
    "mount-options": mount_options,
    "network": network,
    "own-directory": own_directory,
    "port-range": port_range,
    "port-text": port_text,
    "public-key": public_key,
    "ssh-arguments": ssh_arguments,
    "tunnel-network": tunnel_network,
    "url": url,
}
