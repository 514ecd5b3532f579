"""Network namespaces of tasks, joined by a bridge: hosts that can be cut off, on one machine.

Addresses and packet filters are in the namespaces alone, and go with them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress

SUBNET = "10.99.0"
SUBNET6 = "fd99:"
# As a host that loses the network: nothing goes in or out, and no peer gets notice.
CUT = """
table inet cut {
  chain input { type filter hook input priority 0; policy drop; iif lo accept; }
  chain output { type filter hook output priority 0; policy drop; oif lo accept; }
}
"""


def missing() -> str:
    """Say why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if lacking:
        return f"there is no {' and no '.join(lacking)}"
    try:
        Networks(["probe"]).end()
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class Networks:
    """A namespace for each name; the first one has the bridge."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        try:
            for name in names:
                self._ip("netns", "add", self.namespace(name))
                self._ip("-n", self.namespace(name), "link", "set", "lo", "up")
            hub = self.namespace(names[0])
            self._ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            self._up(names[0], "bridge")
            for number, name in enumerate(names[1:], 1):
                end = ("netns", self.namespace(name))
                self._ip("link", "add", f"veth{number}", "netns", hub, "type", "veth", "peer", "name", "eth0", *end)
                self._ip("-n", hub, "link", "set", f"veth{number}", "master", "bridge", "up")
                self._up(name, "eth0")
        except subprocess.CalledProcessError:
            self.end()
            raise

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self._names.index(name) + 1}"

    def address6(self, name: str) -> str:
        return f"{SUBNET6}:{self._names.index(name) + 1:x}"

    def under(self, name: str) -> tuple[str, ...]:
        """Return the command that runs another one in the namespace, as the same process."""
        return ("ip", "netns", "exec", self.namespace(name))

    def set(self, key: str, value: str) -> None:
        """Set a sysctl of the network in every namespace."""
        for name in self._names:
            run(*self.under(name), "sh", "-c", f"echo {value} >/proc/sys/net/{key}")

    def cut(self, name: str) -> None:
        run(*self.under(name), "nft", "-f", "-", text=CUT)

    def restore(self, name: str) -> None:
        run(*self.under(name), "nft", "delete", "table", "inet", "cut")

    def end(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)

    def _up(self, name: str, link: str) -> None:
        namespace = self.namespace(name)
        self._ip("-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", link)
        self._ip("-n", namespace, "addr", "add", f"{self.address6(name)}/64", "dev", link, "nodad")
        self._ip("-n", namespace, "link", "set", link, "up")

    def namespace(self, name: str) -> str:
        """What `ip netns` knows the namespace by."""
        return f"psfleet-bench-{os.getpid()}-{name}"

    def _ip(self, *arguments: str) -> None:
        run("ip", *arguments)


def run(*command: str, text: str = "") -> None:
    subprocess.run(command, input=text, text=True, capture_output=True, check=True)


def free_ports(number: int, lowest: int) -> int:
    """Return the first of so many ports in a row, from `lowest` on, that nobody has."""
    for first in range(lowest, lowest + 5000, number):
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + number):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError(f"no {number} ports in a row are free from {lowest} on")
