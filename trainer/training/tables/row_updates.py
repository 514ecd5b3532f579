"""Updates that touch only the rows of a table which a step has looked up.

Where a gradient names rows (`tf.IndexedSlices`), Keras's optimizers still compute on the whole variable, or send each
row several times between worker and ps. Here they are given rows for variables (rows.py). Their variables, and so
their checkpoints, stay as they are, but that an SGD without momentum has none for it. docs/large-tables.md says which
optimizer gets which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.core.sizes import size
from trainer.core.variables import bytes_of
from trainer.training.placement import name_of
from trainer.training.tables.table_lookups import asked_for_once
from trainer.training.updates.constraints import is_constrained
from trainer.training.updates.optimizers import is_wrapper, optimizers_of
from trainer.training.updates.rows import as_rows

log = logging.getLogger(__name__)
LARGE_BYTES = 64 * 1024 * 1024  # of a shard; to compute on less takes no time that anybody feels
BY_ROWS = "_psfleet_by_rows"  # an attribute of optimizers with an update of rows
# What they do to the rows of a gradient is all that they do, without momentum, weight decay and averages.
SAME = ("SGD", "Adagrad")
LAZY = (*SAME, "Adadelta", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop")
# For optimizers that Keras calls legacy, TensorFlow's own operations change rows alone.
LEGACY = ("Adadelta", "Adagrad", "Adamax", "Ftrl", "SGD")
Update = Callable[..., None]


def update_by_rows(model: Model, *, lazy: bool = False) -> None:
    """Have the optimizers of a tf_keras model change only the rows that a gradient names, where that is the same.

    With `lazy` all of LAZY do so, which is another algorithm: slots of other rows don't decay, and other rows don't
    move. Call it when `one_update.gather` has put all of an update into one, before the step is traced. Raises
    UserError when `lazy` finds no optimizer that can.
    """
    optimizers = [one for one in optimizers_of(model) if one is not None and not is_wrapper(one)]
    if lazy:
        check_lazy(optimizers, tf.keras.optimizers, "tf.keras")
    for optimizer in optimizers:
        if hasattr(optimizer, "get_slot"):
            continue
        if changes_rows(optimizer, tf.keras.optimizers, lazy=lazy):
            replace_update(optimizer, by_rows)
            add_up_rows_once(optimizer)
        elif type(optimizer).__module__.startswith("tf_keras."):
            warn_of_large_tables(optimizer)
        if type(optimizer) is tf.keras.optimizers.SGD and not has_momentum(optimizer):
            leave_momentum_out(optimizer)


def changes_rows(optimizer: Optimizer, library: Any, *, lazy: bool) -> bool:
    """Return whether an optimizer may change only the rows of a gradient; `library` has its Keras's optimizers."""
    # An exact type: a class of the program's own may have another update.
    name = type(optimizer).__name__
    return name in LAZY and type(optimizer) is getattr(library, name) and (lazy or is_same(optimizer))


def is_same(optimizer: Optimizer) -> bool:
    """Return whether one of LAZY changes no rows but those of a gradient by itself."""
    is_plain = optimizer.weight_decay is None and not optimizer.use_ema
    return type(optimizer).__name__ in SAME and is_plain and not has_momentum(optimizer)


def check_lazy(optimizers: Sequence[Optimizer], library: Any, imported: str) -> None:
    """Raise UserError unless one of the optimizers could be a lazy one; `imported` is how programs name their Keras."""
    if any(changes_rows(one, library, lazy=True) or is_by_itself(one) for one in optimizers):
        return
    names = [f"{'legacy.' if hasattr(one, 'get_slot') else ''}{type(one).__name__}" for one in optimizers]
    raise UserError(
        f"lazy_optimizers: {', '.join(names) or 'a model without an optimizer'} can't change the rows of a step alone: "
        f"compile with one of {imported}.optimizers itself ({', '.join(LAZY)}), or leave lazy_optimizers out"
    )


def is_by_itself(optimizer: Optimizer) -> bool:
    """Return whether one that Keras calls legacy changes rows alone, as TensorFlow's own operations do."""
    legacy = tf.keras.optimizers.legacy
    return any(type(optimizer) is getattr(legacy, one) for one in LEGACY) or (
        type(optimizer) is legacy.RMSprop and bool(optimizer._momentum)
    )


def may_deduplicate_lookups(model: Model) -> bool:
    """Return whether a step may ask for each row once.

    Nothing may look at the gradients of single lookups: no clipping, no step and no loss but tf_keras's own.
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


def has_momentum(optimizer: Optimizer) -> bool:
    """Return whether it has momentum, or may have: a variable's later value is unknown."""
    momentum = getattr(optimizer, "momentum", 0)
    return isinstance(momentum, tf.Variable) or momentum != 0


def replace_update(optimizer: Optimizer, update: Callable[..., None]) -> None:
    """Put another update in place of the optimizer's own, past TensorFlow's tracking of attributes.

    It is given the optimizer, its own update and what that is given, where a gradient names rows. A constraint computes
    on all rows, so that nothing is gained.
    """
    plain = optimizer.update_step

    def update_step(gradient: Tensor, variable: Variable, *rate: Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices) and not is_constrained(variable):
            update(optimizer, plain, gradient, variable, *rate)
        else:
            plain(gradient, variable, *rate)

    object.__setattr__(optimizer, "update_step", update_step)
    object.__setattr__(optimizer, BY_ROWS, True)


def by_rows(optimizer: Optimizer, plain: Update, gradient: tf.IndexedSlices, variable: Variable, *rate: Tensor) -> None:
    """Do what an optimizer does to a dense weight to the rows of a gradient, each of which it names once."""
    with as_rows(optimizer, variable, gradient.indices) as rows:
        plain(gradient.values, rows, *rate)


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
                "%s computes on all rows of %s at each step, of which a shard is %s. lazy_optimizers: true "
                "changes only the rows that are looked up, with the optimizers of docs/large-tables.md",
                type(optimizer).__name__,
                name,
                size(bytes_of(variable)),
            )
        plain(gradient, variable)

    object.__setattr__(optimizer, "update_step", update_step)
