"""The proof's computation with TensorFlow itself, on the processor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_check

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
    )


@pytest.fixture(scope="module")
def answer():
    return run_check("gpu_compute_check.py")


def test_a_compiled_product_and_a_convolution_are_right(answer):
    assert answer["found"]["right"] == [{"name": "/device:CPU:0", "error": None}]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("one wrong number", "a compiled product of matrices: 1 of 262144 numbers are wrong"),
        ("one halved", "a convolution: 1 of "),
        ("no number", "a convolution: 25088 of 25088 numbers are wrong"),
        ("without code", "a convolution: InternalError: No DNN"),
    ],
)
def test_what_is_wrong_or_fails_is_told(answer, case, error):
    assert answer["found"][case][0]["error"].startswith(error)


def test_a_task_without_its_gpus_tries_again_instead_of_taking_the_processor():
    members = {job: [f"127.0.0.1:{port}"] for port, job in enumerate(("chief", "ps", "worker"), 1)}
    cluster = {"cluster": members, "task": {"type": "worker", "index": 0}}
    environment = {"TF_CONFIG": json.dumps(cluster), "TRAINER_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    # With a parent of its own, it is the task itself and no supervisor, which would start the next one.
    done = python("-m", "trainer", "--parent", str(os.getpid()), **environment)
    assert done.returncode == 75, done.stderr
    assert "TensorFlow sees 0 GPUs and this task has 2 (CUDA_VISIBLE_DEVICES=0,1). `fab gpu-check`" in done.stderr
