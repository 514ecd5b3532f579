"""`python -m trainer export`: which runs it takes, and what it leaves in their records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_evaluator import write_checkpoint
from trainer import export_run
from trainer.core.config import Config
from trainer.core.failures import FINISHED, USER_ERROR
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import this_process
from trainer.run.records import write_record
from trainer.telemetry.status import read_status

OPTIONS = argparse.Namespace(json=False)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(export_run, "prepare_tensorflow", lambda: None)
    exported = SimpleNamespace(export_now=lambda program, directory, step: "")
    monkeypatch.setitem(sys.modules, "trainer.training.export", exported)
    directory = RunDirectory(tmp_path, "mine")
    write_checkpoint(directory, 10)
    write_record(directory.settings, {"program": "mine:One"})
    return directory


def say(directory: RunDirectory, state: RunState, message: str) -> None:
    write_record(directory.status, {"run": "mine", "run_dir": "", "state": state, "message": message})


def export(directory: RunDirectory) -> int:
    return export_run.run_export(
        OPTIONS, Config(program="mine:One", shared_dir=str(directory.path.parents[1]), run="mine")
    )


def test_a_run_whose_coordinator_lives_is_refused(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    say(directory, RunState.TRAINING, "")
    write_record(directory.lease(1), {**this_process(), "released": False})
    assert export(directory) == USER_ERROR
    assert "run mine is training: it exports its model at its end; or stop it first" in capsys.readouterr().err


def test_a_run_whose_coordinator_was_killed_in_its_export_is_finished(directory: RunDirectory) -> None:
    say(directory, RunState.TRAINING, "exporting the model")
    write_record(directory.lease(1), {**this_process(), "started": -1, "released": False})
    directory.set_state(RunState.FINISHED, 10, asked=10)
    assert export(directory) == FINISHED
    status = read_status(directory)
    assert (status.state, status.message, status.export) == (RunState.FINISHED, "", str(directory.export))


def test_a_run_that_failed_still_says_why(directory: RunDirectory) -> None:
    say(directory, RunState.FAILED, "why")
    assert export(directory) == FINISHED
    status = read_status(directory)
    assert (status.state, status.message, status.export) == (RunState.FAILED, "why", str(directory.export))
