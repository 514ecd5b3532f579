"""Keras's `Model.fit`, with the program's callbacks, around the same calls and controller as the custom loop.

Keras's own train function would read the steps of a call from a ps before each call, and count the steps there. The
one given to it here keeps both numbers on the coordinator and packs the steps as the custom loop does.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from trainer.config import Config
from trainer.training.controller import Controller
from trainer.training.step_runner import StepRunner

log = logging.getLogger(__name__)
# `fit` makes iterators of its own, and the calls have theirs already: they read what the custom loop reads.
NO_DATA = tf.keras.utils.experimental.DatasetCreator(lambda context: tf.data.Dataset.range(1))


class Outputs(tf.distribute.coordinator.RemoteValue):
    """What train_step returned in the call that ended last, fetched when Keras asks: at the end of an epoch."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def fetch(self) -> Any:
        return self._controller.outputs


def train_with_fit(config: Config, program: Any, runner: StepRunner, controller: Controller) -> bool:
    """Train to the last step; raises Stopped, after a checkpoint, when asked to stop.

    Returns False when a callback of the program ended the training before its last step.
    """
    model = runner.model
    # At the end Keras takes averages for weights, and callbacks may put back the best ones.
    has_end = hasattr(program, "callbacks") or getattr(model.optimizer, "use_ema", False)
    if controller.done and (controller.final or not has_end):
        return True
    # A variable made outside the strategy's scope lies on the coordinator: reading it asks nobody. Set past Keras,
    # which would put it into the checkpoint.
    object.__setattr__(model, "_steps_per_execution", tf.Variable(1, dtype=tf.int64))
    follow: Any = None
    model.make_train_function = lambda force=False: lambda iterator: follow.call()
    epochs = -(-config.steps // controller.epoch_steps)
    epoch, step = (epochs, 0) if controller.done else divmod(controller.step, controller.epoch_steps)
    # What BackupAndRestore tells `fit` about where to go on, told by our checkpoint.
    model._maybe_load_initial_counters_from_ckpt = lambda steps, initial: (epoch, step)
    if controller.done:
        log.warning(
            "the end of the training at step %d was cut off: it is made up for, except that the callbacks hear nothing "
            "of the last epoch's end, and have forgotten what they knew (the best weights)", controller.step
        )  # fmt: skip
    # In the scope, so that Keras refuses what it can't call under parameter servers.
    with model.distribute_strategy.scope():
        follow = FollowController(runner, controller)
        own = program.callbacks() if hasattr(program, "callbacks") else []
        callbacks = tf.keras.callbacks.CallbackList(
            [follow, *own, StopTogether(runner, controller)],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=controller.epoch_steps,
        )
    # Keras would complain that the end of a call, where it is waited for another's end, takes longer than a call.
    callbacks._check_timing = False
    model.fit(
        NO_DATA,
        steps_per_epoch=controller.epoch_steps,
        initial_epoch=epoch,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
    if has_end:
        controller.save_the_end(again=True)
    return controller.done


class FollowController(tf.keras.callbacks.Callback):
    """Makes the calls that the controller wants, and evaluates at an epoch's end, before other callbacks."""

    def __init__(self, runner: StepRunner, controller: Controller) -> None:
        super().__init__()
        # So that Keras hands over a call's outputs as they are, without waiting for them.
        self._supports_tf_logs = True
        self._runner = runner
        self._controller = controller
        self._steps = 0  # of the next call; 0 when the epoch has all of its steps

    def call(self) -> Any:
        """Make the next call, as Keras's train function; returns its outputs, perhaps to be fetched later."""
        if not self._steps:
            return Outputs(self._controller)
        outputs = self._controller.call(self._steps).outputs
        return Outputs(self._controller) if outputs is None else outputs

    def on_train_begin(self, logs: Any = None) -> None:
        self._controller.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._runner.reset_metrics()
        self._prepare()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A call that ran twice, because its worker died, leaves Keras behind the step: what it asks for then is done.
        if not self._steps:
            return
        self._prepare()
        if not self._steps:  # for Keras's logs of the epoch
            self._runner.write_metrics()
        if self._controller.done:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A callback may have ended the training in the middle of the epoch.
        self._controller.drain()
        metrics = self._controller.evaluate()
        if logs is not None:
            logs.update({f"val_{name}": value for name, value in metrics.items()})

    def _prepare(self) -> None:
        """Wait until it is time for the next call, and tell Keras of its steps; it takes no more than are left."""
        self._steps = 0 if self._controller.done else self._controller.next_call()
        self.model._steps_per_execution.assign(self._steps or self._controller.epoch_steps)


class StopTogether(tf.keras.callbacks.Callback):
    """Makes a program's callback that ends the training end it on all members, where all look; the last callback."""

    def __init__(self, runner: StepRunner, controller: Controller) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._runner = runner
        self._controller = controller
        self._asked = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._controller.done:
            return
        self._asked |= self.model.stop_training
        self.model.stop_training = self._controller.looked and self._agreed()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._asked |= self.model.stop_training
        self.model.stop_training = self._agreed()

    def _agreed(self) -> bool:
        return bool(self._runner.agree([int(self._asked)])[0])
