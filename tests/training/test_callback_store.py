"""What callbacks remember, in files: each value comes back as it was, and records go when no checkpoint needs them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from trainer.run.callback_store import CallbackStore, NotStorable, encode
from trainer.run.directory import RunDirectory

VALUES = [
    None, True, 3, 2.5, float("inf"), float("nan"), "NaN", "text", [1, [2]], (1, "a"), {3}, {"a": {1: 2.0}},
    np.float32(0.5), np.float32("-inf"), np.int64(7), np.arange(6, dtype=np.int16).reshape(2, 3),
    [np.zeros((2, 0)), np.array("x")],
]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "mine")


def at_once(write: Callable[[], None]) -> None:
    write()


def keep(store: CallbackStore, step: int, value: Any, ended: int = 0) -> None:
    arrays: dict[str, Any] = {}
    store.write(step, ended, {"One 0": {"value": encode(value, arrays)}}, arrays)


def have_checkpoints(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    monkeypatch.setattr(directory.catalogue, "steps", lambda: list(steps))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(directory: RunDirectory, value: Any) -> None:
    store = CallbackStore(directory, at_once, leads=True)
    keep(store, 20, value, ended=100)
    record = store.read(20)
    assert record is not None
    assert (record["step"], record["ended"]) == (20, 100)
    found = record["callbacks"]["One 0"]["value"]
    assert type(found) is type(value)
    np.testing.assert_equal(found, value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("value", [object(), print, b"bytes", np.array([object()]), [Path()], type("L", (list,), {})()])
def test_what_is_no_data_is_not_kept(value: Any) -> None:
    with pytest.raises(NotStorable):
        encode(value, {})


def test_the_newest_that_is_not_too_new_is_taken_and_later_ones_go(directory: RunDirectory) -> None:
    store = CallbackStore(directory, at_once, leads=True)
    assert store.newest(100) == -1
    for step in (20, 40, 60):
        keep(store, step, step)
    assert store.newest(59) == 40
    assert store.newest(100) == 40


def test_records_and_arrays_go_when_no_checkpoint_needs_them(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CallbackStore(directory, at_once, leads=True)
    best = np.ones(3)
    for step in (20, 40, 60):
        keep(store, step, [best, np.full(3, step)])
    assert len(list(directory.callbacks.glob("*.npy"))) == 4
    have_checkpoints(directory, monkeypatch, 50, 70)
    keep(store, 80, [best])
    assert sorted(int(path.stem) for path in directory.callbacks.glob("*.json")) == [40, 60, 80]
    assert len(list(directory.callbacks.glob("*.npy"))) == 3


@pytest.mark.parametrize(
    "damage", ["no JSON", json.dumps({"step": 20}), json.dumps({"callbacks": {"a": {"b": {"array": "0.npy"}}}})]
)
def test_a_damaged_record_is_lost_with_a_warning(
    directory: RunDirectory, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CallbackStore(directory, at_once, leads=True)
    keep(store, 20, 1)
    (directory.callbacks / "20.json").write_text(damage)
    assert store.read(20) is None
    assert "what the callbacks remembered is lost" in caplog.text


@pytest.mark.parametrize("left", [0, 50, 140])
def test_an_array_that_was_cut_off_is_lost_with_a_warning(
    directory: RunDirectory, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = CallbackStore(directory, at_once, leads=True)
    keep(store, 20, np.ones(3))
    [array] = directory.callbacks.glob("*.npy")
    os.truncate(array, left)
    assert store.read(20) is None
    assert "what the callbacks remembered is lost" in caplog.text


def test_only_who_leads_writes(directory: RunDirectory) -> None:
    keep(CallbackStore(directory, at_once, leads=False), 20, 1)
    assert not directory.callbacks.exists()


def test_a_path_that_is_full_costs_the_record_and_not_the_training(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.path.mkdir(parents=True)
    directory.callbacks.write_text("in the way")
    keep(CallbackStore(directory, at_once, leads=True), 20, 1)
    assert "cannot keep what the callbacks remember" in caplog.text


def test_a_path_that_is_full_is_made_no_fuller(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(file: BinaryIO, array: Any, **more: Any) -> None:
        file.write(bytes(4096))
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CallbackStore(directory, at_once, leads=True)
    with monkeypatch.context() as patched:
        patched.setattr(np, "save", fill)
        keep(store, 20, np.zeros(3))
    assert list(directory.callbacks.iterdir()) == []
    (directory.callbacks / f".{'0' * 64}.npy").write_bytes(b"half of one, as a process leaves it that is killed")
    keep(store, 30, np.ones(3))
    assert sorted(path.suffix for path in directory.callbacks.iterdir()) == [".json", ".npy"]


def test_what_changes_before_it_is_written_is_kept_as_it_was(directory: RunDirectory) -> None:
    written: list[Callable[[], None]] = []
    store, weights = CallbackStore(directory, written.append, leads=True), np.ones(3)
    keep(store, 20, weights)
    weights += 1
    for write in written:
        write()
    record = store.read(20)
    assert record is not None
    np.testing.assert_equal(record["callbacks"]["One 0"]["value"], np.ones(3))
