"""A training that lasts as long as a test needs: each batch sleeps, natively, so that it costs no processor time."""

import tensorflow as tf
import tf_keras
from tensorflow.python.data.experimental.ops import testing


class Slow:
    def build_model(self):
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(4,))])
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        return self.eval_dataset(context).repeat().apply(testing.sleep(300_000))

    def eval_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1])))


class Unbuildable(Slow):
    """Has every method, and fails in the proof, which builds its model, with a text that steers a terminal."""

    def build_model(self):
        raise ValueError("no such \x1b]0;owned\x07column")


class Untrainable(Slow):
    """Can be built, and fails in the coordinator."""

    def train_dataset(self, context):
        raise ValueError("no such file")


class Breaking(Slow):
    """Trains for some twenty seconds, and then finds an example that it refuses."""

    def train_dataset(self, context):
        def reject_the_last(number, features, labels):
            tf.debugging.assert_less(number, tf.constant(66, tf.int64), "no such label")
            return features, labels

        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(1_000_000), super().train_dataset(context)))
        return numbered.map(lambda number, example: reject_the_last(number, *example))
