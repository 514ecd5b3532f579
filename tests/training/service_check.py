"""Run as a process of its own: what one process is given by a data service that it serves itself.

Prints one JSON object: the batches of trainings with and without a seed, by one data worker and by two, how many
readings a training begins that goes on, and how trainings without any data end.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import tensorflow as tf
from observers import Log, read_log
from tensorflow.python.data.experimental.ops.testing import sleep

from trainer.core.failures import UserError

EXAMPLES = 64
BATCH = 4
STEPS = 16
MANY = 32  # data that two data workers share


class Reader:
    def build_model(self) -> Any:
        model = Log(MANY, BATCH)
        model.compile("sgd", "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES).batch(BATCH, drop_remainder=True)

    eval_dataset = train_dataset


class Slow(Reader):
    """Has batches that take so long that each of two data workers gives some of them."""

    def train_dataset(self, context: Any) -> Any:
        return super().train_dataset(context).apply(sleep(10_000))  # microseconds


class Counted(Reader):
    """No data, as TensorFlow knows before it reads."""

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.range(0).batch(BATCH)


class Filtered(Reader):
    """No data, as only reading shows."""

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.range(EXAMPLES).filter(lambda number: number < 0).batch(BATCH)


class Some(Reader):
    """Data of which TensorFlow doesn't know how many they are."""

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.range(EXAMPLES).filter(lambda number: number >= 0).batch(BATCH, drop_remainder=True)


def train(program: Any, steps: int, directory: str, strategy: str, sharding: str, data: int, seed: int | None) -> Any:
    more = {"input": "service", "input_sharding": sharding, "seed": seed, "training_timeout_seconds": 60.0}
    return testing.train(
        program, steps, 1, 1, directory, data, strategy=strategy, evaluation="none", export=False, **more
    )


def read(strategy: str, sharding: str = "off", data: int = 1, seed: int | None = None, *turns: int) -> list[Any]:
    """Return the batches that a run was given which went on at each of these steps."""
    with tempfile.TemporaryDirectory() as directory:
        for steps in turns:
            result = train(Reader if data == 1 else Slow, steps, directory, strategy, sharding, data, seed)
        return read_log(result.directory, steps).tolist()[:steps]


def readings() -> int:
    """Return how many readings of the data service a training in one process begins that is stopped and goes on."""
    service = tf.data.experimental.service
    made, real = [], service.from_dataset_id

    def counted(*args: Any, **more: Any) -> Any:
        made.append(more["job_name"])
        return real(*args, **more)

    service.from_dataset_id = counted
    read("one_device", "off", 1, None, STEPS, 2 * STEPS)
    service.from_dataset_id = real
    return len(made)


def end(program: Any, strategy: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return f"trained {train(program, 2, directory, strategy, 'dynamic', 1, None).step}"
        except UserError as error:
            return str(error)


if __name__ == "__main__":
    found: dict[str, Any] = {}
    for strategy in ("parameter_server", "one_device"):
        found[strategy] = {
            "seeded": [read(strategy, "off", 1, 0, STEPS, 2 * STEPS) for _ in range(2)],
            "unseeded": read(strategy, "off", 1, None, STEPS, 2 * STEPS),
            "ends": {program.__name__: end(program, strategy) for program in (Counted, Filtered, Some)},
        }
    found["readings"] = readings()
    found["two"] = {str(seed): read("one_device", "off", 2, seed, MANY) for seed in (0, None)}
    print(json.dumps(found))
    os._exit(0)
