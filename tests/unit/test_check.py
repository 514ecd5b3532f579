"""`python -m trainer check` says what is wrong with a release, a program or a run before a task runs on them."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

import trainer.check
from fleet.places import ROLES
from fleet.rollout.roles import Role
from fleet.site.inventory import load_inventory
from tests.unit.programs import PROGRAMS
from trainer.__main__ import main
from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.selections.queue_changes import add

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
    unevaluated = '{"run": "new", "program": "checked_program:NoEval"}'
    assert check(shared, monkeypatch, "run", "--selection", unevaluated, evaluation="none") == FINISHED
    assert sorted(path.name for path in shared.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize(
    ("selection", "settings", "message"),
    [
        ({"program": "checked_program:Goood"}, {}, "has no 'Goood': did you mean 'Good'?"),
        ({"program": "checked_program:NoEval"}, {}, "has no method eval_dataset: write it, or set evaluation: none"),
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


def test_a_mistake_of_one_of_several_runs_says_whose_it_is(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the queue the others' runs hold up a start, too."""
    config = Config(program="checked_program:Good", shared_dir=str(shared))
    for name, more in (("mine", {}), ("theirs", {"program": "checked_program:Gone"})):
        add(config, {"name": name, "settings": {}, **more}, plan=False)
    points = [{"rate": 1}, {"rate": "a"}]
    sweep = {"program": "checked_program:Rated", "sweep": {"name": "rates", "attempt": 1, "points": points}}
    for selection, message in (
        ({"queue": {}}, "error: run theirs: program checked_program:Gone: "),
        (sweep, "error: run rates-2: "),
    ):
        assert check(shared, monkeypatch, "run", "--selection", json.dumps(selection)) == USER_ERROR
        assert message in capsys.readouterr().err


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


