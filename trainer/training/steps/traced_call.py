"""A call, traced: it does a traced step as often as it is asked to."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import DataIterator, ElementSpec, Graph, Strategy, Tensor, Traced, Variable
from trainer.training.atomic_updates import AtomicUpdates, in_turn
from trainer.training.dynamic.tables import DynamicTables
from trainer.training.learning_rate import LearningRate
from trainer.training.metrics import MetricStates
from trainer.training.staleness import SCOPE
from trainer.training.steps.reports import Reports
from trainer.training.tf_internals.datasets import type_in

COPIED_BYTES = 1 << 24
Take = Callable[..., list[tf.Tensor]]  # does a step with these arguments
Done = tuple[tf.Tensor, list[Tensor], Any]  # how many steps, what ends with them, and the last one's outputs


def trace_call(
    strategy: Strategy,
    train_step: Traced,
    counter: Variable,
    iterator: DataIterator,
    rate: LearningRate | None = None,
    reports: Reports | None = None,
    states: MetricStates | None = None,
    updates: AtomicUpdates | None = None,
    tables: DynamicTables | None = None,
    *,
    unrolled: int = 1,
    waits: bool = False,
) -> Traced:
    """Trace the packed call, which does a traced step as often as it is told to and counts that.

    It takes an iterator, and a vector of the number of steps and, with `reports`, its own number; there it puts what it
    would return otherwise: the step's outputs, the metrics' states, how long `updates` have waited, and the numbers of
    dynamic tables. A call for other processes takes the learning rate as its last argument, and keeps
    `states` itself. `unrolled` is the number of steps in a round of the call's loop; what that leaves over is done
    first, in rounds of one step. The first step of a round counts how stale its update is, which costs a tiny step a
    fifth of its speed. A step that would draw the same random numbers several times in a round has rounds of one.
    With `waits` the iterator gives places and batches as Optional, the step takes a batch, and the call ends where
    there is none.
    """

    copy, unrolled = copy_for(train_step, 1 if waits else unrolled)

    def take_step(*arguments: object, counts: bool) -> list[tf.Tensor]:
        if copy:
            return copy.make(arguments, counts=counts)
        return tf.nest.flatten(train_step(*arguments), expand_composites=True)

    # AutoGraph would translate the loops' source, which takes longer than all the rest.
    @tf.function(autograph=False)
    def train_call(iterator: DataIterator, order: tf.Tensor, *value: tf.Tensor) -> Any:
        kept = states.in_call() if states else []
        if states:
            states.exchange(train_step, kept)
        with strategy.scope():
            if waits:
                steps, ended, outputs = steps_while_given(train_step, take_step, (iterator, *value), order[0])
            else:
                steps, ended, outputs = all_steps(train_step, take_step, (iterator, *value), order[0], unrolled)
            # Once a call and at its end, so that a call that is run again on another worker counts once.
            with tf.control_dependencies(ended):
                counter.assign_add(steps)
            if rate:
                rate.show()
            if reports is None:
                return outputs
            waited = updates.waited() if updates else []
            numbers = tables.numbers() if tables else []
            kept_states = [state.read_value() for state in kept]
            reports.put(order[1], counter.read_value(), steps, (outputs, kept_states, waited, numbers))
            return None

    takes = (iterator, tf.TensorSpec([None], tf.int64), *((rate.spec,) if rate else ()))
    return train_call.get_concrete_function(*takes)


def copy_for(train_step: Traced, unrolled: int) -> tuple[StepCopy | None, int]:
    """Return the copies of a step that is to be unrolled, None where it can't be copied, and how often it may be."""
    copy = StepCopy(train_step) if unrolled > 1 else None
    if copy and not copy.is_possible:
        return None, 1 if copy.has_seeds else unrolled
    return copy, unrolled


def all_steps(step: Traced, take: Take, arguments: Sequence[Any], steps: tf.Tensor, unrolled: int) -> Done:
    """Do so many steps, in what is traced, in rounds of `unrolled`."""
    specs = tf.nest.flatten(step.structured_outputs, expand_composites=True)
    done, flat = repeat_all(lambda counts: take(*arguments, counts=counts), specs, steps, unrolled)
    outputs = tf.nest.pack_sequence_as(step.structured_outputs, flat, expand_composites=True)
    return steps, [done, *flat], outputs  # a step may return nothing


def steps_while_given(step: Traced, take: Take, arguments: Sequence[Any], steps: tf.Tensor) -> Done:
    """Do so many steps, as long as there are batches; the last place is beside the outputs."""
    iterator, *others = arguments
    specs = tf.nest.flatten(step.structured_outputs, expand_composites=True)
    done, flat, place = repeat_while_given(lambda batch: take(batch, *others, counts=True), iterator, specs, steps)
    outputs = tf.nest.pack_sequence_as(step.structured_outputs, flat, expand_composites=True)
    return done, [done, *flat], (outputs, place)


