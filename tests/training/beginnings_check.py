"""Which checkpoints a run keeps, and what a new one begins with: prints what was found, by the name of the case."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from trainer.core.runtime import prepare_tensorflow

prepare_tensorflow()

import beginnings  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from trainer.core.failures import UserError  # noqa: E402
from trainer.core.settings.config import Config  # noqa: E402
from trainer.run.begin_from import begin_from  # noqa: E402
from trainer.run.directory import RunDirectory  # noqa: E402
from trainer.tasks.in_process import start_cluster  # noqa: E402
from trainer.telemetry.checkpoints import read_checkpoints  # noqa: E402
from trainer.telemetry.events import read_events  # noqa: E402
from trainer.testing import train  # noqa: E402
from trainer.training.exports.export import bytes_of_checkpoint  # noqa: E402
from trainer.training.initial_weights import read_initial_weights  # noqa: E402
from trainer.training.steps.remote import RemoteStepRunner  # noqa: E402
from trainer.training.strategies import make_strategy  # noqa: E402

PART_BYTES = 256
SHARED = Path(tempfile.mkdtemp())
SPLIT = {"partitioner_min_bytes": PART_BYTES, "evaluation": "none", "steps_per_execution": 1, "export": False}


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
    settings |= {"checkpoints_kept": 3, "checkpoints_kept_best": 1, "export": False}
    directory = run(beginnings.Valley, "a", 45, **settings)
    found = read_checkpoints(directory)
    return {str(each["step"]): [each["kept"], each["evaluation"]] for each in found}


def branch():
    begin_from(SHARED, "b", "a@10", program_args={"rate": 0.5})
    directory = run(beginnings.Valley, "b", 12, program_args={"rate": 0.5}, evaluation="none", export=False)
    began = rate(directory, 12)
    beginnings.TIMES = 0.5
    run(beginnings.Valley, "b", 14, program_args={"rate": 0.5}, evaluation="none", export=False)
    return [directory.catalogue.steps(), float(value(directory, 12, "count")), began, rate(directory, 14)]


def rate(directory, step):
    return float(value(directory, step, "optimizer/_learning_rate"))


def table_of(directory, step):
    return value(directory, step, "layer_with_weights-0/embeddings")


def began_with(directory, table):
    """Say whether the first checkpoint has the table, and what the run's event told."""
    events = [event for event in read_events(directory.event_log, 100) if event["event"] == "initial-weights"]
    return [directory.catalogue.steps()[0], bool(np.array_equal(table_of(directory, 0), table)), events[-1]["message"]]


def reads(program, source, table):
    """Say what of a source is read into a model of two ps, and whether its table is the one expected."""
    config = Config(
        program="a:B", shared_dir=str(SHARED), initial_weights=str(source), partitioner_min_bytes=PART_BYTES
    )
    runner = RemoteStepRunner(config, program, make_strategy(config, start_cluster("parameter_server", 1, 2)), 1)
    message = read_initial_weights(config, program, runner)
    found = runner.model.layers[1].embeddings
    assert len(found.variables) == 2
    runner.close()
    return [bool(np.array_equal(tf.convert_to_tensor(found), table)), message]


def weights():
    source = run(beginnings.Table, "source", 5, **{**SPLIT, "export": True})
    table = table_of(source, 5)
    whole = beginnings.Table().build_model()
    tf.train.Checkpoint(model=whole).read(source.catalogue.prefix(5)).expect_partial()
    files = {"h5": SHARED / "a.h5", "weights_h5": SHARED / "a.weights.h5", "keras": SHARED / "a.keras"}
    whole.save_weights(str(files["h5"]), save_format="h5")
    whole.save_weights(str(files["weights_h5"]))
    whole.save(str(files["keras"]))
    tf.keras.models.save_model(whole, str(SHARED / "saved"), save_format="tf")
    sources = {**files, "saved_model": SHARED / "saved", "export": source.export}
    sources["checkpoint"] = source.catalogue.prefix(5)
    found = {kind: reads(beginnings.Table(), where, table) for kind, where in sources.items()}
    first, *found["run"] = began_with(run(beginnings.Table, "from-run", 1, initial_weights="source@5", **SPLIT), table)
    found["first"] = first
    found["unnamed"] = reads(beginnings.Table(named=False), "source@5", table)
    found["other_head"] = reads(beginnings.Table(score=2), "source@5", table)
    averaged = run(beginnings.Table(ema=True), "averaged", 1, initial_weights="source@5", **SPLIT)
    reader = tf.train.load_checkpoint(averaged.catalogue.prefix(0))
    averages = [
        reader.get_tensor(key) for key, shape in reader.get_variable_to_shape_map().items() if shape == [64, 16]
    ]
    found["averages"] = [bool(np.array_equal(each, table)) for each in averages]
    sizes = {shape: 4 * int(np.prod(shape)) for shape in ((64, 16), (16, 1), (1,))}
    found["bytes"] = [bytes_of_checkpoint(source, 5), sum(sizes.values())]
    asked = {"evaluation": "inline", "checkpoints_kept_best": 1, "checkpoints_best_metric": "accuracy"}
    found["no_such_metric"] = refused(beginnings.Valley, "best", **asked)
    found["nothing_fits"] = refused(beginnings.Valley, "valley", initial_weights="source@5")
    found["no_such_step"] = refused(beginnings.Table, "none", initial_weights="source@7")
    found["no_such_file"] = refused(beginnings.Table, "none", initial_weights="/no/such.h5")
    # Nothing is read again when the run goes on: what it began with may be gone.
    shutil.rmtree(source.path)
    went_on = run(beginnings.Table, "from-run", 3, initial_weights="source@5", **SPLIT)
    found["went_on"] = went_on.catalogue.newest()
    return found


def refused(program, name, **settings):
    try:
        run(program, name, 1, **{**SPLIT, **settings})
    except UserError as error:
        return str(error)
    return "not refused"


print(json.dumps({"kept": kept(), "branch": branch(), "weights": weights()}), flush=True)
os._exit(0)
