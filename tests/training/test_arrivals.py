"""Which files that come are taken, and when."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer.training.data.arrivals import Arrivals


@pytest.fixture
def arrivals(tmp_path: Path) -> Arrivals:
    return Arrivals([f"{tmp_path}/part-*", f"{tmp_path}/more-*"], 10.0)


def write(path: Path, text: str = "1", age: float = 0.0) -> str:
    path.write_text(text, encoding="ascii")
    os.utime(path, (time.time() - age,) * 2)
    return str(path)


def test_the_first_look_takes_old_files_those_written_first_leading(arrivals: Arrivals, tmp_path: Path) -> None:
    young, old, older = (write(tmp_path / f"part-{age}", age=age) for age in (0, 60, 90))
    assert arrivals.poll(()) == ([older, old], False)
    assert arrivals.poll({older, old}) == ([young], False)


def test_a_file_is_taken_when_two_looks_find_it_the_same(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.poll(())
    name = write(tmp_path / "part-1", age=60)
    assert arrivals.poll(()) == ([], False)
    write(tmp_path / "part-1", "12", age=60)
    assert arrivals.poll(()) == ([], False)
    assert arrivals.poll(()) == ([name], False)


def test_unfinished_and_hidden_names_are_left_out(tmp_path: Path) -> None:
    for name in ("a.tmp", ".b", "_c"):
        write(tmp_path / name, age=60)
    assert Arrivals([f"{tmp_path}/*"], 10.0).poll(()) == ([], False)


def test_the_end_is_told_when_no_file_is_left(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.poll(())
    name = write(tmp_path / "more-1")
    write(tmp_path / "_END")
    assert arrivals.poll(()) == ([], False)
    assert arrivals.poll(()) == ([name], True)
    assert arrivals.poll({name}) == ([], True)


def test_the_end_does_not_come_while_a_folder_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write(tmp_path / "one" / "_END")
    write(tmp_path / "two" / "part-1", age=60)
    list_folder, tried, followed = os.scandir, threading.Event(), threading.Event()

    def fail(path: str) -> Any:
        if path == str(tmp_path / "two") and not tried.is_set():
            tried.set()
            raise OSError(errno.EIO, "Input/output error", path)
        return list_folder(path)

    def glob(pattern: str) -> list[str]:
        """As TensorFlow's does, which passes over a folder that can't be read."""
        return [] if "/two/" in pattern and not tried.is_set() else find(pattern)

    find, ends = tf.io.gfile.glob, []
    monkeypatch.setattr(os, "scandir", fail)
    monkeypatch.setattr(tf.io.gfile, "glob", glob)
    arrivals = Arrivals([f"{tmp_path}/one/part-*", f"{tmp_path}/two/part-*"], 0.05)
    arrivals.follow(tuple, lambda names, is_end: (ends.append((names, is_end)), followed.set()))  # type: ignore[func-returns-value]
    try:
        assert followed.wait(10)
    finally:
        arrivals.close()
    assert ends[0] == ([f"{tmp_path}/two/part-1"], True)
    assert "cannot look for new files: [Errno 5] Input/output error" in caplog.text
