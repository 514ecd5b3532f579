"""What is computed of a tensor, and of what it is computed, also within the functions that a traced step calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.core.contracts import Graph, Operation, Tensor
from trainer.training.tf_internals.graphs import CALLS, CHOICES, LOOPS, called_graphs, condition_of

Calls = tuple[Operation, ...]


class Flow(NamedTuple):
    """A tensor, and the calls of functions in which it is, the outermost first: several calls may be of one function.

    Of a function that is still being traced nothing is known of its calls.
    """

    tensor: Tensor
    calls: Calls = ()

    @property
    def key(self) -> tuple[tuple[int, str], ...]:
        return tuple((id(one.graph), str(one.name)) for one in (self.tensor, *self.calls))

    def inner(self, call: Operation) -> Calls:
        return (*self.calls, call)


class Use(NamedTuple):
    """An operation that takes a tensor, and the calls of functions in which it is."""

    operation: Operation
    given: Tensor
    calls: Calls

    @property
    def results(self) -> list[Flow]:
        """What the operation gives; of IdentityN what it is given."""
        given, made = self.operation.inputs, self.operation.outputs
        own = [
            one for number, one in enumerate(made) if self.operation.type != "IdentityN" or given[number] is self.given
        ]
        return [Flow(one, self.calls) for one in own]


def reach(starts: list[Flow], more: Callable[[Flow], list[Flow]]) -> Iterator[Flow]:
    """Yield these and what each leads to, each once."""
    todo, known = list(starts), {one.key for one in starts}
    while todo:
        yield (one := todo.pop())
        new = {each.key: each for each in more(one) if each.key not in known}
        todo += new.values()
        known.update(new)


def uses(flow: Flow, is_end: Callable[[Operation], bool] = lambda _: False) -> list[Use]:
    """Return what takes a tensor: not the calls of functions but what is in these, unless the call is an end."""
    return [
        Use(operation, one.tensor, one.calls)
        for one in reach([flow], lambda each: copies(each, is_end))
        for operation in one.tensor.consumers()
        if is_end(operation) or not called_graphs(operation)
    ]


def is_only_asserted(use: Use) -> bool:
    """Return whether what an operation computes ends in assertions, which hold of all parts or of none."""
    for one in reach(use.results, lambda each: [result for taker in uses(each) for result in taker.results]):
        if one.calls and is_condition(one.tensor.graph, one.calls[-1]):
            return False
        takers, choices = [each.operation for each in uses(one)], [*filter(called_graphs, one.tensor.consumers())]
        if not all(each.outputs or each.type == "Assert" for each in takers) or not all(map(asserts, choices)):
            return False
        if one.tensor.dtype != tf.bool and not takers and not choices:
            return False
    return True


def asserts(call: Operation) -> bool:
    """Return whether all that a call may do is to fail."""
    inner = [one for one, calls in within([call]) if calls]
    has_effect = any(one.op_def.is_stateful and one.type not in ("Assert", "Placeholder", *CHOICES) for one in inner)
    return not has_effect and all(one.dtype == tf.bool for one in call.outputs)


def copies(flow: Flow, is_end: Callable[[Operation], bool]) -> list[Flow]:
    """Return what stands for a tensor in functions that get it, and around the one that returns it."""
    tensor, calls = flow
    found = [
        Flow(inner, flow.inner(operation))
        for operation in tensor.consumers()
        if not is_end(operation)
        for graph, given in functions_of(operation)
        for inner, outer in zip(graph.inputs, given, strict=True)
        if outer is tensor
    ]
    if not calls or is_condition(tensor.graph, calls[-1]):
        return found
    for number in (number for number, one in enumerate(tensor.graph.outputs) if one is tensor):
        found.append(Flow(calls[-1].outputs[number], calls[:-1]))
        if calls[-1].type in LOOPS:
            found += [Flow(graph.inputs[number], calls) for graph, _ in functions_of(calls[-1])]
    return found


def behind(flow: Flow) -> list[Flow]:
    """Return what a tensor is computed of, but for resources; of IdentityN the one that it is."""
    (tensor, calls), one = flow, flow.tensor.op
    if called := functions_of(one):
        results = [graph.outputs[0 if is_condition(graph, one) else tensor.value_index] for graph, _ in called]
        found = [Flow(each, flow.inner(one)) for each in results]
        first = tensor.value_index if one.type in LOOPS else 0  # a loop's first value, or what is chosen by
        return found if one.type in CALLS else [*found, Flow(one.inputs[first], calls)]
    if calls and (number := place_of(tensor)) is not None:
        [(body, _), *_] = called_graphs(calls[-1])
        return [around(flow, number), *([Flow(body.outputs[number], calls)] if calls[-1].type in LOOPS else [])]
    inputs = one.inputs[tensor.value_index :][:1] if one.type == "IdentityN" else one.inputs
    return [Flow(each, calls) for each in inputs if each.dtype != tf.resource]


def functions_of(operation: Operation) -> list[tuple[Graph, Sequence[Tensor]]]:
    """Return the graphs of what an operation calls, with a loop's condition, each with what it is given."""
    called = called_graphs(operation)
    return [*called, (condition_of(operation), operation.inputs)] if called and operation.type in LOOPS else [*called]


def is_condition(graph: Graph, call: Operation) -> bool:
    return call.type in LOOPS and graph is condition_of(call)


def within(operations: Sequence[Operation], calls: Calls = ()) -> Iterator[tuple[Operation, Calls]]:
    """Yield operations and those of the functions that they call, each with the calls in which it is."""
    for one in operations:
        yield one, calls
        for graph, _ in functions_of(one):
            yield from within(graph.get_operations(), (*calls, one))


def outside(flow: Flow) -> Flow:
    """Return what the functions around a tensor were given for it, as a variable's handle."""
    while flow.calls and (number := place_of(flow.tensor)) is not None:
        flow = around(flow, number)
    return flow


def around(flow: Flow, number: int) -> Flow:
    """Return what a call gives for the tensor at this place."""
    *calls, call = flow.calls
    return Flow(call.inputs[number + (call.type in CHOICES)], tuple(calls))


def place_of(tensor: Tensor) -> int | None:
    """Return the place of a tensor among what the function in which it is gets, or None."""
    inputs: list[Any] = tensor.graph.inputs if tensor.op.type == "Placeholder" else []
    return next((number for number, one in enumerate(inputs) if one is tensor), None)
