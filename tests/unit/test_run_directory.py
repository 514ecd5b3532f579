"""The records of a run: what they keep, and what is done with damaged ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.records import read_record, write_record
from trainer.run.selections.selection import apply_selection
from trainer.telemetry.status import Status


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "mine")


def test_a_shared_path_without_runs_has_none(tmp_path: Path) -> None:
    assert run_directories(tmp_path) == []


def test_the_state_keeps_what_is_not_written_again(directory: RunDirectory) -> None:
    directory.set_state(RunState.TRAINING, 0, epoch=3)
    directory.set_members(members={"ps-0": "a"}, without=["worker-1"], restart={"ps-0": "b"})
    directory.set_state(RunState.FINISHED, 10, asked=10)
    directory.set_members(restart={})
    assert read_record(directory.state) == {
        "state": "finished",
        "step": 10,
        "asked": 10,
        "epoch": 3,
        "members": {"ps-0": "a"},
        "without": ["worker-1"],
        "restart": {},
    }


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_state_that_is_damaged_meanwhile_is_written_again(directory: RunDirectory, damage: str) -> None:
    directory.set_state(RunState.TRAINING, 5)
    directory.set_members(members={"ps-0": "a"})
    directory.state.write_text(damage)
    directory.set_state(RunState.TRAINING, 7)
    directory.set_members(without=["worker-1"], restart={"ps-0": "a"})
    record = read_record(directory.state)
    assert record is not None
    found = record["state"], record["step"], record["members"], record["without"], record["restart"]
    assert found == ("training", 7, {}, ["worker-1"], {"ps-0": "a"})


def test_what_two_threads_say_of_the_state_is_kept(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.set_state(RunState.TRAINING, 5)
    reading = threading.Event()

    def read_slowly(path: Path) -> dict[str, Any] | None:
        record = read_record(path)
        if threading.current_thread() is first:
            reading.set()
            time.sleep(0.3)
        return record

    monkeypatch.setattr("trainer.run.directory.read_record", read_slowly)
    first = threading.Thread(target=directory.set_state, args=("stopped", 6))
    first.start()
    assert reading.wait(60)
    directory.set_members(without=["worker-1"])
    first.join()
    monkeypatch.undo()
    record = read_record(directory.state)
    assert record is not None
    assert record["without"] == ["worker-1"]


def test_a_run_remembers_its_program(tmp_path: Path) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path))
    RunDirectory(tmp_path, "r").claim(config)
    RunDirectory(tmp_path, "r").claim(config.replace(steps=5))
    with pytest.raises(UserError, match=r"run r belongs to the program mine:One, not to mine:Two.*--run NAME"):
        RunDirectory(tmp_path, "r").claim(config.replace(program="mine:Two"))


def test_a_run_names_its_dynamic_tables_in_one_order(tmp_path: Path) -> None:
    directory, names = RunDirectory(tmp_path, "r"), [f"table_{letter}" for letter in "abcdefgh"]
    tables = {name: {"capacity": 10} for name in reversed(names[:4])}
    directory.claim(Config(program="mine:One", run="r", shared_dir=str(tmp_path), dynamic_tables=tables))
    directory.declare_tables(set(names[2:]))
    assert directory.dynamic_tables == names


def test_the_name_of_a_run_that_failed_before_it_trained_is_free(tmp_path: Path) -> None:
    config, directory = Config(program="mine:Onee", run="r", shared_dir=str(tmp_path)), RunDirectory(tmp_path, "r")
    directory.claim(config)
    write_record(directory.status, {"state": "failed", "step": None})
    directory.claim(config.replace(program="mine:One"))
    assert (read_record(directory.settings) or {})["program"] == "mine:One"
    write_record(directory.status, {"state": "failed", "step": 3})
    with pytest.raises(UserError, match="belongs to the program mine:One"):
        directory.claim(config.replace(program="mine:Two"))


def test_a_run_keeps_its_parameters(tmp_path: Path) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path), program_args={"rate": 0.1, "units": 8})
    RunDirectory(tmp_path, "r").claim(config)
    RunDirectory(tmp_path, "r").claim(config.replace(steps=5))
    began = "run r began with rate=0.1, units=8 and keeps that; it can't go on with "
    for other, difference in ({"rate": 0.2}, "rate=0.2"), ({"rate": 0.1, "more": None}, "more=null"):
        with pytest.raises(UserError) as caught:
            RunDirectory(tmp_path, "r").claim(config.replace(program_args=other))
        assert f"{began}{difference}: start another run with --run NAME" in str(caught.value)


def test_a_run_of_an_earlier_version_began_without_parameters(tmp_path: Path) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path))
    write_record(RunDirectory(tmp_path, "r").settings, {"program": "mine:One", "created": 1.0})
    RunDirectory(tmp_path, "r").claim(config)
    with pytest.raises(UserError, match="began with no parameters"):
        RunDirectory(tmp_path, "r").claim(config.replace(program_args={"rate": 0.2}))


def test_finished_until_more_steps_are_wanted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    assert directory.finished(100) is None
    directory.set_state(RunState.TRAINING, 0)
    assert directory.finished(100) is None
    directory.set_state(RunState.FINISHED, 100)
    assert directory.finished(100) == 100
    assert directory.finished(50) == 100
    assert directory.finished(200) is None


@pytest.mark.parametrize("damage", ["", '{"program": "mi', "\0" * 40, "[]", "{}"])
def test_what_a_run_began_with_is_made_again_of_its_status_and_the_damaged_record_is_kept(
    tmp_path: Path, damage: str
) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path), program_args={"rate": 0.1})
    directory = RunDirectory(tmp_path, "r")
    directory.claim(config)
    status = Status("r", "", program="mine:One", program_args={"rate": 0.1}, begun_from="old@20")
    status.write(directory)
    directory.settings.write_text(damage)
    with pytest.raises(UserError, match=r"began with rate=0\.1"):
        directory.claim(config.replace(program_args={"rate": 0.2}))
    write_record(tmp_path / "selection.json", {"run": "r"})
    assert apply_selection(config.replace(program="other:O", run="x", program_args={})).program == "mine:One"
    directory.claim(config)
    record = read_record(directory.settings)
    assert record is not None
    assert (record["program"], record["program_args"], record["from"]) == ("mine:One", {"rate": 0.1}, "old@20")
    assert record["settings"]["run"] == "r"
    assert (directory.path / "run.json.bad").read_text() == damage


@pytest.mark.parametrize("status", [None, "{", '{"step": 7}'])
def test_what_nobody_knows_of_a_damaged_record_is_asked_of_the_user(tmp_path: Path, status: str | None) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path))
    directory = RunDirectory(tmp_path, "r")
    directory.claim(config)
    directory.settings.write_text("")
    if status:
        directory.status.write_text(status)
    with pytest.raises(
        UserError, match=r"run.json is not JSON: .*; remove the file, or put a good one there, and start"
    ):
        directory.claim(config)
    assert directory.settings.read_text() == ""


def test_damaged_records_are_set_aside_and_whole_ones_stay(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    directory.set_state(RunState.FINISHED, 100)
    directory.evaluation.write_text('{"step": 7}')
    directory.status.write_text('{"step": 7, "sta')
    directory.set_damaged_records_aside()
    assert directory.finished(100) == 100
    assert directory.evaluation.exists()
    assert not directory.status.exists()
    assert (directory.path / "status.json.bad").read_text() == '{"step": 7, "sta'
    directory.state.write_text("")
    assert directory.finished(100) is None
    directory.set_damaged_records_aside()
    directory.set_state(RunState.TRAINING, 50)
    assert (directory.path / "state.json.bad").read_text() == ""
