"""Whose fault it is that initial weights can't be read."""

from __future__ import annotations

import errno
import os

import pytest
import tensorflow as tf

from trainer.failures import UserError
from trainer.training.initial_weights import reading


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
