"""`python -m trainer export`: which runs it takes, and what it leaves in their records."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_evaluator import write_checkpoint
from trainer import export_run
from trainer.core.failures import FINISHED, USER_ERROR
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import this_process
from trainer.run.records import write_record
from trainer.telemetry.status import read_status

OPTIONS = argparse.Namespace(json=False, changes=False)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("DATA_DIR", "")  # so that it is put back afterwards
    monkeypatch.delenv("DATA_DIR")
    monkeypatch.setattr(export_run, "prepare_tensorflow", lambda: None)
    exported = SimpleNamespace(
        export_now=lambda program, directory, step: "",
        export_version=lambda program, directory, step, changes: f"{directory.exports}/{step}",
    )
    monkeypatch.setitem(sys.modules, "trainer.training.exports.export", exported)
    monkeypatch.setattr(export_run, "load_program", lambda program, arguments, evaluates: None)
    directory = RunDirectory(tmp_path, "mine")
    write_checkpoint(directory, 10)
    write_record(directory.settings, {"program": "mine:One"})
    return directory


def say(directory: RunDirectory, state: RunState, message: str) -> None:
    write_record(directory.status, {"run": "mine", "run_dir": "", "state": state, "message": message})


def export(directory: RunDirectory) -> int:
    return export_run.run_export(OPTIONS, directory)


def test_a_run_that_trains_is_exported_beside_it(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    say(directory, RunState.TRAINING, "")
    write_record(directory.lease(1), {**this_process(), "released": False})
    assert export(directory) == FINISHED
    assert f"exported step 10 of mine to {directory.exports}/10" in capsys.readouterr().out
    status = read_status(directory)
    assert (status.state, status.export) == (RunState.TRAINING, None)


def test_a_run_whose_coordinator_was_killed_in_its_export_is_finished(directory: RunDirectory) -> None:
    say(directory, RunState.TRAINING, "exporting the model")
    write_record(directory.lease(1), {**this_process(), "started": -1, "released": False})
    directory.set_state(RunState.FINISHED, 10, asked=10)
    assert export(directory) == FINISHED
    status = read_status(directory)
    assert (status.state, status.message, status.export) == (RunState.FINISHED, "", str(directory.export))


def test_a_program_finds_its_data_as_in_a_task(directory: RunDirectory) -> None:
    say(directory, RunState.STOPPED, "")
    assert export(directory) == FINISHED
    assert os.environ["DATA_DIR"] == str(directory.path.parent.parent / "data")


def test_a_run_that_failed_still_says_why(directory: RunDirectory) -> None:
    say(directory, RunState.FAILED, "why")
    assert export(directory) == FINISHED
    status = read_status(directory)
    assert (status.state, status.message, status.export) == (RunState.FAILED, "why", str(directory.export))


@pytest.mark.parametrize(("removed", "code"), [(1, FINISHED), (3, USER_ERROR)])
def test_a_checkpoint_that_is_removed_meanwhile_is_not_the_newest_any_more(
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    removed: int,
    code: int,
) -> None:
    """The training goes on, and removes checkpoints that are exported."""
    say(directory, RunState.TRAINING, "")
    write_record(directory.lease(1), {**this_process(), "released": False})
    tried: list[int] = []

    def export_version(program: object, directory: RunDirectory, step: int, changes: bool) -> str:
        tried.append(step)
        if len(tried) > removed:
            return f"{directory.exports}/{step}"
        write_checkpoint(directory, step + 10)
        for path in directory.checkpoints.glob(f"ckpt-{step}.*"):
            path.unlink()
        raise FileNotFoundError("gone")

    monkeypatch.setattr(sys.modules["trainer.training.exports.export"], "export_version", export_version)
    assert export(directory) == code
    assert tried == [10, 20, 30][: removed + 1]
    out = capsys.readouterr()
    if code == FINISHED:
        assert out.out.startswith("exported step 20")
    else:
        assert out.err.startswith("error: the checkpoint of step 30 was removed while it was exported")
