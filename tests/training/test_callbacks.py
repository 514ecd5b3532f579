"""docs/callbacks.md: every callback of tf_keras has a row there, and what the row says is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras as keras3
import pytest
import tensorflow as tf
from processes import ROOT, run_check

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.callback_store import CallbackStore
from trainer.run.directory import RunDirectory
from trainer.training.loop.as_traced import AsTraced
from trainer.training.loop.callbacks import callbacks_of, keras, keys_of
from trainer.training.loop.epochs import CallbackStates, Epochs
from trainer.training.updates.learning_rate import Rates

pytestmark = pytest.mark.timeout(800)
APIS = ("custom_loop", "fit")


class PerBatch(keras.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class NoisyCheckpoint(keras.ModelCheckpoint):
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "BaseLogger": (keras.BaseLogger, "leave it out"),
    "ProgbarLogger": (keras.ProgbarLogger, "leave it out"),
    "BackupAndRestore": (lambda: keras.BackupAndRestore("there"), "leave it out"),
    "experimental.BackupAndRestore": (lambda: keras.experimental.BackupAndRestore("there"), "leave it out"),
    "SidecarEvaluatorModelExport": (
        lambda: keras.SidecarEvaluatorModelExport("there", "ckpt"),
        "take ModelCheckpoint",
    ),
    "experimental.UpdateEmbeddingCallback": (
        lambda: keras.experimental.UpdateEmbeddingCallback(None, 1),
        "begin a new run",
    ),
}
# How the others may not be used, by what is said.
MISUSED: list[tuple[Callable[[], Any], str]] = [
    (PerBatch, "on_train_batch_end can't be called: use on_epoch_end"),
    (lambda: keras.LambdaCallback(on_batch_end=print), "on_batch_end can't be called"),
    (lambda: NoisyCheckpoint("there", "loss"), "on_batch_end can't be called"),
    (lambda: keras.ModelCheckpoint("there", "loss", save_freq=10), 'pass save_freq="epoch"'),
    (lambda: keras.TensorBoard(update_freq=10), 'pass update_freq="epoch"'),
    (lambda: keras.TensorBoard(profile_batch=2), "pass profile_batch=0"),
    (lambda: keras.TensorBoard(write_steps_per_second=True), "leave it out"),
    (lambda: keras.EarlyStopping("val_loss"), "set evaluation to exact"),
    (lambda: keras.CallbackList([]), "must be a list of"),
    (lambda: print, "must be a list of"),
]
WORKING = {
    "Callback", "CSVLogger", "EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler", "ModelCheckpoint",
    "ReduceLROnPlateau", "RemoteMonitor", "TensorBoard", "TerminateOnNaN",
}  # fmt: skip


class Program:
    def __init__(self, made: Any) -> None:
        self.made = made

    def callbacks(self) -> list[Any]:
        return [self.made]


def compiled(rate: Any = 0.1, kind: Any = tf.keras.optimizers.SGD) -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile(kind(rate), "mse")
    return model


def ask(made: Any, model: Any = None, **settings: Any) -> list[Any]:
    return callbacks_of(Config(program="a:B", **settings), Program(made), model or compiled())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_check("callbacks_check.py", deadline=750)


def test_every_callback_of_keras_has_a_row_and_a_test() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (works|refused)\b", page, re.MULTILINE))
    names = {name for name in dir(keras) if isinstance(getattr(keras, name), type)}
    names |= {f"experimental.{name}" for name in dir(keras.experimental) if name[0].isupper()}
    assert set(rows) == names
    assert {name for name, outcome in rows.items() if outcome == "refused"} == {*REFUSED, "CallbackList"}
    assert {name for name, outcome in rows.items() if outcome == "works"} == WORKING


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_called_is_refused_by_name(name: str) -> None:
    made, fix = REFUSED[name]
    if name == "experimental.UpdateEmbeddingCallback":
        callback = object.__new__(keras.experimental.UpdateEmbeddingCallback)
    else:
        callback = made()
    with pytest.raises(UserError, match=f"Program.callbacks returned {type(callback).__name__}.*{re.escape(fix)}"):
        ask(callback)


@pytest.mark.parametrize(("made", "message"), MISUSED, ids=[message for _, message in MISUSED])
def test_what_would_be_never_or_wrongly_called_is_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        ask(made())


@pytest.mark.parametrize("library", [tf.keras, keras3])
def test_what_is_trained_may_not_be_changed_once_steps_are_traced(library: Any) -> None:
    inner = library.Sequential([library.layers.Input((2,)), library.layers.Dense(1, name="line")])
    model = library.Sequential([library.layers.Input((2,)), inner])
    model.compile("sgd", "mse")
    traced = AsTraced(model)
    traced.check()
    inner.get_layer("line").trainable = False
    with pytest.raises(UserError, match="a callback has changed `trainable` of line: steps were traced before"):
        traced.check()
    inner.get_layer("line").trainable = True
    traced.check()
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match="a callback has compiled the model again"):
        traced.check()


def test_batches_are_refused_only_where_workers_do_them() -> None:
    assert len(ask(PerBatch(), strategy="mirrored")) == 1
    assert len(ask(keras.ModelCheckpoint("there", "loss", save_freq=10), strategy="one_device")) == 1


def test_members_in_step_have_an_idle_callback_where_the_coordinator_writes() -> None:
    config = Config(program="a:B", strategy="multi_worker_mirrored")
    found = {
        leads: callbacks_of(config, Program(keras.CSVLogger("there")), compiled(), leads=leads)
        for leads in (True, False)
    }
    assert isinstance(found[True][0], keras.CSVLogger)
    assert not isinstance(found[False][0], keras.CSVLogger)
    assert keys_of(found[True]) == keys_of(found[False]) == ["CSVLogger 0"]


@pytest.mark.parametrize("optimizer", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD])
@pytest.mark.parametrize("kind", [lambda: keras.LearningRateScheduler(lambda epoch: 0.1), keras.ReduceLROnPlateau])
def test_two_may_not_set_the_learning_rate(kind: Callable[[], Any], optimizer: Any) -> None:
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(UserError, match="give it a number"):
        ask(kind(), compiled(schedule, optimizer), evaluation="exact")
    assert len(ask(kind(), compiled(0.1, optimizer), evaluation="exact")) == 1


@pytest.mark.parametrize("api", APIS)
def test_what_callbacks_remember_outlives_a_fault(found: dict[str, Any], api: str) -> None:
    """The third epoch's end was the last before the fault: patience, best and rate go on as if there had been none."""
    got = found[api]
    assert got["epochs"] == [0, 1, 2, 3, 4], "an attribute of the program's own callback, over both processes"
    assert got["step"] == 40  # three epochs without a better score than the second's
    assert got["exported"] == got["best"]
    assert got["rate"] == pytest.approx(0.005)  # ReduceLROnPlateau, once, after two of them
    assert [name for name in got["files"] if name.startswith("best")] == ["best-1.weights.h5", "best-2.weights.h5"]
    assert got["history"] == [3.0, 1.0, 2.0, 2.0, 2.0]
    assert got["rows"] == [[str(epoch), True] for epoch in range(5)]


