#!/usr/bin/python
"""Ask a host what its packet filter must know of it: how people log in, who else filters, what members are called.

Changes nothing. Fails where the kernel has no packet filter, or no SSH server is found to be left open.

Returns:
    nft: Path of nft, which PATH may lack. Empty where it is not installed.
    first: Whether no table was confirmed here yet.
    ssh_ports: Ports on which SSH is running, and the one through which this module came.
    login_uid: Number of the user who logged in. 0 where that was root, or there is no session of SSH.
    scraper_uid: Number of the user `prometheus`, which scrapes. None where there is no such user.
    name_servers: Addresses of the name servers.
    resolved: Each name's addresses. A name that is unknown has none.
    peers: Other hosts that have a connection to a guarded port open, as `port` and `address`.
    vpn: The VPN that the login came through and that ends here (`device`, `kind`, `ports`). Else empty.
    listening: What listens for other hosts, as `port/protocol program`.
    others: Other programs that filter packets, and are running.
    unread: Whether systemd has yet to read what a run wrote that was broken off then.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.basic import AnsibleModule

SERVICES = ("firewalld", "docker")
SSH_SERVERS = ("sshd", "dropbear")
UFW = Path("/etc/ufw/ufw.conf")
# Which get drop-ins of the role's.
UNITS = ("trainer@*", "tensorboard.service", "nftables.service")
VPNS = ("wireguard", "tun")  # as ip names the kinds of devices
SSH_UNITS = ("ssh.socket", "sshd.socket")  # systemd listens, and starts an sshd for each connection


def others(states: str, ufw: str) -> list[str]:
    """Return who else filters, by `systemctl is-active` of SERVICES and the settings of ufw, where it is installed.

    ufw's unit says nothing: it is active where ufw is off, as Ubuntu has it, and inactive from `ufw enable` on.
    """
    found = [name for name, state in zip(SERVICES, states.split(), strict=False) if state == "active"]
    return [*found, *(["ufw"] if "enabled=yes" in ufw.lower().split() else [])]


class ListeningSocket(NamedTuple):
    """A socket on which something listens."""

    protocol: str
    address: str
    port: int
    program: str
    pids: tuple[int, ...]
    uid: int


def session(pid: int, processes: Path = Path("/proc")) -> tuple[str, int]:
    """Return SSH_CONNECTION (client, its port, server, its port) and the user of the login that a process belongs to.

    The outermost process that has the variable is the login's shell: sudo has it too, as root, and takes it away from
    its own children. Above the shell is the server, which may have been started by another login. Empty, and 0, where
    there is no such login.
    """
    found = "", 0
    while pid > 1:
        process = processes / str(pid)
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            program, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
            user = process.stat().st_uid
        except OSError:
            break
        if program.startswith(SSH_SERVERS):
            break
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"SSH_CONNECTION":
                found = value.decode(), user
        pid = int(rest.split()[1])
    return found


def listeners(output: str) -> list[ListeningSocket]:
    """Read `ss -Hlntupe`."""
    found = []
    for line in output.splitlines():
        fields = line.split()
        address, _, port = fields[4].rpartition(":")
        program = re.search(r'users:\(\("([^"]*)"', line)
        pids = tuple(map(int, re.findall(r"pid=(\d+)", line)))
        user = re.search(r" uid:(\d+)", line)  # root's is not named
        found.append(
            ListeningSocket(
                fields[0],
                address.strip("[]"),
                int(port),
                program[1] if program else "",
                pids,
                int(user[1]) if user else 0,
            )
        )
    return found


def ssh_ports(found: Iterable[ListeningSocket], sockets: str, connection: str) -> list[int]:
    """Return SSH's ports: a running sshd's, those that systemd holds for it, and the one through which this came.

    What a user has sshd listen on (`ssh -R`, X11) is the user's, and no port of SSH's.
    """
    ports = {
        each.port
        for each in found
        if each.protocol == "tcp" and each.program in SSH_SERVERS and not each.uid and not is_local(each.address)
    }
    for unit in sockets.split("\n\n"):
        if "ActiveState=active" in unit.split("\n"):
            ports |= {int(port) for port in re.findall(r"^Listen=(?:.*:)?(\d+) \(Stream\)", unit, re.MULTILINE)}
    return sorted(ports | ({int(connection.split()[3])} if connection else set()))


def is_local(address: str) -> bool:
    """Whether only the host itself can reach what listens there."""
    return address.startswith(("127.", "::ffff:127.")) or address.partition("%")[0] == "::1" or address.endswith("%lo")


def peers(output: str, guarded: Iterable[int]) -> list[dict[str, Any]]:
    """Read `ss -Hnt state established`: who has a connection to a guarded port open."""
    ports = set(guarded)
    found = set()
    for line in output.splitlines():
        here, there = (end.rpartition(":") for end in line.split()[2:4])
        port, address = int(here[2]), there[0].strip("[]")
        if port in ports and here[0] != there[0] and not is_local(address):
            ip = ipaddress.ip_address(address.partition("%")[0])
            found.add((port, str(getattr(ip, "ipv4_mapped", None) or ip)))
    return [{"port": port, "address": address} for port, address in sorted(found)]


def holders(device: str, processes: Path = Path("/proc")) -> set[int]:
    """Return the processes that a tun device leads to."""
    found = set()
    for process in processes.glob("[0-9]*"):
        try:
            if any(f"iff:\t{device}\n" in each.read_text() for each in (process / "fdinfo").iterdir()):
                found.add(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def vpn(module: Any, client: str, found: Iterable[ListeningSocket]) -> dict[str, Any]:
    """Say through which VPN that ends on this host a client comes, and on which ports it comes in; else nothing."""
    ip = module.get_bin_path("ip")
    if not ip or not client:
        return {}
    _, output, _ = module.run_command([ip, "-json", "route", "get", client.partition("%")[0]])
    device = client.partition("%")[2] or next((each.get("dev", "") for each in json.loads(output or "[]")), "")
    _, output, _ = module.run_command([ip, "-json", "-details", "link", "show", "dev", device or "lo"])
    links = [each for each in json.loads(output or "[]") if each]
    kind = next((each.get("linkinfo", {}).get("info_kind", "") for each in links), "")
    if kind not in VPNS:
        return {}
    open_to_others = [each for each in found if not is_local(each.address)]
    if kind == "tun":
        pids = holders(device)
        ports = {f"{each.port}/{each.protocol}" for each in open_to_others if pids & set(each.pids)}
    else:
        # The kernel's own sockets have no program.
        ports = {f"{each.port}/udp" for each in open_to_others if each.protocol == "udp" and not each.program}
        if wg := module.get_bin_path("wg"):
            code, output, _ = module.run_command([wg, "show", device, "listen-port"])
            ports = ports if code else {f"{output.strip()}/udp"}
    return {"device": device, "kind": kind, "ports": sorted(ports)}


def name_servers(text: str) -> list[str]:
    """Return the name servers of a resolv.conf, without zones."""
    return [match.partition("%")[0] for match in re.findall(r"^\s*nameserver\s+(\S+)", text, re.MULTILINE)]


def addresses_of(name: str) -> list[str]:
    """Return what the host's resolver has for a name, and nothing where it is sure that there is no such name."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            return []
        raise


