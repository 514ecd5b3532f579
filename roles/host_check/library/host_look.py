#!/usr/bin/python
"""Look at a host as the others will meet it: its system, room and clock, the others' names, its packets' address.

Changes nothing, sends nothing and needs no rights. The kernel is asked for its routes. Says as which user it looks.

Returns:
    problems: What would stop the training, each with its fix.
    uid: The user that looks, by number.
    cluster: Which cluster the host says it belongs to, with `name`, `since` and `who`; empty for none.
    listeners: By each of `ports` where a process listens its `name`, `pid`, `unit` and `address`. Root sees them all.
    pace: What host_pace has noted since the host booted; empty for nothing.
    notes: What is right, and may surprise.
"""

from __future__ import annotations

import grp
import ipaddress
import json
import os
import platform
import pwd
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# Beyond that, signed lists of packages and certificates may count as expired, or as not yet good.
CLOCK_SECONDS = 600
NAME_SECONDS = 3.0  # fab gives a host 30 s for an answer, and most take several sudos
MAX_NAMED = 3
IPV6_OFF = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
CLUSTER = Path("/var/lib/psfleet/cluster.json")
PACE = Path("/run/psfleet-pace.json")
USER = "trainer"
HOME = "/var/lib/trainer"
MACHINE = "x86_64"
FAMILIES = {"debian", "ubuntu"}  # as ID or ID_LIKE of os-release(5)
WRITTEN = ("etc", "opt", "usr", "var")
HOMES = ("/home", "/root", "/run/user")  # as ProtectHome= of systemd.exec(5) has them
PORT = 9  # of no service: nothing is sent there
RELEASES = "opt/trainer"
# Which one of these a host has where psfleet was before.
SIGNS = ("var/lib/psfleet", "opt/trainer/signers", "usr/local/sbin/psfleet-check-release")
# Bytes and files that must be free: for an environment, for packages, and for small files and systemd (16 MiB of /run).
ENVIRONMENT, PACKAGES, SMALL = (2 * 10**9, 30_000), (50 * 10**6, 1000), (20 * 10**6, 100)

Resolve = Callable[[str], list[str]]
Source = Callable[[str], str]


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, reachable ones first, or an address itself; none where the resolver has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))
    except OSError:
        return []


def source_to(address: str) -> str:
    """Return from which address packets to another one leave; raises OSError where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, PORT))
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Whether an interface of this host has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:  # a kernel without IPv6 has no such socket
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def route_to(address: str) -> str:
    """Say the kernel's route in the words of ip(8), for a message; empty where there is no such command."""
    try:
        done = subprocess.run(["ip", "-oneline", "route", "get", address], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.replace("\\", " ").split()).removesuffix(" cache")


def clock_problem(name: str, here: float, there: float) -> str | None:
    """Say by how much a clock is wrong, in the unit that fits."""
    apart = abs(here - there)
    if apart <= CLOCK_SECONDS:
        return None
    size, unit = next((size, unit) for size, unit in ((86400, "days"), (3600, "h"), (60, "min")) if apart >= size)
    return (
        f"host '{name}': its clock is {apart / size:.1f} {unit} {'behind' if here < there else 'ahead of'} the control "
        f"machine's; expected {CLOCK_SECONDS // 60} min at most: packages' signatures would count as not good. Set it: "
        "`timedatectl set-ntp true`, or `date --set`; a container has the clock of its machine"
    )


