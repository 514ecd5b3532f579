"""Updates that touch only the rows of a table which a step has looked up.

Where a gradient names rows (`tf.IndexedSlices`), tf_keras's `SGD` and `Adam` still compute on the whole variable, and
`Adagrad` sends each row four times between worker and ps. The updates made here take the place of an optimizer's
`update_step`; its variables, and so its checkpoints, stay as they are, but that such an SGD has no momentum.
docs/large-tables.md says which optimizer gets which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.core.variables import bytes_of
from trainer.training.lookups import asked_for_once
from trainer.training.optimizers import optimizers_of
from trainer.training.placement import name_of, size

log = logging.getLogger(__name__)
LARGE_BYTES = 64 * 1024 * 1024  # of a shard; to compute on less takes no time that anybody feels
BY_ROWS = "_psfleet_by_rows"  # an attribute of optimizers with an update of rows
Update = Callable[[Any, Any, Any], None]


def update_by_rows(model: Model, *, lazy_adam: bool = False) -> None:
    """Have the model's optimizers change only the rows that a gradient names, where that comes to the same.

    With `lazy_adam` Adam does so as well, which is another algorithm: moments of other rows don't decay, and other rows
    don't move. Call it before the step is traced. Raises UserError when `lazy_adam` finds no Adam that can.
    """
    kinds = tf.keras.optimizers.Optimizer
    optimizers = [one for one in optimizers_of(model) if isinstance(one, kinds) and not hasattr(one, "inner_optimizer")]
    updates: dict[type, Update] = {tf.keras.optimizers.SGD: sgd, tf.keras.optimizers.Adagrad: adagrad}
    if lazy_adam:
        updates[tf.keras.optimizers.Adam] = adam
        check_lazy_adam(model, optimizers)
    for optimizer in optimizers:
        # An exact type: a class of the program's own may have another update.
        update = updates.get(type(optimizer))
        if update and not touches_all_rows(optimizer):
            replace_update(optimizer, update)
            if update is sgd:
                leave_momentum_out(optimizer)
        elif type(optimizer).__module__.startswith("tf_keras."):
            warn_of_large_tables(optimizer)


def may_ask_once(model: Model) -> bool:
    """Return whether a step may ask for each row once.

    Nobody may look at the gradients of single lookups: no clipping, no step and no loss but tf_keras's own.
    """
    return has_keras_step(model) and all(
        BY_ROWS in vars(one) and not (one.clipnorm or one.clipvalue or one.global_clipnorm)
        for one in optimizers_of(model)
    )


def has_keras_step(model: Model) -> bool:
    """Return whether a step is tf_keras's own, so that nothing but the optimizers changes weights."""
    own = tf.keras.Model
    step = getattr(getattr(model, "train_step", None), "__func__", None)
    return step is own.train_step and type(model).compute_loss is own.compute_loss


def touches_all_rows(optimizer: Optimizer) -> str:
    """Say which argument makes an optimizer change rows that a gradient doesn't name; nothing if none does."""
    momentum = getattr(optimizer, "momentum", 0)
    arguments = {
        # Of a variable nobody knows what it will be.
        "momentum": isinstance(momentum, tf.Variable) or momentum != 0,
        "amsgrad": getattr(optimizer, "amsgrad", False),
        "weight_decay": optimizer.weight_decay is not None,
        "use_ema": optimizer.use_ema,
    }
    return next((name for name, given in arguments.items() if given), "")


def check_lazy_adam(model: Model, optimizers: list[Optimizer]) -> None:
    """Raise UserError unless there is an Adam, and each could be a lazy one."""
    adams = [optimizer for optimizer in optimizers if type(optimizer) is tf.keras.optimizers.Adam]
    if not adams:
        names = [type(optimizer).__name__ for optimizer in optimizers] or [f"legacy.{type(model.optimizer).__name__}"]
        raise UserError(
            f"lazy_adam: the model's optimizer must be tf.keras.optimizers.Adam itself, not {', '.join(names)}: "
            "compile with Adam, or leave lazy_adam out"
        )
    for optimizer in adams:
        if argument := touches_all_rows(optimizer):
            raise UserError(
                f"lazy_adam: the Adam {optimizer.name!r} has {argument}, which changes every row at each step: "
                f"leave {argument} out, or lazy_adam"
            )


def replace_update(optimizer: Optimizer, update: Update) -> None:
    """Put another update in place of the optimizer's own, past TensorFlow's tracking of attributes."""
    plain = optimizer.update_step

    def update_step(gradient: Tensor, variable: Variable) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            update(optimizer, gradient, variable)
        else:
            plain(gradient, variable)

    object.__setattr__(optimizer, "update_step", update_step)
    object.__setattr__(optimizer, BY_ROWS, True)
    add_up_rows_once(optimizer)
    leave_xla_out(optimizer)


