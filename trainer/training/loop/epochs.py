"""A run's epochs as callbacks hear of them, under both APIs: who is called when, and what outlives a process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Callback, Model, Structure
from trainer.core.settings.config import Config
from trainer.run.callback_store import CallbackStore
from trainer.training.keras.adapters import keras_of
from trainer.training.loop.as_traced import AsTraced
from trainer.training.loop.callbacks import attributes, hears_batches, keys_of, may_write, outlives
from trainer.training.loop.controller import Controller
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.steps.runner import StepRunner
from trainer.training.updates.learning_rate import Rates

log = logging.getLogger(__name__)


class LastOutputs(tf.distribute.coordinator.RemoteValue):
    """What train_step returned in the call that ended last, fetched when Keras asks: at the end of an epoch."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def fetch(self) -> Structure:
        return self._controller.outputs

    def get(self, name: str = "", default: object = None) -> Any:
        """Return one output of that call alone, which TerminateOnNaN asks for as if this were a dictionary."""
        return self._controller.last_output(name, default)


class Epochs:
    """The epochs that are left of a run, and the callbacks that hear of them."""

    def __init__(
        self, config: Config, own: list[Callback], runner: StepRunner, controller: Controller, store: CallbackStore
    ) -> None:
        """Take the program's callbacks, and where the run goes on."""
        self._controller = controller
        step, length = controller.step, controller.epoch_steps
        self.count = -(-config.steps // length)
        self._next = (self.count, 0) if controller.done else divmod(step, length)
        self.follow = FollowController(runner, controller, store if own else None)
        self.state_keeper = CallbackStateKeeper(config, own, runner, controller, store)
        (known,) = runner.agree([store.newest(step) if own else -1])
        record = store.read(known) if known >= 0 else None
        if record is not None:
            self.state_keeper.resume_from(record, self._next[0], is_end=controller.done or not self._next[1])
        if known > 0:
            for callback in own:  # it would begin its file again
                if isinstance(callback, keras_of(runner.model).callbacks.CSVLogger):
                    callback.append = True
        # In the scope, so that Keras refuses what it can't call under parameter servers.
        with runner.model.distribute_strategy.scope():
            self.callbacks = keras_of(runner.model).callback_list(
                [self.follow, *own, self.state_keeper],
                add_history=True,
                model=runner.model,
                epochs=self.count,
                steps=length,
            )
        # Keras would complain that the end of a call, where it is waited for another's end, takes longer than a call.
        self.callbacks._check_timing = False

    @property
    def are_over(self) -> bool:
        """Whether nothing is left to train: all steps are done, or a callback has ended the training before."""
        return self._next[0] >= self.count or self.state_keeper.ended

    @property
    def next(self) -> tuple[int, int]:
        """The epoch to go on with, and how many of its steps are done."""
        return (self.count, 0) if self.are_over else self._next

    def logs(self) -> dict[str, float]:
        """Return what train_step has reported of the epoch, by name."""
        outputs = self._controller.outputs
        return {} if outputs is None else fetch_numbers(outputs)


class FollowController(tf.keras.callbacks.Callback):
    """Makes the calls that the controller wants; evaluates at an epoch's end and finalises, before other callbacks."""

    def __init__(self, runner: StepRunner, controller: Controller, store: CallbackStore | None) -> None:
        """Without a store no callback of the program's hears of an epoch's end."""
        super().__init__()
        # So that Keras hands over a call's outputs as they are, without waiting for them.
        self._supports_tf_logs = True
        self._runner = runner
        self._controller = controller
        self._store = store
        self.steps = 0
        """Of the next call; 0 when the epoch has all of its steps."""
        self.on_steps: Callable[[int], object] = lambda steps: None
        """Takes how many steps the next call has, or the epoch when it has all of them."""

    def call(self) -> Any:
        """Make the next call, as Keras's train function; returns its outputs, perhaps to be fetched later."""
        if not self.steps:
            return LastOutputs(self._controller)
        outputs = self._controller.call(self.steps).outputs
        return LastOutputs(self._controller) if outputs is None else outputs

    def on_train_begin(self, logs: object = None) -> None:
        self._controller.begin()

    def on_train_end(self, logs: object = None) -> None:
        finalise(self.model)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._runner.reset_metrics()
        self._prepare()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        # A call that ran twice, because its worker died, leaves Keras behind the step: what it asks for then is done.
        if not self.steps:
            return
        self._prepare()
        if not self.steps:  # for Keras's logs of the epoch
            self._runner.write_metrics()
        if self._controller.done:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A callback may have ended the training in the middle of the epoch.
        self._controller.drain()
        if self._store is not None and logs:
            self._store.note(self._controller.step, fetch_numbers(logs))  # an evaluation may be cut off
        metrics = self._controller.evaluate()
        if logs is not None:
            logs.update(validation(metrics))

    def _prepare(self) -> None:
        """Wait until it is time for the next call, and tell Keras of its steps; it takes no more than are left."""
        self.steps = 0 if self._controller.done else self._controller.next_call()
        self.on_steps(self.steps or self._controller.epoch_steps)


class EndWithTheData(tf.keras.callbacks.Callback):
    """Ends the training where its data have come to their end, before other callbacks are asked whether they do."""

    def __init__(self, runner: StepRunner) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._runner = runner

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._runner.is_over:
            self.model.stop_training = True


class CallbackStates:
    """What callbacks remember: the attributes that are not as they were when the training began."""

    def __init__(self, callbacks: list[Callback], store: CallbackStore) -> None:
        self.callbacks = dict(zip(keys_of(callbacks), callbacks, strict=True))
        self._store = store
        self._fresh: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """The training begins: what is an attribute now is nothing to remember."""
        self._fresh = {key: attributes(callback) for key, callback in self.callbacks.items()}

    def remember(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the callbacks what an earlier process has kept, by their keys."""
        for key, values in kept.items():
            if callback := self.callbacks.get(key):
                vars(callback).update({name: value for name, value in values.items() if outlives(callback, name)})
            elif values:
                log.warning("the program has no callback %s any more: what it remembered is not used", key)

    def noted(self, step: int) -> dict[str, float]:
        """Return what the training reported of an epoch that ends at this step, as far as that is known."""
        return self._store.noted(step)

    def keep(self, step: int, ended: int, rates: Sequence[float] = ()) -> None:
        """Keep what each callback remembers at this step for a later process; the rest is as the store has it."""
        if not self.callbacks:
            return
        arrays: dict[str, Any] = {}
        kept: dict[str, dict[str, Any]] = {}
        for key, callback in self.callbacks.items():
            fresh, kept[key] = self._fresh[key], {}
            for name, (value, named) in attributes(callback).items():
                if name not in fresh or fresh[name][0] != value:
                    kept[key][name] = value
                    arrays.update(named)
        self._store.write(step, ended, kept, arrays, rates)


class CallbackStateKeeper(tf.keras.callbacks.Callback):
    """The last callback: ends the training together, and keeps what the program's callbacks remember.

    A callback that ends the training ends it on all members, where all look. What callbacks remember is kept at each
    epoch's end for a later process.
    """

    def __init__(
        self, config: Config, own: list[Callback], runner: StepRunner, controller: Controller, store: CallbackStore
    ) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self._runner = runner
        self._controller = controller
        self._asked = False
        self._steps = config.steps
        self._own = CallbackStates(own, store)
        self._record: dict[str, Any] | None = None
        self._unheard: int | None = None
        self.ended = False
        """Whether a callback has ended the training, and no more steps were asked for since."""

    def resume_from(self, record: dict[str, Any], epoch: int, *, is_end: bool) -> None:
        """Take the record to go on with, before `epoch`; `is_end` says that the epoch before has all of its steps."""
        step, length = self._controller.step, self._controller.epoch_steps
        is_of_this = record["step"] >= epoch * length
        self._record = {**record, "rates": [*map(float, record.get("rates", []))] if is_of_this else []}
        self.ended = record["step"] == step and record["ended"] >= self._steps
        if is_end and record["step"] < step:
            self._unheard = epoch - 1
        elif not is_of_this and not self._controller.done:
            log.warning("what the callbacks remember is of step %d: the rest is lost", record["step"])

    def on_train_begin(self, logs: object = None) -> None:
        self._called()
        self._own.begin()
        self._traced = AsTraced(self.model)
        if self._record is None:
            self._keep()
            return
        self._own.remember(self._record["callbacks"])
        # The epoch under way begins once more, and its callbacks may change the rate that they find.
        if not any(map(hears_batches, self._own.callbacks.values())):  # which may have changed it since
            Rates(keras_of(self.model).optimizers).assign(self._record["rates"])
        if self._unheard is not None:
            self._make_up_for(self._unheard)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._controller.done:
            return
        self._asked |= self.model.stop_training
        self.model.stop_training = self._controller.polled and self._agreed()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._called()
        self._traced.check()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._called()
        self._traced.check()
        self._asked |= self.model.stop_training
        self.ended = self.model.stop_training = self._agreed()
        self._keep()
        if not self.ended:
            self._controller.end_epoch()

    def _make_up_for(self, epoch: int) -> None:
        """Tell the callbacks of an epoch's end that a fault has cut off."""
        log.warning("the end of epoch %d, at step %d, was cut off: it is made up for", epoch, self._controller.step)
        metrics = self._controller.evaluate() or self._controller.evaluate(again=True)
        known = {**self._own.noted(self._controller.step), **validation(metrics)}
        for callback in self._own.callbacks.values():
            if isinstance(callback, keras_of(self.model).callbacks.CSVLogger) and callback.keys is None:
                callback.keys = sorted({*self._runner.output_names, *known})  # else its columns are the evaluation's
            callback.on_epoch_end(epoch, known)
        self._called()
        self._asked |= self.model.stop_training
        self.ended = self._agreed()
        self._keep()

    def _called(self) -> None:
        """The program's callbacks have just been called."""
        if any(map(may_write, self._own.callbacks.values())):
            self._runner.doubt()

    def _agreed(self) -> bool:
        return bool(self._runner.agree([int(self._asked)])[0])

    def _keep(self) -> None:
        # Where the last epoch is not whole, it may go on with more steps: it has begun already.
        rates = [] if self._controller.done else Rates(keras_of(self.model).optimizers).values
        self._own.keep(self._controller.step, self._steps if self.ended else 0, rates)


def validation(metrics: dict[str, float]) -> dict[str, float]:
    """Return an evaluation's metrics as callbacks hear of them."""
    return {f"val_{name}": value for name, value in metrics.items()}


def finalise(model: Model) -> None:
    """Take averages for weights, as Keras's `fit` does at its end: of each optimizer, for those that it trains.

    Keras would ask the model's own optimizer alone, for all that the model trains.
    """
    for optimizer, weights in keras_of(model).averaged():
        with model.distribute_strategy.scope():
            type(optimizer).finalize_variable_values(optimizer, weights)
