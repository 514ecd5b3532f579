"""Handwritten digits: 1,797 real images of 8 by 8 pixels, which lie beside this file and need no download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository
(CC BY 4.0).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

DATA = Path(__file__).with_suffix(".npz")
BATCH = 32
TEST_IMAGES = 360


def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (uint8, 0 to 16) and labels of "train" or "test", split in the same way every time."""
    with np.load(DATA) as digits:
        images, labels = digits["images"], digits["labels"].astype(np.int32)
    order = np.random.default_rng(seed=1).permutation(len(labels))
    chosen = order[:TEST_IMAGES] if part == "test" else order[TEST_IMAGES:]
    return images[chosen], labels[chosen]


class Digits:
    """A small convolutional network that reads a digit."""

    def __init__(self, learning_rate: float = 1e-3, dropout: float = 0.5) -> None:
        self.learning_rate = learning_rate
        self.dropout = dropout

    def build_model(self) -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((8, 8)),
                tf.keras.layers.Rescaling(1 / 16),  # part of the model, so that the served model takes raw pixels
                tf.keras.layers.Reshape((8, 8, 1)),
                tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dropout(self.dropout),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.Adam(self.learning_rate),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each worker reads its own part, in an order of its own.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(2000).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test"))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(BATCH)
