"""What psfleet keeps of the speed of workers that differ: one of them is slower, and each step varies by 30 %.

A speed is the steps that a worker begins, divided by the time between two of these moments, added up over the workers.
It is compared with what each worker does alone, with a coordinator of its own on the same server, in the same run.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from bench.tables import print_row
from bench.tasks import LocalCluster, write_settings

PROGRAM = "bench.programs:Uneven"
WORKERS = (2, 4)
STEPS = (0.05, 0.5, 1.0, 6.0)
SLOWER = (1, 2, 4, 10)
WARM_SECONDS = 5.0  # in which calls reach their size
POLL_SECONDS = 0.2
ASKED = 0.95


class UnevenWorkers:
    """Coordinators on one cluster of local servers, one after the other, each with its first few workers."""

    def __init__(self, cluster: LocalCluster, directory: Path, *, quick: bool) -> None:
        self._cluster = cluster
        self._directory = directory
        self._quick = quick
        self._runs = itertools.count()
        self._alone: dict[tuple[float, float], float] = {}

    def ratio(self, workers: int, step_seconds: float, slower: float) -> tuple[float, float]:
        """Return what the workers do together (steps/s), and its share of what they do alone."""
        alone = (workers - 1) * self._speed_alone(step_seconds, 1) + self._speed_alone(step_seconds, slower)
        together = self._speed(workers, step_seconds, slower)
        return together, together / alone

    def _speed_alone(self, step_seconds: float, slower: float) -> float:
        key = step_seconds, slower
        if key not in self._alone:
            self._alone[key] = self._speed(1, step_seconds, slower)
        return self._alone[key]

    def _speed(self, workers: int, step_seconds: float, slower: float) -> float:
        run = f"uneven-{next(self._runs)}"
        begun = self._directory / f"{run}-steps"
        begun.mkdir()
        task = self._cluster.start(
            "chief",
            0,
            settings=write_settings(self._directory, run, PROGRAM, steps=10**9, evaluation="none"),
            workers=workers,
            BENCH_STEPS=str(begun),
            BENCH_STEP_SECONDS=str(step_seconds),
            BENCH_SLOWER=str(slower),
        )
        slowest = step_seconds * slower
        at_least, fast, slow = (8, 8, 2) if self._quick else (15, 20, 3)
        seconds = max(at_least, fast * step_seconds, slow * slowest)
        try:
            # Each worker's first step is one in a first call.
            task.until(lambda: len(counted(begun)) == workers, "each worker began a step")
            time.sleep(max(WARM_SECONDS, 1.5 * slowest))
            first = counted(begun)
            end = time.monotonic() + seconds
            task.until(lambda: time.monotonic() > end, "enough was measured", deadline=seconds + 60)
            last = counted(begun)
            return sum(
                (steps - first[worker][0]) / (moment - first[worker][1])
                for worker, (steps, moment) in last.items()
                if moment > first[worker][1]
            )
        finally:
            task.end()


def counted(directory: Path) -> dict[str, tuple[int, float]]:
    """Return how many steps each worker has begun, and when the last of them (seconds since 1970)."""
    found = {}
    for path in directory.iterdir():
        while not (text := path.read_text(encoding="ascii")):  # it is being written
            time.sleep(0.001)
        found[path.name] = int(text), path.stat().st_mtime
    return found


def print_uneven(directory: Path, combinations: list[tuple[int, float, float]], *, quick: bool) -> None:
    """Measure each combination of workers, a step's seconds and how much slower one is; print a row of it."""
    print("\nWorkers of which one is slower, steps that vary by 30 %, 1 ps\n")
    print_row("workers", "a step, s", "one slower by", "together, steps/s", "of what they do alone", "asked", head=True)
    with LocalCluster(max(workers for workers, _, _ in combinations), 1, directory).serving() as cluster:
        bench = UnevenWorkers(cluster, directory, quick=quick)
        for each in combinations:
            together, ratio = bench.ratio(*each)
            print_row(str(each[0]), f"{each[1]:g}", f"{each[2]:g}", f"{together:.3f}", f"{ratio:.3f}", f"{ASKED}")
