"""A disk with a cache that a power failure empties: `/usr/bin/python3 volatile_disk.py MOUNTPOINT MIB LOG`.

MOUNTPOINT/disk is what a loop device lies on. LOG gets each write, in order, and a line for each flush: what was
written before a flush is on the disk after it, of what came later the cache may have written any part, or nothing.
Needs Debian's python3-fusepy, and nothing of this project.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

import fusepy as fuse  # the name that Debian gives it

NAME = "/disk"


class VolatileDisk(fuse.Operations):
    """The one file, and who has written what to it."""

    def __init__(self, size: int, log: str) -> None:
        self._bytes = bytearray(size)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path == NAME:
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": len(self._bytes)}
        raise fuse.FuseOSError(errno.ENOENT)

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", NAME[1:]]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._bytes[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._bytes[offset : offset + len(data)] = data
        os.write(self._log, b"write %d %d\n" % (offset, len(data)) + data)
        return len(data)

    def fsync(self, path: str, datasync: Any, fh: int) -> int:
        os.write(self._log, b"flush\n")
        return 0


if __name__ == "__main__":
    mountpoint, mebibytes, log = sys.argv[1:]
    disk = VolatileDisk(int(mebibytes) << 20, log)
    fuse.FUSE(disk, mountpoint, foreground=True, nothreads=True, big_writes=True)
