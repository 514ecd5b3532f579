"""A call, traced: it does a traced step as often as it is asked to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import DataIterator, ElementSpec, Strategy, Tensor, Traced, Variable
from trainer.training.steps.ahead import CopyAhead
from trainer.training.steps.call_accounts import CallAccounts
from trainer.training.steps.step_copy import StepCopy
from trainer.training.tf_internals.datasets import type_in

Take = Callable[..., list[tf.Tensor]]  # does steps with these arguments, one unless `steps` says how many
Done = tuple[tf.Tensor, list[Tensor], Any]  # how many steps, what ends with them, and the last one's outputs


def trace_call(
    strategy: Strategy,
    train_step: Traced,
    counter: Variable,
    iterator: DataIterator,
    accounts: CallAccounts | None = None,
    *,
    unrolled: int = 1,
    waits: bool = False,
    ahead: bool = False,
) -> Traced:
    """Trace the packed call, which does a traced step as often as it is told to and counts that.

    It takes an iterator, and a vector of the number of steps and, with `accounts`, its own number. A call with these is
    for other processes: it takes the learning rate as its last argument, and keeps the metrics' states itself. It
    reports what it would return otherwise: outputs, states, how long updates have waited, and numbers of dynamic
    tables. `unrolled` is the number of steps in a round of the call's loop; what that leaves over is done
    first, in rounds of one step. The first step of a round counts how stale its update is, which costs a tiny step a
    fifth of its speed. A step that would draw the same random numbers several times in a round has rounds of one.
    With `waits` the iterator gives places and batches as Optional, the step takes a batch, and the call ends where
    there is none. With `ahead` the steps of a round read weights one step ahead; raises UserError where they can't.
    """
    copy, unrolled = copy_for(train_step, 1 if waits else unrolled, ahead=ahead)
    take_round = round_of(train_step, copy)
    do_steps: Callable[..., Done] = steps_while_given if waits else functools.partial(all_steps, unrolled=unrolled)

    # AutoGraph would translate the loops' source, which takes longer than all the rest.
    @tf.function(autograph=False)
    def train_call(iterator: DataIterator, order: tf.Tensor, *value: tf.Tensor) -> Any:
        kept = accounts.metrics.states.in_call() if accounts else []
        if accounts:
            accounts.metrics.states.exchange(train_step, kept)
        with strategy.scope():
            steps, ended, outputs = do_steps(train_step, take_round, (iterator, *value), order[0])
            # Once a call and at its end, so that a call that is run again on another worker counts once.
            with tf.control_dependencies(ended):
                counter.assign_add(steps)
            return accounts.tell(order[1], counter, steps, outputs, kept) if accounts else outputs

    takes = (iterator, tf.TensorSpec([None], tf.int64), *((accounts.rate.spec,) if accounts else ()))
    return train_call.get_concrete_function(*takes)


def round_of(train_step: Traced, copy: StepCopy | None) -> Callable[..., list[tf.Tensor]]:
    """Return what does a round of so many steps: by copies of the step's graph, or by the step where it has none."""

    def take_round(*arguments: object, steps: int = 1) -> list[tf.Tensor]:
        if isinstance(copy, CopyAhead) and steps > 1:
            return copy.make_round(arguments, steps)
        for number in range(steps):
            if copy:
                outputs = copy.make(arguments, counts=number == 0)
            else:
                outputs = tf.nest.flatten(train_step(*arguments), expand_composites=True)
        return outputs

    return take_round


def copy_for(train_step: Traced, unrolled: int, *, ahead: bool) -> tuple[StepCopy | None, int]:
    """Return the copies of a step that is to be unrolled, None where it can't be copied, and how often it may be."""
    if ahead:
        return CopyAhead(train_step), unrolled
    copy = StepCopy(train_step) if unrolled > 1 else None
    if copy and not copy.is_possible:
        return None, 1 if copy.has_seeds else unrolled
    return copy, unrolled


def all_steps(step: Traced, take: Take, arguments: Sequence[Any], steps: tf.Tensor, unrolled: int) -> Done:
    """Do so many steps, in what is traced, in rounds of `unrolled`."""
    specs = tf.nest.flatten(step.structured_outputs, expand_composites=True)
    done, flat = repeat_all(lambda number: take(*arguments, steps=number), specs, steps, unrolled)
    outputs = tf.nest.pack_sequence_as(step.structured_outputs, flat, expand_composites=True)
    return steps, [done, *flat], outputs  # a step may return nothing


def steps_while_given(step: Traced, take: Take, arguments: Sequence[Any], steps: tf.Tensor) -> Done:
    """Do so many steps, as long as there are batches; the last place is beside the outputs."""
    iterator, *others = arguments
    specs = tf.nest.flatten(step.structured_outputs, expand_composites=True)
    done, flat, place = repeat_while_given(lambda batch: take(batch, *others), iterator, specs, steps)
    outputs = tf.nest.pack_sequence_as(step.structured_outputs, flat, expand_composites=True)
    return done, [done, *flat], (outputs, place)


def repeat_all(
    take_steps: Callable[[int], list[tf.Tensor]], specs: Sequence[ElementSpec], steps: tf.Tensor, unrolled: int
) -> tuple[tf.Tensor, list[Tensor]]:
    """Do so many steps, in what is traced: first in rounds of one, then of `unrolled`; returns what `repeat` does."""
    flat = no_outputs(specs)
    if unrolled == 1:
        return repeat(take_steps, specs, steps, 1, flat)
    _, flat = repeat(take_steps, specs, (steps - 1) % unrolled + 1, 1, flat)
    return repeat(take_steps, specs, (steps - 1) // unrolled, unrolled, flat)


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
    take_steps: Callable[[int], list[tf.Tensor]],
    specs: Sequence[ElementSpec],
    rounds: tf.Tensor,
    steps: int,
    outputs: list[Tensor],
) -> tuple[tf.Tensor, list[Tensor]]:
    """Do rounds of so many steps, in what is traced; returns how many rounds are done, and the last step's outputs.

    `take_steps` does so many steps; `specs` are of the last one's outputs.
    """

    def take_round(done: tf.Tensor, *_outputs: Tensor) -> tuple[tf.Tensor, ...]:
        return done + 1, *take_steps(steps)

    begin = (tf.zeros([], tf.int64), *outputs)
    shapes = (tf.TensorShape([]), *(spec.shape for spec in specs))
    done, *outputs = tf.while_loop(lambda done, *_: done < rounds, take_round, begin, shapes)
    return done, outputs
