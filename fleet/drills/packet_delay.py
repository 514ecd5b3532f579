"""Have what this host sends to an address come later: `packet_delay.py ADDRESS MILLISECONDS NAME`, as root of the host.

A table of nftables marks the packets, a rule routes what is marked to a TUN device, and this process sends each one
again when it is due. The mark comes after the filters, which see each packet at the device by which it will leave.
The device goes with its process: with SIGKILL, too, all packets take their own way again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque

# <linux/if_tun.h>
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Also the number of the routing table. A packet that was late is marked so that it is not late twice.
MARK, WAS_LATE = 27307, 27308
PLACES = {4: slice(16, 20), 6: slice(24, 40)}  # of a packet's destination


def main(address: str, milliseconds: float, name: str) -> None:
    family = 6 if ":" in address else 4
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    unmark(name, family)
    try:
        mark(address, name, family)
        announce()
        forward(device, address, family, milliseconds / 1000)
    finally:
        unmark(name, family)


def mark(address: str, name: str, family: int) -> None:
    # Large enough for every packet, as the kernel cuts none for its sake.
    run("ip", "link", "set", name, "mtu", "65535", "txqueuelen", "10000", "up")
    run("ip", f"-{family}", "route", "add", "default", "dev", name, "table", str(MARK))
    run("ip", f"-{family}", "rule", "add", "fwmark", str(MARK), "table", str(MARK))
    rule = f"{'ip6' if family == 6 else 'ip'} daddr {address} meta mark != {WAS_LATE} counter meta mark set {MARK}"
    chain = f"chain late {{\n type route hook output priority 300;\n {rule}\n }}"
    run("nft", f"table inet {name} {{\n {chain}\n}}")


def unmark(name: str, family: int) -> None:
    """Take back what `mark` did, and what was left by a process that was killed."""
    run("nft", f"table inet {name}; delete table inet {name}")
    while run("ip", f"-{family}", "rule", "del", "fwmark", str(MARK), "table", str(MARK), check=False):
        pass


def announce() -> None:
    """Tell systemd, and a reader of the output, that packets come late."""
    print("late", flush=True)
    if place := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(b"READY=1", place.replace("@", "\0", 1))


def forward(device: int, address: str, family: int, seconds: float) -> None:
    """Send each packet for the address again when it is due."""
    kind = socket.AF_INET6 if family == 6 else socket.AF_INET
    target = socket.inet_pton(kind, address)
    waiting: deque[tuple[float, bytes]] = deque()
    with socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW) as way:
        way.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, WAS_LATE)
        while True:
            left = waiting[0][0] - time.monotonic() if waiting else None
            if left is None or left > 0:
                if select.select([device], [], [], left)[0]:
                    packet = os.read(device, 65536)
                    # The kernel greets the routers of each new device.
                    if packet[PLACES[family]] == target:
                        waiting.append((time.monotonic() + seconds, packet))
                continue
            # What can't be sent is lost, as packets are.
            with contextlib.suppress(OSError):
                way.sendto(waiting.popleft()[1], (address, 0))


def run(*command: str, check: bool = True) -> bool:
    quiet = None if check else subprocess.DEVNULL
    return subprocess.run(command, check=check, stderr=quiet).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
