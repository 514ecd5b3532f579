"""What memory this process may take, and whether a whole model fits into it."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.core.failures import UserError

GIB = 1024**3


# Of control groups of either version: how a process's group is named, where groups lie, and the limit's file.
GROUPS = (
    (re.compile(r"^0::(.*)$", re.MULTILINE), "sys/fs/cgroup", "memory.max"),
    (re.compile(r"^\d+:memory:(.*)$", re.MULTILINE), "sys/fs/cgroup/memory", "memory.limit_in_bytes"),
)


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes that this process may take at most: the machine's, or its control groups' where that is less."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    groups = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    for pattern, place, name in GROUPS:
        own = pattern.search(groups)
        group = root / place / (own[1].lstrip("/") if own else "")
        for each in (group, *group.parents):
            try:
                limits.append(int((each / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return min(limits)


def memory_available() -> int:
    """Return the bytes that this machine can give out now: free ones, and those that only cache files."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return int(available[1]) * 1024 if available else memory_limit()


def room(*, now: bool = False) -> int:
    """Return the bytes that this process may take; with `now`, those that the others leave at the moment at most."""
    return min(memory_limit(), memory_available()) if now else memory_limit()


def check_room(needed: int, what: str, fix: str, *, now: bool = False) -> None:
    """Raise UserError, with the sizes, when so many bytes of a model can't lie in this host's memory: see `room`."""
    if needed > (limit := room(now=now)):
        raise UserError(
            f"{what} holds up to {needed / GIB:.1f} GiB of variables, and this host lets it take "
            f"{limit / GIB:.1f} GiB: {fix}"
        )
