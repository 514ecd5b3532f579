"""Assignments to a split variable of what a step computes of it: shard by shard, as a ps can do it in one act.

TensorFlow joins the shards, computes, and gives each shard its slice: that a worker does, and another worker's change
in between is lost (atomic_updates.py). Where the computation is element by element, it is made again of each shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor, Variable
from trainer.training.measures.metrics import READING
from trainer.training.tf_internals.graphs import is_read_since_writes, operation_like
from trainer.training.updates.terms import LIGHT

SHAPING = ("AddN", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze")


def shard_values(split: Variable, value: Any) -> list[Tensor] | None:
    """Return the value of each shard where a traced step computes a new one of the split variable's own.

    Returns None where it computes it of something else, or not element by element.
    """
    if not tf.is_symbolic_tensor(value) or value.graph is not tf.compat.v1.get_default_graph():
        return None
    path: dict[str, Any] = {}
    if not find_path(split, value, path) or value.op.name not in path:
        return None
    begin, found = 0, []
    for shard in split.variables:
        end = begin + int(shard.shape[0])
        found.append(value_of(split, value, path, begin, end, shard.read_value()))
        begin = end
    return found


def find_path(split: Variable, tensor: Tensor, path: dict[str, Any]) -> bool:
    """Add to the path what lies between the shards' reads and a tensor; returns False where it is no such thing."""
    operation = tensor.op
    if operation.name in path:
        return True
    if is_whole_read(split, operation):
        path[operation.name] = operation
        return True
    if not depends_on(split, operation):
        return tensor.shape.rank is not None and tensor.shape.rank <= split.shape.rank
    fits = operation.type in LIGHT and operation.type not in SHAPING and tensor.shape == split.shape
    path[operation.name] = operation
    return fits and all(find_path(split, one, path) for one in operation.inputs)


def is_whole_read(split: Variable, operation: Any) -> bool:
    """Return whether an operation joins the shards as they still are."""
    if operation.type != "ConcatV2" or len(operation.inputs) != len(split.variables) + 1:
        return False
    for given, shard in zip(operation.inputs, split.variables, strict=False):
        read = given.op
        while read.type == "Identity":
            read = read.inputs[0].op
        if read.type != "ReadVariableOp":
            return False
        handle = read.inputs[0]
        if handle is not tf.compat.v1.get_default_graph().capture(shard.handle):
            return False
        if not is_read_since_writes(read, handle, READING):
            return False
    return True


def depends_on(split: Variable, operation: Any) -> bool:
    """Return whether an operation uses what was read of one of the shards."""
    handles = {id(operation.graph.capture(shard.handle)) for shard in split.variables}
    todo, seen = [operation], set[str]()
    while todo:
        one = todo.pop()
        if one.name not in seen:
            seen.add(one.name)
            if any(id(given) in handles for given in one.inputs):
                return True
            todo += [given.op for given in one.inputs]
    return False


def value_of(split: Variable, tensor: Tensor, path: Mapping[str, Any], begin: int, end: int, read: Tensor) -> Tensor:
    """Return the rows of a tensor that belong to a shard, of which that was read."""
    operation = tensor.op
    if operation.name not in path:
        if tensor.shape.rank < split.shape.rank or tensor.shape[0] == 1:
            return tensor
        if tensor.shape[0] is None:
            tensor = tf.broadcast_to(tensor, [split.shape[0], *tf.unstack(tf.shape(tensor))[1:]])
        return tensor[begin:end]
    if operation.type == "ConcatV2":
        return read
    inputs = [value_of(split, one, path, begin, end, read) for one in operation.inputs]
    return operation_like(operation, inputs).outputs[tensor.value_index]
