"""What an operation of a traced step waits for, also by the orders that tf.function adds at the end of the trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from trainer.core.contracts import Graph, Operation, Tensor
from trainer.training.measures.metrics import READING
from trainer.training.tf_internals.graphs import APART, is_stateful, outermost, read_only_inputs

# Of a tensor whose shape is known. A larger one would be copied twice for one message less.
MAX_BYTES = 256 * 1024
# Of one row, where only the step knows how many there are.
MAX_ROW_BYTES = 1024
# tf.function takes all others that use a variable for writes.
READS = tuple(kind for kind in READING if kind != "VarIsInitializedOp")


def sources(operation: Operation) -> list[Operation]:
    """Return the operations that this one waits for."""
    return [*(given.op for given in operation.inputs), *operation.control_inputs]


def waits_for(operations: Sequence[Operation], others: Iterable[Operation]) -> bool:
    """Return whether one of these operations of a graph waits for one of the others, or is one."""
    before: dict[str, list[Operation]] = defaultdict(list)
    for first, then in added_orders(operations[0].graph) if operations else ():
        before[then.name].append(first)
    todo, known = list(operations), {one.name for one in operations}
    while todo:
        one = todo.pop()
        more = {each.name: each for each in (*sources(one), *before[one.name]) if each.name not in known}
        todo += more.values()
        known |= more.keys()
    return any(one.name in known for one in others)


def handles_of(graph: Graph) -> dict[int, Tensor]:
    """Return what stands outside of a graph for each tensor that it captures, by the tensor's id."""
    return {id(inner): outermost(outer) for outer, inner in graph.captures}


def added_orders(graph: Graph) -> Iterator[tuple[Operation, Operation]]:
    """Give the pairs that tf.function will order at the end of the trace."""
    yield from order_of_uses(graph)
    yield from order_of_effects(graph)


def order_of_uses(graph: Graph) -> Iterator[tuple[Operation, Operation]]:
    """Give those of what reads a variable, and what writes it."""
    handles = handles_of(graph)
    written: dict[int, Operation] = {}
    read: dict[int, list[Operation]] = {}
    for operation in graph.get_operations():
        only_read = read_only_inputs(operation)
        for number, tensor in enumerate(operation.inputs):
            if tensor.dtype != tf.resource:
                continue
            used = id(handles.get(id(tensor), tensor))
            if used in written:
                yield written[used], operation
            if operation.type in READS or number in only_read:
                read.setdefault(used, []).append(operation)
                continue
            yield from ((one, operation) for one in read.pop(used, []) if one is not operation)
            written[used] = operation


def order_of_effects(graph: Graph) -> Iterator[tuple[Operation, Operation]]:
    """Give those of which both have an effect that is no variable's, as tf.print has."""
    last = None
    for operation in graph.get_operations():
        has_variable = any(tensor.dtype == tf.resource for tensor in operation.inputs)
        if is_stateful(operation) and not has_variable and APART not in operation.name:
            if last is not None:
                yield last, operation
            last = operation


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor, or each of the rows that it has, is so small that it may wait for others."""
    if tensor.shape.rank is None:
        return False
    known = [length for length in tensor.shape if length is not None]
    size = math.prod(known) * tensor.dtype.size
    if len(known) < tensor.shape.rank:
        return len(known) == tensor.shape.rank - 1 and 0 < size <= MAX_ROW_BYTES
    return 0 < size <= MAX_BYTES
