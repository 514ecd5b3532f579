"""Whose fault it is that initial weights can't be read, and which averages begin with them."""

from __future__ import annotations

import errno
import os

import pytest
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.training.initial_weights import reading, restart_averages


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "gone"),
        ValueError("no such layer"),
        tf.errors.DataLossError(None, None, "corrupted"),
        tf.errors.NotFoundError(None, None, "gone"),
    ],
)
def test_a_source_that_is_damaged_or_gone_is_the_users_to_fix(error: Exception) -> None:
    expected = r"^initial_weights: a@5 can't be read: .*: name another source"
    with pytest.raises(UserError, match=expected), reading("a@5"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        tf.errors.UnknownError(None, None, f"/srv/ckpt-5.index; {os.strerror(errno.ESTALE)}"),
    ],
)
def test_what_the_storage_fails_is_tried_again(error: Exception) -> None:
    with pytest.raises(type(error)), reading("a@5"):
        raise error


def test_each_average_begins_with_its_own_weight_in_whatever_order_a_step_trains_them() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, name=name, input_shape=(1,)) for name in "abcd"])
    model.compile(tf.keras.optimizers.SGD(use_ema=True))
    model.second = tf.keras.optimizers.SGD(use_ema=True)
    model.unused = tf.keras.optimizers.SGD(use_ema=True)
    a, b, c, _ = (layer.kernel for layer in model.layers)
    model.optimizer.build([b, a])
    model.second.build([c])
    for number, weight in enumerate((a, b, c)):
        weight.assign([[float(number)]])
    restart_averages(model)
    averages = (*model.optimizer._model_variables_moving_average, *model.second._model_variables_moving_average)
    assert [average.numpy().item() for average in averages] == [1.0, 0.0, 2.0]
