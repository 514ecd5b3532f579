"""Whose fault it is that initial weights can't be read, and which averages begin with them."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

from trainer.failures import UserError
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
def test_a_source_that_is_damaged_or_gone_is_the_users_to_mend(error: Exception) -> None:
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


class Weight:
    """A variable, or the average of one: what it was given."""

    given: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def assign(self, other: Weight) -> None:
        self.given = other.name


def test_each_average_begins_with_its_own_weight_in_whatever_order_a_step_trains_them() -> None:
    averages = [Weight("of b"), Weight("of a")]
    optimizer = SimpleNamespace(
        use_ema=True,
        _var_key=lambda weight: weight.name,
        _index_dict={"b": 0, "a": 1},
        _model_variables_moving_average=averages,
    )
    restart_averages(SimpleNamespace(optimizer=optimizer, trainable_variables=[Weight(name) for name in "abc"]))
    assert [average.given for average in averages] == ["b", "a"]
