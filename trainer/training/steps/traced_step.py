"""One step of a model, traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import tensorflow as tf

from trainer.core.contracts import DataIterator, Model, Strategy, Structure, Tensor, Traced, Variable
from trainer.core.failures import UserError
from trainer.training.keras.adapters import keras_of
from trainer.training.keras.base import KerasModel
from trainer.training.measures.metrics import metric_pieces
from trainer.training.measures.outputs import outputs_of, problem
from trainer.training.steps.call_accounts import CallAccounts
from trainer.training.tables.dynamic.together import made_together
from trainer.training.tables.precision import no_loss_scaling
from trainer.training.updates.first_trace import FirstTrace
from trainer.training.updates.part_totals import rejecting_numbers_of_parts
from trainer.training.updates.transfers import sending_together


def one_step(
    strategy: Strategy, own_step: Callable[[Any], Any], accounts: CallAccounts | None, *, placed: bool, given: bool
) -> Callable[[DataIterator], Structure]:
    """Return what does a model's train_step with an iterator's next batches, one for each replica of this process.

    With `placed` the iterator tells how far it is, beside each batch, and so does the step beside its outputs.
    With `given` it is the batch itself.
    """

    def train_step(iterator: DataIterator) -> Structure:
        read = functools.partial(next, iterator)
        if given:
            place, batch = None, iterator
        else:
            taken = accounts.wait.measured(read) if accounts and accounts.wait else read()
            place, batch = taken if placed else (None, taken)
        with contextlib.ExitStack() as stack:
            if accounts:
                stack.enter_context(accounts.asked.measured())
                stack.enter_context(accounts.stale.measured(batch))
            outputs = reduce_replicas(strategy, strategy.run(own_step, args=(batch,)))
        return (outputs, strategy.experimental_local_results(place)[-1]) if placed else outputs

    return train_step


def trace_step(
    strategy: Strategy,
    model: Model,
    iterator: DataIterator,
    accounts: CallAccounts | None = None,
    *,
    placed: bool = False,
    given: bool = False,
    seeded: bool = True,
) -> Traced:
    """Trace one step, which takes an iterator and, with `accounts`, which are for other processes, the learning rate.

    Then each update that it makes is one act: other processes make some at the same time.

    This makes what a lazily built model and its optimizer still lack. `placed` and `given` are as for `one_step`. Where
    it is not `seeded`, what it draws has no seed of TensorFlow's: each process that runs it draws other numbers, each
    time.
    """
    keras = keras_of(model)
    own_step, first = keras.step(), FirstTrace()
    step = one_step(strategy, by_autograph(own_step), accounts, placed=placed, given=given)

    def trace() -> Traced:
        @tf.function(autograph=False)
        def train_step(iterator: DataIterator, *value: tf.Tensor) -> Structure:
            if not seeded:
                tf.compat.v1.get_default_graph().seed = None
            with for_workers(keras, model, accounts, first, *value) if accounts else contextlib.nullcontext():
                return step(iterator)

        return accounts.rate.trace(train_step, iterator) if accounts else train_step.get_concrete_function(iterator)

    with strategy.scope(), no_loss_scaling():
        traced = trace()
        while getattr(own_step, "found_more", False):
            traced = trace()
        if first.is_dropped:  # and TensorFlow would use it all the same
            traced = trace()
    if first.is_dropped:
        raise UserError(f"{type(model).__name__}.train_step makes a variable in each trace; make it in build_model")
    outputs = outputs_of(traced, placed=placed)
    if wrong := problem(outputs):
        raise UserError(
            f'{type(model).__name__}.train_step returned {wrong}; expected tensors alone, such as {{"loss": loss}}'
        )
    return traced


@contextlib.contextmanager
def for_workers(
    keras: KerasModel, model: Model, accounts: CallAccounts, first: FirstTrace, *rate: tf.Tensor
) -> Iterator[None]:
    """Have each update that is traced meanwhile be one act, and small tensors travel together."""

    def states() -> list[Variable]:
        return [*metric_pieces(model), *(one for one, _ in accounts.counts), *keras.counts]

    with (
        accounts.rate.given(*rate),
        first.watched(),
        sending_together(functools.partial(metric_pieces, model)),
        accounts.updates.active(states),
        rejecting_numbers_of_parts(lambda: keras.variables),
        made_together(),
    ):
        yield


def by_autograph(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's step as AutoGraph translates it: what is around it would take a tenth of an import."""
    autograph = tf.__internal__.autograph
    return cast(Callable[..., Any], autograph.tf_convert(step, autograph.control_status_ctx()))


def reduce_replicas(strategy: Strategy, outputs: Structure) -> Structure:
    """Average what train_step returns over this process's replicas, without a word to other members.

    Keras's metrics are reduced over all replicas already.
    """

    def reduce(value: object) -> Tensor:
        values = strategy.experimental_local_results(value)
        return tf.add_n(values) / len(values) if len(values) > 1 else values[0]

    return tf.nest.map_structure(reduce, outputs)
