"""Refuse noise that is drawn of one seed for each part of a split weight: all parts would get the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.graphs import CALLS, CHOICES, LOOPS
from trainer.training.updates.atomic_updates import WRITING
from trainer.training.updates.flows import Flow, Use, behind, functions_of, outside, reach, uses, within

SEEDED_BY_INPUTS = ("StatelessRandomNormal", "StatelessRandomUniform", "StatelessTruncatedNormal")
SEEDED_BY_ATTRIBUTES = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal")


def reject_same_noise(
    parts: Sequence[Variable], handles: Sequence[Tensor | None], made: Sequence[Operation], updates: Mapping[str, int]
) -> None:
    """Raise UserError where these operations draw noise of one seed more than once, and for more than one part.

    `handles` are the parts', in the graph of the operations, and `updates` has by the operations' names whose they are:
    the ids of variables.
    """
    owners = {id(one): id(part) for one, part in zip(handles, parts, strict=True) if one is not None}
    drawn: dict[Any, list[Flow]] = {}
    for seed, noise in draws(made):
        drawn.setdefault(seed, []).append(noise)
    for found in drawn.values():
        reached = [one for one in (owners_of(noise, owners, updates) for noise in found) if one & {*owners.values()}]
        if len(reached) > 1 and len(set().union(*reached)) > 1:
            raise UserError(
                f"the step draws random numbers for each part of {name_of(parts[0])}, which is split over the ps, with "
                f"the same seed (as operation {found[0].tensor.op.name}): all parts would get the same. Give each of "
                "trainable_variables a seed of its own, or set partitioner to none, so that weights stay whole"
            )


def draws(made: Sequence[Operation]) -> Iterator[tuple[Any, Flow]]:
    """Yield what operations draw that are seeded by the program: by what, and the numbers."""
    for one, calls in within(made):
        if one.type.startswith(SEEDED_BY_INPUTS):
            seed: Any = tuple(origin(Flow(each, calls)) for each in list(one.inputs)[1:])
        elif one.type in SEEDED_BY_ATTRIBUTES and one.get_attr("seed2"):
            seed = one.get_attr("seed"), one.get_attr("seed2")
        else:
            continue
        yield (one.type, seed), Flow(one.outputs[0], calls)


def origin(flow: Flow) -> Any:
    """Return how a number is computed: two that are computed alike are the same."""
    flow = outside(flow)
    operation = flow.tensor.op
    if operation.type == "Const":
        return operation.get_attr("value").SerializeToString()
    if operation.type == "ReadVariableOp":
        [handle] = operation.inputs
        written = sum(one.type.startswith(WRITING) and one._id < operation._id for one in handle.consumers())
        return outside(Flow(handle, flow.calls)).key, written
    if operation.type in CALLS and functions_of(operation):
        return origin(*behind(flow))
    is_other = operation.type in (*CALLS, *CHOICES, *LOOPS) or operation.op_def.is_stateful
    if is_other or not operation.inputs:
        return flow.key
    return operation.type, flow.tensor.value_index, *(origin(Flow(each, flow.calls)) for each in operation.inputs)


def owners_of(noise: Flow, owners: Mapping[int, int], updates: Mapping[str, int]) -> set[int]:
    """Return the parts to which noise is written, or whose numbers it meets, before it becomes something else."""
    shape = noise.tensor.shape
    changed = reach([noise], lambda flow: alike([each for use in uses(flow) for each in use.results], shape))
    used = [use for one in changed for use in uses(one)]
    found = {owner for use in used for owner in met(use, owners)}
    for use in used:
        if use.operation.type.startswith(WRITING):
            handle = id(outside(Flow(use.operation.inputs[0], use.calls)).tensor)
            of_update = [updates[one.name] for one in (use.operation, *use.calls) if one.name in updates]
            found.update([owners[handle]] if handle in owners else of_update)
    return found


def met(use: Use, owners: Mapping[int, int]) -> Iterator[int]:
    """Yield the parts that an operation is given, or of which it is given what is computed number by number."""
    shape = use.given.shape
    given = [Flow(one, use.calls) for one in use.operation.inputs if one is not use.given and one.dtype != tf.resource]
    for one in reach(alike(given, shape), lambda flow: alike(behind(flow), shape)):
        if one.tensor.op.type == "ReadVariableOp":
            handle = outside(Flow(one.tensor.op.inputs[0], one.calls)).tensor
            if id(handle) in owners:
                yield owners[id(handle)]


def alike(flows: Sequence[Flow], shape: Any) -> list[Flow]:
    return [one for one in flows if one.tensor.shape == shape]
