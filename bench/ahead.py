"""What `weights_ahead` brings where messages take time: psfleet with the setting and without, two workers and two ps.

A process between the tasks keeps back what they send each other (bench/delays.py). Both sides stay beside each other
and work in turns, each on local servers of its own. Only ratios say something.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.delays import delaying
from bench.interleaved import ALONE, Start, add_turns, in_turns, psfleet_on, speeds, times
from bench.options import add_names, parser_of, scratch_directory
from bench.recommender import settings_of_tables
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess
from bench.throughput import Bench, Effort
from trainer.cluster.spec import free_addresses

PROGRAMS = ("TableAdagrad", "WideAndDeepKept", "DLRMKept")


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

    def start(self, job: str, index: int, *arguments: object, **more: object) -> TaskProcess:
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

    def start(is_ahead: bool) -> Start:
        directory = bench.directory / f"{program}-{delay:g}-{is_ahead}"
        directory.mkdir()
        wanted: dict[str, Any] = {**ALONE, **settings, "weights_ahead": is_ahead}
        return DelayedCluster(directory, delay).delayed(), psfleet_on(bench, f"bench.programs:{program}", **wanted)

    with in_turns(map(start, (False, True)), bench.effort.warm_up, turns, seconds) as sides:
        print_row(program, f"{delay:g}", *speeds(sides), *(side.milliseconds() for side in sides))


def tables_of(program: str, rows: int) -> dict[str, Any]:
    """Return the run settings by which a program's tables are dynamic, with room for twice as many rows."""
    if program == "TableAdagrad":
        return {"dynamic_tables": {"embedding": {"capacity": 2 * rows}}}
    return settings_of_tables()["dynamic"]


def main(arguments: list[str]) -> None:
    parser = parser_of("ahead", __doc__)
    add_names(parser, "program", PROGRAMS)
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 1, 5], help="ms one way (default: 0 1 5)")
    parser.add_argument("--rows", type=int, default=100_000, help="of TableAdagrad (default: 100,000)")
    add_turns(parser, 8)
    parser.add_argument("--dynamic", action="store_true", help="with dynamic tables, on both sides")
    parser.add_argument("--call", type=int, metavar="STEPS", help="of a call (default: as many as psfleet gives)")
    options = parser.parse_args(arguments)
    os.environ["BENCH_ROWS"] = str(options.rows)
    heads = ("in turn, steps/s", "ahead, steps/s", "ratio", *times("in turn", "ahead"))
    print_row("program", "ms one way", *heads, head=True)
    with scratch_directory() as directory:
        settings = {"steps_per_execution": options.call} if options.call else {}
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), directory)
        for program in options.program or PROGRAMS:
            own = {**settings, **(tables_of(program, options.rows) if options.dynamic else {})}
            for delay in options.delay:
                compare(bench, program, delay, options.turns, options.seconds, own)


if __name__ == "__main__":
    main(sys.argv[1:])
