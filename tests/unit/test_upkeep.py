"""Whole runs are copied, taken back, cloned, deleted and pruned, also when a process is killed in the middle."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run import copies, upkeep
from trainer.run.copies import find_damage
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.lease import this_process
from trainer.run.records import read_record, write_record
from trainer.run.selections import queue_changes
from trainer.run.selections.queue import Queue
from trainer.telemetry.status import Status, read_status


def tell(done: int) -> None:
    pass


@pytest.fixture
def config(tmp_path: Path) -> Config:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "backups").mkdir()
    write_record(shared / "selection.json", {"run": "chosen"})
    return Config(program="p:P", run="digits", shared_dir=str(shared), lease_seconds=10.0)


def make(
    config: Config, run: str, state: RunState = RunState.FINISHED, steps: tuple[int, ...] = (10, 20)
) -> RunDirectory:
    directory = RunDirectory(config.shared_dir, run)
    directory.claim(config.replace(run=run))
    for step in steps:
        save(directory, step)
    directory.set_state(state, max(steps, default=0), epoch=3)
    directory.set_members(members={"ps-0": "abc"})
    Status(run, str(directory.path), state=state, step=max(steps, default=0), export=str(directory.export)).write(
        directory
    )
    directory.event_log.write_text('{"event": "started"}\n')
    directory.tasks.mkdir()
    (directory.tasks / "ps-0.jsonl").write_text('{"a": 1}\n{"half')
    directory.callbacks.mkdir()
    (directory.callbacks / "20.json").write_text("{}")
    return directory


def save(directory: RunDirectory, step: int) -> None:
    directory.checkpoints.mkdir(exist_ok=True)
    for ending in (".index", ".data-00000-of-00001"):
        Path(directory.catalogue.prefix(step) + ending).write_text(f"{directory.run} {step}{ending}")
    directory.catalogue.write_manifest(step, 3, "2.21.0", loss=1.0, sound=True)


def train(directory: RunDirectory, renewed: float = 0.0) -> None:
    """Have a coordinator of another host hold the lease, renewed so many seconds ago."""
    record = {**this_process(), "host": "another", "epoch": 4, "holder": "x", "released": False}
    write_record(directory.lease(4), record)
    os.utime(directory.lease(4), (time.time() - renewed,) * 2)


def test_a_copy_has_what_a_run_is_and_its_manifest_proves_it(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits", RunState.TRAINING)
    train(directory)
    answer = upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    copy = Path(answer["copy"])
    assert (copy.name, answer["outcome"], answer["step"]) == ("digits@20", "done", 20)
    assert sorted(path.name for path in copy.rglob("ckpt-20*")) == [
        "ckpt-20.data-00000-of-00001",
        "ckpt-20.index",
        "ckpt-20.manifest.json",
    ]
    assert not list(copy.rglob("lease-*"))
    assert (copy / "tasks/ps-0.jsonl").read_text() == '{"a": 1}\n'
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=copy, check=True)
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["digits@20"]


def test_a_copy_that_is_there_is_proven_and_not_made_again(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    first = upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    again = upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    assert (again["outcome"], again["copy"]) == ("there already", first["copy"])
    (Path(first["copy"]) / "checkpoints/ckpt-20.index").write_text("digits 20.inDex")
    assert find_damage(Path(first["copy"])) == "checkpoints/ckpt-20.index differs from SHA256SUMS"
    with pytest.raises(UserError, match="exists and is damaged"):
        upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)


@pytest.mark.parametrize("name", ["a\rb", "a  b", "a\u2028b", "a\\b", "\u00e4"])
def test_files_with_odd_names_are_copied_and_proven(config: Config, tmp_path: Path, name: str) -> None:
    (make(config, "digits").path / name).write_text("x")
    for outcome in ("done", "there already"):
        answer = upkeep.back_up(config, "digits", tmp_path, tell, plan=False)
        assert answer["outcome"] == outcome
    upkeep.restore(config, Path(answer["copy"]), "again", tell, plan=False)
    assert (RunDirectory(config.shared_dir, "again").path / name).read_text() == "x"


@pytest.mark.parametrize("name", ["a\nb", "caf\udce9"])
def test_files_that_no_manifest_can_name_are_refused_first(config: Config, tmp_path: Path, name: str) -> None:
    (make(config, "digits").path / name).write_text("x")
    with pytest.raises(UserError, match=r"run digits has a file .*: expected a name of UTF-8 in one line"):
        upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    assert list((tmp_path / "backups").iterdir()) == []


def test_a_plan_copies_nothing(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    answer = upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=True)
    assert (answer["outcome"], answer["step"], answer["files"] > 5) == ("planned", 20, True)
    assert list((tmp_path / "backups").iterdir()) == []


def test_a_copy_that_was_killed_is_not_seen_and_goes_on(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits")
    backups = tmp_path / "backups"
    stopped = 0

    def stop_in_the_middle(done: int) -> None:
        nonlocal stopped
        stopped = done
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upkeep.back_up(config, "digits", backups, stop_in_the_middle, plan=False)
    assert [path.name for path in backups.iterdir()] == [".digits.coming"]
    before = {path: path.stat().st_ino for path in (backups / ".digits.coming/checkpoints").iterdir()}
    assert before
    save(directory, 30)  # it trains on meanwhile
    upkeep.back_up(config, "digits", backups, tell, plan=False)
    assert [path.name for path in backups.iterdir()] == ["digits@30"]
    kept = {path.name: path.stat().st_ino for path in (backups / "digits@30/checkpoints").iterdir()}
    assert all(kept[path.name] == number for path, number in before.items())
    assert find_damage(backups / "digits@30") == ""


def test_two_copies_of_a_run_are_not_made_at_once(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    with (
        copies.alone(tmp_path / "backups/.digits.coming"),
        pytest.raises(UserError, match="another process is at work"),
    ):
        upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)


def test_a_checkpoint_that_is_removed_meanwhile_is_none_of_the_copy(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits", steps=(10, 20))

    def prune(done: int) -> None:
        if directory.catalogue.newest() == 20:
            directory.catalogue.remove(10)
            directory.catalogue.remove(20)
            save(directory, 30)

    answer = upkeep.back_up(config, "digits", tmp_path / "backups", prune, plan=False)
    assert answer["step"] == 30
    copied = Path(answer["copy"]) / "checkpoints"
    assert sorted(path.name for path in copied.glob("*.manifest.json")) == ["ckpt-30.manifest.json"]
    assert find_damage(copied.parent) == ""


def test_a_checkpoint_that_is_replaced_meanwhile_is_copied_whole(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits", steps=(20,))
    replaced = False

    def replace(done: int) -> None:
        nonlocal replaced
        if not replaced and list((tmp_path / "backups").rglob("ckpt-20.index")):
            replaced = True
            for ending in (".index", ".data-00000-of-00001"):
                Path(directory.catalogue.prefix(20) + ending).write_text(f"another model {ending}")
            directory.catalogue.write_manifest(20, 4, "2.21.0", loss=1.0, sound=True)

    answer = upkeep.back_up(config, "digits", tmp_path / "backups", replace, plan=False)
    copied = Path(answer["copy"]) / "checkpoints"
    assert replaced
    assert (copied / "ckpt-20.index").read_text() == "another model .index"
    assert (copied / "ckpt-20.data-00000-of-00001").read_text() == "another model .data-00000-of-00001"


def test_a_record_that_is_replaced_as_it_is_copied_is_the_old_one_or_the_new_one(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(config, "digits")
    make_directory = copies.make_directory

    def replace(path: Path) -> None:
        make_directory(path)
        record = read_record(directory.status) or {}
        write_record(directory.status, {**record, "message": f"{record.get('message')} and longer"})

    monkeypatch.setattr(copies, "make_directory", replace)
    answer = upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    assert "run" in (read_record(Path(answer["copy"]) / "status.json") or {})


def test_a_place_that_is_full_is_refused_before_anything_is_copied(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(config, "digits")

    class Full:
        f_bavail, f_frsize = 0, 4096

    monkeypatch.setattr(copies.os, "statvfs", lambda path: Full)
    with pytest.raises(UserError, match="0 MB free"):
        upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)


def test_a_folder_that_can_not_be_read_is_no_part_that_a_copy_lacks_in_silence(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(config, "digits")
    list_folder = os.scandir

    def refuse(path: str) -> Any:
        if str(path) == str(directory.callbacks):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="callbacks"):
        upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)
    assert not list((tmp_path / "backups").glob("digits@*"))


def test_a_link_to_a_folder_elsewhere_is_refused_and_one_within_the_run_is_none(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits")
    (directory.path / "newest").symlink_to("tasks")
    assert upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["outcome"] == "done"
    (tmp_path / "elsewhere").mkdir()
    (directory.path / "events").symlink_to(tmp_path / "elsewhere")
    for plan in (True, False):
        with pytest.raises(UserError, match=r"events is a link to a folder outside of the run.*put the folder itself"):
            upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=plan)


def test_a_run_is_taken_back_as_it_was_and_nobody_trains_it(config: Config, tmp_path: Path) -> None:
    directory = make(config, "digits", RunState.TRAINING)
    copy = Path(upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["copy"])
    upkeep.delete_run(config, "digits", plan=False)
    assert upkeep.restore(config, copy, None, tell, plan=True)["outcome"] == "planned"
    assert not directory.path.exists()
    assert upkeep.restore(config, copy, None, tell, plan=False)["outcome"] == "done"
    assert upkeep.restore(config, copy, None, tell, plan=False)["outcome"] == "there already"
    assert directory.catalogue.steps() == [10, 20]
    assert directory.catalogue.check(20) == ""
    state = directory.read_state()
    assert (state["state"], state["step"], state["members"], state["epoch"]) == ("stopped", 20, {}, 0)
    assert read_status(directory).state is RunState.STOPPED
    assert directory.read_claim(config) is not None


def test_a_run_is_taken_back_under_another_name(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    copy = Path(upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["copy"])
    with pytest.raises(UserError, match="exists already, and is not this copy"):
        upkeep.restore(config, copy, None, tell, plan=False)
    upkeep.restore(config, copy, "digits-2", tell, plan=False)
    other = RunDirectory(config.shared_dir, "digits-2")
    status = read_status(other)
    assert (status.run, status.run_dir, status.export) == ("digits-2", str(other.path), str(other.export))
    record = read_record(other.settings)
    assert record is not None
    assert record["settings"]["run"] == "digits-2"


def test_a_damaged_copy_is_not_taken_back(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    copy = Path(upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["copy"])
    (copy / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"run.json is damaged"):
        upkeep.restore(config, copy, "digits-2", tell, plan=False)
    assert [each.run for each in run_directories(Path(config.shared_dir))] == ["digits"]
    with pytest.raises(UserError, match="is no copy of a run"):
        upkeep.restore(config, tmp_path, None, tell, plan=False)


def test_a_manifest_that_leads_elsewhere_is_refused(config: Config, tmp_path: Path) -> None:
    make(config, "digits")
    copy = Path(upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["copy"])
    (copy / "SHA256SUMS").write_text("0" * 64 + "  ../../selection.json\n")
    with pytest.raises(UserError, match="expected paths below the folder"):
        upkeep.restore(config, copy, "digits-2", tell, plan=False)


def test_a_clone_goes_on_by_itself_and_shares_the_checkpoints_bytes(config: Config) -> None:
    directory = make(config, "digits", RunState.TRAINING)
    train(directory)
    assert upkeep.clone(config, "digits", "twin", tell, plan=False)["outcome"] == "done"
    assert upkeep.clone(config, "digits", "twin", tell, plan=False)["outcome"] == "there already"
    twin = RunDirectory(config.shared_dir, "twin")
    index = "ckpt-20.index"
    assert (twin.checkpoints / index).stat().st_ino == (directory.checkpoints / index).stat().st_ino
    assert (twin.state.stat().st_ino, twin.lease_epoch()) != (directory.state.stat().st_ino, 4)
    directory.catalogue.remove(20)
    assert twin.catalogue.check(20) == ""
    make(config, "other")
    with pytest.raises(UserError, match="is no clone of other"):
        upkeep.clone(config, "other", "twin", tell, plan=False)


@pytest.mark.parametrize("name", ["later", "rates-2"])
def test_no_copy_becomes_a_run_that_waits_in_the_queue(config: Config, tmp_path: Path, name: str) -> None:
    make(config, "digits")
    copy = Path(upkeep.back_up(config, "digits", tmp_path / "backups", tell, plan=False)["copy"])
    points = [{"rate": 0.1}, {"rate": 0.2}]
    queue_changes.add(config, {"name": "rates", "points": points}, plan=False)
    queue_changes.add(config, {"name": "later"}, plan=False)
    Queue.read(config.shared_dir).begin("rates-1")
    entry = "later" if name == "later" else "rates"
    refusal = rf"run {name} waits in the queue, and would go on from this copy: .*fab queue-remove {entry}\)"
    for plan in (True, False):
        with pytest.raises(UserError, match=refusal):
            upkeep.clone(config, "digits", name, tell, plan)
        with pytest.raises(UserError, match=refusal):
            upkeep.restore(config, copy, name, tell, plan)
    # One that has begun, and whose files were lost.
    assert upkeep.restore(config, copy, "rates-1", tell, plan=False)["outcome"] == "done"
    queue_changes.remove(config, entry, "bob", stop=True, plan=False)
    assert upkeep.clone(config, "digits", name, tell, plan=False)["outcome"] == "done"


def test_a_run_that_is_added_to_the_queue_meanwhile_does_not_go_on_from_a_copy(config: Config) -> None:
    make(config, "digits")

    def add(_: int) -> None:
        queue_changes.add(config, {"name": "twin"}, plan=False)

    with pytest.raises(UserError, match="run twin waits in the queue"):
        upkeep.clone(config, "digits", "twin", add, plan=False)
    assert not RunDirectory(config.shared_dir, "twin").path.exists()
    queue_changes.remove(config, "twin", "bob", stop=False, plan=False)
    assert upkeep.clone(config, "digits", "twin", tell, plan=False)["outcome"] == "done"


def test_a_clone_needs_no_room_for_the_bytes_that_it_shares(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(config, "digits")
    Path(directory.catalogue.prefix(30) + ".index").write_bytes(bytes(1 << 20))
    directory.catalogue.write_manifest(30, 3, "2.21.0")

    class Full:
        f_bavail, f_frsize = 16, 4096

    monkeypatch.setattr(copies.os, "statvfs", lambda path: Full)
    assert upkeep.clone(config, "digits", "twin", tell, plan=False)["step"] == 30


def test_a_run_that_trains_or_is_selected_is_not_deleted(config: Config) -> None:
    directory = make(config, "digits", RunState.TRAINING)
    train(directory)
    with pytest.raises(UserError, match=r"trained by process .* on another; stop it first: fab stop-cluster"):
        upkeep.delete_run(config, "digits", plan=True)
    train(directory, renewed=60)  # a host that died: its lease is over
    assert upkeep.delete_run(config, "digits", plan=True)["outcome"] == "planned"
    assert directory.path.is_dir()
    make(config, "chosen")
    with pytest.raises(UserError, match="it is selected; select another"):
        upkeep.delete_run(config, "chosen", plan=False)
    make(config, "later")
    queue_changes.add(config, {"name": "later", "priority": 0}, plan=False)
    with pytest.raises(UserError, match="take it out of the queue: fab queue-remove later"):
        upkeep.delete_run(config, "later", plan=False)


def test_a_deleted_run_is_gone_and_its_deletion_may_be_asked_for_twice(config: Config) -> None:
    directory = make(config, "digits")
    answer = upkeep.delete_run(config, "digits", plan=False)
    assert (answer["outcome"], answer["bytes"] > 0, directory.path.exists()) == ("done", True, False)
    interrupted = Path(config.shared_dir) / "removing/digits-1"
    interrupted.mkdir(parents=True)
    assert upkeep.delete_run(config, "digits", plan=False)["outcome"] == "not there"
    assert not interrupted.parent.exists()


def test_two_operators_delete_one_after_the_other(config: Config) -> None:
    """Or each would find that what it removes is gone, and its own run might stay."""
    first, second = make(config, "one"), make(config, "two")
    with copies.alone(Path(config.shared_dir) / "removing"):
        with pytest.raises(UserError, match=r"another process is at work on .*removing: wait until it has ended"):
            upkeep.delete_run(config, "one", plan=False)
        assert first.path.is_dir()
    assert upkeep.delete_run(config, "one", plan=False)["runs"] == [second.run]


def test_a_run_is_deleted_where_the_disk_has_no_room_for_a_directory(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make(config, "digits")
    monkeypatch.setattr(copies, "make_directory", refuse)
    assert upkeep.delete_run(config, "digits", plan=False)["outcome"] == "done"
    assert list((Path(config.shared_dir) / "runs").iterdir()) == []


def test_runs_are_removed_where_an_open_file_stays_in_its_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS has it: what a process has open gets another name there until it is closed."""
    remove_folder = os.rmdir

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        if any(each.startswith(f"{path}/") and each.endswith(" (deleted)") for each in opened):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove_folder(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refuse)
    directory = make(config, "digits")
    unfinished = directory.path.with_name(".x.coming")
    unfinished.mkdir()
    with (directory.path / "state.json").open():  # by another process of this host
        assert upkeep.delete_run(config, "digits", plan=False)["outcome"] == "done"
    assert upkeep.prune_runs(config, 1, plan=False)["outcome"] == "done"
    assert not unfinished.exists()
    assert not (Path(config.shared_dir) / "removing").exists()


