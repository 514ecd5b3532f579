"""A part of a processor for a task of this machine, by a control group: as slow as a host of its own would be."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Microseconds. In each of these the task has its part, and then waits: shorter than a step.
PERIOD = 20_000
# The most that there is of each version: other work of this machine comes behind.
SHARES, WEIGHT = "262144", "10000"


class NoControlGroup(SystemExit):
    """No control group can be made here; ends a bench with the reason."""


@contextlib.contextmanager
def part_of_a_processor(part: float | None, pids: Iterable[int]) -> Iterator[None]:
    """Give these processes, with what they fork, so much of a processor together, or what they like, before all others.

    Raises NoControlGroup where there are none, as without root.
    """
    version_1 = ROOT / "cpu"
    top = version_1 if version_1.is_dir() else ROOT
    group = top / f"psfleet-bench-{os.getpid()}-{time.monotonic_ns()}"
    quota = str(round(part * PERIOD)) if part else None
    try:
        if top == ROOT:
            (top / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    except OSError as error:
        raise NoControlGroup(
            f"bench: no control group can be made, which takes root and writable control groups: {error}"
        ) from error
    try:
        if top == ROOT:
            (group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD}")
            (group / "cpu.weight").write_text(WEIGHT)
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(quota or "-1")
            (group / "cpu.shares").write_text(SHARES)
        for pid in map(str, pids):
            (group / "cgroup.procs").write_text(pid)
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (top / "cgroup.procs").write_text(pid)
        group.rmdir()
