"""`ids` for any number of workers: all count as one."""

import tensorflow as tf
from ids import Ids


class Many(Ids):
    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda cells, label: (cells * tf.constant([0, 1], tf.int64), label))