def way_problems(
    name: str, members: Mapping[str, str], resolve: Resolve = resolve, source: Source = source_to
) -> tuple[list[str], list[str]]:
    """Say which ways to the others are wrong, and what of this host's own address may surprise.

    Args:
        name: the host's own.
        members: the address, or name, of each host.
        resolve: what a name means here.
        source: where packets to an address leave from.
    """
    if name not in members:  # in the group gpu alone, whose hosts call no other
        return [], []
    own = [each for each in resolve(members[name]) if not _is_loopback(each)]
    loopback = [host for host in members if any(map(_is_loopback, resolve(members[host])))]
    problems = [_loopback_problem(name, host, members[host]) for host in loopback if host != name]
    wrong: dict[str, list[tuple[str, str]]] = {}
    for host, address in members.items():
        found = [] if host == name or host in loopback else resolve(address)
        for each in found[:1]:
            try:
                leaves = source(each)
            except OSError as error:
                problems.append(_unreached(name, host, each, error))
                continue
            if own and leaves not in own:
                wrong.setdefault(leaves, []).append((host, each))
    notes = [] if own or name not in loopback else [_own_name(name, members[name])]
    foreign = [address for address in own if not is_own(address)]
    if wrong and foreign == own:
        notes.append(_translated(name, members[name], next(iter(wrong))))
    elif wrong:
        problems += [_source_problem(name, members[name], leaves, others) for leaves, others in wrong.items()]
    return problems, notes


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _loopback_problem(name: str, host: str, address: str) -> str:
    return (
        f"host '{name}': {address}, the name of {host}, means a loopback address here; expected the address of that "
        f"host. Fix /etc/hosts, or give {host} a literal cluster_address"
    )


def _own_name(name: str, address: str) -> str:
    return (
        f"host '{name}': its own name {address} means a loopback address here, as Debian's installer and cloud-init "
        "write it to /etc/hosts: what listens under that name alone, such as a task's metrics, others can't reach. "
        "A literal cluster_address fixes it"
    )


def _translated(name: str, address: str, leaves: str) -> str:
    return (
        f"host '{name}': no interface has its address {address}, and packets leave from {leaves}: right where a router "
        "translates it for all the others, else no host would let it in"
    )


def _unreached(name: str, host: str, address: str, error: OSError) -> str:
    return (
        f"host '{name}': it has no way to {host} at {address}: {error.strerror}; expected a route. Look: `ip route get "
        f"{address}`; addresses of both families in one cluster need both on each host"
    )


def _source_problem(name: str, own: str, leaves: str, others: list[tuple[str, str]]) -> str:
    hosts = ", ".join(host for host, _ in others[:MAX_NAMED])
    hosts += f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
    address = others[0][1]
    route = route_to(address)
    shown = f" (`ip route get`: {route})" if route else ""
    return (
        f"host '{name}': its packets to {hosts} leave from {leaves}{shown}, and the others know it as {own}, which "
        f"alone they let in; expected packets from {own}. Name {leaves} as its cluster_address; or have its routes "
        f"take the other one, as in: ip route replace {_network(route, address)} src {own}, and the same in the "
        "network's configuration"
    )


def _network(route: str, address: str) -> str:
    """Name a route to change, as far as the kernel's answer has its parts."""
    words = route.split()
    parts = [f"{key} {words[words.index(key) + 1]}" for key in ("via", "dev") if key in words[:-1]]
    return " ".join([address, *parts])


def tunnel_problem(name: str, address: str, setting: Path = IPV6_OFF) -> str | None:
    """Say that a new interface can't have its address: hardened hosts often have IPv6 switched off."""
    try:
        is_off = setting.read_text(encoding="ascii").strip() != "0"
    except FileNotFoundError:  # a kernel without IPv6
        is_off = True
    if ":" not in address or not is_off:
        return None
    return (
        f"host '{name}': its tunnel is to have the address {address}, and IPv6 is off here; expected "
        f"net.ipv6.conf.default.disable_ipv6 = 0, also in /etc/sysctl.d. Or give all hosts a wireguard_network of IPv4 "
        "such as 10.213.0.0/24, and each a wireguard_address in it"
    )


def system_problems(name: str, trains: bool, root: Path = Path("/"), machine: str = platform.machine()) -> list[str]:
    """Say what of the host's system no role can change."""
    found = []
    if trains and machine != MACHINE:
        found.append(f"its processor is of {machine}; expected {MACHINE}, which TensorFlow's wheels are for")
    try:
        release = dict(line.split("=", 1) for line in (root / "etc/os-release").read_text().splitlines() if "=" in line)
    except OSError:
        release = {}
    known = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".replace('"', " ").replace("'", " ").split()
    if not FAMILIES & {*known}:
        title = release.get("PRETTY_NAME", "unknown").strip('"')
        found.append(f"its system is {title}; expected Debian or Ubuntu")
    if not (root / "run/systemd/system").is_dir():  # as sd_booted(3) has it
        found.append(
            "systemd did not begin it, as in a container of an application; expected systemd as its first process, "
            "whose units the tasks are. Rent a whole machine, or begin the container with /sbin/init"
        )
    fixed = [each for each in WRITTEN if (root / each).is_dir() and os.statvfs(root / each).f_flag & os.ST_RDONLY]
    if fixed:
        found.append(f"its /{' and /'.join(fixed)} can't be written; expected a system that packages can be added to")
    return [f"host '{name}': {each}" for each in found]


