"""Incremental saves of large variables: what has changed since the save before, row by row, with links to the rest.

    checkpoints/ckpt-<step>{.index,.data-*}                                    all but the large variables
    checkpoints/ckpt-<step>.table-_base.0-of-1.000000{.index,.data-*}          links: the last whole checkpoint
    checkpoints/ckpt-<step>.table-_rows.<ps>-of-<ps in all>.<save>{.index,...} rows of each ps that have changed since

The rows are those that steps have marked. Where something else may have changed rows, the next save is whole. Where
incremental saves have written the same rows again and again, the next one links the whole one alone, and has all rows
that are marked since. docs/decisions/0263 says why; row_restores.py reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Operation, Tensor, Traced, Variable
from trainer.core.settings.config import Config
from trainer.core.variables import bytes_of
from trainer.run.saves.checkpoint_state import COORDINATOR
from trainer.run.saves.snapshot import Snapshot, copy_each, take_value
from trainer.training.tables.row_restores import BASE, ROWS, RowRange, base_files, key_of, row_files
from trainer.training.tf_internals.graphs import outermost
from trainer.training.tf_internals.saving import saving_by
from trainer.training.updates.atomic_updates import written_handles
from trainer.training.updates.row_marks import MARKED, SAVED, UNMARKED, RowMarks, take_marked

log = logging.getLogger(__name__)
MIN_BYTES = 1 << 20  # of a variable, or a shard of one; to write less takes no time that anybody feels
# Of all rows; once incremental saves have written more, the next one joins them, or is whole where that is much, too.
MAX_WRITTEN_SHARE, MAX_JOINED = 0.5, 0.25
MAX_LINKED = 50  # incremental saves; a file takes as long to link as some thousand rows to write


@dataclasses.dataclass(frozen=True)
class LargeVariable:
    """A variable with marks, or a shard of one."""

    part: RowRange
    """Of which rows of which tensor of a checkpoint."""
    variable: Variable
    changed: Variable
    """The numbers of the rows that have changed since the last save."""
    values: Variable
    """These rows."""


@dataclasses.dataclass(frozen=True)
class PreviousRowSave:
    """What an incremental save builds on: the save before it."""

    prefix: str
    increments: int = 0
    """How many incremental saves there were since the whole one."""
    linked: int = 0
    """Of how many of these it has the rows."""
    written: int = 0
    """How many bytes these rows take."""


class RowTraces(NamedTuple):
    """What an incremental save runs on the ps."""

    take_marked: Traced
    take_joined: Traced
    """What has changed since the whole save."""
    count_joined: Traced
    """Returns the bytes of what this would take."""
    write_rest: Traced
    write_rows: Traced
    drop_rows: Traced


class RowSnapshot(Snapshot):
    """A snapshot that takes of large variables only the rows that have changed."""

    def __init__(
        self,
        write: Callable[[Tensor], Any],
        step: Variable,
        copy: Callable[..., None] = copy_each,
        *,
        incremental_saves: int,
        marks: RowMarks,
        io_device: str | None = None,
    ) -> None:
        """After each whole save there may be so many incremental ones.

        `io_device` writes where the ps share no path. `marks` are those of what is saved.
        """
        self._most, self._io_device, self._marks = incremental_saves, io_device, marks
        self._before: PreviousRowSave | None = None
        self._builds_on: PreviousRowSave | None = None
        written: dict[str, list[tuple[str, Tensor]]] = {}

        def write_all(prefix: Tensor) -> Any:
            with saving_by(noting(written)):
                return write(prefix)

        super().__init__(write_all, step, copy)
        self._large = self._find_large(written)
        if self._large:
            self._traces = self._trace_rows(write)
        elif any(is_large(one) for one, _ in self._pairs):
            log.warning(
                "each save is whole, in spite of incremental_saves: steps change large variables as a whole, or the "
                "model is built by its first input (docs/large-tables.md#incremental-saves)"
            )

    def _trace_rows(self, write: Callable[[Tensor], Any]) -> RowTraces:
        names = {large.part.name for large in self._large}

        def write_rest(prefix: Tensor) -> Any:
            with saving_by(leaving_out(names)):
                return write(prefix)

        def traced(function: Callable[..., Any], *takes: ElementSpec) -> Traced:
            return tf.function(function, autograph=False).get_concrete_function(*takes)

        take_marked, take_joined = (traced(partial(self._assign_changes, least)) for least in (MARKED, SAVED))
        text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
        write_rows, drop_rows = traced(self._write_changes, text, number), traced(self._assign_no_changes)
        rest = self._trace_of_copies(write_rest)
        return RowTraces(take_marked, take_joined, traced(self._count_joined), rest, write_rows, drop_rows)

    def copy_variables(self) -> int:
        """Copy the variables, of large ones what has changed; returns, when it is done, the step."""
        before, self._before, self._builds_on = self._before, None, None
        is_doubted = self._marks.end_doubt() or any(self._marks.of(one.variable) is None for one in self._large)
        if before is None or is_doubted or not Path(f"{before.prefix}.index").is_file():
            return super().copy_variables()
        changes = self._traces.take_marked
        if self._is_long(before) or before.linked >= MAX_LINKED:
            changes, before = self._traces.take_joined, dataclasses.replace(before, linked=0, written=0)
        step, sizes = (each.numpy() for each in changes())
        rows = zip(sizes, (row_bytes(large.variable) for large in self._large), strict=True)
        written = before.written + sum(int(size) * width for size, width in rows)
        self._builds_on = dataclasses.replace(before, written=written)
        return int(step)

    def write(self, prefix: str) -> None:
        """Write the copies as the checkpoint of this name, or what has changed with links to the save before."""
        if not self._large:
            return super().write(prefix)
        before, self._builds_on = self._builds_on, None
        if before is None:
            super().write(prefix)
            if self._most and not can_link(prefix):
                self._most = 0
            saved = PreviousRowSave(prefix)
        else:
            try:
                link(before, prefix)
                self._traces.write_rest(tf.constant(prefix)).numpy()
                self._traces.write_rows(tf.constant(prefix), tf.constant(before.linked, tf.int64)).numpy()
            finally:
                with contextlib.suppress(tf.errors.OpError):  # of a ps that is gone
                    self._drop()
                    self._traces.drop_rows()
            increments, linked = before.increments + 1, before.linked + 1
            saved = dataclasses.replace(before, prefix=prefix, increments=increments, linked=linked)
        if saved.increments < self._most and (not self._is_long(saved) or self._may_join()):
            self._before = saved

    @property
    def _bytes(self) -> int:
        return sum(bytes_of(large.variable) for large in self._large)

    def _is_long(self, saved: PreviousRowSave) -> bool:
        """Return whether so much was written since the whole save that the next one must not add to it."""
        return saved.written > MAX_WRITTEN_SHARE * self._bytes

    def _may_join(self) -> bool:
        return int(self._traces.count_joined().numpy()) <= MAX_JOINED * self._bytes

    def start_again(self) -> None:
        self._before = self._builds_on = None

    def _find_large(self, written: dict[str, list[tuple[str, Tensor]]]) -> list[LargeVariable]:
        """Return the large variables with marks among what a checkpoint writes by name, in slices."""
        variables = {id(variable.handle): variable for variable, _ in self._pairs}
        found = []
        for name, slices in written.items():
            read = [variables.get(id(handle_read_by(tensor))) for _, tensor in slices]
            large = [one for one in read if one is not None and is_large(one) and self._marks.of(one) is not None]
            if len(large) == len(slices):
                for (spec, _), one in zip(slices, large, strict=True):
                    part = RowRange.from_slice(name, spec, int(one.shape[0]))
                    found.append(LargeVariable(part, one, *no_changes(one)))
        return found

    def _assign_values(self) -> Tensor:
        def take_all(variable: Variable, source: Tensor, target: Tensor) -> Operation:
            marks = self._marks.of(variable)
            with tf.control_dependencies([] if marks is None else [take_marked(marks, SAVED, UNMARKED)[1]]):
                return take_value(variable, source, target)

        return self._assign_by(take_all)

    def _assign_changes(self, least: int) -> tuple[Tensor, Tensor]:
        """Take the rows whose mark is at least this."""
        large = {id(one.variable.handle): one for one in self._large}
        sizes: dict[int, Tensor] = {}
        taken: dict[int, tuple[Tensor, Operation]] = {}  # once of what a variable shares with its slots

        def take_changes(variable: Variable, source: Tensor, target: Tensor) -> Operation:
            number, marks = id(variable.handle), self._marks.of(variable)
            if number not in large:
                return take_value(variable, source, target)
            if id(marks) not in taken:
                taken[id(marks)] = take_marked(marks, least, SAVED)
            rows, marked = taken[id(marks)]
            values = tf.raw_ops.ResourceGather(resource=source, indices=rows, dtype=variable.dtype)
            sizes[number] = tf.size(rows, tf.int64)
            put = tf.raw_ops.AssignVariableOp(resource=large[number].changed.handle, value=rows)
            with tf.control_dependencies([put, marked]):
                return tf.raw_ops.AssignVariableOp(resource=large[number].values.handle, value=values)

        step = self._assign_by(take_changes)
        return step, tf.stack([sizes[number] for number in large])

    def _count_joined(self) -> Tensor:
        sizes = []
        for large in self._large:
            with tf.device(large.variable.device):
                rows = tf.math.count_nonzero(self._marks.of(large.variable))
                sizes.append(rows * row_bytes(large.variable))
        return tf.add_n(sizes)

    def _write_changes(self, prefix: Tensor, save: Tensor) -> Tensor:
        devices, written = sorted({large.variable.device for large in self._large}), []
        for server, device in enumerate(devices):
            tensors: dict[str, Tensor] = {}
            for large in self._large:
                if large.variable.device == device:
                    with tf.device(device):
                        tensors[key_of("rows", large.part)] = large.changed.read_value() + large.part.begin
                        tensors[key_of("values", large.part)] = large.values.read_value()
            with tf.device(self._io_device or device):
                number = tf.strings.as_string(save, width=6, fill="0")
                path = tf.strings.join([prefix, f".table-{ROWS}.{server}-of-{len(devices)}.", number])
                written.append(
                    tf.raw_ops.SaveV2(
                        prefix=path,
                        tensor_names=list(tensors),
                        shape_and_slices=[""] * len(tensors),
                        tensors=list(tensors.values()),
                    )
                )
        with tf.control_dependencies(written):
            return tf.identity(save)

    def _assign_no_changes(self) -> None:
        for one in self._large:
            with tf.device(one.variable.device):
                one.changed.assign(tf.zeros([0], tf.int64))
                one.values.assign(tf.zeros([0, one.variable.shape[1]], one.variable.dtype))


def snapshots_of(config: Config, marks: RowMarks | None = None) -> Callable[..., Snapshot] | None:
    """Return what makes the snapshots of a run with incremental saves; None without them."""
    if not config.incremental_saves or marks is None:
        return None
    io_device = COORDINATOR if config.local_run_dir else None
    return partial(RowSnapshot, incremental_saves=config.incremental_saves, marks=marks, io_device=io_device)


def noting(written: dict[str, list[tuple[str, Tensor]]]) -> Callable[..., Any]:
    """Return what notes the tensors that a checkpoint writes: slice and tensor, by name."""

    def save(plain: Any, prefix: Any, names: Any, slices: Any, tensors: Any, name: Any = None) -> Any:
        for key, spec, tensor in zip(names, slices, tensors, strict=True):
            written.setdefault(key, []).append((spec, tensor))
        return plain(prefix, names, slices, tensors, name)

    return save


def leaving_out(left: set[str]) -> Callable[..., Any]:
    """Return what writes a checkpoint without the tensors of these names."""
    number = 0

    def save(plain: Any, prefix: Any, names: Any, slices: Any, tensors: Any, name: Any = None) -> Any:
        nonlocal number
        kept = [one for one in zip(names, slices, tensors, strict=True) if one[0] not in left]
        if not kept:  # TensorFlow writes no file without a tensor
            number += 1
            kept = [(f"_nothing/{number}", "", tf.zeros([0]))]
        return plain(prefix, *map(list, zip(*kept, strict=True)), name)

    return save


def handle_read_by(tensor: Tensor) -> Tensor | None:
    """Return the handle of the variable whose value a tensor of a graph is; None where it is no variable's value."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return outermost(operation.inputs[0]) if operation.type == "ReadVariableOp" else None


