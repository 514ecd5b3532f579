"""`make test` runs trainings and unit tests in two processes: each test in one of them, whichever is free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.sharing import share_files as pytest_configure
from tests.sharing import share_option as pytest_addoption
"""
TESTS = """
import os
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_it(number):
    lane = os.environ["LANE"]
    with Path("ran").open("a") as file:
        file.write(f"{lane}: {Path(__file__).stem} {number}\\n")
    while lane == "first" and not Path("go").exists():
        time.sleep(0.01)
    assert "test_b" not in __file__ or number == 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def begin(folder: Path, lane: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "--share", "taken", "-o", f"cache_dir={lane}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LANE": lane}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def test_each_file_runs_in_one_of_two_processes_and_once_more_in_its_own(folder: Path) -> None:
    ran = folder / "ran"
    first = begin(folder, "first")
    try:
        until(ran.exists)
        assert begin(folder, "second").wait(60) == 1
    finally:
        (folder / "go").touch()
    assert first.wait(60) == 0
    lines = ran.read_text().splitlines()
    assert lines == [
        "first: test_a 1",
        *(f"second: test_{name} {number}" for name in "cb" for number in (1, 2)),
        "first: test_a 2",
    ]

    ran.unlink()
    assert begin(folder, "second", "--last-failed", "--last-failed-no-failures", "none").wait(60) == 1
    assert ran.read_text() == "second: test_b 2\n"
