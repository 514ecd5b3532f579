"""Metrics whose states lie where a call runs, and are merged by the coordinator when it has ended.

Keras keeps a metric's state in several variables, say a total and a count. On the ps all workers would add to them at
different moments, and what the coordinator reads or resets meanwhile would belong to no moment at all.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Metric, Model, Operation, Structure, Tensor, Traced, Variable
from trainer.core.variables import flatten
from trainer.training.measures.metric_outputs import trace_outputs
from trainer.training.tf_internals.graphs import CALLS, LOOPS, called_graphs

log = logging.getLogger(__name__)
SUM, MAXIMUM, MINIMUM, LAST = "sum", "maximum", "minimum", "last"
READ = "read"
MERGED: dict[str, Callable[[Any, Any], Any]] = {
    SUM: operator.add,
    MAXIMUM: np.maximum,
    MINIMUM: np.minimum,
    LAST: lambda one, other: other,
}
KINDS = {"AddV2": SUM, "Add": SUM, "AddN": SUM, "Maximum": MAXIMUM, "Minimum": MINIMUM}
TO_FIRST = {  # what was read is their first input
    "Sub": SUM,
    "TensorScatterAdd": SUM,
    "TensorScatterSub": SUM,
    "TensorScatterMax": MAXIMUM,
    "TensorScatterMin": MINIMUM,
}
READING = ("ReadVariableOp", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
ADDING = ("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterNdAdd")


class MetricStates:
    """The states of metrics, for traced functions that keep them in other variables."""

    def __init__(self, metrics: Iterable[Metric], step: Traced, beside: Sequence[tuple[Any, str]] = ()) -> None:
        """Take metrics that have their variables, and the traced step that changes them.

        `beside` has other variables that it changes, each with the way in which its states are merged.
        """
        metrics = list(metrics)
        self.pieces = [piece for metric in metrics for piece in pieces(metric)] + [one for one, _ in beside]
        self.initial = [piece.numpy() for piece in self.pieces]
        self._ways = [way for metric in metrics for way in merges(metric, step)] + [way for _, way in beside]

    def merge(self, states: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
        """Return the states over two parts of the data, of which `more` is the later one."""
        return [MERGED[str(way)](one, other) for way, one, other in zip(self._ways, states, more, strict=True)]

    @tf.autograph.experimental.do_not_convert
    def in_call(self) -> list[Variable]:
        """Make variables that live as long as the call does in whose trace they are made, and where it runs.

        Call it outside the strategy's scope.
        """
        return [
            tf.Variable(lambda value=value: value, trainable=False, experimental_enable_variable_lifting=False)
            for value in self.initial
        ]

    @tf.autograph.experimental.do_not_convert
    def exchange(self, function: Any, variables: Sequence[Variable]) -> None:
        """Let a concrete function, which was traced with the metrics' own variables, work on these."""
        handles = {id(piece.handle): one.handle for piece, one in zip(self.pieces, variables, strict=True)}
        graph = function.graph
        captures = [handles.get(id(capture), capture) for capture in graph.external_captures]
        function.set_external_captures(captures + graph.deferred_external_captures)


class CallMetrics:
    """The model's metrics over calls that ran elsewhere.

    Metrics whose states can't be merged stay on the ps, with what that means.
    """

    def __init__(self, model: Model, step: Traced, beside: Sequence[tuple[Any, str]] = ()) -> None:
        """Take a model, and its traced step: it has all its metrics. `beside` is as for MetricStates."""
        self._model = model
        metrics = metrics_of(model)
        merged = [metric for metric in metrics if None not in merges(metric, step)]
        self._others = [metric.name for metric in metrics if metric not in merged]
        if self._others:
            log.warning(
                "the metrics %s keep a state that is no sum, maximum, minimum or last value: workers share it on the "
                "ps and overwrite each other's, so that what they say is not exact",
                ", ".join(self._others),
            )
        self.states = MetricStates(merged, step, beside)
        self._results = tf.function(model.get_metrics_result).get_concrete_function()
        self._variables = [tf.Variable(value, trainable=False) for value in self.states.initial]
        self.states.exchange(self._results, self._variables)
        self._outputs = trace_outputs(step, self.states.pieces, self._variables)
        self._total = self._last = self.states.initial

    def add(self, states: Sequence[Tensor]) -> None:
        """Add what a call has reported of its own states."""
        self._last = [state.numpy() for state in states]
        self._total = self.states.merge(self._total, self._last)

    def aggregate_outputs(self, outputs: Structure) -> Structure:
        """Return what train_step returned in the call that was added last, with the metrics' results over all calls.

        What is computed of other things than metrics stays as it is. Where that can't be seen, as in a
        function of its own, a metric's result is what has its name and its value.
        """
        if not isinstance(outputs, dict):
            return outputs
        alone, together = self._compute(self._last), self._compute(self._total)
        found = {name: together[name] for name, value in outputs.items() if same(value, alone.get(name))}
        return {**outputs, **found, **self._outputs()}

    def write(self) -> None:
        """Give the model's metrics the states over all calls; nothing may be in flight."""
        for piece, total in zip(self.states.pieces, self._total, strict=True):
            piece.assign(total)

    def reset(self) -> None:
        """Begin again with the next call that ends."""
        self._total = self.states.initial
        if self._others:
            self._model.reset_metrics()

    def _compute(self, states: Sequence[Tensor]) -> dict[str, Any]:
        for variable, state in zip(self._variables, states, strict=True):
            variable.assign(state)
        results: dict[str, Any] = self._results()
        return results