def python_problem(name: str, prefix: str) -> str | None:
    """Say that the tasks can't see the Python that their environment would be made of, as of pyenv."""
    place = os.path.realpath(prefix)
    home = next((each for each in HOMES if place.startswith(f"{each}/")), None)
    if home is None:
        return None
    return (
        f"host '{name}': Ansible's Python there is of {place}, and tasks see nothing below {home}; expected one "
        "elsewhere, as the distribution's. Name it in the inventory: ansible_python_interpreter: /usr/bin/python3"
    )


def room_problems(name: str, trains: bool, root: Path = Path("/")) -> list[str]:
    """Say which file systems are too full for what is written there; each once, by its first place."""
    bare = trains and not any((root / RELEASES / "envs").glob("[!.]*"))
    needed = {RELEASES: ENVIRONMENT if bare else PACKAGES, "usr": PACKAGES, "var": PACKAGES, "etc": SMALL, "run": SMALL}
    found, seen = [], set()
    for place, (size, files) in needed.items():
        path = next(each for each in (root / place, *(root / place).parents) if each.exists())
        if (device := path.stat().st_dev) in seen:
            continue
        seen.add(device)
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        what = f"{free / 1e6:,.0f} MB free; expected {size / 1e6:,.0f}" if free < size else ""
        if not what and disk.f_files and disk.f_favail < files:
            what = f"room for {disk.f_favail:,} more files; expected {files:,}"
        if what:
            use = "du -xh" if free < size else "du -x --inodes"
            found.append(f"host '{name}': {path} has {what}. Free some there: `{use} {path} | sort -h | tail`")
    return found


def stranger_problem(name: str, root: Path = Path("/")) -> str | None:
    """Say that others' files are where psfleet has its releases, which it removes when they are old."""
    place = root / RELEASES
    if not place.is_dir() or any((root / sign).exists() for sign in SIGNS):
        return None
    others = sorted({each.name for each in place.iterdir()} - {"lost+found"})[:MAX_NAMED]  # that is a disk's own
    if not others:
        return None
    return (
        f"host '{name}': its {place} is not of psfleet, and has {', '.join(others)}; expected none, since old releases "
        "are removed there. Move it elsewhere"
    )


def listeners(ports: Iterable[int]) -> dict[str, dict[str, str]]:
    """Return by port the process that listens there: its name, number, unit and address."""
    wanted, found = {*map(str, ports)}, dict[str, dict[str, str]]()
    try:
        printed = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, timeout=10).stdout if wanted else ""
    except (OSError, subprocess.TimeoutExpired):
        printed = ""
    for line in printed.splitlines():
        words = line.split()
        address, _, port = words[3].rpartition(":") if len(words) > 3 else ("", "", "")
        process = re.search(r'\("([^"]+)",pid=(\d+)', line)
        if port in wanted and process:
            name, pid = process.groups()
            found[port] = {"name": name, "pid": pid, "unit": unit_of(pid), "address": address.strip("[]")}
    return found


def unit_of(pid: str) -> str:
    """Return the unit whose control group a process is in; empty where that is unknown."""
    try:
        parts = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition(":")[2].split("/")
    except OSError:
        return ""
    return next((part for part in reversed(parts) if part.endswith(".service")), "")


