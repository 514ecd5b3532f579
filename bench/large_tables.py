"""A table of 10 million rows on two ps, two workers: psfleet against TensorFlow's guide written plainly.

Figures are steps per second, and processor time for a step, of trainings that have warmed up. The sides stay beside
each other and work in turns, each on local servers of its own: the guide's are those of the guide, psfleet's have the
environment that hosts give them. Only ratios say something. Takes 6 GiB of memory, and no disk: nothing is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from bench.tables import print_row
from bench.tasks import PLAIN_SERVER
from bench.throughput import Bench, Effort
from bench.turns import Side

ROWS = 10_000_000
NO_SAVES = {"checkpoint_seconds": 86_400}  # the guide's side saves nothing


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer on both sides: its program, the guide's steps an epoch (some seconds), psfleet's own settings.

    `floor` is the ratio that psfleet must have with 10 million rows. `optimizer` is that of the program TableOf.
    """

    program: str
    epoch_steps: int
    floor: float
    settings: dict[str, bool] = dataclasses.field(default_factory=dict)
    optimizer: str = ""


LAZY = {"lazy_optimizers": True}
KINDS = {
    "SGD": Kind("Table", 10, 24.0),
    "Adam": Kind("TableAdam", 4, 24.0, LAZY),
    "Adagrad": Kind("TableAdagrad", 200, 2.0),
    "momentum": Kind("TableOf", 4, 24.0, LAZY, "SGD"),
    **{name: Kind("TableOf", 4, 24.0, LAZY, name) for name in ("RMSprop", "AdamW", "Nadam", "Adamax", "Ftrl")},
}


def compare(bench: Bench, name: str, turns: int, seconds: float) -> None:
    """Print a row of one optimizer."""
    kind = KINDS[name]
    program = f"bench.programs:{kind.program}"
    os.environ["BENCH_OPTIMIZER"] = kind.optimizer
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(bench.cluster(workers=2, servers=2).serving(command=PLAIN_SERVER))
        plain = Side(cluster, *bench.start_plain(cluster, program, "custom_loop", kind.epoch_steps))
        plain.warm_up(bench.effort.warm_up)
        cluster = stack.enter_context(bench.cluster(workers=2, servers=2).serving())
        psfleet = Side(cluster, *bench.start_psfleet(cluster, program, "custom_loop", **kind.settings, **NO_SAVES))
        psfleet.warm_up(bench.effort.warm_up)
        for _ in range(turns):
            plain.work(seconds)
            psfleet.work(seconds)
        ratio = psfleet.speed() / plain.speed()
        settings = f" (psfleet: {', '.join(kind.settings)})" if kind.settings else ""
        speeds = (f"{side.speed():.4g}" for side in (plain, psfleet))
        times = (milliseconds(side) for side in (plain, psfleet))
        print_row(f"{name}{settings}", *speeds, f"{ratio:.2f}", f"{kind.floor:g}", *times)


def milliseconds(side: Side) -> str:
    jobs = side.step_milliseconds()
    return f"{sum(jobs.values()):.4g} ({', '.join(f'{job} {spent:.3g}' for job, spent in sorted(jobs.items()))})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/tables", description=__doc__)
    parser.add_argument("optimizer", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the table, each 64 bytes (default: {ROWS:,})")
    parser.add_argument("--turns", type=int, default=15, help="of each side (default: 15)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes (default: 3)")
    options = parser.parse_args(arguments)
    if unknown := set(options.optimizer) - set(KINDS):
        parser.error(f"there is no optimizer {', '.join(sorted(unknown))}; they are {', '.join(KINDS)}")
    os.environ["BENCH_ROWS"] = str(options.rows)
    print(f"A table of {options.rows:,} rows of 16 numbers, 2 workers, 2 ps, batches of 1,024 examples of 10 ids\n")
    times = (f"{side}, ms of processor time a step" for side in ("guide", "psfleet"))
    print_row("optimizer", "guide, steps/s", "psfleet, steps/s", "ratio", "floor", *times, head=True)
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        bench = Bench(Effort(repetitions=1, warm_up=10, seconds=0), Path(directory))
        for name in options.optimizer or KINDS:
            compare(bench, name, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
