"""A model whose updates take far longer than its gradients: what a ps can't keep up with."""

import tensorflow as tf

ROWS = 2_000_000


class Heavy:
    def build_model(self):
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((1,), dtype=tf.int64), tf.keras.layers.Embedding(ROWS, 8), tf.keras.layers.Flatten()]
        )
        # It updates all rows at each step, with three slots, though a step has four of them.
        model.compile(tf.keras.optimizers.Adam(0.1, amsgrad=True), "mse")
        return model

    def train_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.zeros([4, 1], tf.int64), tf.ones([4, 8]))).repeat()
