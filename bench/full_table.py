"""A large dynamic table whose rows are all in use: whether it trains, how fast, and how much memory the ps take."""

from __future__ import annotations

import json
import os
from typing import Any

from bench.deltas import FILL_SECONDS
from bench.filling import memory_of
from bench.interleaved import ALONE
from bench.tables import print_row
from bench.throughput import Bench
from bench.timeline import speed

PROGRAMS = {"SGD": "bench.programs:TableFilledSGD", "Adagrad": "bench.programs:TableFilled"}


def train_full(bench: Bench, rows: int, optimizer: str, seconds: float) -> None:
    """Fill a table on two ps by the steps of two workers, train on for so long, and print what was seen."""
    from bench.programs import TableFilled

    os.environ["BENCH_ROWS"] = str(rows)
    filling = TableFilled.filling_steps(rows)
    settings: dict[str, Any] = {**ALONE, "dynamic_tables": {"embedding": {"capacity": rows + rows // 8}}}
    cluster = bench.cluster(workers=2, servers=2)
    with cluster.serving():
        servers = [task for task in cluster.tasks if task.name.startswith("ps")]
        before = memory_of(servers)
        task, observed = bench.start_psfleet(cluster, PROGRAMS[optimizer], "custom_loop", **settings)
        task.until(lambda: (points := observed()) and points[-1].step > filling, "it was full", FILL_SECONDS)
        began = observed()[-1].time
        task.until(lambda: observed()[-1].time >= began + seconds, "it had trained for a while")
        (status,) = bench.directory.glob("runs/*/status.json")
        there = json.loads(status.read_text(encoding="utf-8"))["tables"]["embedding"]["rows"]
        taken = memory_of(servers) - before
        points = observed()
        print_row("optimizer", "rows in use", "memory of both ps, GiB", "bytes a row", "fills, s", "steps/s", head=True)
        found = speed(points, began - points[0].time)
        print_row(
            optimizer,
            f"{there:,}",
            f"{taken / 2**30:.2f}",
            f"{taken / there:.0f}",
            f"{began - points[0].time:.0f}",
            f"{found:.4g}" if found else "-",
        )
