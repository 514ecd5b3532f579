"""The training speed of this checkout against that of another one, such as a worktree at an earlier commit.

Both sides stay beside each other and work in turns, each on local servers of its own, with every setting at its
default. Only ratios say something. 1,000,000 rows take 1 GiB of memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.interleaved import NO_SAVES, add_turns, in_turns, psfleet_on, speeds, times
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import ROOT
from bench.throughput import Bench, Effort

PROGRAMS = {
    **{"Tiny": {}, "Dense": {}, "Table": {}, "TableAdam": {"lazy_optimizers": True}, "TableAdagrad": {}},
    **{"ManyTables": {}, "ManyTablesAdagrad": {}},  # of so many rows each
}


def compare(bench: Bench, other: str, program: str, workers: int, turns: int, seconds: float) -> None:
    """Print a row of one program, trained by as many workers and two ps."""
    start = psfleet_on(bench, f"bench.programs:{program}", **PROGRAMS[program], **NO_SAVES)
    starts = ((bench.cluster(workers, 2, path).serving(), start) for path in (other, str(ROOT)))
    with in_turns(starts, bench.effort.warm_up, turns, seconds) as sides:
        print_row(program, str(workers), *speeds(sides), *(side.milliseconds() for side in sides))


def main(arguments: list[str]) -> None:
    parser = parser_of("against", __doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    add_names(parser, "program", PROGRAMS)
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table, each 64 bytes (default: 1,000,000)")
    add_turns(parser, 12)
    options = parser.parse_args(arguments)
    if not (options.other / "trainer" / "__main__.py").is_file():
        parser.error(f"{options.other} is no checkout of psfleet: it has no trainer/__main__.py")
    os.environ["BENCH_ROWS"] = str(options.rows)
    print_row("program", "workers", "other, steps/s", "this, steps/s", "ratio", *times("other", "this"), head=True)
    with scratch_directory() as directory:
        # The other's trainer alone: benches and programs are this checkout's on both sides.
        (directory / "other").mkdir()
        (directory / "other" / "trainer").symlink_to((options.other / "trainer").resolve())
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), directory)
        for program in options.program or PROGRAMS:
            compare(bench, f"{directory}/other", program, options.workers, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
