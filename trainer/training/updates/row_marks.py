"""Marks of the rows that steps have changed, on the ps of their variables: an incremental save asks for them.

A step marks a row in the same act that changes it, and before it does: no row is changed without a mark, even where an
act is cut off. What writes variables otherwise makes no marks (docs/decisions/0263).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor, Variable
from trainer.training.tf_internals.graphs import APART, handle_shape, outermost
from trainer.training.updates.atomic_updates import written_handles

# How the names of operations begin that change rows alone and say which, and of those that say it otherwise.
BY_ROWS, BY_ELEMENTS = ("ResourceScatter", "ResourceSparseApply"), "ResourceScatterNd"
# What marks say of a row since the last whole save: unchanged, changed before the last save, changed after it. As int8,
# since TensorFlow writes single bools to rows eight times as slowly.
UNMARKED, SAVED, MARKED = 0, 1, 2


class RowMarks:
    """Marks for variables of a model, which their slots share."""

    def __init__(self, variables: Iterable[Variable], act_name_of: Callable[[Tensor], str]) -> None:
        """Take the variables, in no strategy's scope. `act_name_of` is that of AtomicUpdates."""
        self._act_name_of = act_name_of
        self._kept = list(variables)  # so that no other handle has the same id
        self._marks = {id(one.handle): no_marks(one) for one in self._kept}
        self._shared: dict[tuple[str, str, int], Variable] = {}
        self._otherwise: set[int] = set()
        self._is_doubted = False

    @property
    def variables(self) -> list[Variable]:
        """What the marks are in."""
        return list(self._marks.values())

    def add(self, made: Sequence[Operation]) -> None:
        """Have the operations of a step, which have their mutexes, mark what they change."""
        writes = [(one, outermost(handle)) for one in made for handle in written_handles([one]).values()]
        for _, handle in writes:
            if id(handle) in self._marks and self._act_name_of(handle):
                self._shared[self._act_of(handle)] = self._marks[id(handle)]
        added: dict[tuple[int, str, str], Operation] = {}
        for one, handle in writes:
            rows, locks = rows_changed(one), [each for each in one.control_inputs if each.type == "MutexLock"]
            if rows is None or not locks:
                self._otherwise.add(id(handle))
            elif (marks := self._marks_of(handle)) is not None:
                key = (id(marks), rows.name, locks[0].name)
                if key not in added:
                    added[key] = mark(marks, rows, locks)
                one._add_control_input(added[key])

    def of(self, variable: Variable) -> Variable | None:
        """Return the marks of a variable's rows; None where steps change it otherwise."""
        return None if id(variable.handle) in self._otherwise else self._marks_of(variable.handle)

    def doubt(self) -> None:
        """Note that what may change variables otherwise has run."""
        self._is_doubted = True

    def end_doubt(self) -> bool:
        """Return whether that has happened since the last time."""
        doubted, self._is_doubted = self._is_doubted, False
        return doubted

    def _marks_of(self, handle: Tensor) -> Variable | None:
        own = self._marks.get(id(handle))
        return self._shared.get(self._act_of(handle)) if own is None and self._act_name_of(handle) else own

    def _act_of(self, handle: Tensor) -> tuple[str, str, int]:
        """Return what a variable has in common with its slots."""
        return self._act_name_of(handle), str(handle.device), int((handle_shape(handle).as_list() or [0])[0] or 0)


def no_marks(variable: Variable) -> Variable:
    with tf.device(variable.device):
        return tf.Variable(tf.fill(variable.shape[:1], tf.constant(UNMARKED, tf.int8)), trainable=False)


def rows_changed(operation: Operation) -> Tensor | None:
    """Return the rows that an operation changes; None where it may change any."""
    if not operation.type.startswith(BY_ROWS) or operation.type.startswith(BY_ELEMENTS):
        return None
    names = [one.name for one in operation.op_def.input_arg]
    return operation.inputs[names.index("indices")]


def mark(marks: Variable, rows: Tensor, locks: Sequence[Operation]) -> Operation:
    """Mark rows, in the graph of these, while these locks are held."""
    with rows.graph.as_default(), tf.control_dependencies(None), tf.device(marks.device), tf.name_scope(APART):
        number, marked = tf.identity(rows), tf.constant(MARKED, tf.int8)
        with tf.control_dependencies(locks):
            return tf.raw_ops.ResourceScatterUpdate(resource=marks.handle, indices=number, updates=marked)


def take_marked(marks: Variable, least: int, then: int) -> tuple[Tensor, Operation]:
    """Return the rows whose mark is at least this, in what is traced, and what gives them another one."""
    rows = tf.where(tf.raw_ops.ReadVariableOp(resource=marks.handle, dtype=marks.dtype) >= least)[:, 0]
    mark = tf.constant(then, marks.dtype)
    return rows, tf.raw_ops.ResourceScatterUpdate(resource=marks.handle, indices=rows, updates=mark)
