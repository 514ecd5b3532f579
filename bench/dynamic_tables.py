"""A dynamic table against a fixed one of as many rows: psfleet on both sides, two workers and two ps.

Figures are steps per second, and processor time for a step, of trainings that have warmed up. The sides stay beside
each other and work in turns, each on local servers of its own. Only ratios say something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.large_tables import NO_SAVES, milliseconds
from bench.tables import print_row
from bench.throughput import Bench, Effort
from bench.turns import Side

ROWS = 1_000_000
ALONE = {"export": False, "evaluation": "none", **NO_SAVES}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What both sides train, and the run settings of the dynamic side alone."""

    fixed: str
    dynamic: str
    asked: float
    table: dict[str, int] = dataclasses.field(default_factory=dict)


KINDS = {
    "known": Kind("TableAdagrad", "TableAdagrad", 0.85),
    "new": Kind("TableHashed", "TableNew", 0.8),
    "sightings": Kind("TableHashed", "TableNew", 0.7, {"sightings": 3}),
}


def compare(bench: Bench, name: str, rows: int, turns: int, seconds: float) -> None:
    """Print a row of one kind."""
    kind = KINDS[name]
    # By the name that Keras gives to a process's first Embedding. New keys come all the time.
    dynamic: dict[str, Any] = {"dynamic_tables": {"embedding": {"capacity": 8 * rows, **kind.table}}}
    with contextlib.ExitStack() as stack:
        sides = []
        for program, settings in ((kind.fixed, {}), (kind.dynamic, dynamic)):
            cluster = stack.enter_context(bench.cluster(workers=2, servers=2).serving())
            wanted = {**ALONE, **settings}
            started = bench.start_psfleet(cluster, f"bench.programs:{program}", "custom_loop", **wanted)
            sides.append(Side(cluster, *started))
            sides[-1].warm_up(bench.effort.warm_up)
        for _ in range(turns):
            for side in sides:
                side.work(seconds)
        fixed, changing = (side.speed() for side in sides)
        speeds = (f"{fixed:.4g}", f"{changing:.4g}", f"{changing / fixed:.2f}", f"{kind.asked:g}")
        print_row(name, *speeds, *map(milliseconds, sides))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/dynamic", description=__doc__)
    parser.add_argument("kind", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"that ids are drawn from (default: {ROWS:,})")
    parser.add_argument("--turns", type=int, default=8, help="of each side (default: 8)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes (default: 3)")
    options = parser.parse_args(arguments)
    if unknown := set(options.kind) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; they are {', '.join(KINDS)}")
    os.environ["BENCH_ROWS"] = str(options.rows)
    print(f"Adagrad, {options.rows:,} keys of 16 numbers, 2 workers, 2 ps, batches of 1,024 examples of 10 ids\n")
    times = (f"{side}, ms of processor time a step" for side in ("fixed", "dynamic"))
    print_row("ids", "fixed, steps/s", "dynamic, steps/s", "ratio", "asked", *times, head=True)
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        bench = Bench(Effort(repetitions=1, warm_up=10, seconds=0), Path(directory))
        for name in options.kind or KINDS:
            compare(bench, name, options.rows, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
