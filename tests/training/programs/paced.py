"""`ids` at a pace that a test sets while it trains, and with two moments that a test can hit.

In the directory PACE a test writes how long (microseconds) a step takes, for each worker and for the evaluation
(`worker-0`, `worker-1`, `evaluation`) and how long the making of a worker's dataset (`dataset-0`, `dataset-1`). What
begins leaves a file there: `making-0`, a dataset; `step-0`, each step of worker 0; `evaluating`. A step of worker 0
lasts for as long as there is a file `hold-0`.
"""

import os

import tensorflow as tf
from ids import BATCH, EXAMPLES, Counter, Ids
from tensorflow.python.data.experimental.ops import testing

HOLD_MICROSECONDS = tf.constant(50_000, tf.int64)
WAITED = tf.constant(0, tf.int64)


def path(name, number=None):
    parts = [os.environ["PACE"] + "/" + name]
    return tf.strings.join(parts if number is None else [*parts, "-", tf.strings.as_string(number)])


def read(name, number=None):
    return tf.strings.to_number(tf.io.read_file(path(name, number)), tf.int64)


def pause(microseconds):
    """Sleep as tf.data does it, without a processor."""
    return tf.data.Dataset.range(1).apply(testing.sleep(microseconds)).get_single_element()


def hold(name):
    """Wait for as long as there is a file of this name."""
    return tf.while_loop(
        lambda _: tf.size(tf.io.matching_files(name)) > 0, lambda waited: (waited + pause(HOLD_MICROSECONDS),), [WAITED]
    )[0]


def paced(dataset, witness, name, number=None):
    """Make each element leave the witness, then wait as long as the file `name` says."""

    def wait(*element):
        with tf.control_dependencies([tf.io.write_file(path(witness, number), "")]):
            microseconds = read(name, number)
        with tf.control_dependencies([pause(microseconds)]):
            held = hold(path("hold", number))
        with tf.control_dependencies([held]):
            return tf.nest.map_structure(tf.identity, element)

    return dataset.map(wait)


class Seen(Counter):
    def train_step(self, data):
        super().train_step(data)
        return {"last": tf.cast(data[0][0, 1], tf.float32)}  # not a constant: a number that lies on the worker


class Paced(Ids):
    model = Seen

    def train_dataset(self, context):
        number = context.input_pipeline_id
        with tf.control_dependencies([tf.io.write_file(path("making", number), "")]):
            microseconds = read("dataset", number)
        made = pause(microseconds)
        dataset = tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, number + 0 * made)
        dataset = dataset.map(lambda example: self.number(example) - 1)
        cells = dataset.map(lambda example: (tf.stack([number, example]), 0.0))
        return paced(cells.batch(BATCH), "step", "worker", number)

    def eval_dataset(self, context):
        cells = tf.data.Dataset.range(BATCH).map(lambda example: (tf.stack([0 * example, example]), 0.0))
        return paced(cells.batch(BATCH), "evaluating", "evaluation")
