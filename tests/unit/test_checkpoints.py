"""Which files in a run directory count, and which are removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import __version__
from trainer.config import Config
from trainer.failures import UserError
from trainer.run import checkpoints
from trainer.run.checkpoints import RunDirectory, run_directories
from trainer.run.records import read_record


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "mine")
    directory.checkpoints.mkdir(parents=True)
    return directory


def write(directory: RunDirectory, step: int, epoch: int = 1, shards: int = 2) -> None:
    """Save a checkpoint as the trainer does: TensorFlow's files, then the manifest."""
    directory.remove(step)
    write_files(directory, step, shards)
    directory.write_manifest(step, epoch, "2.21.0")


def write_files(directory: RunDirectory, step: int, shards: int = 2, beside: bool = False) -> None:
    for ending in (".index", *(f".data-{shard:05d}-of-{shards:05d}" for shard in range(shards))):
        text = f"{step}{ending}" + (" anew" if beside else "")
        Path(directory.prefix(step, beside) + ending).write_text(text)


def there(directory: RunDirectory) -> set[str]:
    return {path.name for path in directory.checkpoints.iterdir()}


def test_newest_by_number_and_not_by_name(directory: RunDirectory) -> None:
    for step in (900, 1000, 50):
        write(directory, step)
    assert directory.steps() == [50, 900, 1000]
    assert directory.newest() == 1000


def test_a_manifest_says_what_a_checkpoint_consists_of_and_who_wrote_it(directory: RunDirectory) -> None:
    write(directory, 7, epoch=3)
    record = read_record(directory.manifest(7))
    assert record is not None
    index = b"7.index"
    assert 0 <= time.time() - record.pop("created") < 60
    assert record == {
        "step": 7,
        "epoch": 3,
        "files": {"ckpt-7.index": 7, "ckpt-7.data-00000-of-00002": 21, "ckpt-7.data-00001-of-00002": 21},
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "psfleet": "0.1.0",
        "tensorflow": "2.21.0",
        "final": False,
    }
    assert directory.check(7) == ""


def test_the_version_is_the_packages() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project


def test_what_has_no_manifest_does_not_count_and_is_removed(directory: RunDirectory) -> None:
    write(directory, 100)
    write_files(directory, 200)
    (directory.checkpoints / "ckpt-300_temp").mkdir()
    (directory.checkpoints / "ckpt-300_temp" / "part-00000-of-00002.index").touch()
    (directory.checkpoints / ".ckpt-200.manifest.json.x7").touch()
    (directory.checkpoints / "ckpt-mine.index").touch()
    assert directory.steps() == [100]
    kept = {"ckpt-100.index", "ckpt-100.data-00000-of-00002", "ckpt-100.data-00001-of-00002", "ckpt-100.manifest.json"}
    directory.remove_orphans()
    assert there(directory) == {*kept, "ckpt-mine.index"}


