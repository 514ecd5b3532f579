"""Train programs with rules of their own on split weights, and on whole ones; print what came of each, as JSON.

Two workers train on two ps. The loss is linear in the weights, so that their order changes nothing.
"""

import json
import os
import sys

from trainer import testing  # before TensorFlow: it chooses the Keras

import keras as keras3  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import tried  # isort: skip

SPLIT = {"partitioner": "fixed_shards", "partitioner_shards": 2}
WHOLE = {"partitioner": "none"}


class Linear:
    """A mean of what a layer makes of ones; `change` is what a step does to its gradients."""

    batch_size = 4

    def __init__(self, of, change=lambda gradients, weights: gradients, optimizer=None, prepare=lambda made: None):
        self.of, self.change, self.prepare = of, change, prepare
        self.optimizer = optimizer or (lambda: of.optimizers.SGD(0.125))

    def build_model(self):
        program = self

        class Model(self.of.Sequential):
            def train_step(self, data):
                x, _ = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self(x))
                weights = self.trainable_variables
                gradients = tape.gradient(loss, [getattr(one, "value", one) if is_keras3 else one for one in weights])
                changed = program.change(gradients, weights)
                self.optimizer.apply_gradients(list(zip(changed, weights, strict=True)))
                return {"loss": loss}

        is_keras3 = self.of is keras3
        layer = self.of.layers.Dense(2, kernel_initializer="ones", bias_initializer="ones", name="dense")
        self.model = Model([self.of.Input((8,)), layer])
        optimizer = self.optimizer()
        self.prepare(optimizer)
        self.model.compile(optimizer, "mse")
        return self.model

    def train_dataset(self, batch_size):
        return tf.data.Dataset.from_tensors((tf.ones([4, 8]), tf.ones([4, 2]))).repeat()


def train(program, settings, steps=4):
    testing.train(program, steps, 2, 2, evaluation="none", seed=1, **settings)
    return [float(np.array(one).mean()) for one in program.model.get_weights()]


def by_name(gradients, weights):
    ends = ("kernel", "kernel:0")
    return [2 * one if v.name.endswith(ends) else one for one, v in zip(gradients, weights, strict=True)]


def by_shape(gradients, weights):
    return [2 * one if v.shape[0] > 6 else one for one, v in zip(gradients, weights, strict=True)]


def of_keras(of):
    def decayed(settings):
        def excluded(optimizer):
            optimizer.exclude_from_weight_decay(var_names=["kernel:0$"])

        return train(
            Linear(of, optimizer=lambda: of.optimizers.SGD(0.125, weight_decay=0.5), prepare=excluded), settings, 1
        )

    return {
        "by_name": tried(train, Linear(of, by_name), SPLIT),
        "by_name_of_wholes": tried(train, Linear(of, by_name), WHOLE),
        "by_shape": tried(train, Linear(of, by_shape), SPLIT),
        "by_shape_of_wholes": tried(train, Linear(of, by_shape), WHOLE),
        "decayed": tried(decayed, SPLIT),
        "decayed_wholes": tried(decayed, WHOLE),
    }


def main():
    found = {"tf_keras": tried(of_keras, tf.keras), "keras3": tried(of_keras, keras3)}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.modules["parts_check"] = sys.modules["__main__"]
    main()
