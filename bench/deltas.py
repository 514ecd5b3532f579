"""What incremental saves of a dynamic table cost a training: one each few seconds, against none at all.

All keys have their rows before anything is measured, and the first save, which is a whole one, is over. There is room
for more rows: a table that is nearly full drops the least used ones after a save, and is soon saved whole again.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from bench.interleaved import ALONE, Side, Start, in_turns, speeds, times
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess
from bench.throughput import Bench, Observed
from trainer.run.directory import RunDirectory

PROGRAM = "bench.programs:TableFilled"
FILL_SECONDS = 1200.0
SIDES = ("none", "deltas")


def compare_deltas(bench: Bench, rows: int, every: int, turns: int, seconds: float) -> None:
    """Print a row: the speed without saves, and with one after each so many steps."""
    from bench.programs import TableFilled

    os.environ["BENCH_ROWS"] = str(rows)
    every = max(every, 1 + TableFilled.filling_steps(rows))  # the whole save has all rows
    table = {"capacity": rows + rows // 4, "incremental_saves": 1000}
    settings: dict[str, Any] = {**ALONE, "dynamic_tables": {"embedding": table}}
    starts: list[Start] = []
    for name, steps in zip(SIDES, (10**8, every), strict=True):
        start = partial(start_full, bench, name, every, {**settings, "checkpoint_steps": steps})
        starts.append((bench.cluster(workers=2, servers=2).serving(), start))
    with in_turns(starts, bench.effort.warm_up, turns, seconds) as sides:
        print_row(
            f"{rows:,}",
            *speeds(sides),
            "0.99",
            f"{every / sides[1].speed():.1f}",
            f"{last_megabytes(bench.directory):.1f}",
            f"{(milliseconds_of(sides[1]) - milliseconds_of(sides[0])) * every / 1000:.2f}",
            *(side.milliseconds() for side in sides),
        )


def print_head() -> None:
    heads = ["none, steps/s", "deltas, steps/s", "ratio", "asked", "s of training between two", "the last one, MB"]
    print_row("rows", *heads, "a save, s of processor time", *times(*SIDES), head=True)


def milliseconds_of(side: Side) -> float:
    return sum(side.step_milliseconds().values())


def start_full(
    bench: Bench, name: str, every: int, settings: dict[str, Any], cluster: LocalCluster
) -> tuple[TaskProcess, Observed]:
    """Start a side, and wait until its table is full and it has saved that, where it saves."""
    task, observed = bench.start_psfleet(cluster, PROGRAM, "custom_loop", **settings)
    task.until(lambda: (points := observed()) and points[-1].step > every, "it was full", FILL_SECONDS)
    if settings["checkpoint_steps"] == every:
        task.until(lambda: newest_of(bench.directory) is not None, "it had saved", FILL_SECONDS)
    return task, observed


def newest_of(directory: Path) -> int | None:
    """Return the newest checkpoint of the run that has saved."""
    found = [RunDirectory(directory, run.name).catalogue.newest() for run in (directory / "runs").iterdir()]
    return max((step for step in found if step is not None), default=None)


def last_megabytes(directory: Path) -> float:
    """Return how much the last save of a dynamic table has written: what no earlier checkpoint has.

    The next one may have links to all of it by now.
    """
    step, sizes, earlier = newest_of(directory), dict[int, int](), set[int]()
    for path in directory.glob("runs/*/checkpoints/ckpt-*.table-*"):
        of = int(path.name.removeprefix("ckpt-").partition(".")[0])
        found = path.stat()
        if of == step:
            sizes[found.st_ino] = found.st_size
        elif of < (step or 0):
            earlier.add(found.st_ino)
    return sum(size for inode, size in sizes.items() if inode not in earlier) / 1e6
