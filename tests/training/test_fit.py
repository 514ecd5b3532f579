"""Keras's fit: the program's callbacks and train_step, epochs that survive a stop, the same checkpoints."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import tensorflow as tf
from processes import Process, Runs, until

pytestmark = pytest.mark.timeout(300)
FIT = ("--api", "fit", "--no-evaluator", "--checkpoint-seconds", "0")


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def epochs(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[dict], Process]:
    """A run of 2.5 epochs, stopped in its second epoch and started again.

    Returns what the callbacks were told before and after the stop, and the second process.
    """
    options = [*FIT, "--epoch-steps", "250", "--evaluation", "exact", "--steps-per-execution", "5"]
    options += ["--checkpoint-steps", "50", "--checkpoints-kept", "99", "--export", "false"]
    path = tmp_path_factory.mktemp("epochs") / "ends"
    first = runs.local("epochs:Epochs", "epochs", 625, *options, EPOCHS=str(path))
    until(lambda: runs.checkpoints("epochs")[-1:] > [260], "step 260", say=lambda: first.output)
    first.send(signal.SIGTERM)
    assert first.wait() == 143, first.output
    before = records_of(path)
    second = runs.local("epochs:Epochs", "epochs", 625, *options, EPOCHS=str(path))
    assert second.wait() == 0, second.output
    return before, records_of(path)[len(before) :], second


def test_callbacks_hear_each_epoch_and_its_evaluation(epochs: tuple) -> None:
    before, after, _ = epochs
    assert [record.get("begins") for record in before] == [0, None, 1]
    assert {"ends", "loss", "accuracy", "val_loss", "val_accuracy"} <= set(before[1])
    assert before[1]["val_accuracy"] > 0.7
    assert 0.5 < before[1]["accuracy"] < 1
    assert 0 < before[1]["loss"] < 2
    assert after[-1]["ends"] == 2
    assert after[-1]["val_accuracy"] > 0.9


def test_a_run_goes_on_in_the_epoch_where_it_was_stopped(runs: Runs, epochs: tuple) -> None:
    _, after, second = epochs
    assert [record.get("begins") for record in after] == [1, None, 2, None]
    stopped_at = int(second.search(r"going on at step (\d+) of 625")[1])
    assert 260 <= stopped_at < 500
    assert f"trained to step 625; {625 - stopped_at} steps in" in second.output


def test_a_callback_sets_the_learning_rate(epochs: tuple) -> None:
    before, after, _ = epochs
    rates = {record["begins"]: record["rate"] for record in [*before, *after] if "rate" in record}
    assert rates == pytest.approx({0: 1e-3, 1: 5e-4, 2: 2.5e-4})


def test_fit_saves_at_the_steps_of_the_settings(runs: Runs, epochs: tuple) -> None:
    saved = runs.checkpoints("epochs")
    assert {250, 500, 625} <= set(saved)
    assert len({step // 50 for step in saved} - {5, 10, 12}) > 3  # beside the calls, when a multiple has passed


def test_a_callback_may_end_a_run_for_good(runs: Runs) -> None:
    options = [*FIT, "--epoch-steps", "20", "--evaluation", "inline", "--checkpoint-steps", "20"]
    first = runs.local("epochs:EarlyEnd", "early", 1000, *options)
    assert first.wait() == 0, first.output
    assert runs.checkpoints("early") == [20, 40]
    # What it did at the end is in the checkpoint, although there was one of this step, and in what is exported.
    reader = tf.train.load_checkpoint(str(runs.directory("early") / "checkpoints" / "ckpt-40"))
    bias = [name for name, shape in reader.get_variable_to_shape_map().items() if shape == [10]]
    assert any((reader.get_tensor(name) == 7).all() for name in bias)
    exported = tf.saved_model.load(str(runs.directory("early") / "export"))
    assert any((variable.numpy() == 7).all() for variable in exported.variables)
    status = runs.status("early")
    assert (status["state"], status["step"]) == ("finished", 40)
    assert "callback" in status["message"]
    again = runs.local("epochs:EarlyEnd", "early", 1000, *options)
    assert again.wait() == 0, again.output
    assert "run early finished at step 40" in again.output


def test_a_train_step_of_the_program_is_used_and_an_evaluation_that_was_cut_off_made_again(runs: Runs) -> None:
    options = [*FIT, "--evaluation", "inline", "--checkpoint-steps", "20", "--export", "false"]
    first = runs.local("table:Table", "cut-off", 20, *options)
    assert first.wait() == 0, first.output
    assert runs.status("cut-off")["metrics"] == {"own_number": 7.0}
    # As a coordinator leaves it that dies in the evaluation.
    (runs.directory("cut-off") / "evaluation.json").unlink()
    state = runs.directory("cut-off") / "state.json"
    state.write_text(state.read_text().replace("finished", "training"))
    again = runs.local("table:Table", "cut-off", 20, *options)
    assert again.wait() == 0, again.output
    status = runs.status("cut-off")
    assert (status["state"], status["evaluation"]["step"]) == ("finished", 20)


@pytest.mark.matrix
def test_an_end_that_was_cut_off_is_made_up_for(runs: Runs, tmp_path: Path) -> None:
    options = [*FIT, "--in-process", "--checkpoint-steps", "20"]
    told = {"EPOCHS": str(tmp_path / "died"), "NUMBERS": str(runs.directory("cut-end") / "callbacks" / "numbers.json")}
    first = runs.local("epochs:DiesAtTheEnd", "cut-end", 20, *options, **told)
    assert first.wait() == -signal.SIGKILL, first.output
    assert runs.checkpoints("cut-end") == [20]
    again = runs.local("epochs:DiesAtTheEnd", "cut-end", 20, *options, **told)
    assert again.wait() == 0, again.output
    assert "the end of the training at step 20 was cut off" in again.output
    names, numbers = (tmp_path / "died.csv").read_text().splitlines()
    assert names == "epoch,accuracy,loss"
    assert 0 < float(numbers.split(",")[1]) < 1
    model = tf.saved_model.load(str(runs.directory("cut-end") / "export"))
    exported = [variable.numpy() for variable in model.variables]
    assert any((value == 7).all() for value in exported)
    reader = tf.train.load_checkpoint(str(runs.directory("cut-end") / "checkpoints" / "ckpt-20"))
    shapes = reader.get_variable_to_shape_map()
    saved = {name: reader.get_tensor(name) for name, shape in shapes.items() if shape == [1024, 10]}
    (kernel,) = (value for name, value in saved.items() if "/optimizer/" not in name)
    # Momentum and average; the kernel is its average by now.
    assert [(value == kernel).all() for name, value in saved.items() if "/optimizer/" in name].count(True) == 1
    assert any((value == kernel).all() for value in exported if value.shape == (1024, 10))


def test_a_callback_for_each_batch_is_the_users_error(runs: Runs) -> None:
    process = runs.local("epochs:EveryBatch", "batches", 20, *FIT, "--checkpoint-steps", "20")
    assert process.wait() == 78, process.output
    assert "PerBatch" in runs.status("batches")["message"]
