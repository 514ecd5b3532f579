"""One weight, learned at a rate that is a parameter; a rate below zero fails where the model is built."""

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing


class Rated:
    def __init__(self, rate: float, units: int = 1):
        self.rate, self.units = rate, units

    def build_model(self):
        if self.rate < 0:
            raise ValueError(f"a rate of {self.rate} leads away from the minimum")
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(self.units)])
        model.compile(tf.keras.optimizers.SGD(self.rate), "mse")
        return model

    def train_dataset(self, context):
        ones = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, self.units]))).repeat()
        return ones.apply(testing.sleep(10_000))  # microseconds

    def eval_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, self.units])))
