"""Files that are given out one by one, and a model that counts which worker saw which example.

FILES is the pattern of the files, whose lines are numbers of examples. In the directory PACE a test writes how long
(microseconds) a step takes, for each worker: `worker-0`, `worker-1`.
"""

import os

import tensorflow as tf
from ids import BATCH
from paced import pause, read

FILES, FILE = 60, 16
EXAMPLES = FILES * FILE
WORKERS = 2


class Counter(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.counts = self.add_weight(name="counts", shape=(WORKERS, EXAMPLES), initializer="zeros", trainable=False)
        self.number = tf.keras.metrics.Mean(name="number")

    def call(self, numbers):
        return tf.zeros(tf.shape(numbers))

    def train_step(self, numbers):
        worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
        with tf.control_dependencies([pause(read("worker", worker))]):
            cells = tf.stack([tf.fill(tf.shape(numbers), worker), numbers], axis=1)
        self.counts.assign_add(tf.scatter_nd(cells, tf.ones(tf.shape(numbers)), (WORKERS, EXAMPLES)))
        self.number.update_state(numbers)
        return {"loss": tf.constant(0.0), "number": self.number.result()}


class Given:
    def build_model(self):
        model = Counter()
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        lines = context.files(os.environ["FILES"]).flat_map(tf.data.TextLineDataset)
        return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).shuffle(8).batch(BATCH)

    eval_dataset = train_dataset
