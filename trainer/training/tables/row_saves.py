"""Incremental saves of large variables: what has changed since the save before, row by row, with links to the rest.

    checkpoints/ckpt-<step>{.index,.data-*}                                    all but the large variables
    checkpoints/ckpt-<step>.table-_base.0-of-1.000000{.index,.data-*}          links: the last whole checkpoint
    checkpoints/ckpt-<step>.table-_rows.<ps>-of-<ps in all>.<save>{.index,...} rows of each ps that have changed since

The rows are those that steps have marked, of variables that nothing has changed otherwise. For the rest a ps keeps its
copy after a save, and the next save compares: whatever has changed a row, it is found. Rows count as equal if their
bits are. Where incremental saves have written the same rows again and again, the next one links the whole one alone,
and has all rows that are marked since. docs/decisions/0263 says why; row_restores.py reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Operation, Tensor, Traced, Variable
from trainer.core.settings.config import Config
from trainer.core.variables import bytes_of
from trainer.run.saves.checkpoint_state import COORDINATOR
from trainer.run.saves.snapshot import Snapshot, copy_each, no_copy_yet, take_value
from trainer.training.tables.row_restores import BASE, ROWS, RowRange, base_files, key_of, row_files
from trainer.training.tf_internals.graphs import outermost
from trainer.training.tf_internals.saving import saving_by
from trainer.training.updates.row_marks import MARKED, SAVED, UNMARKED, RowMarks, take_marked

log = logging.getLogger(__name__)
MIN_BYTES = 1 << 20  # of a variable, or a shard of one; to write less takes no time that anybody feels
COMPARED_BYTES = 1 << 22  # at once; with more, no faster
# Of all rows; once incremental saves have written more, the next one joins them, or is whole where that is much, too.
MAX_WRITTEN_SHARE, MAX_JOINED = 0.5, 0.25
MAX_LINKED = 50  # incremental saves; a file takes as long to link as some thousand rows to write
BITS = {
    tf.float16: tf.int16,
    tf.bfloat16: tf.int16,
    tf.float32: tf.int32,
    tf.float64: tf.int64,
    tf.int32: tf.int32,
    tf.int64: tf.int64,
}


@dataclasses.dataclass
class ComparedVariable:
    """A variable, or a shard of one, whose rows are compared."""

    part: RowRange
    """Of which rows of which tensor of a checkpoint."""
    variable: Variable
    copy: Variable
    """What was written last, on the same ps."""
    changed: Variable
    """The numbers of the rows that have changed since."""
    values: Variable
    """These rows."""
    empty: Variable
    """In the place of the copy, where a checkpoint is written without it."""


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
    is_marked: bool = False
    """Whether marks have all rows that have changed since the whole one, of what has marks."""


class RowTraces(NamedTuple):
    """What an incremental save runs on the ps."""

    compare: Traced
    take_marked: Traced
    take_joined: Traced
    """What has changed since the whole save."""
    count_joined: Traced
    """Returns the bytes of what this would take."""
    put: Traced
    """Brings the copies up to date."""
    write_rest: Traced
    write_rows: Traced
    drop_rest: Traced


class RowSnapshot(Snapshot):
    """A snapshot whose copies of large variables stay on the ps, to be compared with at the next save."""

    def __init__(
        self,
        write: Callable[[Tensor], Any],
        step: Variable,
        copy: Callable[..., None] = copy_each,
        *,
        incremental_saves: int,
        io_device: str | None = None,
        marks: RowMarks | None = None,
    ) -> None:
        """After each whole save there may be so many incremental ones.

        `io_device` writes where the ps share no path. `marks` are those of what is saved.
        """
        self._most, self._io_device, self._marks = incremental_saves, io_device, marks or RowMarks([], no_mutex)
        self._before: PreviousRowSave | None = None
        self._builds_on: PreviousRowSave | None = None
        written: dict[str, list[tuple[str, Tensor]]] = {}

        def write_all(prefix: Tensor) -> Any:
            with saving_by(noting(written)):
                return write(prefix)

        super().__init__(write_all, step, copy)
        self._large = self._find_large(written)
        if not self._large:
            return
        self._marked = [large.variable for large in self._large if self._marks.of(large.variable) is not None]
        self._traces = self._trace_rows(write)

    def _trace_rows(self, write: Callable[[Tensor], Any]) -> RowTraces:
        names = {large.part.name for large in self._large}

        def write_rest(prefix: Tensor) -> Any:
            with saving_by(leaving_out(names)):
                return write(prefix)

        def traced(function: Callable[..., Any], *takes: ElementSpec) -> Traced:
            return tf.function(function, autograph=False).get_concrete_function(*takes)

        rest = self._trace_of_copies(write_rest)
        # Else whole tables might be read for nothing.
        redirect([rest], {id(large.copy.handle): large.empty.handle for large in self._large})
        compare = traced(partial(self._assign_changes, None))
        take_marked, take_joined = (
            traced(partial(self._assign_changes, least)) if self._marked else compare for least in (MARKED, SAVED)
        )
        text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
        write_rows, drop_rest = traced(self._write_changes, text, number), traced(self._assign_nothing_to_small)
        count, put = traced(self._count_joined), traced(self._put_changes)
        return RowTraces(compare, take_marked, take_joined, count, put, rest, write_rows, drop_rest)

    def copy_variables(self) -> int:
        """Copy the variables, of large ones what has changed; returns, when it is done, the step."""
        before, self._before, self._builds_on = self._before, None, None
        is_doubted = self._marks.end_doubt()
        if before is None:
            return super().copy_variables()
        if is_doubted or any(self._marks.of(one) is None for one in self._marked):
            changes, before = self._traces.compare, dataclasses.replace(before, is_marked=False)
        elif self._is_long(before) or (before.is_marked and before.linked >= MAX_LINKED):
            changes, before = self._traces.take_joined, dataclasses.replace(before, linked=0, written=0)
        else:
            changes = self._traces.take_marked
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
        try:
            if before is not None:
                self._traces.put()
            if before is not None and link(before, prefix):
                self._traces.write_rest(tf.constant(prefix)).numpy()
                self._traces.write_rows(tf.constant(prefix), tf.constant(before.linked, tf.int64)).numpy()
                increments, linked = before.increments + 1, before.linked + 1
                saved = dataclasses.replace(before, prefix=prefix, increments=increments, linked=linked)
            else:
                saved = PreviousRowSave(prefix, is_marked=bool(self._marked))
                self._write(tf.constant(prefix)).numpy()
            if saved.increments < self._most and (not self._is_long(saved) or self._may_join(saved)):
                self._before = saved
        finally:
            with contextlib.suppress(tf.errors.OpError):  # of a ps that is gone
                self._traces.drop_rest()
                if self._before is None:
                    self._renew_large()

    @property
    def _bytes(self) -> int:
        return sum(bytes_of(large.variable) for large in self._large)

    def _is_long(self, saved: PreviousRowSave) -> bool:
        """Return whether so much was written since the whole save that the next one must not add to it."""
        return saved.written > MAX_WRITTEN_SHARE * self._bytes

    def _may_join(self, saved: PreviousRowSave) -> bool:
        return saved.is_marked and int(self._traces.count_joined().numpy()) <= MAX_JOINED * self._bytes

    def start_again(self) -> None:
        self._before = self._builds_on = None
        if self._large:
            with contextlib.suppress(tf.errors.OpError):
                self._renew_large()

    def _find_large(self, written: dict[str, list[tuple[str, Tensor]]]) -> list[ComparedVariable]:
        """Return the large variables among what a checkpoint writes by name, in slices."""
        copies = {id(variable.handle): (variable, copy) for variable, copy in self._pairs}
        found = []
        for name, slices in written.items():
            read = [copies.get(id(handle_read_by(tensor))) for _, tensor in slices]
            if all(one is not None and is_large(one[0]) for one in read):
                for (spec, _), one in zip(slices, read, strict=True):
                    assert one is not None
                    variable, copy = one
                    part = RowRange.from_slice(name, spec, int(variable.shape[0]))
                    found.append(ComparedVariable(part, variable, copy, *no_changes(variable), no_copy_yet(variable)))
        return found

    def _assign_values(self) -> Tensor:
        def take_all(variable: Variable, source: Tensor, target: Tensor) -> Operation:
            marks = self._marks.of(variable)
            with tf.control_dependencies([] if marks is None else [take_marked(marks, SAVED, UNMARKED)[1]]):
                return take_value(variable, source, target)

        return self._assign_by(take_all)

    def _assign_changes(self, least: int | None) -> tuple[Tensor, Tensor]:
        """Take the rows whose mark is at least this; those that differ from the copy where it is None.

        Of variables without marks these are all rows in a save that joins others.
        """
        large = {id(one.variable.handle): one for one in self._large}
        sizes: dict[int, Tensor] = {}
        taken: dict[int, tuple[Tensor, Operation]] = {}  # once of what a variable shares with its slots

        def take_changes(variable: Variable, source: Tensor, target: Tensor) -> Operation:
            number, marks = id(variable.handle), self._marks.of(variable)
            if number not in large:
                return take_value(variable, source, target)
            if marks is not None and id(marks) not in taken:
                taken[id(marks)] = take_marked(marks, least or MARKED, SAVED)
            if least is not None and marks is not None:
                rows = taken[id(marks)][0]
            elif least == SAVED:
                rows = tf.range(variable.shape[0], dtype=tf.int64)
            else:
                rows = rows_that_differ(variable, source, target)
            values = tf.raw_ops.ResourceGather(resource=source, indices=rows, dtype=variable.dtype)
            sizes[number] = tf.size(rows, tf.int64)
            put = tf.raw_ops.AssignVariableOp(resource=large[number].changed.handle, value=rows)
            with tf.control_dependencies([put, *([] if marks is None else [taken[id(marks)][1]])]):
                return tf.raw_ops.AssignVariableOp(resource=large[number].values.handle, value=values)

        step = self._assign_by(take_changes)
        return step, tf.stack([sizes[number] for number in large])

    def _count_joined(self) -> Tensor:
        sizes = []
        for large in self._large:
            marks = self._marks.of(large.variable)
            with tf.device(large.variable.device):
                rows = tf.constant(large.variable.shape[0], tf.int64) if marks is None else tf.math.count_nonzero(marks)
                sizes.append(rows * row_bytes(large.variable))
        return tf.add_n(sizes)

    def _put_changes(self) -> None:
        """Bring the copies up to date."""
        for large in self._large:
            with tf.device(large.variable.device):
                rows, values = large.changed.read_value(), large.values.read_value()
                tf.raw_ops.ResourceScatterUpdate(resource=large.copy.handle, indices=rows, updates=values)

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

    def _assign_nothing_to_small(self) -> None:
        large = {id(one.copy) for one in self._large}
        for _, copy in self._pairs:
            if id(copy) not in large:
                with tf.device(copy.device):
                    tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.zeros([0], copy.dtype))
        for one in self._large:
            with tf.device(one.variable.device):
                one.changed.assign(tf.zeros([0], tf.int64))
                one.values.assign(tf.zeros([0, one.variable.shape[1]], one.variable.dtype))

    def _renew_large(self) -> None:
        """Put other variables in the places of the copies, whose memory is freed.

        TensorFlow copies a variable at each read once rows of it were written: a save would take a third of its bytes.
        """
        new = {id(large.copy): no_copy_yet(large.variable) for large in self._large}
        handles = {id(large.copy.handle): new[id(large.copy)].handle for large in self._large}
        traces = self._traces
        rows = (traces.compare, traces.take_marked, traces.take_joined, traces.put)
        redirect([self._write, self._copy, self._drop, *rows], handles)
        self._pairs = [(variable, new.get(id(copy), copy)) for variable, copy in self._pairs]
        for large in self._large:
            large.copy = new[id(large.copy)]


def snapshots_of(config: Config, marks: RowMarks | None = None) -> Callable[..., Snapshot] | None:
    """Return what makes the snapshots of a run with incremental saves; None without them."""
    if not config.incremental_saves:
        return None
    io_device = COORDINATOR if config.local_run_dir else None
    return partial(RowSnapshot, incremental_saves=config.incremental_saves, io_device=io_device, marks=marks)


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


def redirect(functions: Sequence[Traced], handles: dict[int, Tensor]) -> None:
    """Have traced functions use other handles, by the identity of those that they use now."""
    for function in functions:
        function.set_external_captures([handles.get(id(one), one) for one in function.captured_inputs])


def handle_read_by(tensor: Tensor) -> Tensor | None:
    """Return the handle of the variable whose value a tensor of a graph is; None where it is no variable's value."""
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return outermost(operation.inputs[0]) if operation.type == "ReadVariableOp" else None


