"""Train with weight decay that leaves a weight out by its name, split over two ps and whole; print both as JSON.

Two workers train on two ps. The loss is linear in the weights, so that their order changes nothing.
"""

import json
import sys

from trainer import testing  # before TensorFlow: it chooses the Keras

import keras as keras3  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

SPLIT = {"partitioner": "fixed_shards", "partitioner_shards": 2}
WHOLE = {"partitioner": "none"}


class Linear:
    batch_size = 4

    def __init__(self, of):
        self.of = of

    def build_model(self):
        layer = self.of.layers.Dense(2, kernel_initializer="ones", bias_initializer="ones", name="dense")
        self.model = self.of.Sequential([self.of.Input((8,)), layer])
        optimizer = self.of.optimizers.SGD(0.125, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["kernel:0$"])
        self.model.compile(optimizer, loss=lambda label, made: made)
        return self.model

    def train_dataset(self, batch_size):
        return tf.data.Dataset.from_tensors((tf.ones([4, 8]), tf.ones([4, 2]))).repeat()


def train(of, settings):
    program = Linear(of)
    testing.train(program, 1, 2, 2, evaluation="none", seed=1, **settings)
    return [float(np.array(one).mean()) for one in program.model.get_weights()]


of = keras3 if sys.argv[1] == "keras3" else tf.keras
print(json.dumps({"split": train(of, SPLIT), "whole": train(of, WHOLE)}))
