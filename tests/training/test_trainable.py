"""Layers whose `trainable` is changed after compile: what counts is what counts in Keras's own fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer import testing

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)


class Toggled:
    """One layer is frozen after compile, and another one freed; each step moves what is trained by as much."""

    def __init__(self, library: Any) -> None:
        self.library, self.model = library, None

    def build_model(self) -> Any:
        library, inputs = self.library, self.library.Input((1,))
        frozen, freed = (
            library.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)
            for name in ("frozen", "freed")
        )
        self.model = model = library.Model(inputs, library.layers.Add()([frozen(inputs), freed(inputs)]))
        freed.trainable = False
        model.compile(library.optimizers.SGD(0.5), loss=lambda _, found: found)
        frozen.trainable, freed.trainable = False, True
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat()

    eval_dataset = train_dataset

    @property
    def weights(self) -> dict[str, float]:
        model: Any = self.model
        return {name: float(model.get_layer(name).get_weights()[0].item()) for name in ("frozen", "freed")}


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_two_workers_train_the_layers_that_keras_trains(library: Any, tmp_path: Path) -> None:
    """In tf_keras those that were trainable when the model was compiled, in Keras 3 those that are so now."""
    program = Toggled(library)
    program.build_model().fit(program.train_dataset(None).take(20), verbose=0)
    expected = program.weights
    assert sorted(expected.values()) == [-10.0, 0.0]
    testing.train(program, 20, workers=2, ps=2, directory=tmp_path, evaluation="none")
    assert program.weights == expected
