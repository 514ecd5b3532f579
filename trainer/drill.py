"""The programs of `fab drill` (docs/drills.md): steps as long as the drill says, and errors made on purpose.

How long a step lasts is read before each step from a file on the shared path, so that a drill can have a long step in
flight at the moment of its fault. The wait is TensorFlow's own and costs no processor time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Variable
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.selections.selection import apply_selection
from trainer.training.tables.row_restores import open_checkpoint
from trainer.training.tf_internals.datasets import sleep

log = logging.getLogger(__name__)
PACE = ".psfleet-drill"  # on the shared path: the seconds that a step lasts
ROWS, WIDTH = 8192, 16  # 512 KiB, and as much for each of Adam's slots: half of it on each of two ps
BATCH = 8


def pace_file() -> str:
    """Where a step's length stands; programs know the shared path by DATA_DIR, which is below it."""
    return str(Path(os.environ["DATA_DIR"]).parent / PACE)


class DrillProgram:
    """A table with Adam's slots, spread over the ps; says after a restore whether it is the checkpoint's."""

    rows, optimizer = ROWS, "adam"

    def build_model(self) -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(self.rows, WIDTH, input_length=1),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=self.optimizer, loss="mse")
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        path = pace_file()

        def wait(rows: tf.Tensor, truth: tf.Tensor) -> tf.data.Dataset:
            # A name that the batch has a part in: TensorFlow takes the content of a file whose name is constant for
            # constant, and would read it once.
            name = tf.strings.substr(tf.strings.join([path, tf.strings.as_string(rows[0, 0])]), 0, len(path))
            seconds = tf.strings.to_number(tf.io.read_file(name))
            return tf.data.Dataset.from_tensors((rows, truth)).apply(sleep(tf.cast(seconds * 1e6, tf.int64)))

        return self.eval_dataset(context).repeat().flat_map(wait)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = tf.random.stateless_uniform([BATCH, 1], seed=[1, 2], maxval=self.rows, dtype=tf.int32)
        return tf.data.Dataset.from_tensors((rows, tf.ones([BATCH, 1])))

    def callbacks(self) -> list[tf.keras.callbacks.Callback]:
        """With `api: fit` alone: comparing takes time that the drills of the custom loop do not allow for."""
        return [CompareWithCheckpoint()] if settings().api == "fit" else []


class Large(DrillProgram):
    """A quarter of a gigabyte, so that a save takes long enough to be interrupted."""

    rows, optimizer = 4_000_000, "sgd"


class SoakProgram(DrillProgram):
    """As large as lets a save be hit, and small enough for a restore to be short."""

    rows, optimizer = 1_000_000, "sgd"


class NotANumber(DrillProgram):
    """A loss that is no number, which `check_numerics` finds."""

    def build_model(self) -> tf.keras.Model:
        model = super().build_model()
        model.compile(optimizer="sgd", loss=no_number)
        return model


def no_number(truth: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(tf.math.log(-tf.abs(predicted) - 1.0), "the drill's loss")


class Broken(DrillProgram):
    """An exception in the user's own code."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        raise ValueError("the drill's own error")


class CompareWithCheckpoint(tf.keras.callbacks.Callback):
    """Before the first step, compare every weight and slot with the newest checkpoint's, tensor by tensor.

    A coordinator that goes on with newer variables, on the ps, has nothing to compare.
    """

    def on_train_begin(self, logs: object = None) -> None:
        prefix = newest_checkpoint()
        if prefix is None:
            return
        reader = open_checkpoint(prefix)
        saved = Counter(
            digest(reader.get_tensor(name))
            for name in reader.get_variable_to_shape_map()
            if name.startswith("model/") and name.endswith("VARIABLE_VALUE")
        )
        [counted] = [name for name in reader.get_variable_to_shape_map() if "/_iterations/" in name]
        if int(reader.get_tensor(counted)) != int(self.model.optimizer.iterations.numpy()):
            log.info("went on with variables that are newer than %s", prefix)
            return
        variables = join_shards([*self.model.weights, *self.model.optimizer.variables])
        strange = []
        for name, value in variables.items():
            found = digest(value)
            if saved[found] == 0:
                strange.append(name)
            saved[found] -= 1
        if strange:
            raise ValueError(f"{', '.join(strange)} are not those of {prefix}")
        log.info("all %d tensors are those of %s", len(variables), prefix)


def settings() -> Config:
    """The settings of the run that this process trains."""
    return apply_selection(Config.from_file(Path(os.environ["TRAINER_SETTINGS"])))


def newest_checkpoint() -> str | None:
    """The newest checkpoint of the run that this process trains."""
    config = settings()
    directory = RunDirectory(config.shared_dir, config.run)
    step = directory.catalogue.newest()
    return None if step is None else directory.catalogue.prefix(step)


def join_shards(variables: list[Variable]) -> dict[str, np.ndarray]:
    """Each variable's value. Keras lists a sharded weight's shards one by one: they are put together."""
    parts: dict[str, list[np.ndarray]] = {}
    for number, variable in enumerate(variables):
        name, shards = re.subn(r"/part_\d+", "", variable.name)
        # Slots that are sharded have no names of their own.
        parts.setdefault(name if shards else f"{name} ({number})", []).append(tf.convert_to_tensor(variable).numpy())
    return {name: np.concatenate(values) if len(values) > 1 else values[0] for name, values in parts.items()}


def digest(value: np.ndarray) -> str:
    return hashlib.sha256(repr(value.shape).encode() + value.tobytes()).hexdigest()
