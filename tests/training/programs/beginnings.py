"""A program whose state is easily told: it counts its steps in a weight."""

import numpy as np
import tensorflow as tf

BEST = 10


class Counting(tf.keras.Model):
    """Its weight is the number of steps; its evaluation is the better the nearer that is to BEST."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(name="count", shape=(), initializer="zeros")

    def call(self, features):
        return features * 0.0 + self.count

    def train_step(self, data):
        self.count.assign_add(1.0)
        # NaN from some step on, as where a training has gone wrong.
        return {"loss": tf.where(self.count > NAN_FROM, np.nan, self.count)}


NAN_FROM = 25.0


class Valley:
    def build_model(self):
        model = Counting()
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.zeros([1, 1]), tf.fill([1, 1], float(BEST)))).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(1)
