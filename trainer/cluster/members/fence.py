"""End this process's connections to a member that is silent, so that TensorFlow gets an error instead of waiting.

TensorFlow waits for a member that froze or lost its network for as long as the connection stands. The coordinator knows
which member is silent. Its connections are shut again and again, new ones too: each call fails with UNAVAILABLE. The
heartbeat's own sockets are left alone, or a member that is back would not be heard: they have a TCP_USER_TIMEOUT of
their own. Servers don't hear of silent members: their kernel ends what is not acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

from trainer.cluster.members.heartbeat import MARK

PERIOD_SECONDS = 0.05


class Fence:
    """Keeps a thread that shuts the connections to the addresses that it is told."""

    def __init__(self, silent: Callable[[], Collection[str]]) -> None:
        """Take what returns the addresses (host:port) of the members that are silent now."""
        self._silent = silent
        self._end = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._keep, name="fence", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _keep(self) -> None:
        while not self._end.wait(PERIOD_SECONDS):
            if silent := self._silent():
                with contextlib.suppress(OSError):  # as of a process that can open no more files
                    shut(*silent)


def shut(*addresses: str) -> int:
    """Shut this process's connections to each host:port, whatever their state; returns how many."""
    others: set[str] = set()
    for address in addresses:
        with contextlib.suppress(socket.gaierror):  # a name server may be away with the network
            others |= ends(address)
    wanted = inodes(others)
    return sum(shut_descriptor(int(name), wanted) for name in os.listdir("/proc/self/fd")) if wanted else 0  # noqa: PTH208


@cache
def ends(address: str) -> frozenset[str]:
    """Return how the kernel's tables of connections write host:port as the other end."""
    host, _, port = address.rpartition(":")
    found: set[str] = set()
    for family, *_, end in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
        packed = socket.inet_pton(family, str(end[0]))
        written = "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
        found.add(f"{written}:{int(port):04X}")
        if family == socket.AF_INET:  # gRPC's sockets are IPv6 where the machine has it
            mapped = struct.unpack("=I", b"\0\0\xff\xff")[0]
            found.add(f"{0:016X}{mapped:08X}{written}:{int(port):04X}")
    return frozenset(found)


def inodes(wanted: Collection[str]) -> set[str]:
    """Return the sockets of this network namespace whose other end is one of these."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), Path(f"/proc/self/net/{name}").open() as table:
            next(table)
            found.update(row[9] for row in map(str.split, table) if row[2] in wanted)
    return found


def shut_descriptor(descriptor: int, wanted: Collection[str]) -> bool:
    """Shut the socket, if it is one of these and not the heartbeat's; returns whether."""
    with contextlib.suppress(OSError), opened(descriptor, wanted) as copy:
        if copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) != MARK:
            copy.shutdown(socket.SHUT_RDWR)
            return True
    return False


def limit_waits(seconds: float) -> int:
    """Have this process's TCP connections end when nothing of what they send is acknowledged for so long.

    Left alone, one that was cut off sends again ever more rarely, and stands for minutes after the network is back.
    Those that have such a limit keep it. Returns how many have got one.
    """
    return sum(limit_descriptor(int(name), seconds) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208


def limit_descriptor(descriptor: int, seconds: float) -> bool:
    with contextlib.suppress(OSError), opened(descriptor) as copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if is_tcp and not copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
            return True
    return False


@contextlib.contextmanager
def opened(descriptor: int, wanted: Collection[str] | None = None) -> Iterator[socket.socket]:
    """Give the socket at this descriptor; raises OSError when there is none, or none of those wanted (inodes)."""
    link = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    match = re.fullmatch(r"socket:\[(\d+)\]", link)
    if match is None or (wanted is not None and match[1] not in wanted):
        raise OSError(f"descriptor {descriptor} is {link}")
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # another one has the descriptor by now
        os.close(copy)
        raise
    with found:
        yield found
