"""A program that only counts which worker saw which example: counts[worker, example]."""

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

EXAMPLES = 320
WORKERS = 2
BATCH = 4


class Counter(tf.keras.Model):
    workers = WORKERS

    def __init__(self):
        super().__init__()
        shape = (self.workers, EXAMPLES)
        self.counts = self.add_weight(name="counts", shape=shape, initializer="zeros", trainable=False)

    def call(self, cells):
        return tf.zeros(tf.shape(cells)[:1])

    def train_step(self, data):
        cells, _ = data
        self.counts.assign_add(tf.scatter_nd(cells, tf.ones(tf.shape(cells)[:1]), (self.workers, EXAMPLES)))
        return {"loss": tf.constant(0.0)}


class Ids:
    model = Counter
    examples = EXAMPLES

    def build_model(self):
        # A table of the strategy's: a worker that comes back from the dead must have it again.
        self.number = tf.keras.layers.IntegerLookup(vocabulary=list(range(EXAMPLES)))
        model = self.model()
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        dataset = tf.data.Dataset.range(self.examples)
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        dataset = dataset.map(lambda example: self.number(example) - 1)  # its 0 is for what is not in the table
        cells = dataset.map(lambda example: (tf.stack([context.input_pipeline_id, example]), 0.0))
        return cells.batch(BATCH).apply(testing.sleep(10_000))  # microseconds

    def eval_dataset(self, context):
        return self.train_dataset(context)
