"""Records that are read while they are written."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path

import pytest

from trainer.run.records import read_record, sync, sync_tree, to_json, write_record


def test_round_trip_makes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert read_record(path) is None
    write_record(path, {"step": 1})
    assert read_record(path) == {"step": 1}
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_number_that_json_has_no_word_for_is_a_text(tmp_path: Path) -> None:
    record = {"loss": math.nan, "metrics": {"best": [math.inf, (-math.inf, 1.5)]}, "name": "NaN", "step": 1}
    expected = {"loss": "NaN", "metrics": {"best": ["Infinity", ["-Infinity", 1.5]]}, "name": "NaN", "step": 1}
    write_record(tmp_path / "a.json", record)
    assert strict(to_json(record)) == strict((tmp_path / "a.json").read_text()) == expected


def strict(text: str) -> object:
    """Read JSON as others do, who know no NaN."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_record(path, {"filler": "x" * 100_000, "number": 0})
    ended = threading.Event()

    def write() -> None:
        for number in range(50):
            write_record(path, {"filler": "x" * 100_000, "number": number})
        ended.set()

    threading.Thread(target=write).start()
    while not ended.is_set():
        assert len(read_record(path)["filler"]) == 100_000


def test_a_failed_write_leaves_the_old_record_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_record(path, {"step": 1})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(path, {"step": 2})
    assert read_record(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that are synced, and the names that are given, in their order."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def record_name(source: str, target: Path) -> None:
        replace(source, target)
        calls.append(f"name {target.name}")

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_name)
    return calls


def test_a_record_outlasts_a_power_failure_with_its_directories(tmp_path: Path, synced: list[str]) -> None:
    write_record(tmp_path / "runs" / "a" / "state.json", {"step": 1})
    bytes_of_it = synced.pop(2)
    assert bytes_of_it.startswith("sync .state.json.")
    assert synced == [f"sync {tmp_path.name}", "sync runs", "name state.json", "sync a"]


def test_a_tree_is_synced_from_its_leaves(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "tree" / "variables").mkdir(parents=True)
    (tmp_path / "tree" / "variables" / "data").write_text("1")
    (tmp_path / "tree" / "model").write_text("2")
    sync_tree(tmp_path / "tree")
    assert synced == ["sync data", "sync variables", "sync model", "sync tree"]


def test_a_file_system_that_syncs_no_directory_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    (tmp_path / "file").write_text("1")
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\0\0", b"\xff{}"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        read_record(path)
