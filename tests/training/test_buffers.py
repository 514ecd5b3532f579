"""A warning of buffers that can't lie in the host's memory, and none where they may."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.training.data import doubts
from trainer.training.data.context import DataPass

KIB = 2**10
Make = Callable[[], tf.data.Dataset]


def slices(count: int = 40) -> tf.data.Dataset:
    """Elements of 1 KiB."""
    return tf.data.Dataset.from_tensor_slices(np.zeros((count, 256), np.float32))


def decoded() -> tf.data.Dataset:
    """Nobody knows how many elements of 1 KiB."""
    lines = tf.data.TextLineDataset(["/nowhere"])
    return lines.map(lambda line: tf.ensure_shape(tf.io.decode_raw(line, tf.float32), [256]))


def warned(make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, traced: bool) -> list[str]:
    """Return the warnings for each of two workers, on a host with 32 KiB."""
    monkeypatch.setattr(doubts, "memory_limit", lambda: 32 * KIB)
    doubts._warn_of_buffer.cache_clear()
    program: Any = SimpleNamespace()

    def ask() -> int:
        for part in range(2):
            DataPass(2, part, 1, 0, 0).ask(program, lambda context: make())
        return 0

    caplog.clear()
    with caplog.at_level(logging.WARNING, doubts.__name__):
        (tf.function(ask, autograph=False) if traced else ask)()
    return [record.getMessage() for record in caplog.records if " keeps up to " in record.getMessage()]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: decoded().shuffle(33), "33 elements of 1024 bytes in shuffle()"),
        (lambda: decoded().shuffle(33).batch(4).repeat().prefetch(2), "33 elements of 1024 bytes in shuffle()"),
        (lambda: slices().batch(10, drop_remainder=True).shuffle(1000), "4 elements of 10240 bytes in shuffle()"),
        (lambda: slices().map(lambda x: x + 1).cache(), "40 elements of 1024 bytes in cache()"),
        (
            lambda: decoded().apply(tf.data.experimental.assert_cardinality(50)).cache(),
            "50 elements of 1024 bytes in cache()",
        ),
        (lambda: slices().repeat().shuffle(50), "50 elements of 1024 bytes in shuffle()"),
    ],
)
def test_a_buffer_larger_than_memory_is_warned_of_once(
    make: Make, expected: str, traced: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    [message] = warned(make, caplog, monkeypatch, traced)
    assert f"SimpleNamespace.train_dataset keeps up to {expected}: that is " in message
    assert "this host lets a process take 0.0 GiB" in message


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: decoded().shuffle(32),
        lambda: slices(32).map(lambda x: x + 1).shuffle(10**6),
        lambda: slices(64).filter(lambda x: x[0] > 0).shard(2, 0).take(32).shuffle(32),
        lambda: decoded().cache(),
        lambda: slices().filter(lambda x: x[0] > 0).cache(),
        lambda: slices().cache("/tmp/of-a-file"),
        lambda: tf.data.TextLineDataset(["/nowhere"]).shuffle(10**9),
        lambda: decoded().padded_batch(4).shuffle(10**6),
    ],
)
def test_what_may_fit_is_not_warned_of(
    make: Make, traced: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warned(make, caplog, monkeypatch, traced) == []
