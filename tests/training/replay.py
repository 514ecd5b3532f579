"""Writes down each update of variables while its mutex is held, and does them again, one after the other.

They stand in TensorFlow's staging areas, one for each update in the graph, on its ps. A queue would refuse an update
whose step is cancelled, as when its worker dies, although it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from trainer.training.tf_internals.graphs import outermost
from trainer.training.updates.atomic_updates import Update


class Recorded:
    """What AtomicUpdates takes as `record`; with what the variables were when an update was traced first."""

    def __init__(self) -> None:
        self.staged: list[tuple[Update, Part, dict[str, Any]]] = []
        self.before: dict[int, np.ndarray] = {}
        self._handles: list[Any] = []

    def __call__(self, update: Update, needs: Sequence[Any]) -> list[Any]:
        with tf.init_scope(), tf.device(update.device):
            tf.raw_ops.AssignVariableOp(resource=order_of(), value=tf.constant(0, tf.int64))
            for handle in map(outermost, update.handles.values()):
                self._handles.append(handle)
                if id(handle) not in self.before:
                    self.before[id(handle)] = read(handle).numpy()
        place = {"dtypes": [tf.int64, *(one.dtype for one in needs)], "shared_name": f"updates/{len(self.staged)}"}
        # Later the graph is changed: what goes to a ps is packed, and comes from other operations.
        self.staged.append((update, part_of(update, needs), place))
        # A handle of its own each time: tf.function would have what uses one handle wait for each other.
        with tf.control_dependencies(None):
            order = order_of()
        added = tf.raw_ops.AssignAddVariableOp(resource=order, value=tf.constant(1, tf.int64))
        with tf.control_dependencies([added]):
            number = tf.raw_ops.ReadVariableOp(resource=order, dtype=tf.int64)
        return [tf.raw_ops.Stage(values=[number, *needs], shared_name=place["shared_name"])]

    def replay(self) -> tuple[int, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Do all updates again in this process; returns how many, and what each variable is and should be."""
        found = []
        for number, (update, _, place) in enumerate(self.staged):
            with tf.device(update.device):
                taken = [tf.raw_ops.Unstage(**place) for _ in range(int(tf.raw_ops.StageSize(**place)))]
            found += [(update.device, int(order), number, values) for order, *values in taken]
        variables = {key: tf.Variable(value) for key, value in self.before.items()}
        again = [
            part.again([variables[id(outermost(one))] for one in update.handles.values()])
            for update, part, _ in self.staged
        ]
        for _, _, number, values in sorted(found, key=lambda one: one[:2]):
            again[number](*values)
        named = {id(one): f"{number}: {one.device}" for number, one in enumerate(self._handles)}
        handles = {id(one): one for one in self._handles}
        return len(found), {named[key]: (read(handles[key]).numpy(), one.numpy()) for key, one in variables.items()}


def order_of() -> Any:
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="order_of_updates")


def read(handle: Any) -> Any:
    with tf.device(handle.device):
        data = handle._handle_data.shape_and_type[0]
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(data.dtype))


@dataclass(frozen=True)
class Part:
    """The part of a step's graph that is an update, with the names and types of what it needs, and of its variables."""

    graph: Any
    needs: list[str]
    types: list[tf.DType]
    handles: list[str]

    def again(self, variables: Sequence[Any]) -> Any:
        """Return a function that does the update of other variables, from what it needs."""

        def do(*values: Any) -> None:
            graph = tf.compat.v1.get_default_graph()
            handles = [graph.capture(one.handle) for one in variables]
            given = dict(zip(self.needs, values, strict=True)) | dict(zip(self.handles, handles, strict=True))
            tf.graph_util.import_graph_def(self.graph, given, name="again")

        return tf.function(do, autograph=False, input_signature=[tf.TensorSpec(None, one) for one in self.types])


def part_of(update: Update, needs: Sequence[Any]) -> Part:
    """Cut an update out of the graph that is traced."""
    whole = update.operations[0].graph.as_graph_def()
    part = graph_pb2.GraphDef(library=whole.library, versions=whole.versions)
    own = update.names
    constants = {given.op.name for one in update.operations for given in one.inputs if given.op.type == "Const"} - own
    for node in whole.node:
        if node.name in own | constants:
            kept = part.node.add()
            kept.CopyFrom(node)
            kept.device = ""
            kept.attr.pop("_class", None)
            inputs = [one for one in node.input if not one.startswith("^") or one[1:] in own]
            kept.ClearField("input")
            kept.input.extend(inputs)
    return Part(part, [one.name for one in needs], [one.dtype for one in needs], list(update.handles))


def differing(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return how far each variable is from what it should be, of those that are not the same bit by bit."""
    return {
        name: float(np.max(np.abs(np.asarray(one - other, np.float64))))
        for name, (one, other) in found.items()
        if one.tobytes() != other.tobytes()
    }
