"""Programs whose state is easily told: one that counts its steps in a weight, and one with a table that is split."""

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
TIMES = 1.0  # a check changes it, as one who edits the program between two starts


class Valley:
    def __init__(self, rate=0.01):
        self._rate = rate

    def build_model(self):
        model = Counting()
        model.compile(optimizer=tf.keras.optimizers.SGD(self._rate * TIMES), loss="mse")
        return model

    def train_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.zeros([1, 1]), tf.fill([1, 1], float(BEST)))).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(1)


class Taught(tf.keras.Model):
    """Each layer with weights has an optimizer of its own."""

    def train_step(self, data):
        words, target = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(words) - target))
        *table, kernel, bias = self.trainable_variables  # of the table each shard
        gradients = tape.gradient(loss, [*table, kernel, bias])
        self.optimizer.apply_gradients(zip(gradients[:-2], table, strict=True))
        self.second.apply_gradients(zip(gradients[-2:], [kernel, bias], strict=True))
        return {"score": loss}


class Table:
    """A table and a score, both without names of their own where `named` is false."""

    def __init__(self, named=True, score=1, ema=False):
        self._named, self._score, self._ema = named, score, ema

    def build_model(self):
        names = ("table", "score") if self._named else (None, None)
        words = tf.keras.Input((4,), dtype=tf.int64)
        vectors = tf.keras.layers.Embedding(64, 16, name=names[0])(words)
        score = tf.keras.layers.Dense(self._score, name=names[1])(tf.reduce_mean(vectors, axis=1))
        model = Taught(words, score)
        model.second = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer=tf.keras.optimizers.SGD(0.1, use_ema=self._ema), loss="mse")
        return model

    def train_dataset(self, context):
        words = np.random.default_rng(1).integers(64, size=(8, 4))
        return tf.data.Dataset.from_tensors((words, words[:, : self._score].astype(np.float32))).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(1)
