"""What is said of a program whose data come in one order each time, or whole to each worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from trainer.core.settings.config import Config
from trainer.run.data_position import Beginning
from trainer.training.data.doubts import warn_of_one_order, warn_of_whole_data
from trainer.training.data.input import ReadingPlan, own_train_dataset, train_dataset_fn

Dataset = tf.data.Dataset
Make = Callable[[Any], Any]


def on_cpu() -> tf.distribute.Strategy:
    """A device has the name that this process has now: another test may have made it part of a cluster."""
    return tf.distribute.OneDeviceStrategy("cpu:0")


class Reader:
    def __init__(self, make: Make) -> None:
        self.train_dataset = make


@pytest.fixture(autouse=True)
def forget() -> None:
    warn_of_one_order.cache_clear()
    warn_of_whole_data.cache_clear()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("make", "is_said"),
    [
        (lambda context: Dataset.range(9), True),
        (lambda context: Dataset.range(9).shuffle(9, seed=3, reshuffle_each_iteration=False).batch(2), True),
        (lambda context: Dataset.range(9).shuffle(9), False),
        (lambda context: Dataset.range(9).shuffle(9, seed=3), False),
        (lambda context: Dataset.range(3).interleave(lambda _: Dataset.range(9).shuffle(9)), False),
        (lambda context: Dataset.list_files("/etc/host*"), False),
        (lambda context: Dataset.list_files("/etc/host*", shuffle=False), True),
        (lambda context: Dataset.random().take(9), False),
        (lambda context: Dataset.range(9).map(lambda number: number + tf.cast(context.seed, tf.int64)), False),
    ],
)
def test_a_program_that_shuffles_nothing_is_told(
    make: Make, is_said: bool, seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    own_train_dataset(Config(program="a:B", strategy="one_device", seed=seed), Reader(make), on_cpu())
    assert ("Reader.train_dataset shuffles nothing" in caplog.text) == is_said


@pytest.mark.parametrize(("exact", "times"), [(False, 1), (True, 0)])
def test_it_is_told_once_and_not_where_a_run_reads_on(
    exact: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        plan = ReadingPlan(lambda worker: Beginning(1), exact=exact)
        read: Any = train_dataset_fn(Reader(lambda context: Dataset.range(9)), 1, on_cpu(), plan)
        read.get_concrete_function()
    assert caplog.text.count("shuffles nothing") == times


@pytest.mark.parametrize(
    ("make", "workers", "times"),
    [
        (lambda context: Dataset.range(9).shuffle(9), 2, 1),
        (lambda context: Dataset.range(9).shuffle(9), 1, 0),
        (lambda context: Dataset.range(9).shard(context.num_input_pipelines, context.input_pipeline_id), 2, 0),
        (lambda context: context.files("/etc/host*"), 2, 0),
        (lambda context: Dataset.range(9).map(lambda number: number + tf.cast(context.seed, tf.int64)), 2, 0),
    ],
)
def test_a_program_that_gives_each_worker_all_data_is_told_once(
    make: Make, workers: int, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        read: Any = train_dataset_fn(Reader(make), workers, on_cpu(), ReadingPlan(lambda worker: Beginning(1)))
        read.get_concrete_function()
    assert caplog.text.count("Reader.train_dataset does not use its context: each of 2 workers reads all") == times
