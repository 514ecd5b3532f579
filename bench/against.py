"""The training speed of this checkout against that of another one, such as a worktree at an earlier commit.

Both sides stay beside each other and work in turns, each on local servers of its own, with every setting at its
default. Only ratios say something. 1,000,000 rows take 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from bench.large_tables import NO_SAVES, milliseconds
from bench.tables import print_row
from bench.tasks import ROOT
from bench.throughput import Bench, Effort
from bench.turns import Side

PROGRAMS = {
    **{"Tiny": {}, "Dense": {}, "Table": {}, "TableAdam": {"lazy_optimizers": True}, "TableAdagrad": {}},
    **{"ManyTables": {}, "ManyTablesAdagrad": {}},  # of so many rows each
}


def compare(bench: Bench, other: str, program: str, workers: int, turns: int, seconds: float) -> None:
    """Print a row of one program, trained by as many workers and two ps."""
    sides = []
    with contextlib.ExitStack() as stack:
        for path in (other, str(ROOT)):
            cluster = stack.enter_context(bench.cluster(workers=workers, servers=2, path=path).serving())
            started = bench.start_psfleet(
                cluster, f"bench.programs:{program}", "custom_loop", **PROGRAMS[program], **NO_SAVES
            )
            sides.append(Side(cluster, *started))
            sides[-1].warm_up(bench.effort.warm_up)
        for _ in range(turns):
            for side in sides:
                side.work(seconds)
        before, after = sides
        speeds = (f"{side.speed():.4g}" for side in sides)
        print_row(
            program,
            str(workers),
            *speeds,
            f"{after.speed() / before.speed():.2f}",
            *(milliseconds(one) for one in sides),
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/against", description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("program", nargs="*", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table, each 64 bytes (default: 1,000,000)")
    parser.add_argument("--turns", type=int, default=12, help="of each side (default: 12)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes (default: 3)")
    options = parser.parse_args(arguments)
    if unknown := set(options.program) - set(PROGRAMS):
        parser.error(f"there is no program {', '.join(sorted(unknown))}; they are {', '.join(PROGRAMS)}")
    if not (options.other / "trainer" / "__main__.py").is_file():
        parser.error(f"{options.other} is no checkout of psfleet: it has no trainer/__main__.py")
    os.environ["BENCH_ROWS"] = str(options.rows)
    times = (f"{side}, ms of processor time a step" for side in ("other", "this"))
    print_row("program", "workers", "other, steps/s", "this, steps/s", "ratio", *times, head=True)
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        # The other's trainer alone: benches and programs are this checkout's on both sides.
        (Path(directory) / "other").mkdir()
        (Path(directory) / "other" / "trainer").symlink_to((options.other / "trainer").resolve())
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), Path(directory))
        for program in options.program or PROGRAMS:
            compare(bench, f"{directory}/other", program, options.workers, options.turns, options.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
