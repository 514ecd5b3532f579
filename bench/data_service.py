"""What a data service gives a training that is bound by its input, and what its faults cost.

One worker trains with a `map` that waits: a processor that is busy with reading, without needing one here. Each row is
a run of its own, in turn. Ratios are to the worker that reads for itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess, write_settings
from bench.timeline import TimedStep, speed, take_point

PROGRAM = "bench.programs:Reading"
SHARDINGS = ("off", "dynamic")


class DataServiceBench:
    """Trains on clusters of one worker, one ps and some data workers, each with a run of its own."""

    def __init__(self, directory: Path, warm_up: float, seconds: float) -> None:
        directory.mkdir()
        self._directory = directory
        self._numbers = itertools.count()
        self.warm_up, self.seconds = warm_up, seconds

    def watch(self, data: int, sharding: str, disturb: Callable[[LocalCluster], None] | None = None) -> list[TimedStep]:
        """Return the steps as the status tells them; `disturb` is called in the middle of the time."""
        directory = self._directory / f"cluster-{next(self._numbers)}"
        directory.mkdir()
        wanted = {"steps": 10**9, "log_seconds": 0.2, "steps_per_execution": 5, "evaluation": "none"}
        service = {"input": "service", "input_sharding": sharding} if data else {}
        settings = write_settings(directory, directory.name, PROGRAM, **wanted, **service)
        with LocalCluster(1, 1, directory, data).serving(settings) as cluster:
            chief = cluster.start("chief", 0, settings=settings)
            return self._follow(chief, directory, lambda: disturb(cluster) if disturb else None)

    def _follow(self, chief: TaskProcess, directory: Path, disturb: Callable[[], None]) -> list[TimedStep]:
        status = directory / "runs" / directory.name / "status.json"
        points: list[TimedStep] = []
        middle = False

        def measured() -> bool:
            nonlocal middle
            take_point(points, status)
            passed = points[-1].time - points[0].time if points else 0.0
            if passed > self.warm_up + self.seconds / 2 and not middle:
                middle = True
                disturb()
            return passed >= self.warm_up + self.seconds

        chief.until(measured, "enough was measured")
        return points


def print_speeds(bench: DataServiceBench, most: int) -> None:
    print("\nSteps per second, one worker, a map that waits 50 ms for a batch\n")
    print_row("who reads", "sharding", "steps/s", "ratio", head=True)
    alone = speed(bench.watch(0, ""), bench.warm_up) or 0.0
    print_row("the worker", "", f"{alone:.1f}", "1.00")
    for data in range(1, most + 1):
        for sharding in SHARDINGS:
            reached = speed(bench.watch(data, sharding), bench.warm_up) or 0.0
            who = f"{data} data worker{'s' if data > 1 else ''}"
            print_row(who, sharding, f"{reached:.1f}", f"{reached / alone:.2f}")


def print_faults(bench: DataServiceBench) -> None:
    print("\nThe longest time without a step, one worker, two data workers, sharding dynamic\n")
    print_row("kill -9 of", "longest, s", "longest before the fault, s", "steps/s as before, afterwards", head=True)
    for names in (["data-0"], ["dispatcher-0"], ["data-0", "dispatcher-0"], ["data-0", "data-1"]):
        injected: list[float] = []

        def inject(cluster: LocalCluster, names: list[str] = names, injected: list[float] = injected) -> None:
            for task in cluster.tasks:
                if task.name in names:
                    os.kill(task.pid, signal.SIGKILL)
            injected.append(time.time())

        points = bench.watch(2, "dynamic", inject)
        steady = [point for point in points if point.time - points[0].time >= bench.warm_up]
        before = [point for point in steady if point.time < injected[0]]
        after = [before[-1], *(point for point in steady if point.time >= injected[0])]
        last = [point for point in after if point.time > after[-1].time - bench.seconds / 4]
        kept = (speed(last, 0) or 0.0) / (speed(before, 0) or 1.0)
        print_row(" and ".join(names), f"{longest(after):.1f}", f"{longest(before):.1f}", f"{kept:.2f}")


def longest(points: list[TimedStep]) -> float:
    return max(second.time - first.time for first, second in itertools.pairwise(points))


def main(arguments: list[str]) -> None:
    parser = parser_of("data-service", __doc__)
    add_names(parser, "part", ("speed", "faults"), default="both")
    parser.add_argument("--most", type=int, default=3, metavar="N", help="data workers (default: 3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure for, each row (default: 10)")
    options = parser.parse_args(arguments)
    parts = options.part or ["speed", "faults"]
    with scratch_directory() as directory:
        if "speed" in parts:
            print_speeds(DataServiceBench(directory / "speed", 5.0, options.seconds), options.most)
        if "faults" in parts:
            print_faults(DataServiceBench(directory / "faults", 5.0, 3 * options.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
