"""A round whose steps read their weights before the step before has ended: they travel while it computes.

A copy of a step is made in two parts. The first one takes the batch, looks up rows and reads other weights. Keys of
dynamic tables get their rows there, too. The second one does the rest. tf.function has what changes a variable wait for
the reads that were traced before it, and holds up those that come later. So the first part of each step is traced
before the second part of the one before: what it reads lacks that one's update (docs/decisions/0245).
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Graph, Operation, Tensor, Traced
from trainer.core.failures import UserError
from trainer.training.measures.metrics import READING
from trainer.training.measures.staleness import BEGAN, SCOPE, WEIGHT
from trainer.training.steps.step_copy import StepCopy
from trainer.training.tables.table_lookups import GIVING, lookups_of
from trainer.training.tf_internals.graphs import APART, is_stateful, nodes_of
from trainer.training.updates.atomic_updates import MUTEX_OPERATIONS, WRITING
from trainer.training.updates.orders import handles_of, sources

READS = ("ReadVariableOp", "ResourceGather")
# Beside what has no state, what may come before a read: it changes nothing that a step trains.
BEFORE = ("Placeholder", "IteratorGetNext", "LookupTableFindV2")
# How the names of operations begin that write, and keep what another has written since a read.
KEEPING = (
    *("AssignAdd", "AssignSub", "ResourceApply", "ResourceSparseApply"),
    *("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub"),
)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A step whose first part is in the graph."""

    inputs: Mapping[str, Tensor]
    """What stands there for the step's inputs, by their names."""
    made: Mapping[str, Operation]
    """Its operations, by their names in the step."""
    weight: int
    """For how many steps it counts how stale its update is."""


class CopyAhead(StepCopy):
    """Does what a traced step does, several times in turn, and reads weights a step ahead."""

    def __init__(self, step: Traced) -> None:
        """Raise UserError where the step reads no weights that can be."""
        super().__init__(step)
        if not self.is_possible:
            raise UserError(
                "weights_ahead: train_step has a loop, a condition or another function, or is too large to be copied, "
                "so that each step waits for the whole one before it: leave weights_ahead out"
            )
        self._reads, began, giving = early_reads(step.graph)
        if not self._reads:
            raise UserError(
                "weights_ahead: train_step reads no weights that an optimizer trains before it changes something: "
                "leave weights_ahead out"
            )
        self._given = {one.op.name for one in step.inputs}
        self._first = with_sources(step.graph, [*self._reads, *giving], self._given)
        self._first_counting = with_sources(step.graph, [*self._reads, *giving, *began], self._given)

    def make_round(self, arguments: object, steps: int) -> list[tf.Tensor]:
        """Copy so many steps, two at least; returns what the last one gives, flat.

        The second one counts how stale its update is, for all that read ahead.
        """
        begun = self._begin(arguments, 0)
        for number in range(1, steps):
            following = self._begin(arguments, steps - 1 if number == 1 else 0)
            self._finish(begun, [following.made[name] for name in self._reads])
            begun = following
        return self._finish(begun, [])

    def _begin(self, arguments: object, weight: int) -> Begun:
        self._draw_others()
        names, inputs = self._first_counting if weight else self._first, self._inputs(arguments)
        chosen = sorted(names)
        part = part_of(self._source(weight), names | self._given)
        made, _ = self._copy(part, inputs, chosen, "ahead")
        self._take_turns(made)
        return Begun(inputs, dict(zip(chosen, made, strict=True)), weight)

    def _finish(self, begun: Begun, reads: Sequence[Operation]) -> list[tf.Tensor]:
        """Copy the rest of a step; `reads` are those of the next one."""
        source = self._source(begun.weight)
        rest = part_of(source, {node.name for node in source.node} - begun.made.keys())
        for node in rest.node:
            if node.op == "Const" and SCOPE in node.name and node.name.endswith(WEIGHT):
                node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(begun.weight, tf.int64))
        wait_for_none(rest, {f"^{name}" for name, one in begun.made.items() if not one.outputs})
        wanted = [one.name for one in self._step.outputs if one.op.name not in begun.made]
        returned, made = self._copy(rest, {**begun.inputs, **given_by(begun.made, rest)}, wanted)
        found = dict(zip(wanted, returned, strict=True))
        update_after(made, reads)
        self._take_turns(made)
        for one in self._step.outputs:
            if one.name not in found:
                found[one.name] = begun.made[one.op.name].outputs[one.value_index]
        return self._shaped([found[one.name] for one in self._step.outputs])

    def _source(self, weight: int) -> Any:
        return self._graph if weight else self._without_counts


