"""Run as a process of its own: two replicas in this process, as on a machine with two GPUs (here CPU devices).

Prints what a packed call of three steps did.
"""

import json
import os
from contextlib import suppress

import tensorflow as tf

from trainer.core.settings.config import Config
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.steps.local import LocalStepRunner

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


class Sum(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(
            name="seen",
            shape=(),
            initializer="zeros",
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, values):
        return values

    def train_step(self, data):
        values, _ = data
        self.seen.assign_add(tf.reduce_sum(values))
        with suppress(ValueError):
            tf.keras.losses.MeanSquaredError()(values, values)
            raise AssertionError("Keras refuses a mean where replicas add theirs up")
        return {"mean": tf.reduce_mean(values)}


class Numbers:
    def build_model(self):
        model = Sum()
        model.compile(optimizer="sgd", loss="mse")
        return model

    def train_dataset(self, context):
        dataset = tf.data.Dataset.from_tensor_slices((tf.range(6.0), tf.zeros(6)))
        return dataset.batch(context.get_per_replica_batch_size(2))

    def eval_dataset(self, context):
        return self.train_dataset(context)


strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
config = Config(program="step_runner_check:Numbers", strategy="mirrored")
runner = LocalStepRunner(config, Numbers(), strategy)
outputs = runner.call(3).outputs
print(
    json.dumps({"step": int(runner.step.numpy()), "seen": float(runner.model.seen.numpy()), **fetch_numbers(outputs)})
)
os._exit(0)
