#!/usr/bin/python
"""Keep the kernel from giving a task's port to a connection that leaves the host.

A port in the kernel's range for such connections (`net.ipv4.ip_local_port_range`) may be taken when a task starts. The
kernel leaves out what `net.ipv4.ip_local_reserved_ports` lists, for IPv6 too. That is one list for the whole host. What
others have put there stays.

Returns:
    reserved: The whole list, as the kernel writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

KEY = "net.ipv4.ip_local_reserved_ports"
OURS = "# Of psfleet's tasks: "


def read_ports(text: str) -> set[int]:
    """Read a list of ports and ranges, such as 2222,2400-2402."""
    ports: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        ports |= set(range(int(first), int(last or first) + 1))
    return ports


def write_ports(ports: Iterable[int]) -> str:
    """Write ports as the kernel does, neighbours as a range."""
    ranges: list[list[int]] = []
    for port in sorted(ports):
        if ranges and port == ranges[-1][1] + 1:
            ranges[-1][1] = port
        else:
            ranges.append([port, port])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def plan(kernel: str, file: str, ports: Iterable[int]) -> tuple[str, str]:
    """Return the kernel's list and the file as they are to be; the file is empty where there is nothing to keep.

    Args:
        kernel: the kernel's list as it is.
        file: the file as it is; empty where there is none.
        ports: those of the tasks.
    """
    before = next((line for line in file.splitlines() if line.startswith(OURS)), "")
    ours = set(ports)
    reserved = (read_ports(kernel) - read_ports(before.removeprefix(OURS))) | ours
    text = f"{OURS}{write_ports(ours)}\n{KEY} = {write_ports(reserved)}\n" if ours else ""
    return write_ports(reserved), text


def keep(path: Path, text: str) -> None:
    """Have the file say so, whatever root's umask is."""
    if not text:
        path.unlink(missing_ok=True)
        return
    partial = path.with_name(f".{path.name}.new")
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o644)
    partial.replace(path)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The ports to keep. Those that were kept before, and are not in the list, are given back.
            "ports": {"type": "list", "elements": "int", "required": True},
            # The file that says it again at each boot.
            "file": {"type": "path", "default": "/etc/sysctl.d/99-psfleet-ports.conf"},
            # Where the kernel has its list.
            "kernel": {"type": "path", "default": "/proc/sys/net/ipv4/ip_local_reserved_ports"},
        },
        supports_check_mode=True,
    )
    path, kernel = Path(module.params["file"]), Path(module.params["kernel"])
    file = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        now = kernel.read_text().strip()
    except OSError as error:
        module.warn(f"{kernel} can't be read ({error.strerror}): the tasks' ports are not kept from other connections")
        module.exit_json(changed=False, reserved="")
    wanted, text = plan(now, file, module.params["ports"])
    changed = read_ports(now) != read_ports(wanted) or file != text
    if changed and not module.check_mode:
        keep(path, text)
        if os.access(kernel, os.W_OK):
            kernel.write_text(f"{wanted}\n")
        else:
            module.warn(
                f"{kernel} can't be written, as in a container: the tasks' ports are kept from the next boot on"
            )
    module.exit_json(changed=changed, reserved=wanted)


if __name__ == "__main__":
    main()
