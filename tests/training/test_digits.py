"""One training of the example from start to end, and what is left of it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf
from processes import DIGITS, MINUTE, PROGRAMS, Process, Runs, environment, is_alive, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from trainer.examples.digits import DATA, Digits
from trainer.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(300)


def in_fresh_process(script: str, *arguments: str) -> dict:
    """Run a script that prints one JSON object as its last line."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=PROGRAMS, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_reaches_the_accuracy(digits: Process, runs: Runs) -> None:
    status = runs.status("digits")
    assert status["state"] == "finished"
    assert status["evaluation"]["step"] == 1500
    assert status["evaluation"]["metrics"]["accuracy"] >= 0.95


def test_training_ends_at_the_last_step_exactly(digits: Process, runs: Runs) -> None:
    assert runs.status("digits")["step"] == 1500
    *passed, last = runs.checkpoints("digits")
    assert [step // 500 for step in passed] == [1, 2]
    assert last == 1500


def test_last_line_says_what_was_trained_and_how_fast(digits: Process) -> None:
    assert re.search(
        r"run digits finished: trainer\.examples\.digits:Digits trained to step 1500; 1500 steps in [\d.]+ s "
        r"\([\d.]+ steps/s\), .*loss [\d.e-]+, accuracy [\d.]+; checkpoint \S+/ckpt-1500; model \S+/export",
        digits.output,
    )


def test_its_parameters_reached_the_program_and_belong_to_the_run(digits: Process, runs: Runs) -> None:
    given = {"learning_rate": 0.002, "dropout": 0.4}
    assert runs.status("digits")["program_args"] == given
    assert json.loads((runs.directory("digits") / "run.json").read_text())["program_args"] == given
    read = EventAccumulator(str(runs.directory("digits") / "events")).Reload()
    written = read.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    session = parse_session_start_info_plugin_data(written)
    checkpoint = tf.train.load_checkpoint(str(runs.directory("digits") / "checkpoints" / "ckpt-1500"))
    [rate] = [key for key in checkpoint.get_variable_to_shape_map() if "learning_rate/.ATTRIBUTES" in key]
    assert {name: value.number_value for name, value in session.hparams.items()} == given
    assert float(checkpoint.get_tensor(rate)) == pytest.approx(0.002)


def test_a_run_that_goes_on_keeps_its_parameters(digits: Process, runs: Runs) -> None:
    again = runs.local(DIGITS, "digits", 1500)
    assert again.wait(MINUTE) == 0, again.output
    assert "learning_rate=0.002, dropout=0.4" in again.output
    other = runs.local(DIGITS, "digits", 1500, "--set", "learning_rate=0.1")
    assert other.wait(MINUTE) == 78
    assert "run digits began with learning_rate=0.002, dropout=0.4 and keeps that; it can't go on with " in other.output
    wrong = runs.local(DIGITS, "wrong", 5, "--set", "rate=0.1")
    assert wrong.wait(MINUTE) == 78
    assert "its constructor has no parameter rate; it takes learning_rate, dropout" in wrong.output


def test_log_tensorboard_and_status_show_the_same_numbers(digits: Process, runs: Runs) -> None:
    read = EventAccumulator(str(runs.directory("digits") / "events" / "train")).Reload()
    events = {tag: read.Scalars(tag)[-1].value for tag in read.Tags()["scalars"]}
    status = runs.status("digits")
    assert events["loss"] == pytest.approx(status["loss"])
    assert events["accuracy"] == pytest.approx(status["metrics"]["accuracy"])
    logged = re.findall(r"step 1500 of 1500, \S+ steps/s, loss (\S+), accuracy (\S+)", digits.output)[-1]
    assert float(logged[0]) == pytest.approx(status["loss"], rel=1e-3)


def test_tensorflow_reports_no_error_of_its_own(digits: Process) -> None:
    """Neither that this machine has no GPU, nor anything else in the form of its native log.

    A ps may say that it let go of what a call had not fetched: not with each run.
    """
    lines = re.findall(r"^.*[|] [IWEF]\d{4} .*$", digits.output, re.MULTILINE)
    assert [line for line in lines if "Local rendezvous is aborting with status: ABORTED: Cleanup" not in line] == []


def test_no_process_is_left(digits: Process, runs: Runs) -> None:
    pids = [int(pid) for pid in re.findall(r"started, pid (\d+)$", digits.output, re.MULTILINE)]
    assert len(pids) == 6
    over = RunDirectory(runs.shared, "digits").status.stat().st_mtime

    def is_left(pid: int) -> bool:
        return is_alive(pid) and started_at(pid) < over  # else another process has this number now

    # The last ones have ended, and their parent may still have to see it.
    until(lambda: not any(map(is_left, pids)), f"none of {pids} is left", deadline=20)


def started_at(pid: int) -> float:
    """Return when a process was started, of time.time; never, where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return math.inf
    if fields[0] == "Z":
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def test_evaluator_agrees_with_one_process(digits: Process, runs: Runs) -> None:
    program = Digits()
    model = program.build_model()
    prefix = str(runs.directory("digits") / "checkpoints" / "ckpt-1500")
    tf.train.Checkpoint(model=model).read(prefix).expect_partial()
    alone = model.evaluate(program.eval_dataset(tf.distribute.InputContext()), return_dict=True, verbose=0)
    evaluation = runs.status("digits")["evaluation"]["metrics"]
    assert evaluation["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-6)
    assert evaluation["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_exported_model_reads_raw_digits_without_the_program(digits: Process, runs: Runs) -> None:
    found = in_fresh_process(
        """
import json, sys
import numpy as np, tensorflow as tf
data = np.load(sys.argv[2])
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
[name] = serve.structured_input_signature[1]
[scores] = serve(**{name: tf.constant(data["images"], tf.float32)}).values()
trainer = [module for module in sys.modules if module.startswith("trainer")]
print(json.dumps({"accuracy": float(np.mean(np.argmax(scores, 1) == data["labels"])), "trainer": trainer}))
""",
        str(runs.directory("digits") / "export"),
        str(DATA),
    )
    assert found["trainer"] == []
    assert found["accuracy"] >= 0.95


def test_starting_a_finished_run_again_says_so_and_does_nothing(digits: Process, runs: Runs) -> None:
    files = list(runs.directory("digits").rglob("*"))
    before = {path: path.stat().st_mtime for path in files}
    again = runs.local(DIGITS, "digits", 1500)
    assert again.wait(MINUTE) == 0
    assert "run digits finished at step 1500; start a new one with --run NAME" in again.output
    assert {path: path.stat().st_mtime for path in runs.directory("digits").rglob("*")} == before


def test_a_run_keeps_its_program(digits: Process, runs: Runs) -> None:
    other = runs.local("table:Table", "digits", 4000)
    assert other.wait(MINUTE) == 78
    assert f"run digits belongs to the program {DIGITS}, not to table:Table" in other.output
    assert "--run NAME" in other.output
    assert (runs.directory("digits") / "export").exists()
