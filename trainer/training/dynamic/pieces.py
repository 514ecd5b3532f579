"""Dynamic tables in checkpoints: each ps writes and reads its rows itself, in pieces.

    checkpoints/ckpt-<step>.table-<layer>.<ps>-of-<ps in all>.<piece>.{index,data-00000-of-00001}

A piece holds rows with their keys. So a table is restored on any number of ps, each of which takes what is its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.training.dynamic.arrays import Array
from trainer.training.dynamic.hashing import owner_of
from trainer.training.dynamic.shard import FIRST, NEXT, REFUSED
from trainer.training.dynamic.table import Table

PIECE_BYTES = 32 * 1024 * 1024
CLOCK = "clock"


class Pieces:
    """Saves and restores one table. Everything is traced once: what is traced again stays on every ps."""

    def __init__(self, table: Table, mutexes: Sequence[str], io_device: str | None = None) -> None:
        """`mutexes` are those of the shards' updates; `io_device` reads and writes where the ps share no path."""
        self._table, self._mutexes, self._io_device = table, mutexes, io_device
        self._length = max(1, PIECE_BYTES // table.shards[0].row_bytes)
        text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
        ends = tf.TensorSpec([len(table.shards)], tf.int64)
        self._ends = tf.function(self._read_ends, autograph=False).get_concrete_function()
        self._write = tf.function(self._write_piece, autograph=False).get_concrete_function(text, number, ends)
        texts = tf.TensorSpec([len(table.shards)], tf.string)
        self._read = tf.function(self._read_piece, autograph=False).get_concrete_function(texts)

    @property
    def _kept(self) -> dict[str, Array]:
        return self._table.shards[0].kept

    def save(self, prefix: str) -> None:
        """Write the rows that there are now beside the checkpoint of this name."""
        numbers = self._ends().numpy()
        longest = int(numbers[:, NEXT].max()) - FIRST
        for piece in range(max(1, -(-longest // self._length))):
            self._write(tf.constant(prefix), tf.constant(piece, tf.int64), tf.constant(numbers[:, NEXT])).numpy()

    def restore(self, prefix: str) -> None:
        """Read the rows beside the checkpoint of this name; raises ValueError where they don't fit."""
        found = pieces_of(prefix, self._table.name)
        if not found:
            raise ValueError(f"it has no rows of the dynamic table {self._table.name}")
        self._check(found[0][-1])
        servers = len(self._table.shards)
        if found[0][1] == servers:  # each ps reads what it wrote
            by_piece: dict[int, list[str]] = {}
            for _, _, piece, path in found:
                by_piece.setdefault(piece, []).append(path)
            reads = list(by_piece.values())
        else:
            reads = [[path] * servers for *_, path in found]
        for paths in reads:
            self._read(tf.constant(paths)).numpy()
        if (refused := int(self._ends().numpy()[:, REFUSED].sum())) > 0:
            raise ValueError(
                f"it has {refused:,} rows more of the dynamic table {self._table.name} than the ps have room for: set "
                "a larger capacity in dynamic_tables"
            )

    def _check(self, path: str) -> None:
        reader = tf.train.load_checkpoint(path)
        there = {name: shape[1:] for name, shape in reader.get_variable_to_shape_map().items() if name != CLOCK}
        expected = {name: array.shape[1:] for name, array in self._kept.items()}
        if there != expected:
            raise ValueError(
                f"a row of the dynamic table {self._table.name} was {described(there)} and is {described(expected)}"
            )

    def _read_ends(self) -> Tensor:
        found = []
        for shard, device in zip(self._table.shards, self._table.devices, strict=True):
            with tf.device(device):
                found.append(shard.numbers.read())
        return tf.stack(found)

    def _write_piece(self, prefix: Tensor, piece: Tensor, ends: Tensor) -> Tensor:
        table, count, written = self._table, len(self._table.shards), []
        for number, (shard, device, mutex) in enumerate(zip(table.shards, table.devices, self._mutexes, strict=True)):
            start = tf.minimum(FIRST + piece * self._length, ends[number])
            with tf.device(device):
                rows = shard.piece(start, tf.minimum(start + self._length, ends[number]), mutex)
            name = f".table-{table.name}.{number}-of-{count}."
            with tf.device(self._io_device or device):
                path = tf.strings.join([prefix, name, tf.strings.as_string(piece, width=6, fill="0")])
                names, values = zip(*sorted(rows.items()), strict=True)
                saved = tf.raw_ops.SaveV2(
                    prefix=path, tensor_names=names, shape_and_slices=[""] * len(names), tensors=list(values)
                )
                written.append(saved)
        with tf.control_dependencies(written):
            return tf.constant(len(written))

    def _read_piece(self, paths: Tensor) -> Tensor:
        table, kept, taken = self._table, self._kept, []
        names = sorted([*kept, CLOCK])
        dtypes = [tf.int64 if name == CLOCK else kept[name].dtype for name in names]
        for number, (shard, device) in enumerate(zip(table.shards, table.devices, strict=True)):
            with tf.device(self._io_device or device):
                values = tf.raw_ops.RestoreV2(
                    prefix=paths[number], tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
                )
            restored = dict(zip(names, values, strict=True))
            with tf.device(device):
                shapes = {CLOCK: [1], **{name: [None, *array.shape[1:]] for name, array in kept.items()}}
                restored = {name: tf.ensure_shape(value, shapes[name]) for name, value in restored.items()}
                taken.append(shard.take(restored, owner_of(restored["keys"], len(table.shards)) == number))
        return tf.add_n(taken)


def pieces_of(prefix: str, name: str) -> list[tuple[int, int, int, str]]:
    """Return the pieces of a table beside a checkpoint: the ps, how many there were, the piece's number and prefix."""
    pattern = re.compile(rf"{re.escape(Path(prefix).name)}\.table-{re.escape(name)}\.(\d+)-of-(\d+)\.(\d+)\.index")
    found = [pattern.fullmatch(path.name) for path in Path(prefix).parent.iterdir()]
    listed = [match for match in found if match]
    return sorted(
        (*map(int, match.groups()), str(Path(prefix).with_name(match[0].removesuffix(".index"))))  # type: ignore[misc]
        for match in listed
    )


def described(row: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape or 'a number'}" for name, shape in sorted(row.items()))
