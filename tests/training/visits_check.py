"""Run as a process of its own: how often each example of two parts is trained over some faults, in one process.

Each generation goes back to the newest checkpoint, which was saved with calls in flight, and loses what came after it.
The model counts the examples, so its count is that of what the weights have seen. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import keras
import tensorflow as tf
from observers import Counter
from tensorflow.python.data.experimental.ops.testing import sleep

from trainer.core.failures import EmptyPart, UserError
from trainer.core.settings.config import Config
from trainer.run.data_position import Position
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints
from trainer.tasks.in_process import start_cluster
from trainer.tasks.training import Training
from trainer.telemetry.counters import Counters
from trainer.training.data.input import own_train_dataset
from trainer.training.data.places import pass_after_pass
from trainer.training.run_context import RunContext
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.strategies import make_strategy

assert testing
FAULTS = 10
FEW = 3
EXAMPLES = 96
FILE = 8
BATCH = 2
CALL = 2
CALLS = 8
PART_STEPS = EXAMPLES // 2 // BATCH
NONE: Any = None
PROGRESS: Any = SimpleNamespace(counters=Counters())  # all that an end of a generation asks of it
Dataset = tf.data.Dataset


class Files:
    """Examples in files of eight: parts of files, which come in another order each time, and a small shuffle."""

    def __init__(self, batch: int = BATCH) -> None:
        self.batch = batch

    def build_model(self) -> Any:
        model = Counter(EXAMPLES)
        model.compile("sgd", "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        files = Dataset.range(EXAMPLES // FILE).shard(context.num_input_pipelines, context.input_pipeline_id)
        files = files.shuffle(EXAMPLES // FILE)
        examples = files.flat_map(lambda file: Dataset.range(FILE * file, FILE * file + FILE))
        return examples.shuffle(4).batch(self.batch).apply(sleep(3000))  # microseconds

    eval_dataset = train_dataset


class Seen(keras.layers.Layer):
    """Counts how often it is trained with each number."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", shape=(EXAMPLES,), initializer="zeros", trainable=False)

    def call(self, numbers: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(self.seen + keras.ops.sum(keras.ops.one_hot(numbers[:, 0], EXAMPLES), axis=0))
        return keras.ops.cast(numbers, "float32")


class WithKeras3:
    """Has a program count with a model of Keras 3."""

    def build_model(self) -> Any:
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Seen(name="seen"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        dataset: Any = super().train_dataset(context)  # type: ignore[misc]
        return dataset.map(lambda numbers: (numbers[:, None], tf.zeros([tf.size(numbers), 1])))


class OfKeras3(WithKeras3, Files):
    pass


class Endless(Files):
    def train_dataset(self, context: Any) -> Any:
        return Dataset.counter(dtype=tf.int64).map(lambda number: number % EXAMPLES).batch(BATCH)


ENDLESS: dict[str, Callable[[], Any]] = {
    "repeat": lambda: Dataset.range(9).repeat(),
    "sample": lambda: Dataset.sample_from_datasets([Dataset.range(9), Dataset.random()]),
}
ENDING: dict[str, Callable[[], Any]] = {
    "zip": lambda: Dataset.zip((Dataset.range(9), Dataset.counter(), Dataset.range(2).repeat())),
    "take": lambda: Dataset.random().take(9),
    "sample": lambda: Dataset.sample_from_datasets([Dataset.range(9).filter(lambda _: True)] * 2, weights=[0.5, 0.5]),
}


class Empty(Files):
    def train_dataset(self, context: Any) -> Any:
        return super().train_dataset(context).take(0)


class Generation:
    """A model on a cluster, gone back to the newest checkpoint."""

    def __init__(self, config: Config, program: Any, workers: int) -> None:
        cluster = start_cluster("parameter_server", workers, 1)
        self.runner = RemoteStepRunner(config, program, make_strategy(config, cluster), workers)
        self._training = Training(RunContext(config, NONE, NONE, PROGRESS, NONE, None, None, NONE), cluster)
        directory = RunDirectory(config.shared_dir, config.run)
        self.checkpoints = Checkpoints(
            directory,
            CheckpointState(self.runner.trained, self.runner.step),
            config,
            position=lambda: self.runner.position,
        )
        self.go_back()
        self.checkpoints.prepare()

    def go_back(self) -> None:
        """Go back to the newest checkpoint, and read from there."""
        step = self.checkpoints.restore()
        if step is not None and (position := self.checkpoints.position(step)):
            assert not self.runner.go_on_from(position)
        self.runner._data._iterator = None  # the next call makes another, which reads from there

    def train(self, calls: int, in_flight: int) -> None:
        """Give calls, and save when all but so many have ended."""
        given = [self.runner.call(CALL) for _ in range(calls)]
        ended = 0
        while ended < len(given) - in_flight:
            ended += len(self.runner.returned())
            time.sleep(0.001)
        self.checkpoints.save()
        self.runner.join()
        self.checkpoints.settle()

    def end(self) -> None:
        self._training._runner = self.runner
        del self.runner  # its model must go with the training's
        assert not self._training._let_go()


def visits(
    settings: dict[str, Any],
    in_flight: int,
    faults: int = FAULTS,
    workers: tuple[int, ...] = (2,),
    batches: tuple[int, ...] = (BATCH,),
    calls: int = CALLS,
    *,
    rebuilt: bool = True,
) -> dict[str, Any]:
    """Return the least and the greatest count of each of two parts after some faults, and what was trained.

    After each fault the model is `rebuilt`; to go back in the one that exists takes a tenth of the time.
    """
    with tempfile.TemporaryDirectory() as directory:
        config = Config(program="a:B", shared_dir=directory, **settings)
        generation: Generation = NONE
        for fault in range(faults + 1):
            if rebuilt or not fault:
                generation = Generation(config, Files(batches[fault % len(batches)]), workers[fault % len(workers)])
            else:
                generation.go_back()
            generation.train(calls, in_flight)
            step = generation.checkpoints.restore()
            assert step is not None
            # The runner's own position counts the calls, too, that were in flight at the save.
            seen, position = generation.runner.model.seen.numpy(), generation.checkpoints.position(step)
            if rebuilt:
                generation.end()
    parts = seen.reshape(-1, 2, FILE)[:, 0].flatten(), seen.reshape(-1, 2, FILE)[:, 1].flatten()
    return {
        "step": step,
        "trained": float(seen.sum()),
        "position": position and position.as_record(),
        "parts": [[float(part.min()), float(part.max())] for part in parts],
        "counts": seen.tolist(),
    }


def stopped(program: Any, name: str, **settings: Any) -> dict[str, Any]:
    """Return the least and the greatest count of each part of a run that has gone on once, after `PART_STEPS`."""
    settings |= {"input_position": "exact", "evaluation": "none", "export": False}
    with tempfile.TemporaryDirectory() as directory:
        for steps in (PART_STEPS, 2 * PART_STEPS):
            result = testing.train(program, steps, directory=directory, **settings)
        checkpoint = tf.train.load_checkpoint(str(result.directory / "checkpoints" / f"ckpt-{result.step}"))
        seen = checkpoint.get_tensor(f"model/{name}/.ATTRIBUTES/VARIABLE_VALUE")
    parts = seen.reshape(-1, 2, FILE)
    counts = [[float(parts[:, part].min()), float(parts[:, part].max())] for part in range(2)]
    return {"trained": float(seen.sum()), "parts": counts}


def read_again() -> list[int]:
    """Return how often each example is read in eleven readings of a third of the data, each begun again."""
    config = Config(program="a:B", strategy="one_device", seed=5)
    counts = [0] * EXAMPLES
    for reading in range(FAULTS + 1):
        step = reading * EXAMPLES // BATCH // 3
        dataset = own_train_dataset(config, Files(), tf.distribute.OneDeviceStrategy("cpu:0"), seed=5, step=step)
        for batch in itertools.islice(dataset, EXAMPLES // BATCH // 3):
            for number in batch:
                counts[int(number)] += 1
    return counts


def passes(make: Callable[[], Any]) -> str:
    """Say what becomes of a pipeline that is to be read pass after pass."""

    @tf.function(autograph=False)
    def read() -> Any:
        begin = tf.constant(0, tf.int64)
        return pass_after_pass(lambda turn: make(), begin, begin).take(1)

    try:
        return f"read {len(list(read()))}"
    except tf.errors.InvalidArgumentError as error:
        return str(error)


def of_another_run() -> dict[str, Any]:
    """Return what a run says of the position of another one, and where it begins then."""
    config = Config(program="a:B", input_position="exact", program_args={"batch": 4}, seed=5)
    runner = RemoteStepRunner(config, Files(), make_strategy(config, start_cluster("parameter_server", 2, 1)), 2)
    problem = runner.go_on_from(Position(3, ((2, 8), (1, 24)), {"program": "a:B", "program_args": {}}))
    assert runner.position
    return {"problem": problem, "position": runner.position.as_record()}


def refused(program: Any) -> str:
    """Say why a first step is refused."""
    with tempfile.TemporaryDirectory() as directory:
        config = Config(program="a:B", shared_dir=directory, input_position="exact")
        try:
            generation = Generation(config, program, 1)
            generation.runner.call(1)
            generation.runner.join()
        except (UserError, EmptyPart) as error:
            return str(error)
    return ""


class Batch(NamedTuple):
    number: Any


def named() -> list[int]:
    """Return what is read from the second of three elements on, which are named tuples."""

    @tf.function(autograph=False)
    def make() -> Any:
        first, taken = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
        return pass_after_pass(lambda turn: Dataset.range(3).map(Batch), first, taken)

    return [int(batch.number) for _, batch in make().take(4)]


def check() -> dict[str, Any]:
    exact = {"input_position": "exact"}
    return {
        "exact": visits(exact, in_flight=0, faults=FEW, batches=(BATCH, 2 * BATCH)),
        "exact, in flight": visits(exact, in_flight=4, calls=9, rebuilt=False),
        "exact, other workers": visits(exact, in_flight=0, faults=2, workers=(2, 1)),
        "exact, fit": stopped(Files(), "seen", api="fit", epoch_steps=PART_STEPS // 2),
        "exact, Keras 3": stopped(OfKeras3(), "weights/seen.Sseen"),
        "beginning": read_again(),
        "endless": {"in a run": refused(Endless()), **{name: passes(make) for name, make in ENDLESS.items()}},
        "ending": {name: passes(make) for name, make in ENDING.items()},
        "of another run": of_another_run(),
        "empty": refused(Empty()),
        "named": named(),
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(visits({"input_position": sys.argv[1], "seed": 5}, int(sys.argv[2]))), flush=True)
    else:
        print(json.dumps(check()), flush=True)
    os._exit(0)
