"""The gradients of lookups of rows, without the operations by which TensorFlow's own shape them again.

These bring a gradient, and the rows' numbers, into the shape that they have where the numbers are a list: six
operations for each table and ps, which a step takes time to start.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import array_ops, resource_variable_ops  # which register TensorFlow's own

from trainer.core.contracts import Tensor

GIVES = "type"  # of what TensorFlow's registry keeps of a gradient: the function
OWN = {name: ops.gradient_registry.lookup(name) for name in ("ResourceGather", "GatherV2")}


def of_variable(operation: Any, gradient: Any) -> Any:
    """Return the gradient of a lookup of a variable's rows."""
    handle, numbers = operation.inputs
    if numbers.shape.rank != 1:
        return OWN["ResourceGather"](operation, gradient)
    return named(gradient, numbers, resource_variable_ops.variable_shape(handle)), None


def of_tensor(operation: Any, gradient: Any) -> Any:
    """Return the gradient of a lookup of a tensor's rows."""
    rows, numbers, axis = operation.inputs
    is_plain = numbers.shape.rank == 1 and tf.get_static_value(axis) == 0 and not operation.get_attr("batch_dims")
    if not is_plain:
        return OWN["GatherV2"](operation, gradient)
    return named(gradient, numbers, array_ops.shape(rows)), None, None


def named(gradient: Any, numbers: Tensor, shape: Tensor) -> tf.IndexedSlices:
    """Return the gradient of rows of these numbers; that of their own rows is added up first."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])
    return tf.IndexedSlices(gradient, numbers, shape)


def register() -> None:
    """Have TensorFlow use them, in all of this process."""
    for name, function in (("ResourceGather", of_variable), ("GatherV2", of_tensor)):
        ops.gradient_registry._registry[name][GIVES] = function
