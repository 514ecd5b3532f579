"""A dynamic table against a fixed one of as many rows: psfleet on both sides, two workers and two ps.

Figures are steps per second, and processor time for a step, of trainings that have warmed up. The sides stay beside
each other and work in turns, each on local servers of its own. Only ratios say something.

With --fill a table alone is filled with new keys, and saved (bench/filling.py).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from bench.filling import SLOTS, fill
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.throughput import Bench, Effort
from bench.turns import ALONE, add_turns, in_turns, psfleet_on, speeds, times

ROWS = 1_000_000
MANY = 26


@dataclasses.dataclass(frozen=True)
class Kind:
    """What both sides train, and the run settings of the dynamic side alone."""

    fixed: str
    dynamic: str
    asked: float
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: int = 1
    """How many, of which each has so many times fewer rows."""


KINDS = {
    "known": Kind("TableAdagrad", "TableAdagrad", 0.85),
    "new": Kind("TableHashed", "TableNew", 0.8),
    "sightings": Kind("TableHashed", "TableNew", 0.7, {"sightings": 3}),
    # 1.5 times the steps of a request for each table, where fixed ones have 1.8 times (docs/evidence/benchmarks.md).
    "many": Kind("ManyTablesAdagrad", "ManyTablesAdagrad", 0.83, tables=MANY),
}


def compare(bench: Bench, name: str, rows: int, turns: int, seconds: float) -> None:
    """Print a row of one kind."""
    kind = KINDS[name]
    os.environ["BENCH_ROWS"] = str(rows // kind.tables)
    # By the names that Keras gives to a process's Embeddings. New keys come all the time.
    layers = ["embedding", *(f"embedding_{number}" for number in range(1, kind.tables))]
    table = {"capacity": 8 * rows // kind.tables, **kind.table}
    dynamic: dict[str, Any] = {"dynamic_tables": dict.fromkeys(layers, table)}
    starts = (
        (bench.cluster(workers=2, servers=2).serving(), psfleet_on(bench, program, **ALONE, **settings))
        for program, settings in ((f"bench.programs:{kind.fixed}", {}), (f"bench.programs:{kind.dynamic}", dynamic))
    )
    with in_turns(starts, bench.effort.warm_up, turns, seconds) as sides:
        print_row(name, *speeds(sides), f"{kind.asked:g}", *(side.milliseconds() for side in sides))


def main(arguments: list[str]) -> None:
    parser = parser_of("dynamic", __doc__)
    add_names(parser, "kind", KINDS)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"that ids are drawn from (default: {ROWS:,})")
    add_turns(parser, 8)
    filled = parser.add_argument_group("fill")
    filled.add_argument("--fill", type=int, metavar="ROWS", help="fill a table with so many rows instead")
    filled.add_argument("--capacity", type=int, help="rows that it has room for (default: as many)")
    filled.add_argument("--batch", type=int, default=20_000, help="new keys a step (default: 20,000)")
    filled.add_argument("--optimizer", choices=SLOTS, default="Adagrad", help="of whose slots a row has room for")
    options = parser.parse_args(arguments)
    if options.fill:
        with scratch_directory() as directory:
            fill(directory, options.fill, options.batch, options.optimizer, options.capacity or options.fill)
        return
    print(f"Adagrad, {options.rows:,} keys of 16 numbers, 2 workers, 2 ps, batches of 1,024 examples of 10 ids")
    print(f"(many: {MANY} tables with as many keys together, and one id for each)\n")
    print_row("ids", "fixed, steps/s", "dynamic, steps/s", "ratio", "asked", *times("fixed", "dynamic"), head=True)
    with scratch_directory() as directory:
        bench = Bench(Effort(repetitions=1, warm_up=10, seconds=0), directory)
        for name in options.kind or KINDS:
            compare(bench, name, options.rows, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
