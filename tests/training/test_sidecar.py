"""The side-car evaluator's reading of checkpoints that others write, replace and remove meanwhile."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.retention import Retention
from trainer.run.saves.checkpoint_reader import read_model
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints
from trainer.tasks import evaluator as module
from trainer.tasks.evaluator import Evaluator
from trainer.telemetry.status import read_status
from trainer.training.evaluation import reject_best_metric

pytestmark = pytest.mark.timeout(120)


def make_model(width: int = 1) -> Any:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Dense(width, input_shape=(2,))])
    model.compile(loss="mse")
    return model


def make_data() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))


PROGRAM = SimpleNamespace(build_model=make_model, eval_dataset=lambda context: make_data())


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints 10 and 20."""
    import tensorflow as tf

    directory = RunDirectory(tmp_path, "mine")
    step = tf.Variable(0, dtype=tf.int64)
    checkpoints = Checkpoints(directory, CheckpointState(make_model(), step), Config(program="mine:One"))
    for number in (10, 20):
        step.assign(number)
        checkpoints.save()
    return directory


@pytest.fixture
def evaluator(directory: RunDirectory) -> Evaluator:
    return Evaluator(PROGRAM, directory)


def evaluated(directory: RunDirectory) -> int | None:
    record = read_record(directory.evaluation)
    return record["step"] if record else None


def test_a_good_one_is_evaluated(directory: RunDirectory, evaluator: Evaluator) -> None:
    assert evaluator.evaluate(20)
    assert evaluated(directory) == 20
    record = read_record(directory.evaluation)
    assert record is not None
    assert [each.evaluation for each in directory.catalogue.saved()] == [None, record["metrics"]]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_number_of_the_steps_own_is_weighed_by_its_batchs_examples(directory: RunDirectory, compiled: bool) -> None:
    import tensorflow as tf

    class Own(tf.keras.Sequential):  # type: ignore[misc]
        def test_step(self, data: Any) -> dict[str, Any]:
            return {"loss": tf.reduce_mean(data[1])} | ({} if compiled else {"greatest": tf.reduce_max(data[1])})

    def build() -> Any:
        model = Own([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile(**({"loss": "mse"} if compiled else {}))
        return model

    def data(context: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((tf.ones([3, 2]), [[1.0], [2.0], [6.0]])).batch(2)

    Evaluator(SimpleNamespace(build_model=build, eval_dataset=data), directory).evaluate(20)
    record = read_record(directory.evaluation)
    assert record is not None
    assert record["metrics"] == {"loss": 3} | ({} if compiled else {"greatest": pytest.approx(10 / 3)})


@pytest.mark.parametrize("before", [True, False])
def test_one_that_is_pruned_under_its_hands_is_skipped(
    directory: RunDirectory,
    evaluator: Evaluator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: bool,
) -> None:
    def read(directory: RunDirectory, model: Any, step: int, tables: Any = None, **more: Any) -> None:
        directory.catalogue.prune(Retention(1))
        read_model(directory, model, step, tables, **more)

    if before:
        directory.catalogue.prune(Retention(1))
    else:
        monkeypatch.setattr(module, "read_model", read)
    with caplog.at_level(logging.WARNING):
        assert not evaluator.evaluate(10)
    assert "skipping step 10: ckpt-10.manifest.json is gone" in caplog.text
    assert evaluated(directory) is None
    assert evaluator.evaluate(20)


def test_a_truncated_one_is_skipped_and_left_alone(directory: RunDirectory, evaluator: Evaluator) -> None:
    [data] = directory.checkpoints.glob("ckpt-20.data-*")
    data.write_bytes(data.read_bytes()[:-3])
    assert not evaluator.evaluate(20)
    assert directory.catalogue.steps() == [10, 20]


def test_a_model_that_does_not_fit_is_the_users_error(directory: RunDirectory) -> None:
    wider = SimpleNamespace(build_model=lambda: make_model(3), eval_dataset=lambda context: make_data())
    with pytest.raises(UserError, match="does not fit the model"):
        Evaluator(wider, directory).evaluate(20)


def test_the_best_by_a_metric_that_an_evaluation_lacks_is_told(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    text = "no checkpoint is kept as one of the best: checkpoints_best_metric is 'accuracy', which the evaluation does"
    Evaluator(PROGRAM, directory, "accuracy").evaluate(20)
    assert text in caplog.text
    assert read_status(directory).message.startswith(text)
    Evaluator(PROGRAM, directory, "loss").evaluate(20)
    assert read_status(directory).message == ""


def test_the_best_by_a_metric_that_keras_does_not_tell_is_refused_where_its_own_steps_tell_all() -> None:
    import tensorflow as tf

    class OwnStep(tf.keras.Model):
        def test_step(self, data: Any) -> Any: ...

    config = Config(program="mine:One", checkpoints_kept_best=1, checkpoints_best_metric="accuracy")
    for evaluate in (None, object()):  # the side-car, and a strategy's replicas
        with pytest.raises(UserError, match="name one of its metrics, loss, mae"):
            reject_best_metric(config, evaluate, make_model(), ["mae", "loss"])
        reject_best_metric(config, evaluate, OwnStep(), ["mae", "loss"])
    reject_best_metric(config.replace(checkpoints_kept_best=0), None, make_model(), ["loss"])
    reject_best_metric(config, None, make_model(), ["accuracy"])
