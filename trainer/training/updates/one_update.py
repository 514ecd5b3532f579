"""All that an optimizer does to a variable, in its `update_step`: so it is one act (atomic_updates.py).

Keras decays all weights, then updates each, then their averages, and last applies the constraints. Each variable gets
the same here, in the same order. The step's number is read once for all variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.tf_internals.variables import beneath, moving_average
from trainer.training.updates.constraints import constrain, take_constraint
from trainer.training.updates.first_trace import needs_no_update
from trainer.training.updates.learning_rate import replaced
from trainer.training.updates.own_applies import applying, updating
from trainer.training.updates.rows import own
from trainer.training.updates.split_gradients import by_parts


def gather(optimizer: Optimizer) -> None:
    """Have an optimizer of tf_keras do so; call it when its `update_step` is final, before the trace."""
    if hasattr(optimizer, "get_slot"):
        gather_legacy(optimizer)
        return
    if not hasattr(optimizer, "update_step"):  # Keras wraps one of tf.compat.v1 that `compile` gets
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise UserError(f"compile got {kind}, which is none of Keras's optimizers: take one of tf.keras.optimizers")
    plain, apply = optimizer.update_step, optimizer.apply_gradients
    number = (OnceOfNadam if isinstance(optimizer, tf.keras.optimizers.Nadam) else ReadOnce)(optimizer)
    decay = decay_of(optimizer, tf.keras.optimizers.Optimizer)

    def update_step(gradient: Tensor, variable: Variable) -> None:
        if needs_no_update(optimizer):
            return
        with updating(optimizer, gradient, variable), number.replaced():
            decay(variable, optimizer.learning_rate)
            plain(gradient, variable)
            if optimizer.use_ema and (average := moving_average(optimizer, variable)) is not None:
                momentum = optimizer.ema_momentum
                average.assign(momentum * average + (1 - momentum) * variable)
        constrain(variable)

    def apply_gradients(grads_and_vars: list[tuple[Tensor, Variable]], *more: object, **named: object) -> Any:
        number.forget()
        with applying(optimizer):
            return apply(keep_constraints(grads_and_vars), *more, **named)

    for name, method in (
        ("update_step", update_step),
        ("apply_gradients", apply_gradients),
        ("_apply_weight_decay", lambda variables: None),
        ("_update_model_variables_moving_average", lambda variables: None),
        ("jit_compile", False),  # XLA would take the operations out of the graph in which they get their mutex
    ):
        object.__setattr__(optimizer, name, method)


def gather_legacy(optimizer: Optimizer) -> None:
    """Have an optimizer that Keras calls legacy apply constraints where it updates: the rest it does there anyway."""
    apply = optimizer.apply_gradients

    def apply_gradients(grads_and_vars: list[tuple[Tensor, Variable]], *more: object, **named: object) -> Any:
        with applying(optimizer):
            return apply(keep_constraints(grads_and_vars), *more, **named)

    def constrained(update: Any) -> Any:
        def updated(gradient: Tensor, variable: Variable, *more: object, **named: object) -> Any:
            if needs_no_update(optimizer):
                return tf.no_op()
            with updating(optimizer, gradient, variable):
                done = update(gradient, variable, *more, **named)
                constrain(variable)
            return done

        return updated

    object.__setattr__(optimizer, "apply_gradients", apply_gradients)
    # Keras looks for an argument of the plain method, once.
    assert optimizer._dense_apply_args
    for name in ("_resource_apply_dense", "_resource_apply_sparse_duplicate_indices"):
        object.__setattr__(optimizer, name, constrained(getattr(optimizer, name)))


def gather_keras3(optimizer: Optimizer) -> None:
    """Do so with an optimizer of Keras 3, whose averages begin with the weights (keras/keras3/optimizers.py)."""
    import keras

    plain, decay = optimizer.update_step, decay_of(optimizer, keras.optimizers.Optimizer)

    def update_step(gradient: Tensor, variable: Variable, rate: Tensor) -> None:
        if needs_no_update(optimizer):
            return
        with updating(optimizer, gradient, variable):
            decay(variable, rate)
            plain(gradient, variable, rate)
        if optimizer.use_ema:
            average = own(optimizer._model_variables_moving_average[optimizer._get_variable_index(variable)])
            momentum = tf.cast(optimizer.iterations != 0, variable.dtype) * optimizer.ema_momentum
            average.assign(momentum * average + (1 - momentum) * variable)
        constrain(variable)

    for name, method in (
        ("update_step", update_step),
        ("_apply_weight_decay", lambda variables: None),
        ("_update_model_variables_moving_average", lambda variables: None),
    ):
        object.__setattr__(optimizer, name, method)


def decay_of(optimizer: Optimizer, keras_own: Any) -> Callable[[Variable, Tensor], None]:
    """Return what decays one variable, given the learning rate, before its update.

    An optimizer may have a way of its own, as Muon of Keras 3, which decays some weights otherwise.
    """
    whole = optimizer._apply_weight_decay

    def decay(variable: Variable, rate: Tensor) -> None:
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
            rate = tf.cast(rate, variable.dtype)
            variable.assign_sub(variable * tf.cast(optimizer.weight_decay, variable.dtype) * rate)

    def own_decay(variable: Variable, rate: Tensor) -> None:
        known = getattr(optimizer, "_get_variable_index", None)  # Keras 3 gives its own variables
        whole([optimizer._trainable_variables[known(variable)] if known else variable])

    return decay if type(optimizer)._apply_weight_decay is keras_own._apply_weight_decay else own_decay


@tf.autograph.experimental.do_not_convert
def keep_constraints(grads_and_vars: list[tuple[Tensor, Variable]]) -> list[tuple[Tensor, Variable]]:
    """Return the same by parts, with the variables' constraints kept where Keras doesn't look after all updates."""
    pairs = by_parts(grads_and_vars)
    for _, variable in pairs:
        take_constraint(beneath(variable))
    return pairs


class ReadOnce:
    """The number of an optimizer's steps, which it would read for each variable from the ps where it lies."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._read: Any = None

    def forget(self) -> None:
        """Read it again at the next update."""
        self._read = None

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Let the optimizer use what was read."""
        graph = tf.compat.v1.get_default_graph()
        if self._read is None or (tf.is_symbolic_tensor(self._read) and self._read.graph is not graph):
            with tf.device(self._optimizer.iterations.device):
                self._read = self._optimizer.iterations.read_value()
            self._begin()
        with replaced(self._optimizer, "_iterations", self._read):
            yield

    def _begin(self) -> None:
        """Do what is done once an update of all variables."""


class OnceOfNadam(ReadOnce):
    """Beside it the product of momenta, which tf_keras multiplies once for each variable that is traced."""

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        with super().replaced(), contextlib.ExitStack() as stack:
            # tf_keras takes the product as it is where its counter says that this step has multiplied it already.
            for name, value in (("_u_product", self._product), ("_u_product_counter", self._read + 2)):
                stack.enter_context(replaced(self._optimizer, name, value))
            yield

    def _begin(self) -> None:
        optimizer = self._optimizer
        product = optimizer._u_product
        with tf.device(product.device):
            momentum = optimizer.beta_1 * (1 - 0.5 * tf.pow(0.96, tf.cast(self._read + 1, tf.float32)))
            self._product = Multiplied(product * tf.cast(momentum, product.dtype))
            product.assign(self._product.value)


class Multiplied:
    """A number that is multiplied already."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    def __mul__(self, other: Any) -> Tensor:
        return self.value * other

    def __rsub__(self, other: Any) -> Tensor:
        return other - self.value

    def assign(self, value: Any) -> None:
        """Nothing: tf_keras traces what it doesn't do."""
