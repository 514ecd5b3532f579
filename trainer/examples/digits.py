"""Handwritten digits: scikit-learn's 1,797 real images of 8 by 8 pixels, which need no download."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH = 32
TEST_IMAGES = 360


def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (uint8, 0 to 16) and labels of "train" or "test", split in the same way every time."""
    digits = load_digits()
    order = np.random.default_rng(seed=1).permutation(len(digits.target))
    chosen = order[:TEST_IMAGES] if part == "test" else order[TEST_IMAGES:]
    return digits.images[chosen].astype(np.uint8), digits.target[chosen].astype(np.int32)


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
