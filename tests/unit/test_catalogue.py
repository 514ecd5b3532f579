"""Which files in a run directory count, and which are removed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from trainer import __version__
from trainer.run import catalogue as module
from trainer.run.catalogue import Catalogue
from trainer.run.records import read_record, write_record
from trainer.run.retention import Retention


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    (tmp_path / "checkpoints").mkdir()
    return Catalogue(tmp_path / "checkpoints")


def write(catalogue: Catalogue, step: int, epoch: int = 1, shards: int = 2) -> None:
    """Save a checkpoint as the trainer does: TensorFlow's files, then the manifest."""
    catalogue.remove(step)
    write_files(catalogue, step, shards)
    catalogue.write_manifest(step, epoch, "2.21.0")


def write_files(catalogue: Catalogue, step: int, shards: int = 2, replacement: bool = False) -> None:
    for ending in (".index", *(f".data-{shard:05d}-of-{shards:05d}" for shard in range(shards))):
        text = f"{step}{ending}" + (" again" if replacement else "")
        Path(catalogue.prefix(step, replacement=replacement) + ending).write_text(text)


def there(catalogue: Catalogue) -> set[str]:
    return {path.name for path in catalogue.path.iterdir()}


def test_newest_by_number_and_not_by_name(catalogue: Catalogue) -> None:
    for step in (900, 1000, 50):
        write(catalogue, step)
    assert catalogue.steps() == [50, 900, 1000]
    assert catalogue.newest() == 1000


def test_a_manifest_says_what_a_checkpoint_consists_of_and_who_wrote_it(catalogue: Catalogue) -> None:
    write(catalogue, 7, epoch=3)
    record = read_record(catalogue.manifest(7))
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
        "loss": None,
        "sound": None,
        "input": None,
    }
    assert catalogue.check(7) == ""


def test_the_version_is_the_packages() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project


def test_what_has_no_manifest_does_not_count_and_is_removed(catalogue: Catalogue) -> None:
    write(catalogue, 100)
    write_files(catalogue, 200)
    (catalogue.path / "ckpt-300_temp").mkdir()
    (catalogue.path / "ckpt-300_temp" / "part-00000-of-00002.index").touch()
    (catalogue.path / ".ckpt-200.manifest.json.x7").touch()
    (catalogue.path / "ckpt-mine.index").touch()
    assert catalogue.steps() == [100]
    kept = {"ckpt-100.index", "ckpt-100.data-00000-of-00002", "ckpt-100.data-00001-of-00002", "ckpt-100.manifest.json"}
    catalogue.remove_orphans()
    assert there(catalogue) == {*kept, "ckpt-mine.index"}


