"""The proof's computation with TensorFlow itself, on the processor, and the table of what fits against the wheel."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nvidia_compatibility import read_table

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


def test_a_compiled_product_and_a_convolution_are_right():
    done = python("-c", "import json; from trainer.gpu_check import compute; print(json.dumps(compute('CPU')))")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [{"name": "/device:CPU:0", "error": None}]


def test_one_wrong_number_is_seen():
    code = (
        "import json, tensorflow as tf; from trainer import gpu_check\n"
        "spoil = lambda a, b: tf.tensor_scatter_nd_add(tf.matmul(a, b), [[7, 9]], [1.0])\n"
        "gpu_check.multiply = lambda: tf.function(spoil, jit_compile=True)\n"
        "print(json.dumps(gpu_check.compute('CPU')))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])[0]["error"]
    assert said == "a compiled product of matrices: 1 of 262144 numbers are wrong"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            "lambda *a: right(*a) * tf.tensor_scatter_nd_update(tf.ones([2, 28, 28, 16]), [[1, 9, 9, 3]], [0.5])",
            "1 of ",
        ),
        ("lambda *a: right(*a) * float('nan')", "25088 of 25088 numbers are wrong"),
        # As cuDNN speaks of a GPU that it has no code for.
        (
            "lambda *a: raise_(tf.errors.InternalError(None, None, 'No DNN in stream executor.'))",
            "InternalError: No DNN",
        ),
    ],
)
def test_a_convolution_that_is_wrong_or_fails_is_told(spoil, said):
    code = (
        "import json, tensorflow as tf; from trainer import gpu_check\n"
        "def raise_(error): raise error\n"
        f"right = gpu_check.convolve; gpu_check.convolve = {spoil}\n"
        "print(json.dumps(gpu_check.compute('CPU')))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0]["error"].startswith(f"a convolution: {said}")


def test_a_task_without_its_gpus_tries_again_instead_of_taking_the_processor():
    members = {job: [f"127.0.0.1:{port}"] for port, job in enumerate(("chief", "ps", "worker"), 1)}
    cluster = {"cluster": members, "task": {"type": "worker", "index": 0}}
    environment = {"TF_CONFIG": json.dumps(cluster), "TRAINER_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    # With a parent of its own, it is the task itself and no supervisor, which would start the next one.
    done = python("-m", "trainer", "--parent", str(os.getpid()), **environment)
    assert done.returncode == 75, done.stderr
    assert "TensorFlow sees 0 GPUs and this task has 2 (CUDA_VISIBLE_DEVICES=0,1). `fab gpu-check`" in done.stderr


def test_the_table_says_what_the_wheel_says():
    done = python(
        "-c", "import json, tensorflow as tf; print(json.dumps([tf.__version__, tf.sysconfig.get_build_info()]))"
    )
    version, build = json.loads(done.stdout.splitlines()[-1])
    wheel = read_table()["tensorflow"]
    assert version.startswith(f"{wheel['version']}.")
    assert build["cuda_version"].startswith(f"{wheel['cuda']}.")
    names = build["cuda_compute_capabilities"]
    assert [capability(name) for name in names if name.startswith("sm_")] == wheel["binaries"]
    assert [capability(name) for name in names if name.startswith("compute_")] == wheel["ptx"]


def capability(name):
    digits = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", name)
    return f"{digits[1]}.{digits[2]}"
