"""A table of 10 million rows on two ps, two workers: psfleet against TensorFlow's guide written plainly.

Every figure is steps per second between two points of a training that has warmed up. The sides run in turn, each on
local servers of its own: the guide's are those of the guide, psfleet's have the environment that hosts give them. Only
ratios say something. Takes 3 GiB of memory, and no disk: no checkpoint is due in the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.tables import print_row
from bench.tasks import PLAIN_SERVER
from bench.throughput import Bench, Effort, listed

ROWS = 10_000_000


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer on both sides: its program, the guide's steps an epoch (some seconds), psfleet's own settings."""

    program: str
    epoch_steps: int
    asked: float
    settings: dict[str, bool] = dataclasses.field(default_factory=dict)


KINDS = {
    "SGD": Kind("Table", 20, 24.0),
    "Adam": Kind("TableAdam", 8, 24.0, {"lazy_adam": True}),
    "Adagrad": Kind("TableAdagrad", 200, 2.0),
}


def compare(bench: Bench, name: str) -> None:
    """Print a row of one optimizer."""
    kind = KINDS[name]
    program = f"bench.programs:{kind.program}"
    plain: list[float] = []
    psfleet: list[float] = []
    for _ in range(bench.effort.repetitions):
        with bench.cluster(workers=2, servers=2).serving(command=PLAIN_SERVER) as cluster:
            plain.append(bench.plain(cluster, program, "custom_loop", kind.epoch_steps))
        with bench.cluster(workers=2, servers=2).serving() as cluster:
            psfleet.append(bench.psfleet(cluster, program, "custom_loop", **kind.settings))
    ratio = statistics.median(psfleet) / statistics.median(plain)
    settings = f" (psfleet: {', '.join(kind.settings)})" if kind.settings else ""
    print_row(f"{name}{settings}", listed(plain), listed(psfleet), f"{ratio:.1f}", f"{kind.asked:g}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/tables", description=__doc__)
    parser.add_argument("optimizer", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the table, each 64 bytes (default: {ROWS:,})")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side (default: 2, 7 minutes)")
    options = parser.parse_args(arguments)
    if unknown := set(options.optimizer) - set(KINDS):
        parser.error(f"there is no optimizer {', '.join(sorted(unknown))}; they are {', '.join(KINDS)}")
    os.environ["BENCH_ROWS"] = str(options.rows)
    print(f"A table of {options.rows:,} rows of 16 numbers, 2 workers, 2 ps, batches of 1,024 examples of 10 ids\n")
    print_row("optimizer", "guide, steps/s", "psfleet, steps/s", "ratio", "asked", head=True)
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        bench = Bench(Effort(repetitions=options.rounds, warm_up=5, seconds=15), Path(directory))
        for name in options.optimizer or KINDS:
            compare(bench, name)


if __name__ == "__main__":
    main(sys.argv[1:])
