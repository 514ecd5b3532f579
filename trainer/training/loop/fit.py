"""Keras's `Model.fit` around the same calls, callbacks and controller as the custom loop.

Keras's own train function would read the steps of a call from a ps before each call, and count the steps there. The
one given to it here keeps both numbers on the coordinator and packs the steps as the custom loop does.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model
from trainer.training.loop.controller import Controller
from trainer.training.loop.epochs import Epochs

# `fit` makes iterators of its own, and the calls have theirs already: they read what the custom loop reads.
NO_DATA = tf.keras.utils.experimental.DatasetCreator(lambda context: tf.data.Dataset.range(1))


def train_with_fit(model: Model, epochs: Epochs, controller: Controller) -> None:
    """Train to the last step, or until a callback ends it; raises Stopped, after a checkpoint, when asked to stop."""
    # A variable made outside the strategy's scope lies on the coordinator: reading it asks no ps. Set past Keras,
    # which would put it into the checkpoint.
    per_execution = tf.Variable(1, dtype=tf.int64)
    object.__setattr__(model, "_steps_per_execution", per_execution)
    epochs.follow.on_steps = per_execution.assign
    model.make_train_function = lambda force=False: lambda iterator: epochs.follow.call()
    # `follow` does that, for each optimizer that the model has.
    if hasattr(model.optimizer, "finalize_variable_values"):  # a list of optimizers has not
        object.__setattr__(model.optimizer, "finalize_variable_values", lambda variables: None)
    undo_where_predict_fails(model)
    # What BackupAndRestore tells `fit` about where to go on, as our checkpoint has it, once callbacks have begun.
    model._maybe_load_initial_counters_from_ckpt = lambda steps, initial: epochs.next
    model.fit(
        NO_DATA,
        steps_per_epoch=controller.epoch_steps,
        initial_epoch=epochs.next[0],
        epochs=epochs.count,
        callbacks=epochs.callbacks,
        verbose=0,
    )


def undo_where_predict_fails(model: Model) -> None:
    """Have a callback that catches an error of `predict` go on: Keras takes strategy and coordinator away meanwhile."""
    predict = model.predict

    @functools.wraps(predict)
    def undone(*args: Any, **kwargs: Any) -> Any:
        kept = model._distribution_strategy, model._cluster_coordinator
        try:
            return predict(*args, **kwargs)
        finally:
            model._distribution_strategy, model._cluster_coordinator = kept

    object.__setattr__(model, "predict", undone)