def add_up_rows_once(optimizer: Optimizer) -> None:
    """Keep an optimizer from adding up the gradients of a row that has only one, and from sending its number again."""
    plain = optimizer._deduplicate_sparse_grad

    def deduplicate(gradients: list[Tensor]) -> list[Tensor]:
        return [once(gradient) or plain([gradient])[0] for gradient in gradients]

    object.__setattr__(optimizer, "_deduplicate_sparse_grad", deduplicate)


def once(gradient: Tensor) -> tf.IndexedSlices | None:
    """Return the gradient of rows that were asked for once, with the numbers that were sent then."""
    rows = asked_for_once(gradient.indices) if isinstance(gradient, tf.IndexedSlices) else None
    return None if rows is None else tf.IndexedSlices(gradient.values, rows, gradient.dense_shape)


def leave_xla_out(optimizer: Optimizer) -> None:
    """Keep XLA from an update of rows, which it would compile again at each step: their number is another one."""
    object.__setattr__(optimizer, "jit_compile", False)


def leave_momentum_out(optimizer: Optimizer) -> None:
    """Have an SGD without momentum make no variables for it, which take as much as the tables and are never written."""
    make = optimizer.add_variable_from_reference

    def make_other(model_variable: Variable, variable_name: str, *more: object, **named: object) -> Variable:
        return None if variable_name == "m" else make(model_variable, variable_name, *more, **named)

    object.__setattr__(optimizer, "add_variable_from_reference", make_other)


def warn_of_large_tables(optimizer: Optimizer) -> None:
    """Have an optimizer that computes on whole tables say so of large ones, once each, when its step is traced."""
    plain, warned = optimizer.update_step, set()

    def update_step(gradient: Tensor, variable: Variable) -> None:
        name = name_of(variable)
        if isinstance(gradient, tf.IndexedSlices) and bytes_of(variable) >= LARGE_BYTES and name not in warned:
            warned.add(name)
            log.warning(
                "%s computes on all rows of %s at each step, of which a shard is %s: docs/large-tables.md says which "
                "optimizers change only the rows that are looked up",
                type(optimizer).__name__,
                name,
                size(bytes_of(variable)),
            )
        plain(gradient, variable)

    object.__setattr__(optimizer, "update_step", update_step)


def sgd(optimizer: Optimizer, gradient: tf.IndexedSlices, variable: Variable) -> None:
    """Do what SGD without momentum does; it would write one that nobody reads."""
    rate, rows = tf.cast(optimizer.learning_rate, variable.dtype), gradient.indices
    set_rows(variable, rows, rows_of(variable, rows) - gradient.values * rate)


def adagrad(optimizer: Optimizer, gradient: tf.IndexedSlices, variable: Variable) -> None:
    """Do what Adagrad does to the rows of the gradient: to the others it does nothing."""
    accumulator = optimizer._accumulators[optimizer._index_dict[optimizer._var_key(variable)]]
    rate, rows, values = tf.cast(optimizer.learning_rate, variable.dtype), gradient.indices, gradient.values
    sums = rows_of(accumulator, rows) + values * values
    change = -rate * values / tf.sqrt(sums + optimizer.epsilon)
    set_rows(accumulator, rows, sums)
    set_rows(variable, rows, rows_of(variable, rows) + change)


def adam(optimizer: Optimizer, gradient: tf.IndexedSlices, variable: Variable) -> None:
    """Do what Adam does to the rows of the gradient, and nothing to the others."""
    dtype, rows, values = variable.dtype, gradient.indices, gradient.values
    number = optimizer._index_dict[optimizer._var_key(variable)]
    momentum, velocity = optimizer._momentums[number], optimizer._velocities[number]
    beta_1, beta_2, step = optimizer.beta_1, optimizer.beta_2, tf.cast(optimizer.iterations + 1, dtype)
    correction = tf.sqrt(1 - tf.pow(tf.cast(beta_2, dtype), step))
    rate = tf.cast(optimizer.learning_rate, dtype) * correction / (1 - tf.pow(tf.cast(beta_1, dtype), step))
    epsilon = optimizer.epsilon * correction if optimizer.adaptive_epsilon else optimizer.epsilon
    m, v = rows_of(momentum, rows), rows_of(velocity, rows)
    m = m + (values - m) * (1 - beta_1)
    v = v + (tf.square(values) - v) * (1 - beta_2)
    set_rows(momentum, rows, m)
    set_rows(velocity, rows, v)
    set_rows(variable, rows, rows_of(variable, rows) - m * rate / (tf.sqrt(v) + epsilon))


def rows_of(variable: Variable, rows: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=rows, dtype=variable.dtype)


def set_rows(variable: Variable, rows: tf.Tensor, values: tf.Tensor) -> None:
    """Write rows, each of which stands there once: in an update that is one act, which is faster than to add to them.

    `apply_gradients` sees to it that a gradient names each row once.
    """
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=rows, updates=values)
