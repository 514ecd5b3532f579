"""A table of 10 million rows on two ps, two workers: psfleet against TensorFlow's guide written plainly.

Figures are steps per second, and processor time for a step, of trainings that have warmed up. The sides stay beside
each other and work in turns, each on local servers of its own: the guide's are those of the guide, psfleet's have the
environment that hosts give them. Only ratios say something. Takes 6 GiB of memory, and no disk: nothing is saved.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from bench.interleaved import add_turns, against_guide, speeds, times
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.throughput import Bench, Effort

ROWS = 10_000_000


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
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
    "SGD": OptimizerKind("Table", 10, 24.0),
    "Adam": OptimizerKind("TableAdam", 4, 24.0, LAZY),
    "Adagrad": OptimizerKind("TableAdagrad", 200, 2.0),
    "momentum": OptimizerKind("TableOf", 4, 24.0, LAZY, "SGD"),
    **{name: OptimizerKind("TableOf", 4, 24.0, LAZY, name) for name in ("RMSprop", "AdamW", "Nadam", "Adamax", "Ftrl")},
}


def compare(bench: Bench, name: str, turns: int, seconds: float) -> None:
    """Print a row of one optimizer."""
    kind = KINDS[name]
    program = f"bench.programs:{kind.program}"
    os.environ["BENCH_OPTIMIZER"] = kind.optimizer
    with against_guide(bench, program, kind.epoch_steps, turns, seconds, kind.settings) as sides:
        settings = f" (psfleet: {', '.join(kind.settings)})" if kind.settings else ""
        cells = (*speeds(sides), f"{kind.floor:g}", *(side.milliseconds() for side in sides))
        print_row(f"{name}{settings}", *cells)


def main(arguments: list[str]) -> None:
    parser = parser_of("tables", __doc__)
    add_names(parser, "optimizer", KINDS)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the table, each 64 bytes (default: {ROWS:,})")
    add_turns(parser, 15)
    options = parser.parse_args(arguments)
    os.environ["BENCH_ROWS"] = str(options.rows)
    print(f"A table of {options.rows:,} rows of 16 numbers, 2 workers, 2 ps, batches of 1,024 examples of 10 ids\n")
    heads = times("guide", "psfleet")
    print_row("optimizer", "guide, steps/s", "psfleet, steps/s", "ratio", "floor", *heads, head=True)
    with scratch_directory() as directory:
        bench = Bench(Effort(repetitions=1, warm_up=10, seconds=0), directory)
        for name in options.optimizer or KINDS:
            compare(bench, name, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
