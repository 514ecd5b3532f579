"""Saves a parameter-server cluster's variables as they were at one moment, while training goes on to change them.

docs/decisions/0041 says how, and what it costs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor, Traced, Variable

Copies = Sequence[tuple[Variable, Tensor, Tensor]]
"""Variables, each with the handle that is read and the one that gets the value; both lie where the variable does."""


Take = Callable[[Variable, Tensor, Tensor], Operation]
"""Copies one of them, in what is traced; returns the operation that ends it."""


def take_value(variable: Variable, source: Tensor, target: Tensor) -> Operation:
    value = tf.raw_ops.ReadVariableOp(resource=source, dtype=variable.dtype)
    return tf.raw_ops.AssignVariableOp(resource=target, value=value)


def copy_each(copies: Copies, take: Take = take_value) -> None:
    """Copy variables that are not changed meanwhile."""
    for one in copies:
        with tf.device(one[0].device):
            take(*one)


class Snapshot:
    """Copies of a checkpoint's variables, each on its variable's ps, and the traced call that writes them.

    Everything is traced once: what is traced again stays on every ps, some 200 KiB a save.
    """

    def __init__(self, write: Callable[[Tensor], Any], step: Variable, copy: Callable[..., None] = copy_each) -> None:
        """Take what writes a checkpoint of the name that it is given, and the variable of it that counts the steps.

        `copy` copies variables between two updates, in what is traced, each by a Take where it is given one.
        """
        self._step = step
        self._copy_all = copy
        self._pairs: list[tuple[Variable, Variable]] = []
        self._write = self._trace_of_copies(write)
        self._copy = tf.function(self._assign_values, autograph=False).get_concrete_function()
        self._drop = tf.function(self._assign_nothing, autograph=False).get_concrete_function()

    def _trace_of_copies(self, write: Callable[[Tensor], Any]) -> Traced:
        """Trace what writes a checkpoint, and have it write the copies."""
        function = tf.function(write, autograph=False).get_concrete_function(tf.TensorSpec([], tf.string))
        variables = {id(variable.handle): variable for variable in function.graph.variables}
        copies = {id(variable.handle): copy for variable, copy in self._pairs}
        captures = []
        for capture in function.captured_inputs:
            # Lookup tables have no copy: they are written as they are by then.
            if (variable := variables.get(id(capture))) is not None:
                if id(capture) not in copies:
                    copies[id(capture)] = no_copy_yet(variable)
                    self._pairs.append((variable, copies[id(capture)]))
                capture = copies[id(capture)].handle
            captures.append(capture)
        function.set_external_captures(captures)
        return function

    def start_again(self) -> None:
        """Build on no earlier save: what was restored is another state."""

    def copy_variables(self) -> int:
        """Copy the variables; returns, when it is done, the step that is copied with them."""
        return int(self._copy().numpy())

    def write(self, prefix: str) -> None:
        """Write the copies as the checkpoint of this name, and free their memory."""
        try:
            self._write(tf.constant(prefix)).numpy()
        finally:
            with contextlib.suppress(tf.errors.OpError):  # of a ps that is gone
                self._drop()

    def _assign_values(self) -> Tensor:
        return self._assign_by(take_value)

    def _assign_by(self, take: Take) -> Tensor:
        # First the step: so each copy has at least what the calls did that it counts.
        step = self._step.read_value()
        others = []
        for variable, copy in self._pairs:
            if variable.handle is self._step.handle:
                with tf.device(copy.device):
                    tf.raw_ops.AssignVariableOp(resource=copy.handle, value=step)
            else:
                others.append((variable, variable.handle, copy.handle))
        with tf.control_dependencies([step]):
            self._copy_all(others, take)
        return step

    def _assign_nothing(self) -> None:
        for _, copy in self._pairs:
            with tf.device(copy.device):
                tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.zeros([0], copy.dtype))


def no_copy_yet(variable: Variable) -> Variable:
    """Return what a copy of a variable is put into, which takes no memory yet."""
    with tf.device(variable.device):
        return tf.Variable(tf.zeros([0], variable.dtype), trainable=False, shape=tf.TensorShape(None))
