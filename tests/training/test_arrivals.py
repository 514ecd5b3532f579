"""Which files that come are taken, and when."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trainer.training.arrivals import Arrivals


@pytest.fixture
def arrivals(tmp_path: Path) -> Arrivals:
    return Arrivals([f"{tmp_path}/part-*", f"{tmp_path}/more-*"], 10.0)


def write(path: Path, text: str = "1", age: float = 0.0) -> str:
    path.write_text(text, encoding="ascii")
    os.utime(path, (time.time() - age,) * 2)
    return str(path)


def test_the_first_look_takes_old_files_those_written_first_leading(arrivals: Arrivals, tmp_path: Path) -> None:
    young, old, older = (write(tmp_path / f"part-{age}", age=age) for age in (0, 60, 90))
    assert arrivals.look(()) == ([older, old], False)
    assert arrivals.look({older, old}) == ([young], False)


def test_a_file_is_taken_when_two_looks_find_it_the_same(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.look(())
    name = write(tmp_path / "part-1", age=60)
    assert arrivals.look(()) == ([], False)
    write(tmp_path / "part-1", "12", age=60)
    assert arrivals.look(()) == ([], False)
    assert arrivals.look(()) == ([name], False)


def test_unfinished_and_hidden_names_are_left_out(tmp_path: Path) -> None:
    for name in ("a.tmp", ".b", "_c"):
        write(tmp_path / name, age=60)
    assert Arrivals([f"{tmp_path}/*"], 10.0).look(()) == ([], False)


def test_the_end_is_told_when_no_file_is_left(arrivals: Arrivals, tmp_path: Path) -> None:
    arrivals.look(())
    name = write(tmp_path / "more-1")
    write(tmp_path / "_END")
    assert arrivals.look(()) == ([], False)
    assert arrivals.look(()) == ([name], True)
    assert arrivals.look({name}) == ([], True)