def is_large(variable: Variable) -> bool:
    is_matrix = variable.shape.rank == 2 and variable.shape.is_fully_defined()
    return is_matrix and variable.dtype in BITS and bytes_of(variable) >= MIN_BYTES


def row_bytes(variable: Variable) -> int:
    return math.prod(variable.shape[1:]) * int(variable.dtype.size)


def no_mutex(handle: Tensor) -> str:
    return ""


def no_changes(variable: Variable) -> tuple[Variable, Variable]:
    """Return what the numbers and values of a variable's rows are put into."""
    with tf.device(variable.device):
        empty = tf.zeros([0], tf.int64), tf.zeros([0, variable.shape[1]], variable.dtype)
        rows, values = (tf.Variable(one, trainable=False, shape=[None, *one.shape[1:]]) for one in empty)
        return rows, values


def rows_that_differ(variable: Variable, source: Tensor, target: Tensor) -> Tensor:
    """Return the numbers of the rows in which two variables of one shape differ, in what is traced."""
    count, width = variable.shape
    length = max(1, COMPARED_BYTES // row_bytes(variable))
    times, bits = -(-count // length), BITS[variable.dtype]

    def compare(number: Tensor, found: Any) -> tuple[Tensor, Any]:
        numbers = tf.range(number * length, tf.minimum((number + 1) * length, count))
        now, before = (
            tf.ensure_shape(
                tf.raw_ops.ResourceGather(resource=one, indices=numbers, dtype=variable.dtype), [None, width]
            )
            for one in (source, target)
        )
        differs = tf.reduce_any(tf.not_equal(tf.bitcast(now, bits), tf.bitcast(before, bits)), 1)
        rows = tf.where(differs)[:, 0] + number * length  # many times as fast as boolean_mask
        return number + 1, found.write(tf.cast(number, tf.int32), rows)

    found = tf.TensorArray(tf.int64, times, infer_shape=False, element_shape=[None])
    _, found = tf.while_loop(lambda number, _: number < times, compare, (tf.constant(0, tf.int64), found))
    return found.concat()


def link(before: PreviousRowSave, prefix: str) -> bool:
    """Link what a save builds on into this one; returns False where that can't be done, and leaves none."""
    source, target, linked = Path(before.prefix), Path(prefix), list[Path]()
    try:
        whole = {f".table-{BASE}.0-of-1.000000{ending}": name for ending, name in whole_files(before.prefix).items()}
        base, rows = (base_files(before.prefix) if before.increments else whole), row_files(before.prefix)
        rows = rows if before.linked else {}
        saves = {name.split(".")[-2] for name in rows.values() if name.endswith(".index")}
        if before.prefix == prefix or not base or len(saves) != before.linked:
            return False  # it was removed, or a part of it
        found = {**base, **rows}
        for ending, name in found.items():
            linked.append(target.with_name(target.name + ending))  # also where the answer is lost
            linked[-1].hardlink_to(source.with_name(name))
    except (OSError, tf.errors.NotFoundError) as error:
        log.warning("large variables are saved whole: can't link the files of %s: %s", before.prefix, error)
        for new in linked:
            new.unlink(missing_ok=True)
        return False
    return True


def whole_files(prefix: str) -> dict[str, str]:
    """Return the files of a checkpoint that TensorFlow has written, by what follows its name; none if some are gone."""
    path = Path(prefix)
    pattern = re.compile(rf"{re.escape(path.name)}(\.index|\.data-\d+-of-(\d+))")
    found = [match for one in path.parent.iterdir() if (match := pattern.fullmatch(one.name))]
    count = max((int(match[2]) for match in found if match[2]), default=0)
    return {match[1]: match[0] for match in found} if len(found) == 1 + count > 1 else {}
