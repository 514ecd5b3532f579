"""Which checkpoints a run keeps, and what a new one begins with: prints what was found, by the name of the case."""

import json
import os
import tempfile
from pathlib import Path

from trainer.runtime import prepare_tensorflow

prepare_tensorflow()

import beginnings  # noqa: E402
import tensorflow as tf  # noqa: E402

from trainer.reporting.checkpoints import read_checkpoints  # noqa: E402
from trainer.run.branch import begin_from  # noqa: E402
from trainer.run.directory import RunDirectory  # noqa: E402
from trainer.testing import train  # noqa: E402

SHARED = Path(tempfile.mkdtemp())


def run(program, name, steps, **settings):
    """Train to a step, and return the run's directory."""
    train(program, steps, 1, 2, SHARED, run=name, **settings)
    return RunDirectory(SHARED, name)


def value(directory, step, key):
    reader = tf.train.load_checkpoint(directory.catalogue.prefix(step))
    return reader.get_tensor(f"model/{key}/.ATTRIBUTES/VARIABLE_VALUE")


def kept():
    """The best evaluation is at step 10, and the loss is NaN from step 26 on."""
    settings = {"evaluation": "inline", "epoch_steps": 5, "checkpoint_seconds": 0, "checkpoint_steps": 5}
    directory = run(beginnings.Valley, "a", 45, checkpoints_kept=3, checkpoints_kept_best=1, **settings)
    found = read_checkpoints(directory)
    return {str(each["step"]): [each["kept"], each["evaluation"]] for each in found}


def branch():
    begin_from(SHARED, "b", "a@10")
    directory = run(beginnings.Valley, "b", 12, evaluation="none")
    return [directory.catalogue.steps(), float(value(directory, 12, "count"))]


print(json.dumps({"kept": kept(), "branch": branch()}), flush=True)
os._exit(0)
