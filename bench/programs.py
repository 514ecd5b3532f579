"""The programs that the benches train: one tiny classifier, as it is and with slow steps."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

# tf.data's own sleep: it holds no CPU and no Python lock, like a step that waits for an accelerator.
from tensorflow.python.data.experimental.ops.testing import sleep

BATCH = 32
EXAMPLES = 32 * 256
FEATURES = 16
CLASSES = 4


class Tiny:
    """A model so small that a step is nothing but TensorFlow's own work for it."""

    step_seconds = 0.0

    def build_model(self) -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((FEATURES,)),
                tf.keras.layers.Dense(16, activation="relu"),
                tf.keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.01),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        examples = self._examples().shard(context.num_input_pipelines, context.input_pipeline_id)
        batches = examples.repeat().batch(BATCH, drop_remainder=True)
        if not self.step_seconds:
            return batches.prefetch(2)
        # Not prefetched: the time belongs to the step, and no pause of the coordinator may hide behind it.
        return batches.apply(sleep(round(self.step_seconds * 1e6)))

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        return self._examples().batch(BATCH)

    def _examples(self) -> tf.data.Dataset:
        generator = np.random.default_rng(seed=1)
        features = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        labels = features[:, :CLASSES].argmax(axis=1).astype(np.int32)
        return tf.data.Dataset.from_tensor_slices((features, labels))


class Waiting(Tiny):
    """Bound by latency: a step waits 50 ms and computes next to nothing, so that workers can share a processor."""

    step_seconds = 0.05


class Counted(Waiting):
    """Writes down each step that begins, whoever trains it: a file for each dataset that was made, with a number."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        made = tf.strings.as_string(tf.random.uniform([], maxval=tf.int64.max, dtype=tf.int64))
        path = tf.strings.join([os.environ["BENCH_STEPS"] + "/", made])

        def count(number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([tf.io.write_file(path, tf.strings.as_string(number))]):
                return tf.nest.map_structure(tf.identity, batch)

        return super().train_dataset(context).enumerate(start=1).map(count)


class Slow(Tiny):
    """A step of one second, which no packing can make faster."""

    step_seconds = 1.0
