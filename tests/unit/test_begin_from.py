"""A run that begins from a checkpoint of another, and the list of a run's checkpoints."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.core.settings.config import Config, ConfigError
from trainer.run.begin_from import begin_from
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.selections.selection import apply_selection
from trainer.telemetry.checkpoints import describe_checkpoints, read_checkpoints


@pytest.fixture
def old(tmp_path: Path) -> RunDirectory:
    """Return a run with checkpoints of steps 10, 20 and 30."""
    directory = RunDirectory(tmp_path, "old")
    directory.claim(Config(program="p:P", run="old", shared_dir=str(tmp_path), checkpoints_kept_best=1))
    directory.checkpoints.mkdir()
    for step in (10, 20, 30):
        save(directory, step, loss=1 / step)
    return directory


def save(directory: RunDirectory, step: int, loss: float | None = None) -> None:
    for ending in (".index", ".data-00000-of-00001"):
        Path(directory.catalogue.prefix(step) + ending).write_text(f"{directory.run} {step}{ending}")
    directory.catalogue.write_manifest(step, 3, "2.21.0", loss=loss, sound=loss is not None)


def test_a_new_run_has_the_checkpoint_and_the_program(old: RunDirectory, tmp_path: Path) -> None:
    assert begin_from(tmp_path, "new", "old@20")
    new = RunDirectory(tmp_path, "new")
    assert new.catalogue.steps() == [20]
    assert new.catalogue.check(20) == ""
    assert (new.checkpoints / "ckpt-20.index").read_text() == "old 20.index"
    record = read_record(new.settings)
    assert record is not None
    assert (record["program"], record["from"]) == ("p:P", "old@20")
    assert old.catalogue.steps() == [10, 20, 30]


@pytest.mark.parametrize(
    ("program", "given", "kept"),
    [
        (None, {}, {"rate": 0.1, "units": 8}),
        ("p:P", {"rate": 0.2}, {"rate": 0.2, "units": 8}),
        ("q:Q", {"rate": 0.2}, {"rate": 0.2}),
    ],
)
def test_the_new_run_has_the_others_parameters_where_it_has_its_program(
    old: RunDirectory, tmp_path: Path, program: str | None, given: dict[str, float], kept: dict[str, float]
) -> None:
    record = read_record(old.settings)
    assert record is not None
    write_record(old.settings, {**record, "program_args": {"rate": 0.1, "units": 8}})
    begin_from(tmp_path, "new", "old@20", program, given)
    settings = Config(program="p:P", shared_dir=str(tmp_path), program_args={"depth": 2})
    assert apply_selection(settings, {"run": "new", "program_args": given}).program_args == kept


def test_the_new_run_outlives_the_checkpoint_of_the_other(old: RunDirectory, tmp_path: Path) -> None:
    begin_from(tmp_path, "new", "old@20")
    old.catalogue.remove(20)
    save(old, 20)
    assert RunDirectory(tmp_path, "new").catalogue.check(20) == ""


def test_where_files_can_not_be_shared_they_are_copied(
    old: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    begin_from(tmp_path, "new", "old@30")
    assert RunDirectory(tmp_path, "new").catalogue.check(30) == ""


def test_a_coordinator_keeps_in_mind_where_the_run_began(old: RunDirectory, tmp_path: Path) -> None:
    begin_from(tmp_path, "new", "old@20")
    RunDirectory(tmp_path, "new").claim(Config(program="p:P", run="new", shared_dir=str(tmp_path)))
    record = read_record(RunDirectory(tmp_path, "new").settings)
    assert record is not None
    assert record["from"] == "old@20"
    assert record["settings"]["run"] == "new"


def test_what_was_begun_is_not_begun_again(old: RunDirectory, tmp_path: Path) -> None:
    begin_from(tmp_path, "new", "old@20")
    new = RunDirectory(tmp_path, "new")
    save(new, 40)
    assert not begin_from(tmp_path, "new", "old@20")
    assert new.catalogue.steps() == [20, 40]


def test_a_begin_that_was_interrupted_is_finished(old: RunDirectory, tmp_path: Path) -> None:
    new = RunDirectory(tmp_path, "new")
    new.catalogue.adopt(old.catalogue, 20)
    assert begin_from(tmp_path, "new", "old@20", "q:Q")
    assert (read_record(new.settings) or {})["program"] == "q:Q"


@pytest.mark.parametrize(
    ("run", "source", "expected"),
    [
        ("new", "old", "expected RUN@STEP, such as digits-1@2000"),
        ("new", "old@x", "expected RUN@STEP"),
        ("new", "other@10", "there is no run other in .*; the runs are old"),
        ("new", "old@15", "has no checkpoint of step 15; it has 10, 20, 30"),
        ("old", "old@10", "run old exists already and did not begin from old@10"),
    ],
)
def test_what_can_not_be_begun_is_refused(
    old: RunDirectory, tmp_path: Path, run: str, source: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        begin_from(tmp_path, run, source)
    assert not (tmp_path / "runs" / "new" / "run.json").exists()


def test_a_bad_checkpoint_is_refused(old: RunDirectory, tmp_path: Path) -> None:
    (old.checkpoints / "ckpt-20.index").write_text("something")
    with pytest.raises(ConfigError, match=r"that checkpoint is bad, ckpt-20\.index has 9 bytes instead of"):
        begin_from(tmp_path, "new", "old@20")


def test_a_checkpoint_that_is_replaced_while_it_is_taken_is_refused(
    old: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def replaced_meanwhile(source: Path, target: Path) -> None:
        if source.suffix == ".index":
            source.unlink()
            source.write_text("NEW 20.index")  # of the same size
        link(source, target)

    monkeypatch.setattr(os, "link", replaced_meanwhile)
    with pytest.raises(ConfigError, match=r"removed or replaced that checkpoint meanwhile .*ckpt-20\.index"):
        begin_from(tmp_path, "new", "old@20")
    new = RunDirectory(tmp_path, "new")
    assert new.catalogue.steps() == []
    assert not new.settings.exists()


def test_a_checkpoint_that_is_removed_while_it_is_taken_is_refused(
    old: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def removed_meanwhile(source: Path, target: Path) -> None:
        old.catalogue.remove(20)
        link(source, target)

    monkeypatch.setattr(os, "link", removed_meanwhile)
    with pytest.raises(ConfigError, match="choose one again"):
        begin_from(tmp_path, "new", "old@20")


def test_checkpoints_are_listed_with_why_they_are_kept(old: RunDirectory) -> None:
    old.catalogue.write_evaluation(10, {"loss": 0.5, "accuracy": 0.75})
    first, _, last = read_checkpoints(old)
    assert time.time() - first.pop("created") < 60
    evaluation, kept = {"loss": 0.5, "accuracy": 0.75}, {"sound": True, "kept": ["newest", "best"]}
    assert first == {"step": 10, "size": 38, "loss": 0.1, "evaluation": evaluation, **kept}
    assert last["kept"] == ["newest", "sound"]
    head, row, *_ = describe_checkpoints(read_checkpoints(old)).splitlines()
    assert head.split("  ")[0] == "STEP"
    assert row.split()[0] == "10"
    assert row.endswith("0.1            loss 0.5, accuracy 0.75  newest, best")


def test_checkpoints_of_a_host_whose_release_knows_less_are_listed() -> None:
    """As of `fab checkpoints` beside an older release."""
    rows = describe_checkpoints([{"step": 10, "created": 0.0}, {"step": 20, "created": 0.0, "kept": None}]).splitlines()
    assert [row.split()[::3] for row in rows[1:]] == [["10", "0.0"], ["20", "0.0"]]


def test_a_run_whose_settings_are_damaged_is_listed_all_the_same(old: RunDirectory) -> None:
    old.settings.write_text("{")
    assert [(each["step"], each["kept"]) for each in read_checkpoints(old)] == [(10, []), (20, []), (30, [])]


def test_the_commands(old: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--shared-dir", str(tmp_path)]
    assert main(["begin", "--run", "new", "--from", "old@20", *shared], {}) == 0
    assert capsys.readouterr().out == "run new begins from old@20\n"
    assert main(["checkpoints", "--run", "new", "--json", *shared], {}) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [20]
    assert main(["status", "--run", "new", *shared], {}) == 0
    assert "begun from  old@20\n" in capsys.readouterr().out
    assert main(["checkpoints", "--run", "no-such", *shared], {}) == 78
    assert "there is no run no-such" in capsys.readouterr().err
    assert main(["begin", "--from", "old@20", *shared], {}) == 78
    assert "name the new run with --run NAME" in capsys.readouterr().err


def test_the_commands_as_fab_types_them(old: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps(Config(program="p:P", run="old", shared_dir=str(tmp_path)).as_dict()))
    on_hosts = ["--json", "--settings", str(settings)]
    assert main(["begin", *on_hosts, "--run", "new", "--from", "old@20", "--program", "q:Q"], {}) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "new", "from": "old@20", "begun": True, "made": True}
    assert main(["begin", *on_hosts, "--run", "new", "--from", "old@20"], {}) == 0
    assert '"begun": false, "made": false' in capsys.readouterr().out
    assert (read_record(RunDirectory(tmp_path, "new").settings) or {})["program"] == "q:Q"
    assert main(["checkpoints", *on_hosts, "--run", "new"], {}) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [20]
    assert main(["checkpoints", *on_hosts], {}) == 0  # the chosen run's
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [10, 20, 30]
    assert main(["begin", *on_hosts, "--run", "newer", "--from", "old@21"], {}) == 78
    assert capsys.readouterr().err.startswith("error: --from old@21: run old has no checkpoint of step 21")
