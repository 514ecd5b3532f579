"""What others see of a run, without TensorFlow."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress
from trainer.telemetry.status import Status, describe, describe_runs, describe_ways, read_all, read_status

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = ["step", "steps", "steps_per_second", "eta_seconds", "loss", "metrics", "evaluation"]
MEMBERS = ["without", "ways", "workers", "tables", "lookups", "data", "files", "faults"]
PLACES = ["checkpoint", "export", "begun_from", *MEMBERS, "ledger", "events", "updated", "host", "pid"]
KEYS = ["run", "run_dir", "program", "program_args", "state", "phase", "message", *PROGRESS, *PLACES]


def trainer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRAINER_")}
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True)


def settings(shared: Path, **more: Any) -> str:
    path = shared / "run.json"
    path.write_text(json.dumps({"program": "mine:One", "run": "a", "steps": 9, "shared_dir": str(shared), **more}))
    return str(path)


def write_status(shared: Path, run: str, **values: Any) -> None:
    directory = RunDirectory(shared, run)
    Status(run=run, run_dir=str(directory.path), **values).write(directory)


def test_a_run_that_never_started_is_new(tmp_path: Path) -> None:
    done = trainer("status", "--json", TRAINER_SETTINGS=settings(tmp_path))
    status = json.loads(done.stdout)
    assert list(status) == KEYS
    assert (status["state"], status["program"], status["steps"], status["step"]) == ("new", "mine:One", 9, None)


def test_status_follows_the_selection_and_the_command_line(tmp_path: Path) -> None:
    path = settings(tmp_path)
    write_status(tmp_path, "b", state="training")
    write_record(tmp_path / "selection.json", {"run": "b", "program": "mine:Two"})
    assert json.loads(trainer("status", "--json", TRAINER_SETTINGS=path).stdout)["run"] == "b"
    assert json.loads(trainer("status", "--json", "--settings", path, "--run", "c").stdout)["run"] == "c"


def test_evaluation_is_the_newest(tmp_path: Path) -> None:
    write_status(tmp_path, "a", evaluation={"step": 1, "metrics": {"loss": 9.0}})
    directory = RunDirectory(tmp_path, "a")
    write_record(directory.evaluation, {"step": 2, "metrics": {"loss": 0.5}, "updated": 3.0})
    assert read_status(directory).evaluation == {"step": 2, "metrics": {"loss": 0.5}}


def test_runs_lists_every_run(tmp_path: Path) -> None:
    write_status(tmp_path, "z-old", state="finished", step=9, steps=9)
    write_status(tmp_path, "a-new", state="training", step=3, steps=9)
    assert [status.run for status in read_all(tmp_path)] == ["z-old", "a-new"]
    listed = json.loads(trainer("runs", "--json", TRAINER_SETTINGS=settings(tmp_path)).stdout)
    assert [(status["run"], status["state"]) for status in listed] == [("z-old", "finished"), ("a-new", "training")]
    assert all(list(status) == KEYS for status in listed)


def test_no_runs_is_an_empty_list(tmp_path: Path) -> None:
    assert json.loads(trainer("runs", "--json", TRAINER_SETTINGS=settings(tmp_path)).stdout) == []


def test_status_of_a_newer_trainer_can_be_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_record(directory.status, {"run": "a", "run_dir": "x", "state": "training", "mood": 1.0})
    assert read_status(directory).state == "training"


def test_a_damaged_status_hides_no_other_run(tmp_path: Path) -> None:
    write_status(tmp_path, "a", state="training")
    RunDirectory(tmp_path, "b").path.mkdir()
    RunDirectory(tmp_path, "b").status.write_text("{")
    assert {status.run: status.state for status in read_all(tmp_path)} == {"a": "training", "b": "unknown"}
    assert "status.json is not JSON" in describe(read_status(RunDirectory(tmp_path, "b")))


@pytest.mark.parametrize(
    "record", [{"state": "training"}, {"metrics": 3}, {"loss": "x"}, {"loss": []}, {"metrics": {"a": None}}]
)
def test_a_status_of_other_values_hides_no_other_run(tmp_path: Path, record: dict[str, Any]) -> None:
    write_status(tmp_path, "a", state="training")
    write_record(RunDirectory(tmp_path, "b").status, record)
    found = {status.run: status for status in read_all(tmp_path)}
    assert found["a"].state == "training"
    assert found["b"].state == "unknown"
    assert "status.json holds what no psfleet has written: " in found["b"].message


def test_a_status_that_may_not_be_read_hides_no_other_run(tmp_path: Path) -> None:
    write_status(tmp_path, "a", state="training")
    RunDirectory(tmp_path, "b").status.mkdir(parents=True)
    assert {status.run: status.state for status in read_all(tmp_path)} == {"a": "training", "b": "unknown"}


@pytest.mark.parametrize("metrics", [3, {"a": None}, ["x"]])
def test_an_evaluation_of_other_values_hides_nothing_else(tmp_path: Path, metrics: Any) -> None:
    write_status(tmp_path, "a", state="training", step=3)
    write_record(RunDirectory(tmp_path, "a").evaluation, {"step": 2, "metrics": metrics})
    (status,) = read_all(tmp_path)
    assert (status.state, status.step) == ("training", 3)
    assert "evaluation.json holds what no psfleet has written: " in status.message


def test_a_damaged_evaluation_hides_nothing_else(tmp_path: Path) -> None:
    write_status(tmp_path, "a", state="training", step=3, evaluation={"step": 1, "metrics": {"loss": 9.0}})
    directory = RunDirectory(tmp_path, "a")
    directory.evaluation.write_text("{")
    status = read_status(directory)
    assert (status.state, status.step, status.evaluation) == ("training", 3, {"step": 1, "metrics": {"loss": 9.0}})
    assert "evaluation.json is not JSON" in status.message


def test_a_run_with_nan_is_read_and_said_in_json(tmp_path: Path) -> None:
    write_status(tmp_path, "a", state="training", step=3, loss=math.nan, metrics={"mae": math.inf})
    directory = RunDirectory(tmp_path, "a")
    write_record(directory.evaluation, {"step": 2, "metrics": {"loss": math.nan}})
    status = read_status(directory)
    assert "training    loss nan, mae inf\n" in describe(status)
    assert "evaluation  loss nan (step 2)\n" in describe(status)
    assert "loss nan" in describe_runs([asdict(status)])
    path = settings(tmp_path)
    for verb in ("status", "runs"):
        answer = json.loads(trainer(verb, "--json", TRAINER_SETTINGS=path).stdout, parse_constant=pytest.fail)
        record = answer if verb == "status" else answer[0]
        assert [record["loss"], record["metrics"]["mae"], record["evaluation"]["metrics"]["loss"]] == [
            "NaN",
            "Infinity",
            "NaN",
        ]


def test_what_is_wrong_with_an_evaluation_is_said_beside_the_message(tmp_path: Path) -> None:
    write_status(tmp_path, "a", state="training", step=3, message="evaluating")
    directory = RunDirectory(tmp_path, "a")
    write_record(directory.evaluation, {"step": 2, "metrics": {"loss": 0.5}, "trouble": "nothing is kept by it"})
    assert read_status(directory).message == "evaluating. nothing is kept by it"


def test_parameters_are_shown_of_a_run_and_of_one_that_is_to_begin(tmp_path: Path) -> None:
    given = {"rate": 0.1, "layers": [64, 64]}
    write_status(tmp_path, "a", state="training", program_args=given)
    assert "parameters  rate=0.1, layers=[64, 64]\n" in describe(read_status(RunDirectory(tmp_path, "a")))
    assert describe_runs([asdict(each) for each in read_all(tmp_path)]).endswith("  rate=0.1, layers=[64, 64]")
    config = Config(program="mine:One", run="b", shared_dir=str(tmp_path), program_args=given)
    assert read_status(RunDirectory(tmp_path, "b"), config).program_args == given


def test_text_shows_what_is_known() -> None:
    status = Status(
        run="a", run_dir="/r/a", state="training", step=10, steps=40, steps_per_second=20.0, eta_seconds=1.5
    )
    text = describe(status)
    assert "step        10 of 40" in text
    assert "20 steps/s" in text
    assert "checkpoint" not in text
    assert describe_runs([asdict(status)]).splitlines()[1].split() == ["a", "training", "10/40"]


@pytest.mark.parametrize("command", ["status", "runs"])
def test_commands_load_no_tensorflow(tmp_path: Path, command: str) -> None:
    script = (
        "import sys; from trainer.__main__ import main; "
        f"code = main(['{command}', '--settings', sys.argv[1]], {{}}); "
        "assert 'tensorflow' not in sys.modules and 'grpc' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, settings(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status"], "no run settings: set TRAINER_SETTINGS"),
        (["status", "--settings", "/nowhere/run.json"], "cannot read the run settings /nowhere/run.json"),
        ([], "TF_CONFIG is not set"),
    ],
)
def test_operators_mistake_is_one_line_and_78(arguments: list[str], expected: str) -> None:
    done = trainer(*arguments)
    assert done.returncode == 78
    assert done.stderr.startswith("error: " + expected)
    assert done.stderr.count("\n") == 1


class Heard(Notifier):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def status(self, status: str) -> None:
        self.lines.append(status)


def test_systemd_and_the_status_say_the_same(tmp_path: Path) -> None:
    config = Config(program="mine:One", run="a", steps=3000, shared_dir=str(tmp_path))
    directory, heard = RunDirectory(tmp_path, "a"), Heard()
    progress = Progress(config, directory, heard)
    progress.enter(RunState.WAITING, "no answer from ps-1 (host:2222)")
    assert heard.lines == ["waiting a: no answer from ps-1 (host:2222)"]
    progress.close()
    assert read_status(directory).message == "no answer from ps-1 (host:2222)"
    progress.status.step, progress.status.steps_per_second = 1200, 350.2
    progress.enter(RunState.TRAINING)
    assert heard.lines[-1] == "training a: step 1200 of 3000, 350.2 steps/s"
    progress.close()
    assert read_status(directory).message == ""


def test_training_goes_on_when_the_status_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").write_text("a file where a directory should be")
    config = Config(program="mine:One", run="a", shared_dir=str(tmp_path))
    directory = RunDirectory(tmp_path, "b")
    progress = Progress(config, directory, Heard())
    directory.status = tmp_path / "runs" / "a" / "status.json"
    progress.enter(RunState.TRAINING)
    progress.close()
    assert "cannot write" in caplog.text


def test_of_many_broken_ways_some_are_named() -> None:
    """A host of a ps that is cut off breaks a way of each worker."""
    ways = {f"worker-{n}": {"ps-0": "broken (no answer in 4 s)", "ps-1": "ok"} for n in range(300)}
    text = describe_ways(ways)
    assert text.startswith("300 of 600 work. worker-0 to ps-0: broken (no answer in 4 s). worker-1 to ps-0: ")
    assert text.endswith("worker-19 to ps-0: broken (no answer in 4 s). And 280 more")
