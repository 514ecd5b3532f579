"""The learning rate goes out with each call, so that no worker reads it from a parameter server.

Keras keeps an optimizer's learning rate in a variable, which lies on one ps; every update of every variable would read
it there, and a `LearningRateSchedule` would also write it there at every step. Callbacks and checkpoints still find the
variable where Keras has it, but it lies on the coordinator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Optimizer, Traced
from trainer.core.failures import UserError, explain

SET_BY_WORKERS = (
    "train_step sets the optimizer's learning rate, which under parameter_server every worker would do to all others "
    "at every step: give the optimizer a LearningRateSchedule, or set it from a callback"
)


class LearningRate:
    """An optimizer's learning rate, for calls that run elsewhere.

    Make it outside the strategy's scope, before checkpoints look at the optimizer. It leaves alone the optimizers that
    Keras calls legacy, which keep their rate in another way.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # A LossScaleOptimizer (mixed precision) has the rate of the optimizer inside it.
        self._optimizer = optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        self._schedule = rate if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule) else None
        self._variable: Any = None
        self._holder, self._name = optimizer, "_learning_rate"
        if rate is not None and isinstance(
            getattr(rate, "_value", None), tf.Variable
        ):  # Keras 3 has a variable of its own around it
            self._holder, self._name, rate = rate, "_value", rate._value
        if isinstance(rate, tf.Variable):
            self._variable = tf.Variable(rate.numpy(), trainable=False, dtype=rate.dtype, name="learning_rate")
            setattr(self._holder, self._name, self._variable)

    @property
    def value(self) -> tf.Tensor:
        """The rate as it is now, to be given to a call; 0 where the call finds it by itself. Asks no other task."""
        return tf.constant(0.0) if self._variable is None else self._variable.read_value()

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([], tf.float32 if self._variable is None else self._variable.dtype)

    def trace(self, call: Any, *specs: ElementSpec) -> Traced:
        """Return the concrete function of a call whose last argument, after those specified, is the rate."""
        try:
            return call.get_concrete_function(*specs, self.spec)
        except AttributeError as error:
            if SET_BY_WORKERS in str(error):
                raise UserError(explain(error)) from error
            raise

    @contextlib.contextmanager
    def given(self, value: tf.Tensor) -> Iterator[None]:
        """Let the optimizer use this rate, or the schedule's at each step, in what is traced inside."""
        optimizer, schedule = self._optimizer, self._schedule
        if self._variable is not None:
            for name in ("assign", "assign_add", "assign_sub"):
                setattr(value, name, raise_set_by_workers)
            with replaced(self._holder, self._name, value):
                yield
        elif schedule is not None:
            shown = optimizer._current_learning_rate

            def compute() -> None:
                object.__setattr__(optimizer, "_current_learning_rate", schedule(optimizer.iterations))

            with (
                replaced(optimizer, "_current_learning_rate", shown),
                replaced(optimizer, "_compute_current_learning_rate", compute),
            ):
                yield
        else:
            yield

    @tf.autograph.experimental.do_not_convert
    def show(self) -> None:
        """Have the optimizer say its schedule's rate, in what is traced: once a call, so that it is about right."""
        if self._schedule is not None:
            self._optimizer._current_learning_rate.assign(self._schedule(self._optimizer.iterations))


class Rates:
    """The learning rates that optimizers have now, as a program has just given them before a checkpoint is read."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Take optimizers; those with a schedule have no rate of their own."""
        self._rates = [(rate, rate.numpy()) for rate in map(rate_of, optimizers) if hasattr(rate, "assign")]

    @property
    def values(self) -> list[float]:
        """The rates as they were."""
        return [float(value) for _, value in self._rates]

    def take_back(self) -> None:
        """Have the optimizers use these rates again."""
        self.assign(self.values)

    def assign(self, values: Sequence[float]) -> None:
        """Have the optimizers use rates that an earlier process had; none where a schedule has come or gone."""
        if len(values) == len(self._rates):
            for (rate, _), value in zip(self._rates, values, strict=True):
                rate.assign(value)

    def replaced(self) -> list[str]:
        """Say which rates are others by now."""
        now = ((rate.numpy(), value) for rate, value in self._rates)
        return [f"the learning rate {one:.4g}, not the program's {value:.4g}" for one, value in now if one != value]


def rate_of(optimizer: Optimizer) -> Any:
    """Return what has an optimizer's learning rate: a variable, or a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    hyperparameters = getattr(inner, "_hyper", {})  # of one that Keras calls legacy
    return getattr(inner, "_learning_rate", hyperparameters.get("learning_rate"))


def raise_set_by_workers(*_: object, **__: object) -> None:
    """Stand for what sets a rate: within a step it is a number, and no variable."""
    raise AttributeError(SET_BY_WORKERS)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Put another value in place of an attribute, past TensorFlow's tracking of attributes."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)
