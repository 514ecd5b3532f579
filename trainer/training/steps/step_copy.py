"""Copies of a traced step's operations, for a graph that does the step several times."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Graph, Operation, Tensor, Traced
from trainer.training.measures.staleness import SCOPE
from trainer.training.tables.table_lookups import GIVING
from trainer.training.tf_internals.graphs import place
from trainer.training.updates.atomic_updates import in_turn

COPIED_BYTES = 1 << 24


class StepCopy:
    """Does what a traced step does by operations of its own.

    A call would wait until all of the one before has ended, with a message from the ps. Operations wait only for those
    that used the same variable.
    """

    def __init__(self, step: Traced) -> None:
        self._step = step
        self._graph = graph = step.graph.as_graph_def()
        functions = graph.library.function
        nodes = [*graph.node, *(node for function in functions for node in function.node_def)]
        self._without_counts = without(graph, SCOPE)
        self._seeded = [node for node in (*nodes, *self._without_counts.node) if has_seed(node)]
        self.has_seeds = bool(self._seeded)
        """Whether several calls in one graph would draw the same random numbers."""
        # By the graph: what gives mutexes back in its last copy.
        self._last: weakref.WeakKeyDictionary[Any, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
        known = {one.func.name for node in nodes if GIVING in node.name for one in node.attr.values()}
        calls_others = any(function.signature.name not in known for function in functions)
        self.is_possible = not calls_others and graph.ByteSize() < COPIED_BYTES
        """Whether it can be copied: it calls no function, as loops and conditions do, and is not big.

        What gives keys rows is one, which uses nothing of the step but these.
        """
        self._devices = {node.name: node.device for node in graph.node if node.device}
        for node in itertools.chain(graph.node, self._without_counts.node):
            if node.device:
                node.attr.pop("_class", None)  # it names what stands for a variable, and would take the device of that
                node.device = ""  # TensorFlow's import would take long to set those of the copies

    def make(self, arguments: object, *, counts: bool = True) -> list[tf.Tensor]:
        """Copy it into the function that is being traced; returns what it gives, flat.

        One that does not count leaves out how stale its updates are. Each copy draws other random numbers, also where
        the program has seeded them.
        """
        self._draw_others()
        outputs = [output.name for output in self._step.outputs]
        returned, made = self._copy(self._graph if counts else self._without_counts, self._inputs(arguments), outputs)
        self._take_turns(made)
        return self._shaped(returned)

    def _copy(
        self, part: Any, given: Mapping[str, Tensor], wanted: Sequence[str], name: str = "step"
    ) -> tuple[list[Any], list[Operation]]:
        """Copy operations into the function that is being traced; returns what is wanted of them, and all of them."""
        graph = tf.compat.v1.get_default_graph()
        before, scope = len(graph.get_operations()), graph.unique_name(name, mark_as_used=False)
        returned = list(tf.graph_util.import_graph_def(part, given, wanted, name=name))
        made = graph.get_operations()[before:]
        place({one: self._devices.get(one.name.removeprefix(f"{scope}/")) for one in made})
        return returned, made

    def _take_turns(self, made: Sequence[Operation]) -> None:
        """Have a copy's operations take their mutexes after those of the copy before in the same graph."""
        graph = tf.compat.v1.get_default_graph()
        self._last[graph] = in_turn(made, self._last.get(graph, {}))

    def _draw_others(self) -> None:
        for node in self._seeded:
            node.attr["seed2"].i += 1 << 32  # beyond what TensorFlow gives to other operations

    def _inputs(self, arguments: object) -> dict[str, Any]:
        """Return what stands for the step's inputs in the function that is being traced, by their names."""
        graph, given = tf.compat.v1.get_default_graph(), tf.nest.flatten(arguments, expand_composites=True)
        names = {}
        for inner, outer in zip(self._step.inputs, [*given, *self._step.captured_inputs], strict=True):
            names[inner.name] = names["^" + inner.op.name] = graph.capture(outer)
        return names

    def _shaped(self, returned: list[tf.Tensor]) -> list[tf.Tensor]:
        """Give them the shapes that the step's outputs have, which Python may have told TensorFlow."""
        for one, output in zip(returned, self._step.outputs, strict=True):
            one.set_shape(output.shape)
        return returned


def without(graph: Graph, scope: str) -> Any:
    """Return a graph without what was made in a name scope, whose values nothing else uses."""
    kept = tf.compat.v1.GraphDef()
    kept.CopyFrom(graph)
    del kept.node[:]
    for node in graph.node:
        if scope not in node.name or node.op == "Placeholder":  # an input that others may use too
            inputs = [name for name in node.input if not (name.startswith("^") and scope in name)]
            one = kept.node.add()
            one.CopyFrom(node)
            del one.input[:]
            one.input.extend(inputs)
    return kept


def has_seed(node: Any) -> bool:
    return "seed2" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)
