"""What memory this process may take, and whether a whole model fits into it."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.core.failures import UserError

GIB = 1024**3


def memory_limit() -> int:
    """Return the bytes that this process may take at most: the machine's, or its control groups' where that is less."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    own = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(encoding="ascii"), re.MULTILINE)
    group = Path("/sys/fs/cgroup") / (own[1].lstrip("/") if own else "")
    for place in (group, *group.parents):
        try:
            limits.append(int((place / "memory.max").read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def memory_available() -> int:
    """Return the bytes that this machine can give out now: free ones, and those that only cache files."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return int(available[1]) * 1024 if available else memory_limit()


def check_room(needed: int, what: str, mend: str, *, now: bool = False) -> None:
    """Raise UserError, with the sizes, when a model of so many bytes can't lie in this host's memory as a whole.

    With `now` it may take no more than the others on the machine leave at the moment.
    """
    limit = min(memory_limit(), memory_available()) if now else memory_limit()
    if needed > limit:
        raise UserError(
            f"{what} holds the whole model in one process, {needed / GIB:.1f} GiB of variables, and this host lets it "
            f"take {limit / GIB:.1f} GiB: {mend}"
        )
