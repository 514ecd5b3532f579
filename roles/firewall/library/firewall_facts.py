#!/usr/bin/python
"""Ask a host what its packet filter must know of it: how people log in, who else filters, what members are called."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: firewall_facts
short_description: Ask a host what its packet filter must know of it
description:
  - Changes nothing. Fails where the kernel has no packet filter, or no SSH server is found to be left open.
options:
  names:
    description: Members that are known by a name. The host's own resolver is asked, since its packets go there.
    type: list
    elements: str
    required: true
author:
  - psfleet
"""
EXAMPLES = r"""
- name: Ask the host what its packet filter must know
  firewall_facts:
    names: [node-1.example.org]
"""
RETURN = r"""
ssh_ports:
  description: Ports on which SSH is running, and the one through which this module came.
  type: list
  returned: success
login_uid:
  description: Number of the user who logged in. 0 where that was root, or nobody came through SSH.
  type: int
  returned: success
name_servers:
  description: Addresses of the name servers.
  type: list
  returned: success
resolved:
  description: Each name's addresses. A name that is unknown has none.
  type: dict
  returned: success
listening:
  description: What listens for other hosts, as C(port/protocol program).
  type: list
  returned: success
others:
  description: Other programs that filter packets, and are running.
  type: list
  returned: success
"""
OTHERS = ("firewalld", "ufw", "docker")
SSH_UNITS = ("ssh.socket", "sshd.socket")  # systemd listens, and starts an sshd for each connection


def session(pid: int, processes: Path = Path("/proc")) -> tuple[str, int]:
    """Return SSH_CONNECTION (client, its port, server, its port) and the user of the login that a process belongs to.

    sudo takes the variable away: the shell above it has it still. Empty, and 0, where there is no such login.
    """
    while pid > 1:
        process = processes / str(pid)
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"SSH_CONNECTION":
                return value.decode(), process.stat().st_uid
        pid = parent
    return "", 0


def listeners(said: str) -> list[tuple[str, str, int, str]]:
    """Read `ss -Hlntup` as (protocol, address, port, program)."""
    found = []
    for line in said.splitlines():
        fields = line.split()
        address, _, port = fields[4].rpartition(":")
        program = re.search(r'users:\(\("([^"]*)"', line)
        found.append((fields[0], address.strip("[]"), int(port), program[1] if program else ""))
    return found


def ssh_ports(found: Iterable[tuple[str, str, int, str]], sockets: str, connection: str) -> list[int]:
    """Return SSH's ports: a running sshd's, those that systemd holds for it, and the one through which this came."""
    ports = {port for protocol, _, port, program in found if protocol == "tcp" and program in ("sshd", "dropbear")}
    for unit in sockets.split("\n\n"):
        if "ActiveState=active" in unit.split("\n"):
            ports |= {int(port) for port in re.findall(r"^Listen=(?:.*:)?(\d+) \(Stream\)", unit, re.MULTILINE)}
    return sorted(ports | ({int(connection.split()[3])} if connection else set()))


def is_local(address: str) -> bool:
    """Whether nobody but the host itself can reach what listens there."""
    return address.startswith("127.") or address.partition("%")[0] in ("::1", "[::ffff:127.0.0.1]") or "%lo" in address


def name_servers(text: str) -> list[str]:
    """Return the name servers of a resolv.conf, without zones."""
    return [match.partition("%")[0] for match in re.findall(r"^\s*nameserver\s+(\S+)", text, re.MULTILINE)]


def addresses_of(name: str) -> list[str]:
    """Return what the host's resolver has for a name, and nothing where it has nothing."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def facts(module: Any, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the host, and fail where it can't be closed safely."""
    there = module.get_bin_path("nft")
    code, _, error = module.run_command(["nft", "list", "tables"]) if there else (1, "", "it is not installed")
    if code and not (module.check_mode and not there):  # in check mode nobody has installed it
        module.fail_json(
            msg=f"nft can't be used here: {error.strip()}; expected the package nftables (common_packages has it) and "
            "a kernel that lets root filter packets. Or leave this host open: firewall_closes: none"
        )
    _, said, _ = module.run_command(["ss", "-Hlntup"], check_rc=True)
    _, sockets, _ = module.run_command(["systemctl", "show", "--property=Listen,ActiveState", *SSH_UNITS])
    _, active, _ = module.run_command(["systemctl", "is-active", *(f"{name}.service" for name in OTHERS)])
    connection, login = session(os.getpid())
    found = listeners(said)
    ports = ssh_ports(found, sockets, connection)
    if not ports:
        module.fail_json(
            msg="no SSH server is running here, and none would be left open; expected sshd among what `ss -lntp` lists"
        )
    try:
        resolver = Path("/etc/resolv.conf").read_text()
    except OSError:
        resolver = ""
    return {
        "ssh_ports": ports,
        "login_uid": login,
        "name_servers": name_servers(resolver),
        "resolved": {name: addresses_of(name) for name in environment["names"]},
        "listening": sorted(
            {f"{port}/{protocol} {program}".strip() for protocol, at, port, program in found if not is_local(at)}
        ),
        "others": [name for name, state in zip(OTHERS, active.split(), strict=False) if state == "active"],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={"names": {"type": "list", "elements": "str", "required": True}}, supports_check_mode=True
    )
    module.exit_json(changed=False, **facts(module, module.params))


if __name__ == "__main__":
    main()
