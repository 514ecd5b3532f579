"""The memory of processes, as /proc/<pid>/smaps_rollup has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Resident memory, MiB: `alone` is what it would be on a host with no other process of TensorFlow's."""

    rss: float
    pss: float
    alone: float


def read_memory(*pids: int) -> ProcessMemory:
    """Return the memory of a task's processes together: of a supervisor and its child."""
    each = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        each.append({line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines})
    own = sum(one["Pss_Anon"] for one in each)
    # The files of one are those of the other, which was forked from it.
    files = max(one["Rss"] - one["Anonymous"] for one in each)
    return ProcessMemory(sum(one["Rss"] for one in each), sum(one["Pss"] for one in each), own + files)
