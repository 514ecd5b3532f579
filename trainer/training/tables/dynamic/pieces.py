"""Dynamic tables in checkpoints: each ps writes and reads its rows itself, in pieces.

    checkpoints/ckpt-<step>.table-<layer>.<ps>-of-<ps in all>.<piece>.{index,data-00000-of-00001}

A piece holds rows with their keys. So a table is restored on any number of ps, each of which takes what is its own.
An incremental save links the pieces of the one before, and writes those rows alone that were given or trained since,
in pieces with greater numbers. The last piece of each save has also what has changed since the save began: so the rows
of a ps are of one moment. Of a key in several pieces, the greatest number counts. Where incremental saves have written
much of the same rows again and again, the next one links the whole save alone, and has all that has changed since
(docs/decisions/0239).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.training.tables.dynamic.arrays import Array
from trainer.training.tables.dynamic.hashing import owner_of
from trainer.training.tables.dynamic.shard import BEGIN, EVICTED, FIRST, NEXT, REFUSED, ROWS, Shard
from trainer.training.tables.dynamic.table import Table
from trainer.training.tf_internals.graphs import APART

log = logging.getLogger(__name__)
PIECE_BYTES = 32 * 1024 * 1024
SPARSER = 8  # times as many rows are looked through for a piece of an incremental save, of which few have changed
# Of all rows; once incremental saves have written more, the next one joins them, or is whole where that is much, too.
MAX_WRITTEN_SHARE, MAX_JOINED = 0.5, 0.25
MAX_LINKED = 50  # incremental saves; a file takes as long to link as some thousand rows to write
EVER = -1  # before any clock
CLOCK = "clock"
SUFFIXES = (".index", ".data-00000-of-00001")


@dataclasses.dataclass(frozen=True)
class PreviousTableSave:
    """What an incremental save builds on: the save before it."""

    prefix: str
    clocks: np.ndarray
    """Those of the shards at its last piece."""
    evicted: np.ndarray
    """How many rows each shard had taken away when the whole save began."""
    pieces: int
    """How many numbers its pieces have."""
    increments: int
    """How many incremental saves there were since the whole one."""
    linked: int
    """Of how many of these it has the pieces."""
    written: int
    """How many rows these pieces have."""
    whole: PreviousTableSave | None = None
    """The whole one; None in itself."""


class Pieces:
    """Saves and restores one table. A save is traced once: what is traced again stays on every ps."""

    def __init__(
        self, table: Table, mutexes: Sequence[str], io_device: str | None = None, incremental_saves: int = 0
    ) -> None:
        """`mutexes` are those of the shards' updates; `io_device` reads and writes where the ps share no path.

        After each whole save there may be so many incremental ones.
        """
        self._table, self._mutexes, self._io_device = table, mutexes, io_device
        self._incremental_saves = incremental_saves
        self._before: PreviousTableSave | None = None
        self._length = max(1, PIECE_BYTES // table.shards[0].row_bytes)
        text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
        of_shards = tf.TensorSpec([len(table.shards)], tf.int64)
        self._ends = tf.function(self._read_ends, autograph=False).get_concrete_function()
        self._count = tf.function(self._count_changed, [of_shards], autograph=False)
        if incremental_saves:
            self._count.get_concrete_function()
        self._write, self._write_last = (
            tf.function(partial(self._write_piece, take), autograph=False).get_concrete_function(
                text, number, of_shards, of_shards, of_shards
            )
            for take in (Shard.piece, Shard.last_piece)
        )

    @property
    def _kept(self) -> dict[str, Array]:
        return self._table.shards[0].kept

    def save(self, prefix: str) -> None:
        """Write the rows that there are now beside the checkpoint of this name, or those that have changed."""
        now = self._ends().numpy()
        before, self._before = self._before, None
        saved = None
        if before is not None:
            before = self._joined(before, now)
        if before is not None and self._has_room(now, before) and self._links(before, prefix):
            before = dataclasses.replace(
                before,
                prefix=prefix,
                increments=before.increments + 1,
                linked=before.linked + 1,
                whole=before.whole or before,
            )
            saved = self._write_all(before, now, self._length * SPARSER)
            if not self._has_room(self._ends().numpy(), before):  # for what was given meanwhile
                self._remove(prefix)
                saved = None
        if saved is None:
            ever = np.full_like(now[:, len(BEGIN)], EVER)
            whole = PreviousTableSave(prefix, ever, now[:, EVICTED], pieces=0, increments=0, linked=0, written=0)
            saved = dataclasses.replace(self._write_all(whole, now, self._length), written=0)
        if saved.increments < self._incremental_saves:
            self._before = saved

    def _joined(self, before: PreviousTableSave, now: np.ndarray) -> PreviousTableSave | None:
        """Return what the next incremental save builds on: the save before, or the whole one; None if it is too large.

        So a checkpoint, which an evaluation reads as a whole, is never much larger than the rows that there are.
        """
        rows = now[:, ROWS].sum()
        if before.whole is None or (before.written <= MAX_WRITTEN_SHARE * rows and before.linked < MAX_LINKED):
            return before
        if int(self._count(before.whole.clocks)) > MAX_JOINED * rows:
            return None
        return dataclasses.replace(before.whole, prefix=before.prefix, increments=before.increments, whole=before.whole)

    def _write_all(self, saved: PreviousTableSave, now: np.ndarray, length: int) -> PreviousTableSave:
        """Write the rows that have changed since what is saved; returns what is saved then."""
        ends, began = now[:, NEXT], now[:, len(BEGIN)]
        last = max(1, -(-(int(ends.max()) - FIRST) // length)) - 1
        starts = [np.minimum(FIRST + piece * length, ends) for piece in range(last + 1)]
        written = saved.written
        for piece in range(last):
            place = tf.constant(saved.prefix), tf.constant(saved.pieces + piece, tf.int64)
            written += int(self._write(*place, starts[piece], starts[piece + 1], saved.clocks)[0])
        place = tf.constant(saved.prefix), tf.constant(saved.pieces + last, tf.int64)
        rows, clocks = (each.numpy() for each in self._write_last(*place, starts[last], saved.clocks, began))
        return dataclasses.replace(saved, clocks=clocks, pieces=saved.pieces + last + 1, written=written + int(rows))

    def _remove(self, prefix: str) -> None:
        for *_, path in pieces_of(prefix, self._table.name):
            for suffix in SUFFIXES:
                Path(path + suffix).unlink()

    def _has_room(self, now: np.ndarray, before: PreviousTableSave) -> bool:
        """Return whether each shard has room for all that is written, and for what was taken away since the whole save.

        The checkpoint still has these rows. While it is written, all that are free may be given again.
        """
        most = now[:, NEXT] - FIRST + now[:, EVICTED] - before.evicted
        return all(most <= [shard.capacity for shard in self._table.shards])

    def _links(self, before: PreviousTableSave, prefix: str) -> bool:
        """Link the pieces of the save before into this one; returns False where that can't be done, and leaves none."""
        linked, target = list[Path](), Path(prefix)
        try:
            found = pieces_of(before.prefix, self._table.name)
            pieces = [each for each in found if each[2] < before.pieces]
            if len(pieces) != before.pieces * len(self._table.shards):
                return False  # it was removed, or a part of it
            for *_, path in pieces:
                for suffix in SUFFIXES:
                    name = target.name + Path(path).name.removeprefix(Path(before.prefix).name) + suffix
                    linked.append(target.with_name(name))  # also where the answer is lost
                    linked[-1].hardlink_to(path + suffix)
        except OSError as error:
            log.warning("the dynamic table %s is saved whole: can't link its files: %s", self._table.name, error)
            for new in linked:
                new.unlink(missing_ok=True)
            return False
        return True

    def restore(self, prefix: str, servers: Sequence[int] | None = None) -> None:
        """Read the rows beside the checkpoint of this name, on these ps or all; raises ValueError for a misfit."""
        self._before = None
        count = len(self._table.shards)
        servers = range(count) if servers is None else servers
        found = all_pieces_of(prefix, self._table.name)
        self._check(found[0][-1])
        if are_own := found[0][1] == count:  # each ps reads what it wrote
            by_piece: dict[int, list[str]] = {}
            for server, _, piece, path in found:
                if server in servers:
                    by_piece.setdefault(piece, []).append(path)
            reads = list(by_piece.values())
        else:
            reads = [[path] * len(servers) for *_, path in found]
        read = tf.function(partial(self._read_piece, servers), autograph=False).get_concrete_function(
            tf.TensorSpec([len(servers)], tf.string)
        )
        others = sum(int(read(tf.constant(paths))) for paths in reads)
        if are_own and others:
            raise ValueError(
                f"{others:,} rows of the dynamic table {self._table.name} are in the files of ps that they do not "
                "belong to: its keys had other owners when it was written. Any other number of ps reads all of them"
            )
        if (refused := int(self._ends().numpy()[list(servers), REFUSED].sum())) > 0:
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
                clock = shard.clock.read()
                with tf.control_dependencies([clock]):  # rows beyond the end were given later
                    found.append(tf.concat([shard.numbers.read(), clock], 0))
        return tf.stack(found)

    def _count_changed(self, since: Tensor) -> Tensor:
        """Return how many rows have changed since these clocks."""
        sizes = []
        for number, (shard, device) in enumerate(zip(self._table.shards, self._table.devices, strict=True)):
            with tf.device(device), tf.name_scope(APART):
                own = shard.with_own_handles()
                first = tf.constant(FIRST, tf.int64)
                sizes.append(tf.size(own.changed_rows(first, own.numbers.read()[NEXT], since[number])))
        return tf.reduce_sum(sizes)

    def _write_piece(
        self, take: Callable[..., dict[str, Tensor]], prefix: Tensor, piece: Tensor, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write what is taken of each shard, with its own of the numbers; returns how many rows, and the clocks."""
        table, count, written, sizes, clocks = self._table, len(self._table.shards), [], [], []
        for number, (shard, device, mutex) in enumerate(zip(table.shards, table.devices, self._mutexes, strict=True)):
            with tf.device(device):
                rows = take(shard, *(one[number] for one in given), mutex)
                sizes.append(tf.size(rows["keys"]))
                clocks.append(rows["clock"][0])
            name = f".table-{table.name}.{number}-of-{count}."
            with tf.device(self._io_device or device):
                path = tf.strings.join([prefix, name, tf.strings.as_string(piece, width=6, fill="0")])
                names, values = zip(*sorted(rows.items()), strict=True)
                saved = tf.raw_ops.SaveV2(
                    prefix=path, tensor_names=names, shape_and_slices=[""] * len(names), tensors=list(values)
                )
                written.append(saved)
        with tf.control_dependencies(written):
            return tf.reduce_sum(sizes), tf.stack(clocks)  # which wait, as add_n of one would not

    def _read_piece(self, servers: Sequence[int], paths: Tensor) -> Tensor:
        """Have each ps take its rows of a piece; returns how many are another's."""
        table, kept, taken, others = self._table, self._kept, [], []
        names = sorted([*kept, CLOCK])
        dtypes = [tf.int64 if name == CLOCK else kept[name].dtype for name in names]
        for place, number in enumerate(servers):
            shard, device = table.shards[number], table.devices[number]
            with tf.device(self._io_device or device):
                values = tf.raw_ops.RestoreV2(
                    prefix=paths[place], tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
                )
            restored = dict(zip(names, values, strict=True))
            with tf.device(device):
                shapes = {CLOCK: [1], **{name: [None, *array.shape[1:]] for name, array in kept.items()}}
                restored = {name: tf.ensure_shape(value, shapes[name]) for name, value in restored.items()}
                own = owner_of(restored["keys"], len(table.shards)) == number
                taken.append(shard.insert_restored(restored, own))
                others.append(tf.size(own) - tf.math.count_nonzero(own, dtype=tf.int32))
        with tf.control_dependencies(taken):
            return tf.reduce_sum(others)


def pieces_of(prefix: str, name: str) -> list[tuple[int, int, int, str]]:
    """Return the pieces of a table beside a checkpoint: the ps, how many there were, the piece's number and prefix.

    Of a key in several of them, the first counts.
    """
    pattern = re.compile(rf"{re.escape(Path(prefix).name)}\.table-{re.escape(name)}\.(\d+)-of-(\d+)\.(\d+)\.index")
    found = [pattern.fullmatch(path.name) for path in Path(prefix).parent.iterdir()]
    listed = [match for match in found if match]
    pieces = [
        (int(match[1]), int(match[2]), int(match[3]), str(Path(prefix).with_name(match[0].removesuffix(".index"))))
        for match in listed
    ]
    return sorted(pieces, key=lambda piece: (-piece[2], piece[0]))


def all_pieces_of(prefix: str, name: str) -> list[tuple[int, int, int, str]]:
    """Return the same; raises ValueError without any.

    Raises NotFoundError where not all are present, as while another process removes them.
    """
    pieces = pieces_of(prefix, name)
    if not pieces:
        raise ValueError(f"it has no rows of the dynamic table {name}")
    count = pieces[0][1] * (1 + pieces[0][2])
    if len(pieces) != count:
        missing = f"{count - len(pieces)} of {count} parts of the dynamic table {name} are gone"
        raise tf.errors.NotFoundError(None, None, missing)
    return pieces


def described(row: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape or 'a number'}" for name, shape in sorted(row.items()))