@pytest.mark.parametrize("api", APIS)
def test_records_are_kept_as_long_as_a_checkpoint_needs_them(found: dict[str, Any], api: str) -> None:
    got = found[api]
    assert got["checkpoints"] == [8, 16, 24, 32, 40]
    assert got["records"] == [8, 16, 24, 32, 40]


@pytest.mark.parametrize("api", APIS)
def test_callbacks_that_write_do(found: dict[str, Any], api: str) -> None:
    got = found[api]
    assert {"saved-2", "whole-2.keras", *(f"each-{epoch}.weights.h5" for epoch in range(1, 6))} <= set(got["files"])
    assert got["board"] == ["train", "validation"]
    assert got["posts"] == 5
    assert got["lambdas"] == [[epoch, ["loss", "lr", "score", "val_loss"]] for epoch in range(5)]


@pytest.mark.parametrize("api", APIS)
def test_a_scheduler_sets_the_rate(found: dict[str, Any], api: str) -> None:
    assert found[api]["rates"] == pytest.approx([0.01, 0.005])


@pytest.mark.parametrize("api", APIS)
def test_a_callback_calls_the_model_and_the_error_of_one_that_predicts_may_be_caught(
    found: dict[str, Any], api: str
) -> None:
    shapes, message = found[api]["predicting"]
    assert shapes == [3, 1, 3, 1]  # of two epochs' ends
    assert "A callback calls the model, self.model(x)" in message


@pytest.mark.parametrize("api", APIS)
def test_a_loss_that_is_no_number_ends_the_training(found: dict[str, Any], api: str) -> None:
    assert 0 < found[api]["not_a_number"] < 50_000


