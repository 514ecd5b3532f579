"""What `weights_ahead` brings where messages take time: psfleet with the setting and without, two workers and two ps.

A process between the tasks keeps back what they send each other (bench/delays.py). Both sides stay beside each other
and work in turns, each on local servers of its own. Only ratios say something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.delays import delaying
from bench.large_tables import NO_SAVES, milliseconds
from bench.tables import print_row
from bench.tasks import LocalCluster, Task
from bench.throughput import Bench, Effort
from bench.turns import Side
from trainer.cluster.spec import free_addresses

PROGRAMS = ("TableAdagrad", "WideAndDeepKept", "DLRMKept")
ALONE = {"export": False, "evaluation": "none", **NO_SAVES}


class DelayedCluster(LocalCluster):
    """Two workers and two ps, whom all others reach so many milliseconds later, by other addresses than their own."""

    def __init__(self, directory: Path, delay: float) -> None:
        super().__init__(workers=2, servers=2, directory=directory)
        self._delay = delay
        self._own = {job: list(self._jobs[job]) for job in ("ps", "worker")}

    @contextlib.contextmanager
    def delayed(self) -> Iterator[LocalCluster]:
        own = [address for addresses in self._own.values() for address in addresses]
        shown = free_addresses(len(own)) if self._delay else own
        places = iter(shown)
        self._jobs |= {job: [next(places) for _ in addresses] for job, addresses in self._own.items()}
        between = delaying(self._delay, dict(zip(shown, own, strict=True)), self._directory / "delays.log")
        with between if self._delay else contextlib.nullcontext(), self.serving():
            yield self

    def start(self, job: str, index: int, *arguments: object, **more: object) -> Task:
        shown = self._jobs
        if job in self._own:  # it listens at its own address
            at = list(shown[job])
            at[index] = self._own[job][index]
            self._jobs = {**shown, job: at}
        try:
            return super().start(job, index, *arguments, **more)  # type: ignore[arg-type]
        finally:
            self._jobs = shown


def compare(bench: Bench, program: str, delay: float, turns: int, seconds: float, settings: dict[str, Any]) -> None:
    """Print a row of one program with one delay; `settings` are of both sides."""
    with contextlib.ExitStack() as stack:
        sides = []
        for is_ahead in (False, True):
            directory = bench.directory / f"{program}-{delay:g}-{is_ahead}"
            directory.mkdir()
            cluster = stack.enter_context(DelayedCluster(directory, delay).delayed())
            wanted: dict[str, Any] = {**ALONE, **settings, "weights_ahead": is_ahead}
            sides.append(
                Side(cluster, *bench.start_psfleet(cluster, f"bench.programs:{program}", "custom_loop", **wanted))
            )
            sides[-1].warm_up(bench.effort.warm_up)
        for turn in range(turns):
            for side in sides if turn % 2 else sides[::-1]:
                side.work(seconds)
        plain, ahead = (side.speed() for side in sides)
        speeds = (f"{plain:.4g}", f"{ahead:.4g}", f"{ahead / plain:.2f}")
        print_row(program, f"{delay:g}", *speeds, *map(milliseconds, sides))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/ahead", description=__doc__)
    parser.add_argument("program", nargs="*", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 1, 5], help="ms one way (default: 0 1 5)")
    parser.add_argument("--rows", type=int, default=100_000, help="of TableAdagrad (default: 100,000)")
    parser.add_argument("--turns", type=int, default=8, help="of each side (default: 8)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes (default: 3)")
    parser.add_argument("--call", type=int, metavar="STEPS", help="of a call (default: as many as psfleet gives)")
    options = parser.parse_args(arguments)
    if unknown := set(options.program) - set(PROGRAMS):
        parser.error(f"there is no program {', '.join(sorted(unknown))}; they are {', '.join(PROGRAMS)}")
    os.environ["BENCH_ROWS"] = str(options.rows)
    times = (f"{side}, ms of processor time a step" for side in ("in turn", "ahead"))
    print_row("program", "ms one way", "in turn, steps/s", "ahead, steps/s", "ratio", *times, head=True)
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        settings = {"steps_per_execution": options.call} if options.call else {}
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), Path(directory))
        for program in options.program or PROGRAMS:
            for delay in options.delay:
                compare(bench, program, delay, options.turns, options.seconds, settings)


if __name__ == "__main__":
    main(sys.argv[1:])
