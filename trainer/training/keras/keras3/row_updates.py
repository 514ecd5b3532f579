"""Updates of rows by the optimizers of Keras 3, as row_updates.py has them for tf_keras.

Keras 3 adds up the gradients of a row nowhere. Where its result is kept, its SGD and Adagrad see them one by one, as in
Keras; an optimizer that changes to lazy ones gets their sum, as in tf_keras.
"""

from __future__ import annotations

import tensorflow as tf

from trainer.core.contracts import Model, Optimizer, Tensor, Variable
from trainer.training.keras.keras3.optimizers import optimizers_of
from trainer.training.tables.row_updates import Update, by_rows, changes_rows, check_lazy, is_same, replace_update
from trainer.training.tables.table_lookups import lookups_of
from trainer.training.updates.rows import own, place_of


def update_by_rows(model: Model, *, lazy: bool = False) -> None:
    """Have the model's optimizers change only the rows that a gradient names, as `row_updates.update_by_rows` does.

    Call it when `gather_keras3` has put all of an update into one. Raises UserError when `lazy` finds none that can.
    """
    import keras

    optimizers = [one for _, one in optimizers_of(model)]
    if lazy:
        check_lazy(optimizers, keras.optimizers, "keras")
    for optimizer in optimizers:
        if not changes_rows(optimizer, keras.optimizers, lazy=lazy):
            continue
        clip_rows(optimizer)
        if not is_same(optimizer):
            replace_update(optimizer, by_rows)
            add_up_rows(optimizer)
        elif type(optimizer) is keras.optimizers.Adagrad:  # Keras's own SGD changes those rows alone
            replace_update(optimizer, adagrad)


def adagrad(optimizer: Optimizer, plain: Update, gradient: tf.IndexedSlices, variable: Variable, rate: Tensor) -> None:
    """Do what Adagrad does, which divides by the roots of a whole table to use a few."""
    accumulator = own(optimizer._accumulators[place_of(optimizer, variable)])
    rows, values = gradient.indices, gradient.values
    accumulator.scatter_add(tf.IndexedSlices(tf.square(values), rows))
    roots = tf.sqrt(accumulator.sparse_read(rows) + optimizer.epsilon)
    variable.scatter_sub(tf.IndexedSlices(tf.cast(rate, variable.dtype) * values / roots, rows))


def clip_rows(optimizer: Optimizer) -> None:
    """Have clipping by a norm leave a gradient's rows as they are named: Keras would make one of the whole table."""
    plain = optimizer._clip_gradients

    def clip(gradients: list[Tensor]) -> list[Tensor]:
        clipped = plain([one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients])
        return [
            tf.IndexedSlices(value, one.indices, one.dense_shape) if isinstance(one, tf.IndexedSlices) else value
            for value, one in zip(clipped, gradients, strict=True)
        ]

    object.__setattr__(optimizer, "_clip_gradients", clip)


def add_up_rows(optimizer: Optimizer) -> None:
    """Have the gradients of each row added up before they are sent."""
    plain = optimizer._all_reduce_sum_gradients

    def reduce(grads_and_vars: list[tuple[Tensor, Variable]]) -> list[tuple[Tensor, Variable]]:
        return [(added_up(gradient), variable) for gradient, variable in plain(grads_and_vars)]

    object.__setattr__(optimizer, "_all_reduce_sum_gradients", reduce)


def added_up(gradient: Tensor) -> Tensor:
    """Return a gradient that names each row once; a dynamic table's update adds up its own."""
    if not isinstance(gradient, tf.IndexedSlices) or lookups_of(gradient.indices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
