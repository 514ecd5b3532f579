"""A program that counts its steps on each of two ps: ps-0 has the step and `right`, ps-1 `left`."""

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing


class Counter(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.left = self.add_weight(name="left", shape=(), initializer="zeros", trainable=False)
        self.right = self.add_weight(name="right", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return x

    def train_step(self, data):
        self.left.assign_add(1.0)
        self.right.assign_add(1.0)
        return {"loss": tf.constant(0.0)}


class Both:
    def build_model(self):
        model = Counter()
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        ones = tf.data.Dataset.from_tensors((tf.ones([1]), tf.ones([1]))).repeat(1000).batch(1)
        return ones.apply(testing.sleep(10_000))  # microseconds

    def eval_dataset(self, context):
        return self.train_dataset(context)
