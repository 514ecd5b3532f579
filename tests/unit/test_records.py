"""Records that are read while they are written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from trainer.run.records import read_record, write_record


def test_round_trip_makes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert read_record(path) is None
    write_record(path, {"step": 1})
    assert read_record(path) == {"step": 1}
    assert path.stat().st_mode & 0o777 == 0o644


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


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json"):
        read_record(path)
