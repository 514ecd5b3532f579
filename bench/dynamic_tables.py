"""A dynamic table against a fixed one of as many rows: psfleet on both sides, two workers and two ps.

Figures are steps per second, and processor time for a step, of trainings that have warmed up. The sides stay beside
each other and work in turns, each on local servers of its own. Only ratios say something.

With --deltas a full table is saved again and again while it trains (bench/deltas.py). With --operations the operations
of a step are counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from bench.commands import run_command
from bench.deltas import compare_deltas, print_head
from bench.interleaved import ALONE, add_turns, in_turns, psfleet_on, speeds, times
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import clean_environment
from bench.throughput import Bench, Effort

ROWS = 1_000_000
MANY = 26


@dataclasses.dataclass(frozen=True)
class TableKind:
    """What both sides train, and the run settings of the dynamic side alone."""

    fixed: str
    dynamic: str
    asked: float
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: int = 1
    """How many, of which each has so many times fewer rows."""


KINDS = {
    "known": TableKind("TableAdagrad", "TableAdagrad", 0.85),
    "new": TableKind("TableHashed", "TableNew", 0.8),
    "sightings": TableKind("TableHashed", "TableNew", 0.7, {"sightings": 3}),
    # 1.5 times the steps of a request for each table, where fixed ones have 1.8 times (docs/evidence/benchmarks.md).
    "many": TableKind("ManyTablesAdagrad", "ManyTablesAdagrad", 0.83, tables=MANY),
}


def sides_of(kind: TableKind, rows: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the program and the run settings of the fixed side, and of the dynamic one."""
    # By the names that Keras gives to a process's Embeddings. New keys come all the time.
    layers = ["embedding", *(f"embedding_{number}" for number in range(1, kind.tables))]
    table = {"capacity": 8 * rows // kind.tables, **kind.table}
    dynamic = {"dynamic_tables": dict.fromkeys(layers, table)}
    return [(f"bench.programs:{kind.fixed}", {}), (f"bench.programs:{kind.dynamic}", dynamic)]


def print_operations(kinds: Sequence[str], rows: int) -> None:
    """Print how many operations a step of each side has; each is counted in a process of its own."""
    print_row("ids", "fixed, operations of a step", "dynamic", head=True)
    for name in kinds:
        environment = clean_environment(BENCH_ROWS=str(rows // KINDS[name].tables))
        counts = []
        for program, settings in sides_of(KINDS[name], rows):
            command = [sys.executable, "-m", "bench.tracing", "--program", program, "--settings", json.dumps(settings)]
            counts.append(json.loads(run_command(command, environment).splitlines()[-1])["operations"])
        print_row(name, *(f"{count:,}" for count in counts))


def compare(bench: Bench, name: str, rows: int, turns: int, seconds: float) -> None:
    """Print a row of one kind."""
    kind = KINDS[name]
    os.environ["BENCH_ROWS"] = str(rows // kind.tables)
    starts = (
        (bench.cluster(workers=2, servers=2).serving(), psfleet_on(bench, program, **ALONE, **settings))
        for program, settings in sides_of(kind, rows)
    )
    with in_turns(starts, bench.effort.warm_up, turns, seconds) as sides:
        print_row(name, *speeds(sides), f"{kind.asked:g}", *(side.milliseconds() for side in sides))


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("dynamic", __doc__)
    add_names(parser, "kind", KINDS)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"that ids are drawn from (default: {ROWS:,})")
    add_turns(parser, 8)
    saved = parser.add_argument_group("deltas")
    saved.add_argument("--deltas", type=int, metavar="ROWS", help="save a full table of so many rows instead")
    saved.add_argument("--every", type=int, default=1000, help="steps from one save to the next (default: 1,000)")
    parser.add_argument("--operations", action="store_true", help="count the operations of a step instead")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = options_of(arguments)
    if options.operations:
        print_operations(options.kind or list(KINDS), options.rows)
        return
    if options.deltas:
        print_head()
        with scratch_directory() as directory:
            bench = Bench(Effort(repetitions=1, warm_up=0, seconds=0), directory)
            compare_deltas(bench, options.deltas, options.every, options.turns, options.seconds)
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