def test_a_checkpoint_is_not_removed_whose_manifest_is_seen_late(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a listing may be older than the next one."""
    write(catalogue, 100)
    late = [catalogue.manifest(100).name]

    def listed(path: Path) -> list[str]:
        return [name for name in os.listdir(path) if name not in late]  # noqa: PTH208

    def refreshed(dir: Path) -> contextlib.nullcontext[None]:
        assert dir == catalogue.path
        late.clear()
        return contextlib.nullcontext()

    with monkeypatch.context() as patched:
        patched.setattr(module, "names_in", listed)
        patched.setattr(module.tempfile, "TemporaryFile", refreshed)
        catalogue.remove_orphans()
    assert catalogue.check(100) == ""

    listings = 0

    def listed_twice(path: Path) -> list[str]:
        nonlocal listings
        listings += path == catalogue.path
        return [name for name in os.listdir(path) if listings > 2 or name != "ckpt-100.manifest.json"]  # noqa: PTH208

    monkeypatch.setattr(module, "names_in", listed_twice)
    catalogue.remove_orphans()
    assert catalogue.check(100) == ""


def test_the_run_directory_of_a_new_run_has_no_orphans(tmp_path: Path) -> None:
    Catalogue(tmp_path / "new").remove_orphans()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ckpt-100.index", "ckpt-100.index"),
        ("ckpt-100.data-00001-of-00002", "ckpt-100.data-00001-of-00002"),
        ("ckpt-100.manifest.json", "not JSON"),
    ],
)
def test_a_truncated_file_is_found(catalogue: Catalogue, name: str, wrong: str) -> None:
    write(catalogue, 100)
    os.truncate(catalogue.path / name, 5)
    assert wrong in catalogue.check(100)


def test_a_lost_file_is_found(catalogue: Catalogue) -> None:
    for step in (1, 2, 3):
        write(catalogue, step)
    (catalogue.path / "ckpt-1.index").unlink()
    (catalogue.path / "ckpt-2.data-00000-of-00002").unlink()
    catalogue.manifest(3).unlink()
    assert [catalogue.check(step) for step in (1, 2, 3)] == [
        "ckpt-1.index is gone",
        "ckpt-2.data-00000-of-00002 is gone",
        "ckpt-3.manifest.json is gone",
    ]


def test_another_index_of_the_same_size_is_found(catalogue: Catalogue) -> None:
    write(catalogue, 100)
    (catalogue.path / "ckpt-100.index").write_text("101.index")
    assert catalogue.check(100) == "ckpt-100.index is not the one that was saved"


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 100}', "\x00\x00"])
def test_what_is_no_manifest_is_named_and_not_removed(catalogue: Catalogue, text: str) -> None:
    write(catalogue, 50)
    write(catalogue, 100)
    catalogue.manifest(100).write_text(text)
    assert catalogue.steps() == [50]
    assert catalogue.unreadable() == [100]
    catalogue.remove_orphans()
    assert catalogue.manifest(100).name in catalogue.check(100)


def test_an_older_epoch_with_a_higher_step_never_counts(catalogue: Catalogue) -> None:
    for step in (10, 20):
        write(catalogue, step, epoch=1)
    write(catalogue, 15, epoch=2)
    assert catalogue.steps() == [10, 15]
    write(catalogue, 30, epoch=2)
    write(catalogue, 25, epoch=1)
    assert catalogue.newest() == 30
    assert catalogue.steps() == [10, 15, 30]
    catalogue.prune(Retention(5))
    assert {name.split(".")[0] for name in there(catalogue)} == {"ckpt-10", "ckpt-15", "ckpt-30"}


def test_checkpoint_state_file_is_not_relied_on(catalogue: Catalogue) -> None:
    write(catalogue, 5)
    (catalogue.path / "checkpoint").write_text('model_checkpoint_path: "ckpt-99"')
    assert catalogue.newest() == 5
    catalogue.list_for_tensorflow()
    assert 'model_checkpoint_path: "ckpt-5"' in (catalogue.path / "checkpoint").read_text()


def test_a_run_that_never_started_has_none(tmp_path: Path) -> None:
    assert Catalogue(tmp_path / "none").steps() == []


def test_files_are_on_disk_before_the_manifest_says_so(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(module, "sync", lambda path: synced.append((path.name, catalogue.manifest(5).exists())))
    write(catalogue, 5, shards=1)
    assert synced == [("ckpt-5.data-00000-of-00001", False), ("ckpt-5.index", False), ("checkpoints", False)]


def test_the_best_is_kept_with_its_evaluation_and_goes_with_it(catalogue: Catalogue) -> None:
    rules = Retention(1, best=1)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.3), (40, 0.2)):
        write(catalogue, step)
        catalogue.write_evaluation(step, {"loss": loss})
        catalogue.prune(rules)
    assert catalogue.steps() == [20, 40]
    assert [each.evaluation for each in catalogue.saved()] == [{"loss": 0.1}, {"loss": 0.2}]
    assert {name for name in there(catalogue) if "evaluation" in name} == {
        "ckpt-20.evaluation.json",
        "ckpt-40.evaluation.json",
    }


def test_numbers_that_json_has_no_word_for_come_back(catalogue: Catalogue) -> None:
    write_files(catalogue, 10)
    catalogue.write_manifest(10, 1, "2.21.0", loss=math.nan, sound=False)
    catalogue.write_evaluation(10, {"loss": math.nan, "accuracy": -math.inf})
    [found] = catalogue.saved()
    assert (str(found.loss), found.sound, found.evaluation) == ("nan", False, {"loss": ANY, "accuracy": -math.inf})
    assert Retention(1, best=1, metric="accuracy").reasons([found]) == {10: ["newest"]}


@pytest.mark.parametrize(("loss", "sound"), [(0.5, True), ("NaN", False), (None, False)])
def test_an_older_manifest_is_sound_by_its_loss(catalogue: Catalogue, loss: object, sound: bool) -> None:
    write(catalogue, 10)
    record = read_record(catalogue.manifest(10))
    assert record is not None
    del record["sound"]
    write_record(catalogue.manifest(10), {**record, "loss": loss})
    [found] = catalogue.saved()
    assert found.sound is sound


def test_an_evaluation_of_what_is_gone_is_removed(catalogue: Catalogue) -> None:
    for step in (10, 20):
        write(catalogue, step)
    catalogue.write_evaluation(10, {"loss": 0.5})
    catalogue.manifest(10).unlink()
    assert "ckpt-10.evaluation.json" in there(catalogue)
    catalogue.prune(Retention(3))
    assert "ckpt-10.evaluation.json" not in there(catalogue)


def test_an_evaluation_is_kept_only_of_what_was_evaluated(catalogue: Catalogue) -> None:
    """A side-car may still evaluate a checkpoint that the coordinator has removed, or saved again."""
    catalogue.write_evaluation(10, {"loss": 0.5})
    assert there(catalogue) == set()
    write(catalogue, 10)
    saved = catalogue.saved_at(10)
    assert saved is not None
    catalogue.write_evaluation(10, {"loss": 0.5}, saved - 1)
    assert catalogue.evaluation(10) is None
    catalogue.write_evaluation(10, {"loss": 0.5}, saved)
    assert catalogue.evaluation(10) == {"loss": 0.5}


def test_the_evaluation_of_what_is_replaced_goes(catalogue: Catalogue) -> None:
    write(catalogue, 10)
    catalogue.write_evaluation(10, {"loss": 0.5})
    write_files(catalogue, 10, replacement=True)
    catalogue.write_manifest(10, 1, "2.21.0", replacement=True)
    catalogue.finish_replacements()
    assert catalogue.evaluation(10) is None


def test_a_damaged_evaluation_keeps_nothing_from_going_on(catalogue: Catalogue) -> None:
    write(catalogue, 10)
    (catalogue.path / "ckpt-10.evaluation.json").write_text("{")
    catalogue.prune(Retention(1, best=1))
    assert [(each.step, each.evaluation) for each in catalogue.saved()] == [(10, None)]


def test_a_manifest_of_a_later_version_counts(catalogue: Catalogue) -> None:
    write(catalogue, 10)
    record = read_record(catalogue.manifest(10))
    assert record is not None
    write_record(catalogue.manifest(10), {**record, "colour": "green"})
    assert catalogue.steps() == [10]
    assert catalogue.check(10) == ""


def test_prune_keeps_the_newest_and_every_file_of_them(catalogue: Catalogue) -> None:
    for step in (1, 2, 3, 10, 11):
        write(catalogue, step)
    catalogue.prune(Retention(3))
    assert catalogue.steps() == [3, 10, 11]
    assert {name.split(".")[0] for name in there(catalogue)} == {"ckpt-3", "ckpt-10", "ckpt-11"}
    assert [catalogue.check(step) for step in catalogue.steps()] == ["", "", ""]


class Died(Exception):
    """The process ends here."""


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_replacement_takes_its_place_wherever_the_process_dies(
    catalogue: Catalogue, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what it was until the new one is complete, and the new one from then on."""
    write(catalogue, 50)
    replace, left = Path.replace, 0

    def die_later(path: Path, target: Path) -> None:
        nonlocal left
        if left == 0:
            raise Died
        left -= 1
        replace(path, target)

    for dies_after in range(shards + 3):
        write(catalogue, 100)
        write_files(catalogue, 100, shards, replacement=True)
        catalogue.remove_orphans()
        assert catalogue.check(100) == ""
        assert (catalogue.path / "ckpt-100.index").read_text() == "100.index"

        write_files(catalogue, 100, shards, replacement=True)
        catalogue.write_manifest(100, 1, "2.21.0", replacement=True)
        left = dies_after
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", die_later)
            # The index, the data and the manifest are renamed.
            with contextlib.nullcontext() if dies_after > shards + 1 else pytest.raises(Died):
                catalogue.finish_replacements()
        catalogue.remove_orphans()
        assert catalogue.steps() == [50, 100]
        assert catalogue.check(100) == ""
        assert (catalogue.path / "ckpt-100.index").read_text() == "100.index again"
        assert len([name for name in there(catalogue) if "100" in name]) == shards + 2


def test_a_replacement_of_an_older_epoch_or_without_a_good_manifest_replaces_nothing(catalogue: Catalogue) -> None:
    write(catalogue, 100, epoch=2)
    before = there(catalogue)
    write_files(catalogue, 100, replacement=True)
    catalogue.write_manifest(100, 1, "2.21.0", replacement=True)
    catalogue.finish_replacements()
    assert there(catalogue) == before
    write_files(catalogue, 100, replacement=True)
    catalogue.manifest(100, replacement=True).write_text("{}")
    catalogue.finish_replacements()
    assert there(catalogue) == before
    assert catalogue.check(100) == ""
    assert (catalogue.path / "ckpt-100.index").read_text() == "100.index"


def test_what_is_set_aside_counts_no_more_and_is_still_there(catalogue: Catalogue) -> None:
    for step in (100, 200):
        write(catalogue, step)
    before = {name for name in there(catalogue) if "200" in name}
    assert catalogue.set_aside(200) == catalogue.path / "ckpt-200.manifest.json.bad"
    assert catalogue.steps() == [100]
    assert catalogue.set_aside_files() == [catalogue.path / "ckpt-200.manifest.json.bad"]
    catalogue.remove_orphans()
    assert {name for name in there(catalogue) if "200" in name} == {f"{name}.bad" for name in before}


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_step_that_was_set_aside_can_be_saved_again(catalogue: Catalogue, shards: int) -> None:
    write(catalogue, 100)
    catalogue.set_aside(100)
    write(catalogue, 100, shards=shards)
    assert catalogue.steps() == [100]
    assert catalogue.check(100) == ""
    assert len(catalogue.set_aside_files()) == 1


def test_prune_does_not_keep_what_is_set_aside_instead_of_good_ones(catalogue: Catalogue) -> None:
    for step in (1, 2, 3, 100, 200, 300):
        write(catalogue, step)
    for step in (100, 200, 300):
        catalogue.set_aside(step)
    write(catalogue, 4)
    catalogue.prune(Retention(3))
    assert catalogue.steps() == [2, 3, 4]


def test_prune_takes_along_what_was_set_aside_at_the_same_step(catalogue: Catalogue) -> None:
    write(catalogue, 1)
    catalogue.set_aside(1)
    for step in (1, 2, 3):
        write(catalogue, step)
    catalogue.prune(Retention(2))
    assert catalogue.set_aside_files() == []


def test_no_save_is_begun_without_room_for_it(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue.path.mkdir(parents=True, exist_ok=True)
    catalogue.check_room(1)
    real = os.statvfs(catalogue.path)
    full = SimpleNamespace(f_bavail=0, f_frsize=real.f_frsize, f_files=0, f_favail=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(OSError, match=r"No space left on device: 0 bytes are free, and a checkpoint takes 1$"):
            catalogue.check_room(1)
    write(catalogue, 7)
    catalogue.check_room(1)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(OSError, match=r"No space left on device: 0 bytes are free, and a checkpoint takes \d\d"):
        catalogue.check_room(1)


def test_no_save_is_begun_where_too_few_files_can_be_made(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(catalogue, 7, shards=1)
    for files, left, is_refused in ((100, 3, True), (100, 4, False), (0, 0, False)):
        space = SimpleNamespace(f_bavail=10, f_frsize=1 << 20, f_files=files, f_favail=left)
        monkeypatch.setattr(os, "statvfs", lambda path, found=space: found)
        expected = "No space left on device: 3 more files can be made, and a checkpoint takes 4$"
        with pytest.raises(OSError, match=expected) if is_refused else contextlib.nullcontext():
            catalogue.check_room(1)
