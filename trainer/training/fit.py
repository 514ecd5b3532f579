"""Keras's `Model.fit`, with the program's callbacks, around the same calls and the same course as the custom loop.

Keras's own train function would read the steps of a call from a ps before each call, and count the steps there. The
one given to it here keeps both numbers on the coordinator and packs the steps as the custom loop does.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from trainer.config import Config
from trainer.training.controller import Controller

log = logging.getLogger(__name__)
# `fit` makes iterators of its own, and the calls have theirs already: they read what the custom loop reads.
NO_DATA = tf.keras.utils.experimental.DatasetCreator(lambda context: tf.data.Dataset.range(1))


def train_with_fit(config: Config, program: Any, replicas: Any, course: Controller) -> bool:
    """Train to the last step; raises Stopped, after a checkpoint, when asked to stop.

    Returns False when a callback of the program ended the training before its last step.
    """
    model = replicas.model
    # At the end Keras takes averages for weights, and callbacks may put back the best ones.
    has_end = hasattr(program, "callbacks") or getattr(model.optimizer, "use_ema", False)
    if course.done and (course.final or not has_end):
        return True
    # A variable made outside the strategy's scope lies on the coordinator: reading it asks nobody. Set past Keras,
    # which would put it into the checkpoint.
    object.__setattr__(model, "_steps_per_execution", tf.Variable(1, dtype=tf.int64))
    model.make_train_function = lambda force=False: (
        lambda iterator: replicas.call(int(model._steps_per_execution.numpy()))
    )
    epochs = -(-config.steps // course.epoch_steps)
    epoch, step = (epochs, 0) if course.done else divmod(course.step, course.epoch_steps)
    # What BackupAndRestore tells `fit` about where to go on, told by our checkpoint.
    model._maybe_load_initial_counters_from_ckpt = lambda steps, initial: (epoch, step)
    if course.done:
        log.warning(
            "the end of the training at step %d was cut off: it is made up for, except that the callbacks hear nothing "
            "of the last epoch's end, and have forgotten what they knew (the best weights)", course.step
        )  # fmt: skip
    # In the scope, so that Keras refuses what it can't call under parameter servers.
    with model.distribute_strategy.scope():
        follow = FollowCourse(replicas, course)
        own = program.callbacks() if hasattr(program, "callbacks") else []
        callbacks = tf.keras.callbacks.CallbackList(
            [follow, *own, StopTogether(replicas, course, follow)],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=course.epoch_steps,
        )
    # Keras would complain that the end of a call, where a block is waited for, takes longer than a call.
    callbacks._check_timing = False
    model.fit(
        NO_DATA,
        steps_per_epoch=course.epoch_steps,
        initial_epoch=epoch,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
    if has_end:
        course.save_the_end(again=True)
    return course.done


class FollowCourse(tf.keras.callbacks.Callback):
    """Ends blocks after the calls that the course planned, and evaluates at an epoch's end, before other callbacks."""

    def __init__(self, replicas: Any, course: Controller) -> None:
        super().__init__()
        # So that Keras hands over a call's outputs as they are, without waiting for them.
        self._supports_tf_logs = True
        self._replicas = replicas
        self._course = course
        self._left: list[int] = []
        self.block_over = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._course.begin()
        if not self._course.done:
            self._plan()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._course.block_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.block_over = not self._left
        if self._left:
            self._next_call()
            return
        self._replicas.join(self._course.waiting)
        # An epoch's metrics are Keras's to reset.
        self._course.block_ended(logs, reset_metrics=False)
        if self._course.done:
            self.model.stop_training = True
        else:
            self._plan()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        metrics = self._course.evaluate()
        if logs is not None:
            logs.update({f"val_{name}": value for name, value in metrics.items()})

    def _plan(self) -> None:
        self._left = list(self._course.plan())  # the course keeps its own, to learn from
        self._next_call()

    def _next_call(self) -> None:
        self.model._steps_per_execution.assign(self._left.pop(0))


class StopTogether(tf.keras.callbacks.Callback):
    """Makes a program's callback that ends the training end it at a block's end, on all members; the last callback."""

    def __init__(self, replicas: Any, course: Controller, follow: FollowCourse) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._replicas = replicas
        self._course = course
        self._follow = follow
        self._asked = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._course.done:
            return
        self._asked |= self.model.stop_training
        self.model.stop_training = self._follow.block_over and self._agreed()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._asked |= self.model.stop_training
        self.model.stop_training = self._agreed()

    def _agreed(self) -> bool:
        return bool(self._replicas.agree([int(self._asked)])[0])
