"""The table of GPUs beside TensorFlow's wheel with CUDA. `make test-gpu` runs it, and it needs no GPU.

`make venv-tf TF_LOCK=locks/cuda-3.11.txt` brings that wheel; without TF_LOCK it brings tensorflow-cpu.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from fleet.site.nvidia import read_table

BUILD = "import json, tensorflow as tf; print(json.dumps([tf.__version__, dict(tf.sysconfig.get_build_info())]))"


def test_the_table_says_what_the_wheel_says() -> None:
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no TensorFlow is installed: make venv-tf TF_LOCK=locks/cuda-3.11.txt")
    version, build = json.loads(done.stdout.splitlines()[-1])
    if not build["is_cuda_build"]:
        pytest.skip("this TensorFlow is built without CUDA: make venv-tf TF_LOCK=locks/cuda-3.11.txt")
    wheel = read_table()["tensorflow"]
    assert version.startswith(f"{wheel['version']}.")
    assert build["cuda_version"].startswith(f"{wheel['cuda']}.")
    names = build["cuda_compute_capabilities"]
    assert [capability(name) for name in names if name.startswith("sm_")] == wheel["binaries"]
    assert [capability(name) for name in names if name.startswith("compute_")] == wheel["ptx"]


def capability(name: str) -> str:
    digits = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)", name)
    assert digits
    return f"{digits[1]}.{digits[2]}"
