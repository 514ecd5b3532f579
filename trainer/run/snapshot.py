"""Saves a parameter-server cluster's variables as they were at one moment, while training goes on to change them.

docs/decisions/0041 says how, and what it costs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Variable

Copies = Sequence[tuple[Any, Any, Any]]
"""Variables, each with the handle that is read and the one that gets the value; both lie where the variable does."""


def copy_each(copies: Copies) -> None:
    """Copy variables that nobody changes meanwhile."""
    for variable, source, target in copies:
        with tf.device(variable.device):
            value = tf.raw_ops.ReadVariableOp(resource=source, dtype=variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=target, value=value)


class Snapshot:
    """Copies of a checkpoint's variables, each on its variable's ps, and the traced call that writes them.

    Everything is traced once: what is traced again stays on every ps, some 200 KiB a save.
    """

    def __init__(self, write: Callable[[Any], Any], step: Variable, copy: Callable[[Copies], None] = copy_each) -> None:
        """Take what writes a checkpoint of the name that it is given, and the variable of it that counts the steps.

        `copy` copies variables between two updates, in what is traced.
        """
        self._step = step
        self._copy_all = copy
        self._write = tf.function(write, autograph=False).get_concrete_function(tf.TensorSpec([], tf.string))
        variables = {id(variable.handle): variable for variable in self._write.graph.variables}
        self._pairs: list[tuple[Any, Any]] = []
        captures = []
        for capture in self._write.captured_inputs:
            # Lookup tables have no copy: they are written as they are by then.
            if (variable := variables.get(id(capture))) is not None:
                with tf.device(variable.device):
                    nothing = tf.zeros([0], variable.dtype)
                    kept = tf.Variable(nothing, trainable=False, shape=tf.TensorShape(None))
                self._pairs.append((variable, kept))
                capture = kept.handle
            captures.append(capture)
        self._write.set_external_captures(captures)
        self._copy = tf.function(self._assign_values, autograph=False).get_concrete_function()
        self._drop = tf.function(self._assign_nothing, autograph=False).get_concrete_function()

    def take(self) -> int:
        """Copy the variables; returns, when it is done, the step that is copied with them."""
        return int(self._copy().numpy())

    def write(self, prefix: str) -> None:
        """Write the copies as the checkpoint of this name, and free their memory."""
        try:
            self._write(tf.constant(prefix)).numpy()
        finally:
            with contextlib.suppress(tf.errors.OpError):  # of a ps that is gone
                self._drop()

    def _assign_values(self) -> Any:
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
            self._copy_all(others)
        return step

    def _assign_nothing(self) -> None:
        for _, copy in self._pairs:
            with tf.device(copy.device):
                tf.raw_ops.AssignVariableOp(resource=copy.handle, value=tf.zeros([0], copy.dtype))
