"""An incremental save of a dynamic table against a whole one: bytes and seconds, in one process, of two shards.

The floor is a file of as many bytes, written and synced by this process. Only ratios say something.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bench.tables import print_row
from trainer.training.dynamic.hashing import constant
from trainer.training.dynamic.pieces import Pieces
from trainer.training.dynamic.shard import FIRST, Shard
from trainer.training.dynamic.table import Table

WIDTH, SHARDS, CPU = 16, 2, "/device:CPU:0"
BATCH = 10_240  # ids a step: 1,024 examples of 10


def make_table(rows: int) -> Table:
    """Return a table with room for these rows and a slot, as of Adagrad."""
    first = constant(WIDTH, 0.5)
    shards = [Shard(f"table/{number}", "", WIDTH, rows, first) for number in range(SHARDS)]
    for shard in shards:
        shard.add_slots({"accumulator": 0.1})
        tf.function(shard.reserve, autograph=False)()
    return Table("table", WIDTH, shards, [CPU] * SHARDS)


def trains(shard: Shard) -> Any:
    """Return what gives keys rows and changes them, as one step does."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def step(keys: Any) -> None:
        with tf.control_dependencies(
            shard.give(tf.boolean_mask(keys, shard.index.find(keys) < 0), tf.size(keys, tf.int64))
        ):
            found = shard.index.find(keys)
        with shard.changing(found, keys) as rows:
            shard.values.set(rows, shard.values.rows(rows) + 0.1)

    return step


def measure(directory: Path, pieces: Pieces, step: int) -> tuple[int, float]:
    """Save; returns the bytes that were written and how long that and the disk took."""
    began = time.perf_counter()
    pieces.save(str(directory / f"ckpt-{step}"))
    os.sync()
    seconds = time.perf_counter() - began
    found = [path.stat() for path in directory.glob(f"ckpt-{step}.*")]
    return sum(each.st_size for each in found if each.st_nlink == 1), seconds


def floor(directory: Path, size: int) -> float:
    """Return how long a plain file of this size takes."""
    began = time.perf_counter()
    (directory / "plain").write_bytes(bytes(size))
    os.sync()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    """Print a row for a whole save, and one for an incremental save after each number of steps."""
    parser = argparse.ArgumentParser(prog="bench/incremental-saves", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100])
    options = parser.parse_args(arguments)
    table, random = make_table(options.rows), np.random.default_rng(1)
    steps = [trains(shard) for shard in table.shards]
    for start in range(0, options.rows, 1_000_000):
        keys = np.arange(start, min(start + 1_000_000, options.rows))
        for number, step in enumerate(steps):
            step(tf.constant(keys[keys % SHARDS == number]))
    for step in steps:  # else the rows of the last step count as changed
        step(tf.constant([FIRST], tf.int64))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        directory, pieces = Path(name), Pieces(table, [""] * SHARDS, incremental_saves=len(options.steps))
        print(f"{options.rows:,} rows of {WIDTH} with a slot, steps of {BATCH:,} keys by Zipf's law\n")
        print_row("save", "MB", "s", "of the whole", "the disk alone, s", head=True)
        whole, seconds = measure(directory, pieces, 0)
        print_row("whole", f"{whole / 1e6:.1f}", f"{seconds:.2f}", "1", f"{floor(directory, whole):.2f}")
        for number, count in enumerate(options.steps, 1):
            for _ in range(count):
                keys = np.unique(random.zipf(1.2, BATCH) % options.rows)
                for place, step in enumerate(steps):
                    step(tf.constant(keys[keys % SHARDS == place]))
            size, seconds = measure(directory, pieces, number)
            row = f"after {count} steps", f"{size / 1e6:.1f}", f"{seconds:.2f}", f"{size / whole:.3f}"
            print_row(*row, f"{floor(directory, size):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
