"""A program with a table that two parameter servers share, an optimizer with slots, and a train_step of its own."""

import numpy as np
import tensorflow as tf

WORDS = 256
WIDTH = 16


class Averager(tf.keras.Model):
    """Built only by its first input."""

    def __init__(self):
        super().__init__()
        self.table = tf.keras.layers.Embedding(WORDS, WIDTH)
        self.score = tf.keras.layers.Dense(1)

    def call(self, words):
        return self.score(tf.reduce_mean(self.table(words), axis=1))

    def train_step(self, data):
        words, target = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(words, target, self(words, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss, "own_number": tf.constant(7.0)}


class Table:
    def build_model(self):
        model = Averager()
        model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss="mse")
        return model

    def train_dataset(self, context):
        words = np.random.default_rng(1).integers(WORDS, size=(512, 4))
        dataset = tf.data.Dataset.from_tensor_slices((words, (words[:, :1] / WORDS).astype(np.float32)))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)

    def eval_dataset(self, context):
        return self.train_dataset(context).take(4)
