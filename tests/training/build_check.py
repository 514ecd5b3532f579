"""Build each program's model as the proof of a release does, and say as JSON what it exits with and says."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

from trainer.core.settings.config import Config
from trainer.tasks.build_proof import build


class Good:
    """Looks words up, as a program does, and has a table that is split over the ps."""

    def build_model(self) -> Any:
        words = tf.keras.Input((1,), dtype=tf.string)
        found = tf.keras.layers.StringLookup(vocabulary=["a", "b"])(words)
        table = tf.keras.layers.Embedding(1000, 128)
        model = tf.keras.Model(words, tf.keras.layers.Dense(1)(table(found)))
        self.sharded = isinstance(table.embeddings, ShardedVariable)
        self.strategy = type(tf.distribute.get_strategy()).__name__
        model.compile("sgd", "mse")
        return model


class Fails(Good):
    def build_model(self) -> Any:
        return self.columns()["no such column"]

    def columns(self) -> dict[str, Any]:
        return {}


class NotCompiled(Good):
    def build_model(self) -> Any:
        return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])


class Enormous(Good):
    def build_model(self) -> Any:
        tf.zeros([2**28, 2**28])


class Leaves(Good):
    def build_model(self) -> Any:
        sys.exit("no data directory")


class Three(Good):
    """A model of Keras 3 that its data build: a table that is split, and an optimizer that can't train such a one."""

    optimizer = "sgd"

    def build_model(self) -> Any:
        model = keras.Sequential([keras.layers.Embedding(1000, 128, name="table"), keras.layers.Dense(1)])
        model.compile(self.optimizer, "mse")
        self.model = model
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((tf.zeros([2, 1], tf.int64), tf.zeros([2, 1, 1])))

    @property
    def sharded(self) -> bool:
        return isinstance(self.model.layers[0].embeddings._value, ShardedVariable)


class Refused(Three):
    optimizer = "adafactor"


class NoData(Three):
    def train_dataset(self, context: Any) -> Any:
        raise KeyError("no such file")


class Asks(Good):
    """A model whose layer asks for a dynamic table itself. No program before has any such class."""

    evaluation = "distributed"

    def __init__(self) -> None:
        from trainer.examples.dynamic_embedding import DynamicEmbedding

        self.layer = DynamicEmbedding

    def build_model(self) -> Any:
        ids = tf.keras.Input((1,), dtype=tf.int64)
        found = self.layer(8, {"capacity": 1000}, rows=100, name="items")(ids)
        model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(found))
        model.compile("sgd", "mse")
        return model


class AsksAndIsCopied(Asks):
    evaluation = "exact"


PROGRAMS = (Good, Fails, NotCompiled, Enormous, Leaves, Three, Refused, NoData, Asks, AsksAndIsCopied)


def main() -> None:
    found = {}
    for strategy in ("parameter_server", "multi_worker_mirrored", "mirrored", "one_device"):
        for program in PROGRAMS if strategy == "parameter_server" else (Good,):
            evaluation = getattr(program, "evaluation", Config.evaluation)
            config = Config(program=f"build_check:{program.__name__}", strategy=strategy, evaluation=evaluation)
            out, err = io.StringIO(), io.StringIO()
            built = program()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = build(config, built, None)
            more = [getattr(built, name, None) for name in ("strategy", "sharded")]
            found[f"{strategy} {program.__name__}"] = [code, out.getvalue(), err.getvalue(), *more]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
