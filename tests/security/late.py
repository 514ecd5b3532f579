"""Have what this host sends to an address come later: `python late.py ADDRESS MILLISECONDS`, as root.

A stand-in for the kernel's netem, for kernels without it. A TUN device takes the packets; this process keeps each one
for so long, and the kernel forwards it then by the host's own device, which is eth0.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

DEVICE, TABLE = "late", "77"
# <linux/if_tun.h>
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Packets with an address of this host's own come in by the device.
SYSCTLS = ("ip_forward", "conf/all/accept_local", f"conf/{DEVICE}/accept_local")
FILTERS = ("conf/all/rp_filter", f"conf/{DEVICE}/rp_filter")


def main(address: str, milliseconds: float) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for names, value in ((SYSCTLS, "1"), (FILTERS, "0")):
        for name in names:
            Path("/proc/sys/net/ipv4", name).write_text(value)
    [source] = subprocess.check_output(["hostname", "-I"], text=True).split()[:1]
    for words in (
        f"link set {DEVICE} up",
        f"route add {address} dev eth0 table {TABLE}",
        f"rule add iif {DEVICE} table {TABLE}",
        f"route add {address} dev {DEVICE} src {source}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    threading.Thread(target=forward, args=(device, waiting), daemon=True).start()
    print("late", flush=True)
    while True:
        packet = os.read(device, 65536)
        waiting.put((time.monotonic() + milliseconds / 1000, packet))


def forward(device: int, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        due, packet = waiting.get()
        time.sleep(max(0.0, due - time.monotonic()))
        os.write(device, packet)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
