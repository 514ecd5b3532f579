"""Dynamic tables: a key gets one row, whoever asks first, and what was trained is neither lost nor another key's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer import testing  # noqa: F401 (before TensorFlow: with tf_keras)

# isort: split
import tensorflow as tf

from trainer.training.dynamic.hashing import constant
from trainer.training.dynamic.shard import FIRST, NEXT, Shard
from trainer.training.dynamic.table import Table, giving_rows

pytestmark = pytest.mark.timeout(300)
WIDTH = 4
CPU = "/device:CPU:0"


def table(name: str, servers: int = 2, capacity: int = 1000, slots: tuple[float, ...] = ()) -> Table:
    shards = [Shard(f"{name}/{n}", f"test/{name}/{n}", WIDTH, capacity, constant(WIDTH, 0.5)) for n in range(servers)]
    for shard in shards:
        shard.add_slots(slots)
        tf.function(shard.reserve, autograph=False)()
    return Table(name, WIDTH, shards, [CPU] * servers)


def test_keys_get_rows_in_training_alone() -> None:
    made = table("alone")
    ids = tf.constant([[7, 7, 9], [2**40, -3, 9]], tf.int64)

    @tf.function(autograph=False)
    def train(ids: Any) -> Any:
        with giving_rows():
            return made.look_up(ids)

    look = tf.function(made.look_up, autograph=False)
    np.testing.assert_array_equal(look(ids), np.zeros([2, 3, WIDTH]))
    assert train(ids).shape == [2, 3, WIDTH]
    np.testing.assert_array_equal(train(ids), np.full([2, 3, WIDTH], 0.5))
    np.testing.assert_array_equal(look(ids), np.full([2, 3, WIDTH], 0.5))
    assert sum(int(one.numbers.read()[NEXT]) - FIRST for one in made.shards) == 4
