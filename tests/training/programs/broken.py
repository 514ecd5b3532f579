"""Programs with one mistake each."""

import tensorflow as tf

from trainer.examples.digits import Digits


class Raises(Digits):
    def train_dataset(self, context):
        raise ValueError("the data is not where it should be")  # line: raises


class NotCompiled(Digits):
    def build_model(self):
        return tf.keras.Sequential(
            [tf.keras.layers.Input((8, 8)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)]
        )


class OutOfRange(Digits):
    def train_dataset(self, context):
        def spoil(image, label):
            return tf.gather(image, [label] * 8), label

        dataset = tf.data.Dataset.from_tensor_slices((tf.zeros((64, 8, 8)), tf.fill([64], 99)))
        return dataset.map(spoil).batch(8)


class PythonNumber(Digits):
    def train_dataset(self, context):
        files = [f"part-{number}" for number in range(4)]
        return tf.data.Dataset.from_tensor_slices(files[context.input_pipeline_id :: 2])  # line: number
