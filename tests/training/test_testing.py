"""What docs/testing-programs.md tells users to write works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import write_files
from processes import MINUTE, ROOT, Runs, environment

pytestmark = pytest.mark.timeout(450)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("user")
    names = [path.name for path in write_files("testing-programs.md", directory)]
    assert names == ["sums.py", "conftest.py", "test_sums.py", "notebook.py"]
    return directory


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does, who has not set TF_USE_LEGACY_KERAS."""
    user = environment(PYTHONPATH=f"{ROOT}:{directory}")
    del user["TF_USE_LEGACY_KERAS"]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=user, capture_output=True, text=True, timeout=6 * MINUTE)


def test_users_unit_tests_pass(pages: Path) -> None:
    done = run(pages, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_notebook_trains_twice_in_one_process(pages: Path) -> None:
    done = run(pages, "notebook.py")
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^(\d+) {'loss': [\d.e-]+}$", done.stdout, re.MULTILINE)
    assert steps == ["100", "200"], done.stdout


def test_in_process_cluster_is_one_process(runs: Runs, pages: Path) -> None:
    arguments = ["-m", "trainer", "local", "--in-process", "--program", "sums:Sums", "--run", "inside", "--steps", "50"]
    done = run(pages, *arguments, "--shared-dir", str(runs.shared), "--workers", "2", "--ps", "2")
    assert done.returncode == 0, done.stderr
    status = runs.status("inside")
    assert (status["state"], status["step"], status["evaluation"]["step"]) == ("finished", 50, 50)
    assert "started, pid" not in done.stdout


def test_the_coordinator_can_be_used_directly(tmp_path: Path) -> None:
    """As docs/training.md shows it."""
    [script] = write_files("training.md", tmp_path)
    done = run(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_keras_3_is_refused_when_it_is_too_late(pages: Path) -> None:
    done = run(pages, "-c", "import tensorflow as tf; tf.keras.Model; import trainer.testing")
    assert done.returncode == 1
    assert "ImportError: TensorFlow was imported with Keras 3" in done.stderr
