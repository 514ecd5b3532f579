"""Train with an optimizer on 2 ps, save, restore on others, train on; print what was equal, by layout.

The arguments are the case, and the layouts to try beside the one that saved: all of them where none is named. `--names`
prints which cases there are, and `--names matrix3` those of Keras 3, which are called "keras3 NAME".

A layout's answer is "refused: ..." or the values that are not the saved ones (`restored`), and those that are not an
undisturbed training's after the next steps (`after`), each with its greatest difference. `where` says how many shards
the table had.
"""

import importlib
import json
import os
import re
import sys
import tempfile

from trainer.core.runtime import prepare_tensorflow

prepare_tensorflow()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from trainer.core.failures import UserError  # noqa: E402
from trainer.core.settings.config import Config  # noqa: E402
from trainer.core.variables import flatten  # noqa: E402
from trainer.run.directory import RunDirectory  # noqa: E402
from trainer.run.saves.checkpoint_state import CheckpointState  # noqa: E402
from trainer.run.saves.checkpoints import Checkpoints  # noqa: E402
from trainer.tasks.in_process import start_cluster  # noqa: E402
from trainer.training.keras.keras3.checkpoint import CheckpointedModel, raw  # noqa: E402
from trainer.training.steps.remote import RemoteStepRunner  # noqa: E402
from trainer.training.strategies import make_strategy  # noqa: E402

SAVED_ON = (2, "min_size")
LAYOUTS = {"2 ps": SAVED_ON, "1 ps": (1, "min_size"), "3 ps": (3, "min_size"), "none": (2, "none")}
PART = re.compile(r"/part_(\d+)")
OF_KERAS3 = "keras3 "


class Training:
    """A model on a cluster in this process, with its checkpoints."""

    def __init__(self, case, shared, servers, partitioner):
        config = Config(
            program="matrix:Matrix", run="matrix", shared_dir=shared, partitioner=partitioner, partitioner_min_bytes=256
        )
        strategy = make_strategy(config, start_cluster("parameter_server", 1, servers))
        self._runner = runner = RemoteStepRunner(config, program(case), strategy, 1)
        state = CheckpointState(runner.trained, runner.step)
        self.checkpoints = Checkpoints(RunDirectory(shared, "matrix"), state, config)

    def train(self, steps):
        self._runner.call(steps)
        self._runner.join()
        return self.values()

    def values(self):
        """Return every weight and slot as a whole, by its name."""
        trained = self._runner.trained
        if isinstance(trained, CheckpointedModel):
            held = {**trained.weights, **{f"slot {name}": one for name, one in trained.optimizer["optimizer"].items()}}
            return {name: np.array(tf.convert_to_tensor(one)) for name, one in held.items()}
        model, shards = self._runner.model, {"step": {0: self._runner.step.numpy()}}
        kept = model.optimizer.variables
        for variable in flatten([*model.variables, *(kept() if callable(kept) else kept)]):
            found = PART.search(variable.name)
            shards.setdefault(PART.sub("", variable.name), {})[int(found[1]) if found else 0] = variable.numpy()
        return {
            name: np.concatenate([by[part] for part in sorted(by)]) if len(by) > 1 else by[0]
            for name, by in shards.items()
        }

    def shards(self):
        return len(list(flatten(raw([self._runner.model.get_layer("table").embeddings]))))

    def close(self):
        self._runner.close()


def whole(parts):
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def differences(left, right, tolerance):
    """Return the greatest difference of each value; null where there is no such value, or of another shape."""
    found = {}
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a is None or b is None or a.shape != b.shape:
            found[name] = None
        elif not np.allclose(a, b, rtol=tolerance, atol=tolerance / 10):
            found[name] = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    return found


def restore(case, shared, layout, saved, undisturbed):
    try:
        training = Training(case, shared, *layout)
    except UserError as error:
        return f"refused: {error}"
    training.checkpoints.restore()
    restored = differences(saved, training.values(), 0.0)
    answer = {"where": training.shards(), "restored": restored}
    answer["after"] = differences(undisturbed, training.train(3), 1e-5)
    training.close()
    return answer


def check(case, *names):
    with tempfile.TemporaryDirectory() as shared:
        try:
            training = Training(case, shared, *SAVED_ON)
        except UserError as error:
            refused = {"saved": f"refused: {error}"}
            training = Training(case, shared, 2, "none")  # which is the fix
        else:
            refused = {"saved": {"where": training.shards()}}
        first = training.values()
        saved = training.train(6)
        training.checkpoints.save_and_wait()
        moved = sorted(name for name in saved if not np.array_equal(first.get(name), saved[name]))
        undisturbed = training.train(3)
        training.close()
        del training
        chosen = names or LAYOUTS
        layouts = {name: restore(case, shared, LAYOUTS[name], saved, undisturbed) for name in chosen}
        return {**refused, "moved": moved, **layouts}


def program(case):
    if case.startswith(OF_KERAS3):
        return importlib.import_module("matrix3").Matrix(case.removeprefix(OF_KERAS3))
    return importlib.import_module("matrix").Matrix(case)


def names(module="matrix"):
    return sorted(importlib.import_module(module).CASES)


print(json.dumps(names(*sys.argv[2:]) if sys.argv[1] == "--names" else check(*sys.argv[1:])), flush=True)
os._exit(0)