@pytest.mark.parametrize("library", [tf.keras, keras3])
def test_what_is_better_is_the_same_in_each_process(tmp_path: Path, library: Any) -> None:
    store = CallbackStore(RunDirectory(tmp_path, "mine"), lambda write: write(), leads=True)
    found = []
    for epoch, loss in enumerate((3.0, 2.8, 2.4)):
        stopping = library.callbacks.EarlyStopping("loss", min_delta=0.5, patience=9)
        stopping.set_model(library.Sequential())
        states = CallbackStates([stopping], store)
        stopping.on_train_begin()
        states.begin()
        if epoch:
            states.remember(store.read(epoch)["callbacks"])  # type: ignore[index]
        stopping.on_epoch_end(epoch, {"loss": loss})
        states.keep(epoch + 1, 0)
        found.append((stopping.best, stopping.wait))
    assert found == [(3.0, 0), (3.0, 1), (2.4, 0)]


class Process:
    """A coordinator's process of a run with epochs of 20 steps, whose callback wants to know the loss."""

    def __init__(self, path: Path, step: int, rate: float = 0.8, *more: Any) -> None:
        self.model, self.told = compiled(rate), []
        store = CallbackStore(RunDirectory(path, "mine"), lambda write: write(), leads=True)
        tell = keras.LambdaCallback(on_epoch_end=lambda epoch, logs: self.told.append((epoch, logs["loss"])))
        own = [keras.LearningRateScheduler(lambda epoch, rate: rate / 2), tell, *more]
        nothing = {name: lambda: None for name in ("begin", "drain", "end_epoch")}
        self.controller = SimpleNamespace(
            step=step, epoch_steps=20, done=False, evaluate=lambda **_: {}, next_call=lambda: 20, **nothing
        )
        runner = SimpleNamespace(model=self.model, reset_metrics=lambda: None, doubt=lambda: None, agree=list)
        config = Config(program="a:B", steps=100, epoch_steps=20)
        self.epochs = Epochs(config, own, cast(Any, runner), cast(Any, self.controller), store)
        self.model.stop_training = False
        self.epochs.callbacks.on_train_begin()

    def begin_epoch(self, epoch: int) -> float:
        """Return the rate of the epoch."""
        self.epochs.callbacks.on_epoch_begin(epoch)
        return round(float(self.model.optimizer.learning_rate.numpy()), 4)

    def end_epoch(self, epoch: int, loss: float) -> None:
        self.controller.step = (epoch + 1) * 20
        self.epochs.callbacks.on_epoch_end(epoch, {"loss": loss})


def test_an_epoch_that_was_cut_off_begins_with_the_rate_that_it_found(tmp_path: Path) -> None:
    """Else a scheduler would lower it once more with each fault."""
    process = Process(tmp_path, 0)
    assert process.begin_epoch(0) == 0.4
    process.end_epoch(0, 1.0)
    rate = process.begin_epoch(1)
    for _ in range(2):
        process = Process(tmp_path, 30, rate)
        rate = process.begin_epoch(1)
    assert rate == 0.2
    process.end_epoch(1, 1.0)
    assert Process(tmp_path, 40, rate).begin_epoch(2) == 0.1


def test_a_rate_that_batches_may_have_changed_is_the_checkpoints(tmp_path: Path) -> None:
    """As with a decay at each call, where this process trains."""
    Process(tmp_path, 0, 0.8).end_epoch(0, 1.0)
    process = Process(tmp_path, 30, 0.3, keras.LambdaCallback(on_batch_end=lambda *_: None))
    assert process.begin_epoch(1) == 0.15


def test_rates_are_not_taken_for_each_other_where_a_schedule_was() -> None:
    optimizers = [tf.keras.optimizers.SGD(rate) for rate in (0.1, 0.2)]
    Rates(optimizers).assign([0.5])
    assert Rates(optimizers).values == pytest.approx([0.1, 0.2])
    Rates(optimizers).assign([0.5, 0.6])
    assert Rates(optimizers).values == pytest.approx([0.5, 0.6])


def test_an_epochs_end_that_was_cut_off_is_told_with_the_trainings_numbers(tmp_path: Path) -> None:
    process = Process(tmp_path, 0)
    process.begin_epoch(0)
    process.controller.evaluate = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        process.end_epoch(0, 0.25)
    again = Process(tmp_path, 20)
    assert again.told == [(0, 0.25)]
    assert Process(tmp_path, 20).told == []


def test_both_apis_take_the_averages_for_weights_at_the_end(found: dict[str, Any]) -> None:
    ends = [found[api]["averaged"] for api in APIS]
    for end in ends:
        assert len(end["last"]) == 1
        assert end["exported"] == end["saved"] != end["last"][0]
        assert any(end["second"])
        assert end["third"] == [[0.5]]
    assert ends[0]["exported"] == ends[1]["exported"]
    assert ends[0]["evaluation"] == pytest.approx(ends[1]["evaluation"])
