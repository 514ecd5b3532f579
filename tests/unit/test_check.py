"""`python -m trainer check` says what is wrong with a release, a program or a run before a task runs on them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import trainer.check
from tests.unit.programs import PROGRAMS
from trainer.__main__ import main
from trainer.core.config import Config
from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR
from trainer.run.directory import RunDirectory

RATED = """
class Rated(Good):
    def __init__(self, rate: float = 1): ...
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared path, with a program that can be imported; TensorFlow is left out, the other modules need none."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trainer.check, "import_server_library", lambda: None)
    monkeypatch.setattr(trainer.check, "PROGRAM_MODULES", ())
    (tmp_path / "checked_program.py").write_text(f"{PROGRAMS}{RATED}")
    return tmp_path


def check(shared: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **settings: object) -> int:
    given = {"program": "checked_program:Good", "shared_dir": str(shared), **settings}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(given)))
    return main(["check", *arguments, "--settings", "-"], {})


def test_what_is_right_is_proven_and_nothing_is_written(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in shared.iterdir())
    assert check(shared, monkeypatch, "release") == FINISHED
    assert check(shared, monkeypatch, "program") == FINISHED
    assert check(shared, monkeypatch, "run", "--selection", '{"run": "new"}') == FINISHED
    assert capsys.readouterr().out.endswith("program checked_program:Good, run new\n")
    rated = '{"run": "new", "program": "checked_program:Rated", "program_args": {"rate": 2}}'
    assert check(shared, monkeypatch, "run", "--selection", rated) == FINISHED
    assert sorted(path.name for path in shared.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize(
    ("selection", "settings", "message"),
    [
        ({"program": "checked_program:Goood"}, {}, "has no 'Goood': did you mean 'Good'?"),
        ({"program": "checked_program:NoEval"}, {}, "has no method eval_dataset"),
        ({"program": "not_there:Good"}, {}, "there is no module 'not_there'"),
        ({}, {"steps": 0}, "steps: must be at least 1"),
        ({}, {"stepz": 1}, "did you mean 'steps'"),
        ({"program_args": {"rate": 1}}, {}, "its constructor has no parameter rate; it takes none"),
        ({"program": "checked_program:Rated", "program_args": {"rate": "a"}}, {}, 'rate: float, and rate is "a"'),
        ({"run": "rated", "program_args": {"rate": 2}}, {}, "run rated began with rate=1 and keeps that; it can't go"),
        ({"run": "old"}, {}, ""),
        ({"run": "old", "program": "checked_program:Good"}, {}, "run old belongs to the program other:One"),
    ],
)
def test_what_is_wrong_is_the_users_error(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    selection: dict[str, str],
    settings: dict[str, object],
    message: str,
) -> None:
    old = Config(program="other:One", run="old", shared_dir=str(shared))
    RunDirectory(shared, "old").claim(old)
    rated = old.replace(run="rated", program="checked_program:Rated", program_args={"rate": 1})
    RunDirectory(shared, "rated").claim(rated)
    code = check(shared, monkeypatch, "run", "--selection", json.dumps(selection), **settings)
    # A run that is named without a program is proven with the program that it remembers, which is not here.
    assert code == USER_ERROR
    assert (message or "there is no module 'other'") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sweep", "built"),
    [
        ({}, [("new", "")]),
        ({"points": [{"rate": 1}]}, [("rates-1", "")]),
        (
            {"points": [{"rate": 1}, {"rate": 2}, {"rate": 3}]},
            [("rates-1", "rates-1, point 1 of 3"), ("rates-2", "rates-2, point 2 of 3")],
        ),
    ],
)
def test_each_point_of_a_sweep_is_built_by_its_name_until_one_fails(
    shared: Path, monkeypatch: pytest.MonkeyPatch, sweep: dict[str, object], built: list[tuple[str, str]]
) -> None:
    asked: list[tuple[str, str]] = []

    def build(config: Config, program: object, cluster: object, point: str) -> int:
        asked.append((config.run, point))
        return USER_ERROR if config.run == "rates-2" else FINISHED

    monkeypatch.setattr(trainer.check, "build", build)
    monkeypatch.setattr(trainer.check, "go_first", lambda: None)
    selection: dict[str, object] = {"run": "new", "program": "checked_program:Rated"}
    if sweep:
        selection["sweep"] = {"name": "rates", "attempt": 1, **sweep}
    code = check(shared, monkeypatch, "run", "--build-here", "--selection", json.dumps(selection))
    assert asked == built
    assert code == (USER_ERROR if len(asked) == 2 else FINISHED)


def test_the_selection_on_the_shared_path_counts_for_the_run_alone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared / "selection.json").write_text('{"program": "not_there:Good"}')
    assert check(shared, monkeypatch, "program") == FINISHED
    assert check(shared, monkeypatch, "run") == USER_ERROR
    assert "not_there" in capsys.readouterr().err


def test_a_release_that_does_not_import_is_nobodys_program(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.check, "PROGRAM_MODULES", ("no_such_library",))
    assert check(shared, monkeypatch, "release") == FINISHED
    assert check(shared, monkeypatch, "program") == TRY_AGAIN
    monkeypatch.setattr(trainer.check, "MODULES", ("no_such_library",))
    assert check(shared, monkeypatch, "release") == TRY_AGAIN


def test_a_cluster_that_the_strategy_cannot_use_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = json.dumps({"program": "checked_program:Good", "strategy": "mirrored"})
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    cluster = {"chief": ["h:1"], "worker": ["w:1"]}
    environment = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})}
    assert main(["check", "program", "--settings", "-"], environment) == USER_ERROR
