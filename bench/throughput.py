"""psfleet's speed against TensorFlow's parameter-server guide written plainly, and its scaling.

Every figure is steps per second between two points of a training that has warmed up, on local servers of the same
kind, with every setting of psfleet at its default. What is compared runs in turn; only ratios say something.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess, write_settings
from bench.timeline import TimedStep, read_point, spans, speed, take_point
from bench.uneven_workers import SLOWER, STEPS, WORKERS, print_uneven

Observed = Callable[[], list[TimedStep]]
APIS = {"fit": "fit", "custom_loop": "custom loop"}


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: repetitions of what is noisy, seconds of warm-up and of measuring."""

    repetitions: int
    warm_up: float
    seconds: float


FULL = Effort(repetitions=3, warm_up=5, seconds=10)
QUICK = Effort(repetitions=1, warm_up=4, seconds=5)


class Bench:
    """Runs coordinators on a cluster, one after the other, and measures them."""

    def __init__(self, effort: Effort, directory: Path) -> None:
        self.effort = effort
        self.directory = directory
        self._runs = itertools.count()

    def cluster(self, workers: int, servers: int = 1, path: str = "") -> LocalCluster:
        directory = self.directory / f"cluster-{next(self._runs)}"
        directory.mkdir()
        return LocalCluster(workers=workers, servers=servers, directory=directory, path=path)

    def psfleet(self, cluster: LocalCluster, program: str, api: str, **more: Any) -> float:
        """Return the speed of psfleet's own coordinator (steps/s), read from the status that it publishes.

        `more` are run settings that are not left at their defaults.
        """
        return self._measure(*self.start_psfleet(cluster, program, api, **more))

    def start_psfleet(self, cluster: LocalCluster, program: str, api: str, **more: Any) -> tuple[TaskProcess, Observed]:
        """Start psfleet's coordinator; the points that it has reached are returned by what is returned beside it."""
        run = f"run-{next(self._runs)}"
        settings = write_settings(self.directory, run, program, api=api, steps=10**9, **more)
        status = self.directory / "runs" / run / "status.json"
        points: list[TimedStep] = []

        def observed() -> list[TimedStep]:
            take_point(points, status)
            return points

        return cluster.start("chief", 0, settings=settings), observed

    def plain(self, cluster: LocalCluster, program: str, api: str, epoch_steps: int) -> float:
        """Return the speed of the guide's code (steps/s), which says when an epoch of so many steps has ended."""
        return self._measure(*self.start_plain(cluster, program, api, epoch_steps))

    def start_plain(
        self, cluster: LocalCluster, program: str, api: str, epoch_steps: int
    ) -> tuple[TaskProcess, Observed]:
        """Start the guide's coordinator, and return what `start_psfleet` returns."""
        module = {"fit": "bench.plain_fit", "custom_loop": "bench.plain_loop"}[api]
        task = cluster.start("chief", 0, ("-m", module, program, str(epoch_steps)))
        return task, lambda: [point for line in task.output().splitlines() if (point := read_point(line))]

    def _measure(self, task: TaskProcess, observed: Observed) -> float:
        warm_up, seconds = self.effort.warm_up, self.effort.seconds

        def measured() -> float | None:
            points = observed()
            return speed(points, warm_up) if spans(points, warm_up + seconds) else None

        try:
            return float(task.until(measured, "enough was measured"))
        finally:
            task.end()


def compare(bench: Bench, program: str, epoch_steps: int, repetitions: int, asked: dict[str, float]) -> None:
    """Print a table of psfleet against the guide for both APIs, 2 workers and 1 ps."""
    speeds: dict[tuple[str, str], list[float]] = {(side, api): [] for api in APIS for side in ("plain", "psfleet")}
    with bench.cluster(workers=2).serving() as cluster:
        for _ in range(repetitions):
            for api in APIS:
                speeds["plain", api].append(bench.plain(cluster, program, api, epoch_steps))
                speeds["psfleet", api].append(bench.psfleet(cluster, program, api))
    print_row("API", "guide, steps/s", "psfleet, steps/s", "ratio", "asked", head=True)
    for api, name in APIS.items():
        plain, psfleet = speeds["plain", api], speeds["psfleet", api]
        ratio = statistics.median(psfleet) / statistics.median(plain)
        print_row(name, listed(plain), listed(psfleet), f"{ratio:.2f}", f"{asked[api]:.1f}")


def print_tiny(bench: Bench) -> None:
    print("\nA tiny model, 2 workers, 1 ps\n")
    compare(bench, "bench.programs:Tiny", 500, bench.effort.repetitions, {"fit": 3.0, "custom_loop": 2.5})


def print_slow(bench: Bench) -> None:
    print("\nSteps of 1 s, 2 workers, 1 ps\n")
    compare(bench, "bench.programs:Slow", 10, 1, {"fit": 1.0, "custom_loop": 1.0})


def print_scaling(bench: Bench) -> None:
    print("\nSteps that wait 50 ms, 1 ps, psfleet's custom loop\n")
    print_row("workers", "steps/s", "of ideal", "asked", head=True)
    alone = 0.0
    for workers in (1, 2, 4):
        with bench.cluster(workers=workers).serving() as cluster:
            reached = bench.psfleet(cluster, "bench.programs:Waiting", "custom_loop")
        alone = alone or reached
        print_row(str(workers), f"{reached:.2f}", f"{reached / (workers * alone):.3f}", "0.97")


def listed(speeds: list[float]) -> str:
    """Return the median, and all values where there are several."""
    every = f" ({', '.join(f'{value:.4g}' for value in speeds)})" if len(speeds) > 1 else ""
    return f"{statistics.median(speeds):.4g}{every}"


PARTS = {"tiny": print_tiny, "slow": print_slow, "scaling": print_scaling}
UNEVEN = "uneven"


def main(arguments: list[str]) -> None:
    parser = parser_of("throughput", __doc__)
    add_names(parser, "part", (*PARTS, UNEVEN), default=f"all but {UNEVEN}, which takes an hour")
    parser.add_argument("--quick", action="store_true", help="short and rough: about 2 minutes instead of 8")
    uneven = parser.add_argument_group(UNEVEN)
    uneven.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers")
    uneven.add_argument("--steps", type=float, nargs="+", default=STEPS, metavar="SECONDS", help="lengths of a step")
    uneven.add_argument("--slower", type=float, nargs="+", default=SLOWER, metavar="TIMES", help="of one worker")
    options = parser.parse_args(arguments)
    with scratch_directory() as directory:
        bench = Bench(QUICK if options.quick else FULL, directory)
        for name, print_part in PARTS.items():
            if not options.part or name in options.part:
                print_part(bench)
        if UNEVEN in options.part:
            combinations = itertools.product(options.workers, options.steps, options.slower)
            print_uneven(bench.directory, list(combinations), quick=options.quick)


if __name__ == "__main__":
    main(sys.argv[1:])
