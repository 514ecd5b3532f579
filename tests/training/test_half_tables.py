"""A table of float16: TensorFlow saves its parts, but reads none that are cut in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.core.settings.config import Config
from trainer.testing import train
from trainer.training.partitioners import make_partitioner

# isort: split
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)


class Half:
    def build_model(self) -> Any:
        layers = tf.keras.layers
        pooled = layers.GlobalAveragePooling1D(dtype="float32")
        table = layers.Embedding(50, 4, dtype="float16")
        model = tf.keras.Sequential([layers.Input((3,), dtype=tf.int64), table, pooled, layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors(
            (tf.reshape(tf.range(24, dtype=tf.int64), (8, 3)), tf.ones((8, 1)))
        ).repeat()

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(1)


def test_a_run_goes_on_and_is_exported_on_another_number_of_ps(tmp_path: Path) -> None:
    for steps, ps in ((4, 2), (8, 1)):
        result = train(Half, steps=steps, ps=ps, directory=tmp_path, partitioner_min_bytes=64, evaluation="none")
        assert result.step == steps
        assert (result.directory / "export" / "saved_model.pb").exists()


@pytest.mark.parametrize(
    ("dtype", "parts"), [(tf.float16, [1, 1]), (tf.uint32, [1, 1]), (tf.bfloat16, [2, 1]), (tf.float32, [2, 1])]
)
def test_what_is_not_read_in_parts_stays_whole(dtype: Any, parts: list[int]) -> None:
    split = make_partitioner(Config(program="a:B", partitioner_min_bytes=64), 2)
    assert list(split(tf.TensorShape([50, 4]), dtype)) == parts