def uid_of(name: str) -> int | None:
    """Return the number of a user of this host, or None."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def read_or_nothing(path: Path) -> str:
    """Return a file's text; nothing where it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def resolve(module: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the addresses of each name, and fail where the host's resolver does not answer."""
    resolved = {}
    for name in names:
        try:
            resolved[name] = addresses_of(name)
        except OSError as error:
            module.fail_json(
                msg=f"this host's resolver does not answer for {name}: {error.strerror}; expected its addresses, or "
                f"that there is no such name. A table without them would shut that member out. Look with `getent "
                f"ahosts {name}`, fix the name servers, and run site.yml again"
            )
    return resolved


def find_nft(module: Any) -> str:
    """Return the path of nft, empty where check mode has yet to install it; fail where it can't be used."""
    there = module.get_bin_path("nft")
    code, _, error = module.run_command([there, "list", "tables"]) if there else (1, "", "it is not installed")
    if code and not (module.check_mode and not there):  # check mode has not installed it
        module.fail_json(
            msg=f"nft can't be used here: {error.strip()}; expected the package nftables (common_packages has it) and "
            "a kernel that lets root filter packets. Or leave this host open: firewall_closes: none"
        )
    return there or ""


def facts(module: Any, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the host, and fail where it can't be closed safely."""
    nft = find_nft(module)
    ss = module.get_bin_path("ss", required=True)
    _, output, _ = module.run_command([ss, "-Hlntupe"], check_rc=True)
    _, established, _ = module.run_command([ss, "-Hnt", "state", "established"], check_rc=True)
    _, sockets, _ = module.run_command(["systemctl", "show", "--property=Listen,ActiveState", *SSH_UNITS])
    _, active, _ = module.run_command(["systemctl", "is-active", *(f"{name}.service" for name in SERVICES)])
    _, unread, _ = module.run_command(["systemctl", "show", "--value", "--property=NeedDaemonReload", *UNITS])
    ufw = read_or_nothing(UFW) if module.get_bin_path("ufw") else ""
    connection, login = session(os.getpid())
    found = listeners(output)
    ports = ssh_ports(found, sockets, connection)
    if not ports:
        module.fail_json(
            msg="no SSH server is running here, and none would be left open; expected sshd among what `ss -lntp` lists"
        )
    resolved = resolve(module, environment["names"])
    resolver = read_or_nothing(Path("/etc/resolv.conf"))
    return {
        "nft": nft,
        "first": not Path(environment["kept"]).exists(),
        "ssh_ports": ports,
        "login_uid": login,
        "scraper_uid": uid_of("prometheus"),
        "name_servers": name_servers(resolver),
        "resolved": resolved,
        "peers": peers(established, environment["guarded"]),
        "vpn": vpn(module, connection.partition(" ")[0], found),
        "listening": sorted(
            {f"{each.port}/{each.protocol} {each.program}".strip() for each in found if not is_local(each.address)}
        ),
        "others": others(active, ufw),
        "unread": "yes" in unread.split(),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Members that are known by a name. The host's own resolver is asked, since its packets go
            # there.
            "names": {"type": "list", "elements": "str", "required": True},
            # Ports that the table closes to all others, also where connections are open already.
            "guarded": {"type": "list", "elements": "int", "required": True},
            # The table's file once it is confirmed.
            "kept": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **facts(module, module.params))


if __name__ == "__main__":
    main()