def test_what_was_given_up_of_a_build_is_not_marked_as_built(
    shared: Path, monkeypatch: pytest.MonkeyPatch, prove: Callable[..., str]
) -> None:
    """Of two points the first one is given up: the second one is built all the same."""
    ends: list[int | None] = [None, FINISHED]
    monkeypatch.setattr(trainer.check, "build", lambda *_: ends.pop(0))
    points = [{"rate": 1}, {"rate": 2}]
    sweep = {"name": "rates", "attempt": 1, "points": points}
    selection = json.dumps({"run": "r", "program": "checked_program:Rated", "sweep": sweep})
    said = prove("run", "--build-here", "--selection", selection)
    assert ends == []
    assert [line.endswith(" built") for line in said.splitlines() if line.startswith("mark: ")] == [False, False]


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


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's directory, in which the check works."""
    place = tmp_path / "releases" / "abc"
    place.mkdir(parents=True)
    (place / "slow.py").write_text("a")
    digest = hashlib.sha256(b"a").hexdigest()
    (place / "SHA256SUMS").write_text(f"# psfleet release abc\n{digest}  slow.py\n")
    (place / "env").symlink_to("../../envs/cpu-1")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def prove(
    shared: Path, release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Check as the role does; what is said is returned, and marks are kept."""
    monkeypatch.setattr(trainer.check, "build", lambda *_: FINISHED)
    monkeypatch.setattr(trainer.check, "go_first", lambda: None)

    def prove(*arguments: str, start: bool = False, env: Mapping[str, str] | None = None, **settings: object) -> str:
        given = {"program": "checked_program:Good", "shared_dir": str(shared), **settings}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(given)))
        known = {} if start else {"TRAINER_PROVEN": str(shared / "proven")}
        environment = {"TRAINER_PROOF": "sandbox", **known, **(env or {})}
        assert main(["check", *arguments, "--settings", "-"], environment) == FINISHED
        said = capsys.readouterr().out
        with (shared / "proven").open("a") as kept:
            kept.writelines(f"{line.removeprefix('mark: ')}\n" for line in said.splitlines() if "mark: " in line)
        return said

    return prove


STARTED = ("run", "--build-here", "--selection", '{"run": "digits-2"}')


def test_what_a_start_has_proven_is_not_proven_again_with_equal_settings(
    shared: Path, release: Path, prove: Callable[..., str]
) -> None:
    again = "proven: release abc, before\n"
    assert prove("program") != again
    assert prove("program") == again
    assert again not in prove(*STARTED, start=True)
    assert again not in prove(*STARTED, start=True)  # a start proves each time
    (shared / "selection.json").write_text('{"run": "digits-2"}')
    assert prove("program") == prove("run") == prove("run", "--build-here") == again
    RunDirectory(shared, "digits-2").claim(Config(program="checked_program:Good", run="digits-2"))
    assert prove("run") == again  # as it has begun
    assert prove("program", steps=7) != again
    assert prove("program", env={"TRAINER_PROOF": "another sandbox"}) != again
    (shared / "selection.json").write_text('{"run": "rated", "program": "checked_program:Rated"}')
    assert prove("run") != again
    assert prove("run") == again
    assert prove("run", "--build-here") != again  # it was not built


def test_a_mark_counts_only_for_the_files_that_were_proven(
    shared: Path, release: Path, prove: Callable[..., str]
) -> None:
    again = "proven: release abc, before\n"
    prove("program")
    assert prove("program") == again
    (release / "slow.py").write_text("b")
    assert prove("program") != again
    (release / "slow.py").unlink()
    assert prove("program") != again
    (release / "slow.py").write_text("a")
    assert prove("program") == again
    (release / "env").unlink()
    (release / "env").symlink_to("../../envs/cpu-2")
    assert prove("program") != again


def test_a_proof_that_reads_secrets_leaves_no_mark(prove: Callable[..., str], tmp_path: Path) -> None:
    for _ in range(2):
        said = prove("program", env={"CREDENTIALS_DIRECTORY": str(tmp_path)})
        assert said == "proven: release abc, program checked_program:Good\n"


def test_a_sweep_is_proven_where_one_of_its_points_was_not(
    shared: Path, release: Path, prove: Callable[..., str]
) -> None:
    def rates(*values: int) -> str:
        points = [{"rate": value} for value in values]
        selection = {"run": "r", "program": "checked_program:Rated", "sweep": {"name": "rates", "attempt": 1}}
        return json.dumps({**selection, "sweep": {**selection["sweep"], "points": points}})  # type: ignore[dict-item]

    prove("run", "--selection", rates(1, 2), start=True)
    assert prove("run", "--selection", rates(2, 1)) == "proven: release abc, before\n"
    assert "before" not in prove("run", "--selection", rates(1, 2, 3))


def test_the_role_and_a_start_keep_the_same_marks() -> None:
    inventory = load_inventory("inventory/gpu-example")
    host = inventory.chief.host

    def role(**more: object) -> Role:
        return Role(
            inventory, host, "release", "release.yml", "prove", psfleet_release="abc",
            __release_now={"stdout_lines": []}, __release_running=False, **more,
        )  # fmt: skip

    site, start = role(), role(fab_shipment={"release": "abc", "selection": {"run": "r"}, "untried": True})
    ours, theirs = (each.value("__release_proof_environment") for each in (site, start))
    assert ours == {**theirs, "TRAINER_PROVEN": "/opt/trainer/proven"}
    assert [each.arguments("prove", "ansible.builtin.command")["argv"][:4] for each in (site, start)] == [
        ["sh", "-c", site.value("__release_keep_marks"), "sh"]
    ] * 2


@pytest.mark.parametrize(("code", "kept"), [(0, ["one", "one built", "old"]), (1, ["old"])])
def test_marks_are_kept_once_of_what_proved_right(tmp_path: Path, code: int, kept: list[str]) -> None:
    place = tmp_path / "proven"
    place.write_text("old\n")
    variables = yaml.safe_load((ROLES / "release/vars/main.yml").read_text())
    script = variables["__release_keep_marks"].replace("/opt/trainer/proven", str(place))
    proof = f"cat; echo 'proven: x'; echo 'mark: one'; echo 'mark: one built'; echo 'error: y' >&2; exit {code}"
    for _ in range(2):
        done = subprocess.run(
            ["sh", "-c", script, "sh", "sh", "-c", proof], input="given\n", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (code, "error: y\n")
        assert done.stdout == "given\nproven: x\nmark: one\nmark: one built\n"
    assert place.read_text().splitlines() == kept
