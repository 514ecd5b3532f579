"""A regularizer sees a weight that is split over the ps as the program wrote it: whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer import testing

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)


def of_rows(library: Any) -> Any:
    return library.regularizers.OrthogonalRegularizer(0.5, mode="rows")


def of_mean(library: Any) -> Any:
    return lambda weight: tf.reduce_mean(tf.square(weight))


def of_sum(library: Any) -> Any:
    return library.regularizers.L1L2(0.1, 0.2)


class Regularized:
    """Two matrices for each kind of regularizer, a table and a kernel."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def build_model(self) -> Any:
        layers, lines = self.library.layers, []
        ids = self.library.Input([2], dtype="int64")
        for make in (of_rows, of_mean, of_sum):
            rows = layers.Embedding(6, 4, embeddings_regularizer=make(self.library))(ids)
            lines.append(layers.Dense(1, kernel_regularizer=make(self.library))(layers.Flatten()(rows)))
        model = self.library.Model(ids, layers.Add()(lines))
        drawn = np.random.default_rng(1)
        shapes = [*3 * [[6, 4]], *3 * [[8, 1], [1]]]
        model.set_weights([drawn.normal(size=shape).astype(np.float32) for shape in shapes])
        model.compile(self.library.optimizers.SGD(0.1), "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((np.array([[1, 2], [3, 5]]), np.ones([2, 1], np.float32))).repeat()

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(2).shard(context.num_input_pipelines, context.input_pipeline_id)


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_a_regularizer_is_that_of_the_whole_weight(library: Any) -> None:
    program = Regularized(library)
    alone = program.build_model()
    history = alone.fit(program.train_dataset(None).take(1), verbose=0)
    expected = alone.evaluate(program.train_dataset(None).take(2), verbose=0)
    result = testing.train(program, 1, workers=2, ps=2, evaluation="distributed", export=False, partitioner_min_bytes=8)
    assert result.metrics["loss"] == pytest.approx(history.history["loss"][0], rel=1e-5)
    assert result.evaluation["loss"] == pytest.approx(expected, rel=1e-5)