def is_large(variable: Variable) -> bool:
    is_matrix = variable.shape.rank == 2 and variable.shape.is_fully_defined()
    return is_matrix and bytes_of(variable) >= MIN_BYTES


def writes_large(traced: Traced) -> bool:
    """Return whether what is traced may change a large variable."""
    written = {id(outermost(one)) for one in written_handles(traced.graph.get_operations()).values()}
    return any(id(one.handle) in written and is_large(one) for one in traced.graph.variables)


def row_bytes(variable: Variable) -> int:
    return math.prod(variable.shape[1:]) * int(variable.dtype.size)


def no_changes(variable: Variable) -> tuple[Variable, Variable]:
    """Return what the numbers and values of a variable's rows are put into."""
    with tf.device(variable.device):
        empty = tf.zeros([0], tf.int64), tf.zeros([0, variable.shape[1]], variable.dtype)
        rows, values = (tf.Variable(one, trainable=False, shape=[None, *one.shape[1:]]) for one in empty)
        return rows, values


def can_link(prefix: str) -> bool:
    """Return whether files may have links beside a checkpoint, which a later save needs; else the log says why not."""
    source, target = Path(f"{prefix}.index"), Path(f"{prefix}.index_link")
    try:
        target.hardlink_to(source)
        target.unlink()
    except OSError as error:
        log.warning("large variables are saved whole: can't link the files of %s: %s", prefix, error)
        target.unlink(missing_ok=True)
        return False
    return True


def link(before: PreviousRowSave, prefix: str) -> None:
    """Link what a save builds on into this one; raises OSError or NotFoundError where that can't be done."""
    whole = {f".table-{BASE}.0-of-1.000000{ending}": name for ending, name in whole_files(before.prefix).items()}
    base = base_files(before.prefix) if before.increments else whole
    rows = row_files(before.prefix) if before.linked else {}
    if not base or len({name.split(".")[-2] for name in rows.values()}) != before.linked:
        raise FileNotFoundError(f"parts of the checkpoint {before.prefix} are gone, which the next one needs")
    for ending, name in {**base, **rows}.items():
        Path(prefix + ending).hardlink_to(Path(before.prefix).with_name(name))


def whole_files(prefix: str) -> dict[str, str]:
    """Return the files of a checkpoint that TensorFlow has written, by what follows its name; none if some are gone."""
    path = Path(prefix)
    pattern = re.compile(rf"{re.escape(path.name)}(\.index|\.data-\d+-of-(\d+))")
    found = [match for one in path.parent.iterdir() if (match := pattern.fullmatch(one.name))]
    count = max((int(match[2]) for match in found if match[2]), default=0)
    return {match[1]: match[0] for match in found} if len(found) == 1 + count > 1 else {}
