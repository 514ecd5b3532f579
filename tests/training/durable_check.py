"""Train a few steps below the directory that is given, save and export: for those who watch what comes to the disk.

With `averages` there are two checkpoints, and the end replaces the second.
"""

import json
import os
import sys

from trainer.testing import train  # before TensorFlow: it chooses the Keras

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip
from table import Table  # isort: skip


class Remembering(tf.keras.callbacks.Callback):
    """Keeps an array, in a file of its own."""

    def on_epoch_end(self, epoch, logs=None):
        self.best = np.ones(8)


class Remembered(Table):
    def callbacks(self):
        return [Remembering()]


class Averaged(Remembered):
    """The averages of its weights are taken for weights at the end."""

    def build_model(self):
        model = super().build_model()
        model.compile(optimizer=tf.keras.optimizers.Adam(0.01, use_ema=True), loss="mse")
        return model


program, settings = (
    (Averaged, {"checkpoint_steps": 2, "steps_per_execution": 2}) if "averages" in sys.argv[2:] else (Remembered, {})
)
settings |= {"partitioner_min_bytes": 1024, "evaluation": "none"}
result = train(program(), 4, 1, 2, directory=sys.argv[1], **settings)
print(json.dumps({"step": result.step, "directory": str(result.directory)}), flush=True)
os._exit(0)
