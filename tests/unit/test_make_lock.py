"""`make lock` leaves a lock that stays the same as it is, so that nothing is built again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fleet.places import CODE as ROOT
from tests.unit.stand_ins import put_program

MADE = (".venv/.control", ".cache/docs/.made")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One that has built what its locks say."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    for path in (tmp_path / "locks").iterdir():
        os.utime(path, (1000, 1000))
    for made in MADE:
        (tmp_path / made).parent.mkdir(parents=True)
        (tmp_path / made).touch()
        os.utime(tmp_path / made, (2000, 2000))
    return tmp_path


def lock(checkout: Path, written: str) -> None:
    """Have a uv that writes this at the end of each lock."""
    (checkout / ".venv/bin").mkdir()
    for name, text in {
        "uv": f"#!/bin/sh\nfor lock; do :; done\nprintf '{written}' >>$lock; touch $lock\n",
        "python": "#!/bin/sh\n",
    }.items():
        put_program(checkout / ".venv/bin" / name, text)
    subprocess.run(["make", "--silent", "--old-file=venv", "lock"], cwd=checkout, check=True)


def is_built(checkout: Path, target: str) -> bool:
    return subprocess.run(["make", "--question", target], cwd=checkout, check=False).returncode == 0


def test_what_is_locked_as_before_is_not_built_again(checkout: Path) -> None:
    lock(checkout, "")
    assert all(is_built(checkout, made) for made in MADE)


def test_what_is_locked_otherwise_is_built_again(checkout: Path) -> None:
    lock(checkout, "mine==2")
    assert not any(is_built(checkout, made) for made in MADE)
    assert (checkout / "locks/control.txt").read_text().endswith("mine==2")
