"""An incremental save of a table against a whole one: bytes and seconds, in one process, of two shards.

A fixed table (`--fixed`) has marks of its changed rows.

The floor is a file of as many bytes, written and synced by this process. Only ratios say something.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bench.options import parser_of, plain_seconds
from bench.tables import print_row
from trainer.training.tables.dynamic.hashing import constant
from trainer.training.tables.dynamic.pieces import Pieces
from trainer.training.tables.dynamic.shard import FIRST, Shard
from trainer.training.tables.dynamic.table import Table
from trainer.training.tables.dynamic.tables import run_once
from trainer.training.tables.row_saves import RowSnapshot
from trainer.training.updates.row_marks import MARKED, RowMarks

WIDTH, SHARDS, CPU = 16, 2, "/device:CPU:0"
BATCH = 10_240  # ids a step: 1,024 examples of 10


def make_table(rows: int, devices: Sequence[str], slots: Mapping[str, float]) -> Table:
    """Return a table whose shards have room for these rows each, with slots that begin with these values."""
    shards = []
    for number, device in enumerate(devices):
        with tf.device(device):
            shard = Shard(f"table/{number}", f"table/{number}", WIDTH, rows, constant(WIDTH, 0.5))
            shard.add_slots(slots)
            run_once(shard.reserve)
            shards.append(shard)
    return Table("table", WIDTH, shards, devices)


def trains(shard: Shard) -> Any:
    """Return what gives keys rows and changes them, as one step does."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def step(keys: Any) -> None:
        _, given = shard.give(tf.boolean_mask(keys, shard.index.find(keys) < 0), tf.size(keys, tf.int64))
        with tf.control_dependencies(given):
            found = shard.index.find(keys)
        with shard.changing(found, keys) as rows:
            shard.values.set(rows, shard.values.rows(rows) + 0.1)

    return step


def measure(directory: Path, save: Callable[[str], object], step: int) -> tuple[int, float]:
    """Save; returns the bytes that were written and how long that and the disk took."""
    began = time.perf_counter()
    save(str(directory / f"ckpt-{step}"))
    os.sync()
    seconds = time.perf_counter() - began
    found = [path.stat() for path in directory.glob(f"ckpt-{step}.*")]
    return sum(each.st_size for each in found if each.st_nlink == 1), seconds


class Fixed:
    """A fixed table with a slot, and its saves."""

    def __init__(self, rows: int, saves: int) -> None:
        parts = [rows // SHARDS] * SHARDS
        self._shards = [[tf.Variable(tf.zeros([part, WIDTH])) for part in parts] for _ in ("values", "slot")]
        self._step = tf.Variable(0, dtype=tf.int64)
        saved = tf.train.Checkpoint(shards=self._shards, step=self._step)
        self._marks = RowMarks([one for shards in self._shards for one in shards], lambda handle: "")
        self._snapshot = RowSnapshot(saved.write, self._step, incremental_saves=saves, marks=self._marks)
        self.train(np.arange(SHARDS))  # from here on TensorFlow copies what it reads, as in a training
        self.waited = 0.0
        """How long training waited for the last save."""

    def train(self, keys: np.ndarray) -> None:
        for shards in self._shards:
            for number, shard in enumerate(shards):
                rows = tf.constant(keys[keys % SHARDS == number] // SHARDS % shard.shape[0])
                shard.scatter_add(tf.IndexedSlices(tf.fill([len(rows), WIDTH], 0.1), rows))
                if (marks := self._marks.of(shard)) is not None:
                    marks.scatter_update(tf.IndexedSlices(tf.fill([len(rows)], tf.constant(MARKED, tf.int8)), rows))

    def save(self, prefix: str) -> None:
        began = time.perf_counter()
        self._snapshot.copy_variables()
        self.waited = time.perf_counter() - began
        self._snapshot.write(prefix)


def make_dynamic(rows: int, saves: int) -> tuple[Callable[[np.ndarray], None], Callable[[str], None]]:
    """Return what trains keys of a full dynamic table, and what saves it."""
    table = make_table(rows, [CPU] * SHARDS, {"accumulator": 0.1})
    steps = [trains(shard) for shard in table.shards]

    def train(keys: np.ndarray) -> None:
        for number, step in enumerate(steps):
            step(tf.constant(keys[keys % SHARDS == number]))

    for start in range(0, rows, 1_000_000):
        train(np.arange(start, min(start + 1_000_000, rows)))
    for step in steps:  # else the rows of the last step count as changed
        step(tf.constant([FIRST], tf.int64))
    return train, Pieces(table, [""] * SHARDS, incremental_saves=saves).save


def main(arguments: list[str]) -> None:
    """Print a row for a whole save, and one for an incremental save after each number of steps."""
    parser = parser_of("incremental-saves", __doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--fixed", action="store_true", help="a fixed table")
    options = parser.parse_args(arguments)
    random, saves = np.random.default_rng(1), len(options.steps)
    fixed = Fixed(options.rows, saves) if options.fixed else None
    train, save = (fixed.train, fixed.save) if fixed else make_dynamic(options.rows, saves)

    def waited() -> list[str]:
        return [f"{fixed.waited:.2f}"] if fixed else []

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        directory = Path(name)
        print(f"{options.rows:,} rows of {WIDTH} with a slot, steps of {BATCH:,} keys by Zipf's law\n")
        head = ("save", "MB", "s", "of the whole", "the disk alone, s", *(["training waits, s"] if fixed else []))
        print_row(*head, head=True)
        whole, seconds = measure(directory, save, 0)
        row = f"{whole / 1e6:.1f}", f"{seconds:.2f}", "1", f"{plain_seconds(directory, whole):.2f}"
        print_row("whole", *row, *waited())
        for number, count in enumerate(options.steps, 1):
            for _ in range(count):
                train(np.unique(random.zipf(1.2, BATCH) % options.rows))
            size, seconds = measure(directory, save, number)
            row = f"{size / 1e6:.1f}", f"{seconds:.2f}", f"{size / whole:.3f}", f"{plain_seconds(directory, size):.2f}"
            print_row(f"after {count} steps", *row, *waited())


if __name__ == "__main__":
    main(sys.argv[1:])
