"""Run as a process of its own: what a run reads before and after it was stopped and goes on, in one process.

Prints one JSON object: for each strategy and kind of pipeline two runs of the same seed, each with what it got of 64
numbers in its first four steps, and in the four after it went on, and what these steps drew. One program reads all
kinds beside each other.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from typing import Any

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import numpy as np
import tensorflow as tf
from observers import Log, read_log

from trainer.core.settings.config import Config
from trainer.training.data.input import eval_dataset, own_train_dataset

EXAMPLES = 64
STEPS = 4
BATCH = 4


def draw(number: Any) -> Any:
    return tf.random.uniform([], maxval=EXAMPLES, dtype=tf.int64)


def interleave(numbers: Any) -> Any:
    files = tf.data.Dataset.range(4)
    return files.interleave(lambda file: tf.data.Dataset.range(16 * file, 16 * file + 16).shuffle(16), cycle_length=2)


def ask(seed: Any) -> Any:
    return lambda number: tf.random.stateless_uniform([], [seed, number], maxval=EXAMPLES, dtype=tf.int64)


KINDS = {
    "shuffled": lambda numbers, context: numbers.shuffle(16),
    "interleaved": lambda numbers, context: interleave(numbers),
    "fixed": lambda numbers, context: numbers.shuffle(16, seed=3),
    "split": lambda numbers, context: numbers.shuffle(EXAMPLES, seed=3, reshuffle_each_iteration=False).take(16),
    "drawn": lambda numbers, context: numbers.map(draw),
    "permuted": lambda numbers, context: tf.data.Dataset.from_tensor_slices(np.random.permutation(EXAMPLES)),
    "asked": lambda numbers, context: numbers.map(ask(context.seed)),
}


class Drawing(Log):
    """Keeps what a step draws itself, beside what it is given."""

    def observe(self, batch: Any) -> None:
        super().observe((*batch, tf.random.uniform([BATCH], maxval=EXAMPLES, dtype=tf.int64)))


class Reader:
    def build_model(self) -> Any:
        model = Drawing(2 * STEPS, len(KINDS) + 1, BATCH)
        model.compile("sgd", "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        numbers = tf.data.Dataset.range(EXAMPLES)
        return tf.data.Dataset.zip(tuple(kind(numbers, context).batch(BATCH) for kind in KINDS.values()))

    eval_dataset = train_dataset


class Split(Reader):
    def train_dataset(self, context: Any) -> Any:
        return KINDS["split"](tf.data.Dataset.range(EXAMPLES), context).batch(BATCH)

    eval_dataset = train_dataset


def read(strategy: str) -> dict[str, Any]:
    """Return what a run got before it was stopped and after."""
    with tempfile.TemporaryDirectory() as directory:
        for turn in (1, 2):
            result = testing.train(
                Reader, turn * STEPS, 1, 1, directory, strategy=strategy, seed=0, evaluation="none", export=False
            )
        log = read_log(result.directory, 2 * STEPS)
    return {kind: [log[:STEPS, n].tolist(), log[STEPS:, n].tolist()] for n, kind in enumerate([*KINDS, "in the step"])}


def divided() -> list[list[int]]:
    """Return what training and evaluation have of a division, in processes with seeds of TensorFlow's and without."""
    found, on_cpu = [], tf.distribute.OneDeviceStrategy("cpu:0")
    for seed, step in ((None, 0), (5, 0), (5, 7)):
        tf.random.set_seed(seed) if seed is not None else None
        settings = Config(program="a:B", strategy="one_device", seed=seed)
        train = own_train_dataset(settings, Split(), on_cpu, seed=seed or 0, step=step)
        for dataset in (itertools.islice(train, 16 // BATCH), eval_dataset(Split())):
            found.append(sorted(int(number) for batch in dataset for number in batch))
    return found


if __name__ == "__main__":
    found = {}
    for strategy in ("parameter_server", "one_device"):
        first, second = read(strategy), read(strategy)
        found[strategy] = {kind: [first[kind], second[kind]] for kind in first}
    print(json.dumps({"divided": divided(), **found}))
    os._exit(0)
