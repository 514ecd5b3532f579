"""Damaged checkpoints: they are set aside, the one before is taken, and new ones are written in their place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import tensorflow as tf
from processes import Runs

from trainer.core.failures import Infrastructure, UserError
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints

pytestmark = pytest.mark.timeout(300)
# Epochs that callbacks hear of end at their steps exactly, and so do their checkpoints.
OPTIONS = (
    "--api", "fit", "--epoch-steps", "50", "--checkpoint-steps", "50", "--checkpoints-kept", "3", "--no-evaluator",
)  # fmt: skip


def truncate(directory: Path, pattern: str) -> None:
    """Cut the larger half off every file that matches."""
    paths = [path for path in directory.glob(pattern) if path.stat().st_size > 1]
    assert paths
    for path in paths:
        os.truncate(path, path.stat().st_size // 3)


def read_all(prefix: str) -> int:
    """Read every value of a checkpoint, which verifies its checksum; returns the step."""
    reader = tf.train.load_checkpoint(prefix)
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    return int(values["step/.ATTRIBUTES/VARIABLE_VALUE"])


# Without a cluster, the tests below damage an index too.
@pytest.mark.parametrize("ending", ["data-*", pytest.param("index", marks=pytest.mark.matrix)])
def test_run_goes_on_before_the_damage_and_saves_that_step_again(runs: Runs, ending: str) -> None:
    run = f"damaged-{ending[:-2] if '*' in ending else ending}"
    checkpoints = runs.directory(run) / "checkpoints"
    first = runs.local("ids:Ids", run, 100, *OPTIONS)
    assert first.wait() == 0, first.output
    assert runs.checkpoints(run) == [50, 100]
    truncate(checkpoints, f"ckpt-100.{ending}")
    for name in ("state.json", "status.json", "evaluation.json"):
        (runs.directory(run) / name).write_text('{"step": 1')

    second = runs.local("ids:Ids", run, 150, *OPTIONS)
    assert second.wait() == 0, second.output
    assert re.search(
        r"ckpt-100 is bad and set aside as ckpt-100\.manifest\.json\.bad: .* bytes instead of", second.output
    )
    assert "going on at step 50 of 150" in second.output
    assert "trained to step 150; 100 steps in" in second.output
    aside = {path.name.removeprefix("ckpt-100.").split("-")[0] for path in checkpoints.glob("ckpt-100.*.bad")}
    assert aside == {"manifest.json.bad", "index.bad", "data"}
    assert {path.name for path in runs.directory(run).glob("*.bad")} == {
        "state.json.bad",
        "status.json.bad",
        "evaluation.json.bad",
    }
    assert runs.checkpoints(run) == [50, 100, 150]
    assert [read_all(str(checkpoints / f"ckpt-{step}")) for step in (50, 100, 150)] == [50, 100, 150]


class Trained:
    """A run's model of one variable, without a cluster."""

    def __init__(self, directory: RunDirectory, dtype: tf.DType = tf.float32) -> None:
        self.model = tf.Module()
        self.model.table = tf.Variable(tf.zeros([64], dtype))
        self.step = tf.Variable(0, dtype=tf.int64)
        config = Config(program="mine:One", checkpoints_kept=3)
        self.checkpoints = Checkpoints(directory, CheckpointState(self.model, self.step), config)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.step.assign(step)
            self.checkpoints.save()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "run")
    Trained(directory).save(10, 20, 30)
    return directory


def test_damaged_ones_do_not_cost_the_good_ones(directory: RunDirectory) -> None:
    truncate(directory.checkpoints, "ckpt-20.data-*")
    truncate(directory.checkpoints, "ckpt-30.index")
    trained = Trained(directory)
    assert trained.checkpoints.restore() == 10
    trained.save(15, 16, 20)
    assert directory.catalogue.steps() == [15, 16, 20]
    assert Trained(directory).checkpoints.restore() == 20


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(directory: RunDirectory) -> None:
    truncate(directory.checkpoints, "ckpt-*.data-*")
    for _ in range(2):
        with pytest.raises(UserError, match=r"none of the checkpoints in \S+/run/checkpoints can be read") as raised:
            Trained(directory).checkpoints.restore()
        assert "set aside: ckpt-10.manifest.json.bad, ckpt-20.manifest.json.bad, ckpt-30.manifest.json.bad" in str(
            raised.value
        )
        assert "--run NAME" in str(raised.value)


def test_storage_that_fails_is_no_damage(directory: RunDirectory) -> None:
    [data] = directory.checkpoints.glob("ckpt-30.data-*")
    data.unlink()
    data.mkdir()
    directory.catalogue.write_manifest(30, epoch=0, tensorflow=tf.__version__)
    with pytest.raises(Infrastructure, match=r"cannot read \S+/ckpt-30: .*Is a directory"):
        Trained(directory).checkpoints.restore()
    assert directory.catalogue.steps() == [10, 20, 30]


def test_a_flipped_bit_is_found_by_tensorflow_and_set_aside(directory: RunDirectory) -> None:
    [data] = directory.checkpoints.glob("ckpt-30.data-*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert directory.catalogue.check(30) == ""
    assert Trained(directory).checkpoints.restore() == 20
    assert [path.name for path in directory.catalogue.set_aside_files()] == ["ckpt-30.manifest.json.bad"]


def test_a_truncated_manifest_is_set_aside(directory: RunDirectory) -> None:
    truncate(directory.checkpoints, "ckpt-30.manifest.json")
    assert Trained(directory).checkpoints.restore() == 20
    assert [path.name for path in directory.catalogue.set_aside_files()] == ["ckpt-30.manifest.json.bad"]


def test_another_type_is_no_damage(directory: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"ckpt-30 does not fit the model.*--run NAME"):
        Trained(directory, tf.int32).checkpoints.restore()
    assert directory.catalogue.steps() == [10, 20, 30]


def test_a_changed_model_is_told_what_differs_and_which_weights_it_may_begin_with(directory: RunDirectory) -> None:
    more, fewer = Trained(directory), Trained(directory)
    more.model.bias = tf.Variable([0.0], name="more/bias")
    del fewer.model.table
    for trained, what in ((more, "it has no more/bias"), (fewer, "the model has no table")):
        with pytest.raises(UserError, match=rf"ckpt-30 does not fit the model: {what}\. .*initial_weights: run@30$"):
            trained.checkpoints.restore()