def user_problems(name: str, number: int) -> list[str]:
    """Say which other user or group has the name, or the number, that the tasks' user is to have."""
    own, by_number = _known(pwd.getpwnam, USER), _known(pwd.getpwuid, number)
    group, group_by_number = _known(grp.getgrnam, USER), _known(grp.getgrgid, number)
    found = []
    if own and own.pw_dir != HOME:
        found.append(
            f"host '{name}': it has a user {USER} already, with the number {own.pw_uid} and the home {own.pw_dir}, who "
            f"would lose home and shell to the training tasks; expected none. Rename it; or where nobody uses it: "
            f"userdel {USER}"
        )
    elif group and not own and group.gr_gid != number:
        found.append(
            f"host '{name}': it has a group {USER} already, with the number {group.gr_gid}; expected none, or one with "
            f"cluster_uid, {number}. Rename it; or where nobody uses it: groupdel {USER}"
        )
    others = [f"user {by_number.pw_name}"] if by_number and by_number.pw_name != USER else []
    others += [f"group {group_by_number.gr_name}"] if group_by_number and group_by_number.gr_name != USER else []
    if others:
        found.append(
            f"host '{name}': cluster_uid is {number}, the number of its {' and of its '.join(others)}; expected one "
            f"that is free for {USER}. Give all hosts another, free on each: see `getent passwd` and `getent group`"
        )
    return found


def own_name_problem(
    name: str, own: str, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic
) -> str | None:
    """Say that each sudo waits for a name server that does not answer: sudo looks up the machine's own name."""
    began = clock()
    resolve(own)
    took = clock() - began
    if took < NAME_SECONDS:
        return None
    return (
        f"host '{name}': to look up its own name {own} takes {took:.0f} s, and each sudo waits for that; expected an "
        f"answer at once. Put the line `127.0.1.1 {own}` into /etc/hosts, and look at the servers in /etc/resolv.conf"
    )


def sudo_problem(name: str, login: str) -> str | None:
    """Say that a login becomes root alone: what the tasks' user owns is written as that user."""
    if not login or login == "root":
        return None
    other = USER if _known(pwd.getpwnam, USER) else "nobody"
    asked = ["sudo", "-n", "-l", "-U", login, "-u", other, "/bin/sh"]
    try:
        allowed = subprocess.run(asked, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # no sudo, or one that asks a server: later steps say more
        allowed = True
    if allowed:
        return None
    return (
        f"host '{name}': its sudo lets {login} become root alone; expected any user, as {USER} too: put the line "
        f"`{login} ALL=(ALL) NOPASSWD: ALL` into /etc/sudoers.d/psfleet"
    )


def _known(ask: Callable[[Any], Any], what: str | int) -> Any:
    try:
        return ask(what)
    except KeyError:
        return None


def check_host(
    name: str, members: Mapping[str, str], now: float, tunnel: str = "", number: int = 0, trains: bool = False
) -> tuple[list[str], list[str]]:
    """Look at everything; return problems and notes."""
    problems, notes = way_problems(name, members)
    if number:
        sudo = sudo_problem(name, os.environ.get("SUDO_USER", ""))
        own = own_name_problem(name, socket.gethostname())
        system = [*system_problems(name, trains), *room_problems(name, trains), *_some(stranger_problem(name))]
        system += _some(python_problem(name, sys.base_prefix) if trains else None)
        problems = [*system, *_some(sudo), *_some(own), *user_problems(name, number), *problems]
    return [*_some(clock_problem(name, time.time(), now)), *_some(tunnel_problem(name, tunnel)), *problems], notes


def noted(file: Path) -> dict[str, Any]:
    """Return what a file notes; empty where that is missing or damaged."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _some(text: str | None) -> Iterable[str]:
    return [text] if text else []


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The host's own name in `members`.
            "name": {"type": "str", "required": True},
            # The addresses, or names, by which the hosts reach one another, by the hosts' names.
            "members": {"type": "dict", "required": True},
            # The control machine's clock, in seconds since the epoch.
            "now": {"type": "float", "required": True},
            # The host's address in the encrypted tunnel; empty without encryption.
            "tunnel": {"type": "str", "default": ""},
            # The number that user and group of the training tasks are to have; 0 where they are not needed.
            "number": {"type": "int", "default": 0},
            # Whether TensorFlow runs there.
            "trains": {"type": "bool", "default": False},
            # Ports whose listeners are wanted.
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    ports = module.params.pop("ports")
    problems, notes = check_host(**module.params)
    known = {"cluster": noted(CLUSTER), "pace": noted(PACE), "listeners": listeners(ports)}
    module.exit_json(changed=False, problems=problems, notes=notes, uid=os.geteuid(), **known)


if __name__ == "__main__":
    main()
