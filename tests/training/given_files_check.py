"""Run as a process of its own: what is trained of files that are given out one by one, over restarts, in one process.

The model counts the examples, so its count is that of what the weights have seen. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import tensorflow as tf
from observers import Counter
from visits_check import BATCH, EXAMPLES, FILE, NONE, Generation, WithKeras3

from trainer.core.failures import EmptyPart, UserError
from trainer.core.settings.config import Config

assert testing
FILES = EXAMPLES // FILE
PLACE = Path(tempfile.mkdtemp(prefix="psfleet-given-"))
PATTERN = str(PLACE / "part-*")
DYNAMIC = {"input_sharding": "dynamic"}
CALLS, IN_FLIGHT, FAULTS = 9, 4, 6


def write() -> None:
    """Write files with the numbers of their examples."""
    for file in range(FILES):
        lines = "".join(f"{number}\n" for number in range(FILE * file, FILE * file + FILE))
        (PLACE / f"part-{file:02}").write_text(lines, encoding="ascii")


class Given:
    def build_model(self) -> Any:
        model = Counter(EXAMPLES)
        model.compile("sgd", "mse")
        return model

    def files(self, context: Any) -> Any:
        return context.files(PATTERN)

    def train_dataset(self, context: Any) -> Any:
        lines = self.files(context).interleave(tf.data.TextLineDataset)
        return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).shuffle(4).batch(BATCH)

    eval_dataset = train_dataset


class OfKeras3(WithKeras3, Given):
    pass


class NoFiles(Given):
    def files(self, context: Any) -> Any:
        return tf.data.Dataset.list_files(PATTERN)


class Twice(Given):
    def files(self, context: Any) -> Any:
        return context.files(PATTERN).concatenate(context.files(PATTERN))


class Endless(Given):
    def train_dataset(self, context: Any) -> Any:
        return super().train_dataset(context).repeat()


class Missing(Given):
    def files(self, context: Any) -> Any:
        return context.files(str(PLACE / "missing-*"))


class Empty(Given):
    def train_dataset(self, context: Any) -> Any:
        return super().train_dataset(context).take(0)


def restarts(workers: tuple[int, ...], in_flight: int, *, calls: int = CALLS) -> dict[str, Any]:
    """Return what was trained when the run has gone back to its newest checkpoint a few times."""
    with tempfile.TemporaryDirectory() as directory:
        config = Config(program="a:B", shared_dir=directory, **DYNAMIC)
        generation: Generation = NONE
        for turn, count in enumerate(workers):
            if in_flight and turn:
                generation.go_back()
            else:
                generation = Generation(config, Given(), count)
            generation.train(calls, in_flight)
            step = generation.checkpoints.restore()
            # The checkpoint's: the runner's counts calls that were in flight at the save, and have ended since.
            seen, position = generation.runner.model.seen.numpy(), generation.checkpoints.position(step)
            if not in_flight:
                generation.end()
    assert position
    return {"seen": seen.tolist(), **position.as_record()["files"]}


def stopped(program: Any, name: str, **settings: Any) -> dict[str, Any]:
    """Return what was trained in a run that has gone on once."""
    with tempfile.TemporaryDirectory() as directory:
        more = {**DYNAMIC, "evaluation": "none", "export": False, **settings}
        for steps in (20, 40):
            result = testing.train(program, steps, directory=directory, **more)
        prefix = str(result.directory / "checkpoints" / f"ckpt-{result.step}")
        manifest = json.loads(Path(f"{prefix}.manifest.json").read_text(encoding="utf-8"))
        seen = tf.train.load_checkpoint(prefix).get_tensor(f"model/{name}/.ATTRIBUTES/VARIABLE_VALUE")
    return {"seen": seen.tolist(), **manifest["input"]["files"]}


def shards() -> dict[str, list[float]]:
    """Return what is trained of one pass where files are no one's to give out."""
    steps = EXAMPLES // BATCH
    found = {}
    for strategy in ("parameter_server", "one_device"):
        more = {"evaluation": "none", "export": False, "strategy": strategy, "input_position": "beginning"}
        result = testing.train(Given(), steps // 2, 1, 1, **more)
        prefix = str(result.directory / "checkpoints" / f"ckpt-{result.step}")
        seen = tf.train.load_checkpoint(prefix).get_tensor("model/seen/.ATTRIBUTES/VARIABLE_VALUE")
        found[strategy] = seen.tolist()
    return found


def refused(program: Any) -> str:
    """Say why a first step is refused."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            generation = Generation(Config(program="a:B", shared_dir=directory, **DYNAMIC), program, 2)
            generation.runner.call(1)
            generation.runner.join()
        except (UserError, EmptyPart) as error:
            return str(error)
    return ""


def check() -> dict[str, Any]:
    write()
    return {
        "workers": restarts((2, 1, 3, 2), in_flight=0),
        "in flight": restarts((2,) * (FAULTS + 1), in_flight=IN_FLIGHT),
        "fit": stopped(Given(), "seen", api="fit", epoch_steps=10),
        "Keras 3": stopped(OfKeras3(), "weights/seen.Sseen"),
        "shards": shards(),
        "refused": {kind.__name__: refused(kind()) for kind in (NoFiles, Twice, Endless, Missing, Empty)},
    }


if __name__ == "__main__":
    print(json.dumps(check()), flush=True)
    os._exit(0)