def repeat_all(
    take_step: Callable[[bool], list[tf.Tensor]], specs: Sequence[ElementSpec], steps: tf.Tensor, unrolled: int
) -> tuple[tf.Tensor, list[Tensor]]:
    """Do so many steps, in what is traced: first in rounds of one, then of `unrolled`; returns what `repeat` does."""
    flat = no_outputs(specs)
    if unrolled == 1:
        return repeat(take_step, specs, steps, 1, flat)
    _, flat = repeat(take_step, specs, (steps - 1) % unrolled + 1, 1, flat)
    return repeat(take_step, specs, (steps - 1) // unrolled, unrolled, flat)


def no_outputs(specs: Sequence[ElementSpec]) -> list[Tensor]:
    """Return outputs for a loop to begin with, which returns them only where it does no step."""
    lengths = [spec.shape.as_list() if spec.shape.rank else [] for spec in specs]
    return [tf.zeros([one or 0 for one in each], spec.dtype) for each, spec in zip(lengths, specs, strict=True)]


def repeat_while_given(
    take_step: Callable[[Any], list[tf.Tensor]], iterator: DataIterator, specs: Sequence[ElementSpec], steps: tf.Tensor
) -> tuple[tf.Tensor, list[Tensor], tf.Tensor]:
    """Do so many steps, as long as there are batches; returns how many, the last one's outputs, and the last place."""

    place, batch = next(iterator)
    what = type_in(tf.type_spec_from_value(batch))

    def goes_on(done: tf.Tensor, _: tf.Tensor, batch: Any, *__: Tensor) -> tf.Tensor:
        return (done < steps) & batch.has_value()

    # The step is in no condition: of what is asked for each worker, as its tables, TensorFlow gives nothing to those.
    def take(done: tf.Tensor, place: tf.Tensor, batch: Any, *_: Tensor) -> tuple[Any, ...]:
        outputs = take_step(batch.get_value())
        with tf.control_dependencies(outputs):
            done += 1
        nothing = (place, tf.experimental.Optional.empty(what))
        return done, *tf.cond(done < steps, lambda: next(iterator), lambda: nothing), *outputs

    begin = (tf.zeros([], tf.int64), place, batch, *no_outputs(specs))
    shapes = (tf.TensorShape([]), tf.TensorShape([2]), tf.type_spec_from_value(batch), *(spec.shape for spec in specs))
    done, place, _, *outputs = tf.while_loop(goes_on, take, begin, shapes)
    return done, outputs, place


def repeat(
    take_step: Callable[[bool], list[tf.Tensor]],
    specs: Sequence[ElementSpec],
    rounds: tf.Tensor,
    steps: int,
    outputs: list[Tensor],
) -> tuple[tf.Tensor, list[Tensor]]:
    """Do rounds of so many steps, in what is traced; returns how many rounds are done, and the last step's outputs.

    `take_step` does one step, and says by its argument whether that counts how stale its update is. `specs` are of its
    outputs.
    """

    def take_round(done: tf.Tensor, *_outputs: Tensor) -> tuple[tf.Tensor, ...]:
        for number in range(steps):
            values = take_step(number == 0)
        return done + 1, *values

    begin = (tf.zeros([], tf.int64), *outputs)
    shapes = (tf.TensorShape([]), *(spec.shape for spec in specs))
    done, *outputs = tf.while_loop(lambda done, *_: done < rounds, take_round, begin, shapes)
    return done, outputs


class StepCopy:
    """Does what a traced step does by operations of its own.

    A call would wait until all of the one before has ended, with a message from the ps. Operations wait only for those
    that used the same variable.
    """

    def __init__(self, step: Traced) -> None:
        self._step = step
        self._graph = graph = step.graph.as_graph_def()
        functions = graph.library.function
        nodes = itertools.chain(graph.node, *(function.node_def for function in functions))
        self._without_counts = without(graph, SCOPE)
        nodes = itertools.chain(nodes, self._without_counts.node)
        self._seeded = [node for node in nodes if has_seed(node)]
        self.has_seeds = bool(self._seeded)
        """Whether several calls in one graph would draw the same random numbers."""
        # By the graph: what gives mutexes back in its last copy.
        self._last: weakref.WeakKeyDictionary[Any, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
        self.is_possible = not functions and graph.ByteSize() < COPIED_BYTES
        """Whether it can be copied: it calls no function, as loops and conditions do, and is not big."""
        for node in itertools.chain(graph.node, self._without_counts.node):
            if node.device:
                node.attr.pop("_class", None)  # it names what stands for a variable, and would take the device of that

    def make(self, arguments: object, *, counts: bool = True) -> list[tf.Tensor]:
        """Copy it into the function that is being traced; returns what it gives, flat.

        One that does not count leaves out how stale its updates are. Each copy draws other random numbers, also where
        the program has seeded them.
        """
        for node in self._seeded:
            node.attr["seed2"].i += 1 << 32  # beyond what TensorFlow gives to other operations
        graph, given = tf.compat.v1.get_default_graph(), tf.nest.flatten(arguments, expand_composites=True)
        names = {}
        for inner, outer in zip(self._step.inputs, [*given, *self._step.captured_inputs], strict=True):
            names[inner.name] = names["^" + inner.op.name] = graph.capture(outer)
        outputs = [output.name for output in self._step.outputs]
        before = len(graph.get_operations())
        step = self._graph if counts else self._without_counts
        returned = list(tf.graph_util.import_graph_def(step, names, outputs, name="step"))
        self._last[graph] = in_turn(graph.get_operations()[before:], self._last.get(graph, {}))
        for one, output in zip(returned, self._step.outputs, strict=True):
            one.set_shape(output.shape)  # which Python may have told TensorFlow
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
