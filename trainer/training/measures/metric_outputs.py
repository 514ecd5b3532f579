"""What a step returns that is computed of metrics alone: it is computed again of their states over all calls.

A train_step may return a metric's result under another name, or make one number of the results of several metrics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor, Traced, Variable
from trainer.training.tf_internals.graphs import is_stateful, nodes_of


def trace_outputs(step: Traced, states: Sequence[Variable], variables: Sequence[Variable]) -> Traced:
    """Trace a function that gives by name what a traced step returns of these states, computed of other variables."""
    others = {id(state.handle): other for state, other in zip(states, variables, strict=True)}
    given = {inner.name: others[id(outer)] for outer, inner in step.graph.captures if id(outer) in others}
    chosen: dict[str, Tensor] = {}
    needed: dict[str, Operation] = {}
    for name, value in named_outputs(step).items():
        if operations := computing(value, given):
            chosen[name] = value
            needed |= operations
    reads = {name: given[one.inputs[0].name] for name, one in needed.items() if is_read(one)}
    part = part_of(step.graph.as_graph_def(), needed.keys() - reads.keys())

    @tf.function(autograph=False)
    def outputs() -> dict[str, Tensor]:
        inputs = {f"{name}:0": variable.read_value() for name, variable in reads.items()}
        made = tf.graph_util.import_graph_def(part, inputs, [one.name for one in chosen.values()], name="outputs")
        return dict(zip(chosen, made, strict=True))

    return outputs.get_concrete_function()


def named_outputs(step: Traced) -> Mapping[str, Any]:
    """Return the tensors that a traced step returns by name, also where it says its place besides."""
    outputs = step.graph.structured_outputs
    outputs = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    return outputs if isinstance(outputs, Mapping) else {}


def computing(value: Any, given: Mapping[str, Any]) -> dict[str, Operation]:
    """Return the operations that compute a tensor of what is read of `given` alone; none where it needs more."""
    found: dict[str, Operation] = {}
    todo = [value.op] if tf.is_symbolic_tensor(value) else []
    while todo:
        operation = todo.pop()
        if operation.name in found:
            continue
        found[operation.name] = operation
        if is_read(operation) and operation.inputs[0].name in given:
            continue
        if operation.type == "Placeholder" or is_stateful(operation):
            return {}
        todo += [one.op for one in operation.inputs]
    return found if any(map(is_read, found.values())) else {}


def is_read(operation: Operation) -> bool:
    return operation.type == "ReadVariableOp"


def part_of(graph: Any, names: Collection[str]) -> Any:
    """Return the operations of these names, which wait for nothing but their inputs, and run anywhere."""
    part = nodes_of(graph, names)
    for one in part.node:
        inputs = [each for each in one.input if not each.startswith("^")]
        one.device = ""
        one.attr.pop("_class", None)
        del one.input[:]
        one.input.extend(inputs)
    return part
