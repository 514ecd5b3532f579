"""Refuse arrays that are too large for a graph: TensorFlow sends a graph to each worker in one message.

Warn of large ones in its functions, of which a worker's TensorFlow makes dozens of copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Graph
from trainer.core.failures import UserError
from trainer.training.tf_internals.graphs import inner_graphs

log = logging.getLogger(__name__)

COPIED_BYTES = 1 << 25  # a worker with a constant of 200 MiB took 10 GiB
# The largest message of Protocol Buffers is 2 GiB, of which the graph itself takes some.
LIMIT_BYTES = (1 << 31) - (1 << 24)
FIX = (
    "A graph goes to each worker in one message, of 2 GiB at most. Write the data to files (TFRecord) and read those "
    "in train_dataset; a table that the model looks up is a weight that build_model makes (docs/input.md)"
)


def reject_large_arrays(graph: Graph, what: str, kept_once: Graph | None = None) -> None:
    """Raise UserError where the arrays of a traced graph, those that it is given included, are too large together.

    Warn of those that a worker copies; it does not copy what is in the graph `kept_once`.
    """
    found = list(arrays(graph))
    total = sum(size for size, _ in found)
    if total > LIMIT_BYTES:
        largest, tensor = max(found, key=lambda one: one[0])
        raise UserError(
            f"{what} has arrays of {total / 2**30:.2f} GiB in its graph, {len(found)} in all; the largest has "
            f"{largest / 2**30:.2f} GiB, the shape {tuple(tensor.shape)} and the type {tensor.dtype.name}. {FIX}"
        )

    copied = sum(size for size, tensor in found if tf.is_symbolic_tensor(tensor) and tensor.graph is not kept_once)
    if copied > COPIED_BYTES:
        log.warning(
            "%s has NumPy arrays of %.0f MiB in its functions: a worker may need fifty times as much memory, and die. "
            "Make a tensor of each, by tf.constant(array) in build_model, or before map() (docs/input.md)",
            what,
            copied / 2**20,
        )


def arrays(graph: Graph) -> Iterator[tuple[int, Any]]:
    """Yield the bytes of each array of known size in a graph or in a function of it, and the array."""
    for inner in inner_graphs(graph):
        given = [tensor for tensor, _ in inner.captures if not tf.is_symbolic_tensor(tensor)]
        constants = [operation.outputs[0] for operation in inner.get_operations() if operation.type == "Const"]
        for tensor in (*constants, *given):
            size, count = tensor.dtype.size, tensor.shape.num_elements()
            # A resource's size is that of its handle, and a text has none of its own.
            if size and count and tensor.dtype not in (tf.resource, tf.variant):
                yield size * count, tensor