def metrics_of(model: Model) -> list[Metric]:
    """Return the model's metrics, each once; Keras 3 puts those that it was compiled with into one more."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        is_one = isinstance(metric, tf.keras.metrics.Metric) or not hasattr(metric, "metrics")
        inner = [metric] if is_one else metric.metrics
        found.update({id(each): each for each in inner})
    return list(found.values())


def pieces(metric: Metric) -> list[Variable]:
    """Return the variables of a metric's state; the partitioner may have split one over several ps."""
    if isinstance(metric, tf.keras.metrics.Metric):
        return list(flatten(metric.weights))
    return list(flatten(one._value for one in metric.variables))


def metric_pieces(model: Model) -> list[Variable]:
    """Return the variables of a model's metrics, as they are by now."""
    return [piece for metric in metrics_of(model) for piece in pieces(metric)]


def merges(metric: Metric, step: Traced) -> list[str | None]:
    """Say how the states for parts of the data make that of all, one for each piece, as the traced step changes them.

    None says that they don't: a total that begins at another value, a state that is changed in another way or by
    the metric's other states, and a metric that says itself how it is merged.
    """
    kept = pieces(metric)
    if isinstance(metric, tf.keras.metrics.Metric):
        if type(metric).merge_state is not tf.keras.metrics.Metric.merge_state:
            return [None] * len(kept)
    elif any(variable.aggregation != SUM for variable in metric.variables):
        return [None] * len(kept)
    inner = {id(outer): inner for outer, inner in step.graph.captures}
    handles = [inner.get(id(piece.handle)) for piece in kept]
    return [way_of(piece, handle, handles) for piece, handle in zip(kept, handles, strict=True)]


def way_of(piece: Any, handle: Tensor, handles: Iterable[Tensor]) -> str | None:
    """Return how a traced step changes a variable: by adding, to a maximum or minimum, to the last value; or None.

    The handles are those of the metric's variables in the step: None is of one that it leaves as it is.
    """
    others = [one for one in handles if one is not None and one is not handle]
    found = {SUM} if handle is None else set(changes(handle, [], others)) or {SUM}
    way = found.pop() if len(found) == 1 else None
    return None if way == SUM and np.any(piece.numpy()) else way


def changes(handle: Tensor, tainted: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[str | None]:
    """Yield what each operation of a graph makes of the variable with this handle, but for those that only read.

    `tainted` are inputs of a function's graph that depend on the variable. `others` are the handles of the metric's
    other variables, and inputs that depend on those: over all data these are others than over a part.
    """
    of_state, of_others = reached([handle, *tainted]), reached(others)

    def way(value: Any) -> str | None:
        """Return what was done to what was read, to come to this value."""
        operation, inputs = value.op, list(value.op.inputs)
        if value.name in of_others:
            return None
        if value.name not in of_state:
            return LAST
        if operation.type == "ReadVariableOp" and inputs[0].name == handle.name:
            return READ
        if operation.type in ("Identity", "Cast"):
            return way(inputs[0])
        kind = (KINDS | TO_FIRST).get(operation.type)
        read = [number for number, one in enumerate(inputs) if one.name in of_state]
        if kind is None or len(read) > 1 or (operation.type in TO_FIRST and read != [0]):
            return None
        return kind if way(inputs[read[0]]) in (READ, kind) else None

    for operation in handle.consumers():
        if operation.type in READING:
            continue
        if operation.type == "AssignVariableOp":
            if (found := way(operation.inputs[1])) != READ:
                yield found
        elif operation.type in ADDING:
            yield None if operation.inputs[-1].name in of_state | of_others else SUM
        elif called_graphs(operation):
            for found in changes_in_calls(operation, handle, of_state, of_others):
                # Where it is not written, it has its first value, which is no last one.
                yield None if found == LAST and operation.type not in CALLS else found
        else:
            yield None


def changes_in_calls(
    operation: Operation, handle: Tensor, of_state: Collection[str], of_others: Collection[str]
) -> Iterator[str | None]:
    """Yield what `changes` does of the functions that an operation calls; these names depend on the states."""
    for inner, inputs in called_graphs(operation):
        pairs = list(zip(inputs, inner.inputs, strict=True))
        handles = [given for one, given in pairs if one.name == handle.name]
        more = [given for one, given in pairs if one.name in of_state and one.name != handle.name]
        rest = [given for one, given in pairs if one.name in of_others]
        if operation.type in LOOPS:
            more, rest = in_rounds(inner, handles, more), in_rounds(inner, [], rest)
        for each in handles:
            yield from changes(each, more, rest)


def reached(tensors: Iterable[Tensor]) -> set[str]:
    """Return the names of these tensors, and of all in their graph that are computed from them."""
    found: set[str] = set()
    todo = list(tensors)
    while todo:
        tensor = todo.pop()
        if tensor.name not in found:
            found.add(tensor.name)
            todo += [output for operation in tensor.consumers() for output in operation.outputs]
    return found


def in_rounds(loop: Operation, handles: Sequence[Tensor], tainted: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of a loop's body that depend on these, after any number of rounds."""
    found = list(tainted)
    while True:
        names = reached([*handles, *found])
        known = {one.name for one in found}
        more = [
            given
            for given, output in zip(loop.inputs, loop.outputs, strict=True)
            if output.name in names and given.name not in known and given.dtype != tf.resource
        ]
        if not more:
            return found
        found += more


def same(value: Any, result: Any) -> bool:
    """Return whether an output is what a metric says: both are one number, and nearly equal."""
    if getattr(value, "ndim", None) != 0 or getattr(result, "ndim", None) != 0:
        return False
    return bool(np.isclose(float(value), float(result), rtol=1e-4, atol=1e-7, equal_nan=True))
