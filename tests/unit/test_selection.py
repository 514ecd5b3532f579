"""What the operator chose last is laid over the settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.core.settings.config import Config, ConfigError
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.run.selections.selection import apply_selection


def config(shared: Path) -> Config:
    return Config(program="mine:One", run="first", shared_dir=str(shared))


def select(shared: Path, value: object) -> None:
    (shared / "selection.json").write_text(json.dumps(value))


def test_without_a_selection_the_settings_count(tmp_path: Path) -> None:
    assert apply_selection(config(tmp_path)) == config(tmp_path)


def test_selection_overrides_run_and_program(tmp_path: Path) -> None:
    select(tmp_path, {"run": "second", "program": "mine:Two"})
    chosen = apply_selection(config(tmp_path))
    assert (chosen.run, chosen.program) == ("second", "mine:Two")


def test_a_new_run_takes_the_settings_program_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    select(tmp_path, {"run": "second"})
    assert apply_selection(config(tmp_path)).program == "mine:One"
    RunDirectory(tmp_path, "second").claim(config(tmp_path).replace(run="second", program="mine:Two"))
    assert apply_selection(config(tmp_path)).program == "mine:Two"


def test_a_new_run_takes_the_settings_parameters_for_their_program_alone(tmp_path: Path) -> None:
    settings = config(tmp_path).replace(program_args={"rate": 0.1, "units": 8})
    select(tmp_path, {"run": "second", "program_args": {"rate": 0.2}})
    assert apply_selection(settings).program_args == {"rate": 0.2, "units": 8}
    select(tmp_path, {"run": "second", "program": "mine:Two", "program_args": {"rate": 0.2}})
    assert apply_selection(settings).program_args == {"rate": 0.2}
    select(tmp_path, {"program_args": {"units": 9}})
    assert apply_selection(settings).program_args == {"rate": 0.1, "units": 9}


def test_an_old_run_keeps_its_parameters_whatever_the_settings_say_by_now(tmp_path: Path) -> None:
    began = config(tmp_path).replace(run="second", program_args={"rate": 0.1})
    RunDirectory(tmp_path, "second").claim(began)
    select(tmp_path, {"run": "second"})
    settings = config(tmp_path).replace(program_args={"rate": 0.5, "units": 8})
    assert apply_selection(settings).program_args == {"rate": 0.1}
    assert apply_selection(config(tmp_path)).program_args == {"rate": 0.1}
    # What is asked for beside it is not lost, so that the coordinator can refuse it.
    select(tmp_path, {"run": "second", "program_args": {"units": 8}})
    assert apply_selection(config(tmp_path)).program_args == {"rate": 0.1, "units": 8}
    # Nor where the settings name the run themselves.
    select(tmp_path, {})
    assert apply_selection(settings.replace(run="second")).program_args == {"rate": 0.5, "units": 8}


def test_a_run_that_failed_untrained_begins_with_what_is_asked_for_now(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "second")
    directory.claim(config(tmp_path).replace(run="second", program_args={"lr": 1}))
    select(tmp_path, {"run": "second", "program": "mine:Two", "program_args": {"rate": 0.5}})
    assert apply_selection(config(tmp_path)).program_args == {"lr": 1, "rate": 0.5}
    write_record(directory.status, {"state": "failed", "step": 0})
    assert apply_selection(config(tmp_path)).program_args == {"rate": 0.5}


def test_a_damaged_record_of_the_selected_run_is_named_with_what_fixes_it(tmp_path: Path) -> None:
    select(tmp_path, {"run": "second"})
    record = RunDirectory(tmp_path, "second").settings
    record.parent.mkdir(parents=True)
    record.write_text("{")
    with pytest.raises(ConfigError, match=r"runs/second/run.json is not JSON.*remove the file.*run second.*--program"):
        apply_selection(config(tmp_path))
    select(tmp_path, {"run": "second", "program": "mine:Two"})
    assert apply_selection(config(tmp_path)).program == "mine:Two"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"run": "../up"}, "run: is the name of a directory"),
        ({"runs": "a"}, "did you mean 'run'"),
        ({"program": 3}, "program: expected a text, not 3"),
        ({"program_args": [1]}, "program_args: expected a mapping of names to values, not [1]"),
        ({"program_args": {"a-b": 1}}, "'a-b' can't name a parameter"),
        (["run"], "holds no JSON object"),
    ],
)
def test_bad_selection_is_refused_with_its_file(tmp_path: Path, value: object, expected: str) -> None:
    select(tmp_path, value)
    with pytest.raises(ConfigError) as caught:
        apply_selection(config(tmp_path))
    assert expected in str(caught.value)
    assert str(tmp_path / "selection.json") in str(caught.value)