def test_a_checkpoint_is_not_removed_whose_manifest_is_seen_late(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a listing may be older than the next one."""
    write(directory, 100)
    late = [directory.manifest(100).name]

    def listed(path: Path) -> list[str]:
        return [name for name in os.listdir(path) if name not in late]  # noqa: PTH208

    def refreshed(dir: Path) -> contextlib.nullcontext[None]:
        assert dir == directory.checkpoints
        late.clear()
        return contextlib.nullcontext()

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "names", listed)
        patched.setattr(checkpoints.tempfile, "TemporaryFile", refreshed)
        directory.remove_orphans()
    assert directory.check(100) == ""

    listings = 0

    def listed_twice(path: Path) -> list[str]:
        nonlocal listings
        listings += path == directory.checkpoints
        return [name for name in os.listdir(path) if listings > 2 or name != "ckpt-100.manifest.json"]  # noqa: PTH208

    monkeypatch.setattr(checkpoints, "names", listed_twice)
    directory.remove_orphans()
    assert directory.check(100) == ""


def test_the_run_directory_of_a_new_run_has_no_orphans(tmp_path: Path) -> None:
    RunDirectory(tmp_path, "new").remove_orphans()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ckpt-100.index", "ckpt-100.index"),
        ("ckpt-100.data-00001-of-00002", "ckpt-100.data-00001-of-00002"),
        ("ckpt-100.manifest.json", "not JSON"),
    ],
)
def test_a_truncated_file_is_found(directory: RunDirectory, name: str, wrong: str) -> None:
    write(directory, 100)
    os.truncate(directory.checkpoints / name, 5)
    assert wrong in directory.check(100)


def test_a_lost_file_is_found(directory: RunDirectory) -> None:
    for step in (1, 2, 3):
        write(directory, step)
    (directory.checkpoints / "ckpt-1.index").unlink()
    (directory.checkpoints / "ckpt-2.data-00000-of-00002").unlink()
    directory.manifest(3).unlink()
    assert [directory.check(step) for step in (1, 2, 3)] == [
        "ckpt-1.index is gone",
        "ckpt-2.data-00000-of-00002 is gone",
        "ckpt-3.manifest.json is gone",
    ]


def test_another_index_of_the_same_size_is_found(directory: RunDirectory) -> None:
    write(directory, 100)
    (directory.checkpoints / "ckpt-100.index").write_text("101.index")
    assert directory.check(100) == "ckpt-100.index is not the one that was saved"


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 100}', "\x00\x00"])
def test_what_is_no_manifest_is_named_and_not_removed(directory: RunDirectory, text: str) -> None:
    write(directory, 50)
    write(directory, 100)
    directory.manifest(100).write_text(text)
    assert directory.steps() == [50]
    assert directory.unreadable() == [100]
    directory.remove_orphans()
    assert directory.manifest(100).name in directory.check(100)


def test_an_older_epoch_with_a_higher_step_never_counts(directory: RunDirectory) -> None:
    for step in (10, 20):
        write(directory, step, epoch=1)
    write(directory, 15, epoch=2)
    assert directory.steps() == [10, 15]
    write(directory, 30, epoch=2)
    write(directory, 25, epoch=1)
    assert directory.newest() == 30
    assert directory.steps() == [10, 15, 30]
    directory.prune(5)
    assert {name.split(".")[0] for name in there(directory)} == {"ckpt-10", "ckpt-15", "ckpt-30"}


def test_checkpoint_state_file_is_not_relied_on(directory: RunDirectory) -> None:
    write(directory, 5)
    (directory.checkpoints / "checkpoint").write_text('model_checkpoint_path: "ckpt-99"')
    assert directory.newest() == 5
    directory.list_for_tensorflow()
    assert 'model_checkpoint_path: "ckpt-5"' in (directory.checkpoints / "checkpoint").read_text()


def test_a_run_that_never_started_has_none(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path, "none").steps() == []
    assert run_directories(tmp_path) == []


def test_prune_keeps_the_newest_and_every_file_of_them(directory: RunDirectory) -> None:
    for step in (1, 2, 3, 10, 11):
        write(directory, step)
    directory.prune(3)
    assert directory.steps() == [3, 10, 11]
    assert {name.split(".")[0] for name in there(directory)} == {"ckpt-3", "ckpt-10", "ckpt-11"}
    assert [directory.check(step) for step in directory.steps()] == ["", "", ""]


class Died(Exception):
    """The process ends here."""


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_replacement_takes_its_place_wherever_the_process_dies(
    directory: RunDirectory, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what it was until the new one is complete, and the new one from then on."""
    write(directory, 50)
    replace, left = Path.replace, 0

    def die_later(path: Path, target: Path) -> None:
        nonlocal left
        if left == 0:
            raise Died
        left -= 1
        replace(path, target)

    for dies_after in range(shards + 3):
        write(directory, 100)
        write_files(directory, 100, shards, beside=True)
        directory.remove_orphans()
        assert directory.check(100) == ""
        assert (directory.checkpoints / "ckpt-100.index").read_text() == "100.index"

        write_files(directory, 100, shards, beside=True)
        directory.write_manifest(100, 1, "2.21.0", beside=True)
        left = dies_after
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", die_later)
            # The index, the data and the manifest are renamed.
            with contextlib.nullcontext() if dies_after > shards + 1 else pytest.raises(Died):
                directory.replace()
        directory.remove_orphans()
        assert directory.steps() == [50, 100]
        assert directory.check(100) == ""
        assert (directory.checkpoints / "ckpt-100.index").read_text() == "100.index anew"
        assert len([name for name in there(directory) if "100" in name]) == shards + 2


def test_a_replacement_of_an_older_epoch_or_without_a_good_manifest_replaces_nothing(directory: RunDirectory) -> None:
    write(directory, 100, epoch=2)
    before = there(directory)
    write_files(directory, 100, beside=True)
    directory.write_manifest(100, 1, "2.21.0", beside=True)
    directory.replace()
    assert there(directory) == before
    write_files(directory, 100, beside=True)
    directory.manifest(100, beside=True).write_text("{}")
    directory.replace()
    assert there(directory) == before
    assert directory.check(100) == ""
    assert (directory.checkpoints / "ckpt-100.index").read_text() == "100.index"


def test_what_is_set_aside_counts_no_more_and_is_still_there(directory: RunDirectory) -> None:
    for step in (100, 200):
        write(directory, step)
    before = {name for name in there(directory) if "200" in name}
    assert directory.set_aside(200) == directory.checkpoints / "ckpt-200.manifest.json.bad"
    assert directory.steps() == [100]
    assert directory.set_aside_files() == [directory.checkpoints / "ckpt-200.manifest.json.bad"]
    directory.remove_orphans()
    assert {name for name in there(directory) if "200" in name} == {f"{name}.bad" for name in before}


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_step_that_was_set_aside_can_be_saved_again(directory: RunDirectory, shards: int) -> None:
    write(directory, 100)
    directory.set_aside(100)
    write(directory, 100, shards=shards)
    assert directory.steps() == [100]
    assert directory.check(100) == ""
    assert len(directory.set_aside_files()) == 1


def test_prune_does_not_keep_what_is_set_aside_instead_of_good_ones(directory: RunDirectory) -> None:
    for step in (1, 2, 3, 100, 200, 300):
        write(directory, step)
    for step in (100, 200, 300):
        directory.set_aside(step)
    write(directory, 4)
    directory.prune(3)
    assert directory.steps() == [2, 3, 4]


def test_prune_takes_along_what_was_set_aside_at_the_same_step(directory: RunDirectory) -> None:
    write(directory, 1)
    directory.set_aside(1)
    for step in (1, 2, 3):
        write(directory, step)
    directory.prune(2)
    assert directory.set_aside_files() == []


def test_the_state_keeps_what_is_not_told_anew(directory: RunDirectory) -> None:
    directory.set_state("training", 0, epoch=3, members={"ps-0": "a"}, without=["worker-1"], restart={"ps-0": "b"})
    directory.set_state("finished", 10, asked=10, restart={})
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
def test_a_state_that_is_damaged_meanwhile_is_written_anew(directory: RunDirectory, damage: str) -> None:
    directory.set_state("training", 5, members={"ps-0": "a"})
    directory.state.write_text(damage)
    directory.set_state("training", 7, restart={"ps-0": "a"})
    directory.set_members(without=["worker-1"])
    record = read_record(directory.state)
    assert record is not None
    told = record["state"], record["step"], record["members"], record["without"], record["restart"]
    assert told == ("training", 7, {}, ["worker-1"], {"ps-0": "a"})


def test_what_two_threads_say_of_the_state_is_kept(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.set_state("training", 5)
    reading = threading.Event()

    def read_slowly(path: Path) -> dict[str, Any] | None:
        record = read_record(path)
        if threading.current_thread() is first:
            reading.set()
            time.sleep(0.3)
        return record

    monkeypatch.setattr("trainer.run.checkpoints.read_record", read_slowly)
    first = threading.Thread(target=directory.set_state, args=("stopped", 6))
    first.start()
    assert reading.wait(10)
    directory.set_state("stopped", 6, without=["worker-1"])
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


def test_finished_until_more_steps_are_wanted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    assert directory.finished(100) is None
    directory.set_state("training", 0)
    assert directory.finished(100) is None
    directory.set_state("finished", 100)
    assert directory.finished(100) == 100
    assert directory.finished(50) == 100
    assert directory.finished(200) is None


def test_damaged_records_are_set_aside_and_whole_ones_stay(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    directory.set_state("finished", 100)
    directory.evaluation.write_text('{"step": 7}')
    directory.status.write_text('{"step": 7, "sta')
    directory.mend()
    assert directory.finished(100) == 100
    assert directory.evaluation.exists()
    assert not directory.status.exists()
    assert (directory.path / "status.json.bad").read_text() == '{"step": 7, "sta'
    directory.state.write_text("")
    assert directory.finished(100) is None
    directory.mend()
    directory.set_state("training", 50)
    assert (directory.path / "state.json.bad").read_text() == ""


def test_no_save_is_begun_without_room_for_it(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.checkpoints.mkdir(parents=True, exist_ok=True)
    directory.check_room(1)
    real = os.statvfs(directory.checkpoints)
    full = SimpleNamespace(f_bavail=0, f_frsize=real.f_frsize)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(OSError, match=r"No space left on device: 0 bytes are free, and a checkpoint takes 1$"):
            directory.check_room(1)
    write(directory, 7)
    directory.check_room(1)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(OSError, match=r"No space left on device: 0 bytes are free, and a checkpoint takes \d\d"):
        directory.check_room(1)
