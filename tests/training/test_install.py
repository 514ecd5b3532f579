"""The package works from a plain install: its wheel holds every module, and needs nothing of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import ROOT

pytestmark = pytest.mark.timeout(120)
# What a build front end does without isolation, so with no network.
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy: setuptools writes beside the sources, and would take in what an earlier build left there."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return built / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run(installed: Path, directory: Path, *arguments: str) -> str:
    """Run a Python command in a directory with nothing but the installed package; returns its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TF_", "TRAINER_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**kept, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_every_tracked_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "trainer"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.splitlines())
    assert "trainer/__main__.py" in tracked
    with zipfile.ZipFile(wheel) as archive:
        assert tracked - set(archive.namelist()) == set()


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        outside = [name for name in archive.namelist() if not name.startswith(("trainer/", "psfleet-"))]
    assert outside == []


def test_commands_run_from_the_install_alone(installed: Path, tmp_path: Path) -> None:
    place = run(installed, tmp_path, "-c", "import trainer; print(trainer.__file__)").strip()
    assert Path(place) == installed / "trainer" / "__init__.py"
    assert "become the task that TF_CONFIG names" in run(installed, tmp_path, "-m", "trainer", "--help")
    assert "--checkpoint-steps" in run(installed, tmp_path, "-m", "trainer", "local", "--help")
    shared = tmp_path / "shared"
    shared.mkdir()
    listed = run(installed, tmp_path, "-m", "trainer", "runs", "--json", "--shared-dir", str(shared))
    assert json.loads(listed) == []


def test_installed_example_can_be_loaded(installed: Path, tmp_path: Path) -> None:
    script = "from trainer.core.program import load_program; print(load_program('trainer.examples.digits:Digits', {}))"
    assert "trainer.examples.digits.Digits" in run(installed, tmp_path, "-c", script)