def early_reads(graph: Graph) -> tuple[list[str], list[str], list[str]]:
    """Return the names of what reads trained variables, and needs nothing of a step but its batch and such reads.

    The second list has what reads the optimizer's count for the staleness, if it can be read as early, and the third
    one what gives rows of dynamic tables to keys.
    """
    handles, trained = handles_of(graph), {id(one.handle) for one in graph.trainable_variables}
    gathers = [one for one in graph.get_operations() if one.type == "ResourceGather" and lookups_of(one.inputs[1])]
    trained |= {id(handles[id(one.inputs[0])]) for one in gathers if id(one.inputs[0]) in handles}
    trained -= {id(handles[id(inner)]) for _, inner in graph.captures if is_overwritten(inner)}
    operations = {one.name: one for one in graph.get_operations()}
    waits = {name: [one.name for one in sources(operation)] for name, operation in operations.items()}
    early: dict[str, bool] = {}
    weights, began, giving = [], [], []
    for name in graphlib.TopologicalSorter(waits).static_order():
        operation = operations[name]
        is_read = operation.type in READS and id(handles.get(id(operation.inputs[0]))) in trained
        counts = operation.type in READS and BEGAN in name
        may_be = is_read or counts or operation.type in BEFORE or not is_stateful(operation)
        gives = GIVING in name  # it uses mutexes of its own, and no update waits for it
        early[name] = (gives or (may_be and bool(operation.outputs))) and all(early[one] for one in waits[name])
        if early[name] and counts:
            began.append(name)
        elif early[name] and is_read:
            weights.append(name)
        elif early[name] and gives:
            giving.append(name)
    return weights, began, giving


def is_overwritten(handle: Tensor) -> bool:
    """Return whether a step writes what it has computed of an early read, which would undo the update before."""
    users = handle.consumers()
    overwrites = any(one.type.startswith(WRITING) and not one.type.startswith(KEEPING) for one in users)
    reads = [one for one in users if one.type in READING]
    return overwrites and not any(each.type == "MutexLock" for one in reads for each in one.control_inputs)


def with_sources(graph: Graph, names: Collection[str], given: Collection[str]) -> set[str]:
    """Return these operations, and all that they wait for but what is given."""
    found: set[str] = set()
    todo = [graph.get_operation_by_name(name) for name in names]
    while todo:
        operation = todo.pop()
        if operation.name not in found and operation.name not in given:
            found.add(operation.name)
            todo += sources(operation)
    return found


def part_of(graph: Any, names: Collection[str]) -> Any:
    """Return the operations of these names."""
    part = nodes_of(graph, names)
    for one in part.node:
        others = [each.decode().removeprefix("loc:@") for each in one.attr["_class"].list.s]
        if not all(each in names for each in others):
            del one.attr["_class"]
    return part


def wait_for_none(part: Any, writes: Collection[str]) -> None:
    """Have nothing wait for these writes of a first part: only a step's end does, and tf.function has them run."""
    for node in part.node:
        inputs = [each for each in node.input if each not in writes]
        del node.input[:]
        node.input.extend(inputs)


def given_by(made: Mapping[str, Operation], part: Any) -> dict[str, Tensor]:
    """Return what the operations of a first part give to the rest, by the names that `import_graph_def` takes."""
    given = {}
    for each in {name for node in part.node for name in node.input}:
        name, _, number = each.removeprefix("^").partition(":")
        if name in made:
            key = each if each.startswith("^") or number else f"{name}:0"
            given[key] = made[name].outputs[int(number or 0)]
    return given


def update_after(made: Sequence[Any], reads: Sequence[Any]) -> None:
    """Have the updates of what the next step reads take their mutexes when it has done so.

    tf.function has them wait for that anyway, but with the mutex held, and so for a worker.
    """
    for operation in made:
        before = [one for one in reads if operation.type.startswith(WRITING) and one.inputs[0] is operation.inputs[0]]
        todo = [operation] if before else []
        while todo:
            for one in sources(todo.pop()):
                if one.type in MUTEX_OPERATIONS:
                    todo.append(one)
                elif one.type == "Assert" and APART in one.name:  # what the update needs has arrived
                    one._add_control_inputs(before)