def test_what_can_not_be_removed_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    make(config, "digits")
    remove_file = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if str(path) == "ps-0.jsonl":
            raise OSError(errno.EIO, "Input/output error", path)
        remove_file(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            upkeep.delete_run(config, "digits", plan=False)
    assert upkeep.delete_run(config, "digits", plan=False)["outcome"] == "not there"
    assert not (Path(config.shared_dir) / "removing").exists()


def test_a_run_is_deleted_where_no_file_more_can_be_made(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    train(make(config, "digits"), renewed=60)

    def refuse(*arguments: object, **named: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert upkeep.delete_run(config, "digits", plan=False)["outcome"] == "done"


def test_prune_keeps_the_newest_and_what_is_in_use(config: Config) -> None:
    for number, run in enumerate(["a", "b", "chosen", "c", "d"]):
        directory = make(config, run)
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))
    train(RunDirectory(config.shared_dir, "b"))
    unfinished = Path(config.shared_dir) / "runs/.x.coming"
    unfinished.mkdir()
    planned = upkeep.prune_runs(config, 1, plan=True)
    assert (planned["removed"], planned["left"]) == (["a", "c"], [".x.coming"])
    assert set(planned["kept"]) == {"b", "chosen", "d"}
    assert unfinished.exists()
    done = upkeep.prune_runs(config, 1, plan=False)
    assert done["bytes"] == planned["bytes"] > 0
    assert [each.run for each in run_directories(Path(config.shared_dir))] == ["b", "chosen", "d"]
    assert not unfinished.exists()
    assert upkeep.prune_runs(config, 1, plan=False)["removed"] == []


def test_bytes_that_another_run_shares_are_not_counted_as_freed(config: Config) -> None:
    directory = make(config, "digits")
    alone = upkeep.freed([directory.path])["bytes"]
    upkeep.clone(config, "digits", "twin", tell, plan=False)
    shared = sum(path.stat().st_size for path in directory.checkpoints.iterdir())
    assert upkeep.freed([directory.path])["bytes"] == alone - shared
    assert upkeep.freed([directory.path, RunDirectory(config.shared_dir, "twin").path])["bytes"] > alone


def test_the_commands_print_how_far_they_are_and_their_answer(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(config, "digits")
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"program": "p:P", "run": "digits", "shared_dir": config.shared_dir}))
    monkeypatch.setattr("trainer.keep_run.EVERY_SECONDS", -1.0)
    words = ["--settings", str(settings)]
    assert main(["backup", "digits", "--to", str(tmp_path / "backups"), *words], {}) == 0
    *progress, answer = map(json.loads, capsys.readouterr().out.splitlines())
    assert progress[-1] == {"done": answer["bytes"]}
    assert main(["restore-run", answer["copy"], "--as", "digits-2", *words], {}) == 0
    assert main(["clone-run", "digits-2", "digits-3", *words], {}) == 0
    assert main(["prune", "--keep", "1", "--plan", *words], {}) == 0
    assert main(["delete-run", "digits-2", *words], {}) == 0
    capsys.readouterr()
    assert main(["backup", "digits", "--to", "backups", *words], {}) == 78
    assert "expected a whole path of this host" in capsys.readouterr().err
    assert main(["backup", "gone", "--to", str(tmp_path), *words], {}) == 78
    assert "there is no run gone" in capsys.readouterr().err


def test_the_upkeep_needs_no_tensorflow() -> None:
    script = "import sys, trainer.keep_run; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
