"""The trainer works from a plain install, without a checkout. tests/unit/test_package.py has the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.package import build_wheel

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


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
