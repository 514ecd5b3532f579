"""The gradients of lookups of rows, without the operations by which TensorFlow's own shape them again.

These bring a gradient, and the rows' numbers, into the shape that they have where the numbers are a list: six
operations for each table and ps, which a step takes time to start. TensorFlow asks one registry of the whole process
for gradients. So only lookups by numbers that are known by their names have these, and all others TensorFlow's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import array_ops, resource_variable_ops  # which register TensorFlow's own

from trainer.core.contracts import Tensor

GIVES = "type"  # of what TensorFlow's registry keeps of a gradient: the function
OWN = {name: ops.gradient_registry.lookup(name) for name in ("ResourceGather", "GatherV2")}
_names: list[str] = []  # that operations which give rows' numbers have in theirs


def of_variable(operation: Any, gradient: Any) -> Any:
    """Return the gradient of a lookup of a variable's rows."""
    handle, numbers = operation.inputs
    if is_known(operation, numbers):
        shape = resource_variable_ops.variable_shape(handle)
        if is_of_rows(gradient, shape):
            return named(gradient, numbers, shape), None
    return OWN["ResourceGather"](operation, gradient)


def of_tensor(operation: Any, gradient: Any) -> Any:
    """Return the gradient of a lookup of a tensor's rows."""
    rows, numbers, axis = operation.inputs
    if is_known(operation, numbers) and tf.get_static_value(axis) == 0:
        with ops.colocate_with(rows):
            shape = array_ops.shape(rows)
        if is_of_rows(gradient, shape):
            return named(gradient, numbers, shape), None, None
    return OWN["GatherV2"](operation, gradient)


def is_known(operation: Any, numbers: Tensor) -> bool:
    """Return whether a lookup is by a list of numbers of such a name, in the graph in which its gradient is traced.

    What a gradient returns of another graph is no output of this one, as where a function is called step by step.
    """
    if not tf.is_symbolic_tensor(numbers) or numbers.graph is not tf.compat.v1.get_default_graph():
        return False
    is_list = numbers.shape.rank == 1 and not operation.get_attr("batch_dims")
    return is_list and any(name in numbers.op.name for name in _names)


def is_of_rows(gradient: Any, shape: Tensor) -> bool:
    """Return whether a gradient is known to be of rows of a table of this shape: a program's own may be of any."""
    return gradient.shape.rank == shape.shape[0] and gradient.shape[1:].is_fully_defined()


def named(gradient: Any, numbers: Tensor, shape: Tensor) -> tf.IndexedSlices:
    """Return the gradient of rows of these numbers; that of their own rows is added up first."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])
    return tf.IndexedSlices(gradient, numbers, shape)


def register(*names: str) -> None:
    """Have TensorFlow use them for lookups by numbers of these names."""
    _names.extend(names)
    for name, function in (("ResourceGather", of_variable), ("GatherV2", of_tensor)):
        ops.gradient_registry._registry[name][GIVES] = function
