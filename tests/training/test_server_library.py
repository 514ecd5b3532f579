"""A ps and a worker import the part of TensorFlow that they need, and nothing that they would miss."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from trainer.process.server_library import KERNELS, PLUGINS, VARIABLES, has_plugins

SERVES = """
import sys
from trainer.process.warm_start import warm_up_server, why_unsafe
from trainer.process.server_library import load_server_library
warm_up_server()
heavy = {"tensorflow", "keras", "tf_keras", "scipy"} & sys.modules.keys()
assert not heavy, heavy
assert not why_unsafe(), why_unsafe()
library = load_server_library()
session = sys.modules["tensorflow.python.client.pywrap_tf_session"]
ops = sys.modules["tensorflow.core.framework.op_def_pb2"]
def known():
    data = session.TF_GetBuffer(session.TF_GetAllOpList())
    return {op.name for op in ops.OpList.FromString(data).op}
before = known()
assert len(before) > 1000 and "tensorflow" not in sys.modules
server = library.Server(library.ClusterSpec({"ps": {0: "localhost:0"}}), job_name="ps", task_index=0, protocol="grpc")
import tensorflow as tf
assert tf.distribute.Server is library.Server
assert known() == before, known() ^ before
assert tf.config.list_physical_devices() == library.list_physical_devices()
with tf.compat.v1.Session(server.target, graph=tf.Graph()) as session:
    with session.graph.as_default():
        print(session.run(tf.constant(20) + 1) * 2)
print(tf.keras.Model.__module__)
"""


def test_a_server_runs_and_all_of_tensorflow_can_follow() -> None:
    done = subprocess.run([sys.executable, "-c", SERVES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    number, keras = done.stdout.split()
    assert number == "42"
    assert keras.startswith("tf_keras.")


def test_what_adds_kernels_or_devices_needs_all_of_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, site = tmp_path / "tensorflow", tmp_path / "site"
    spec = ModuleSpec("tensorflow", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(sys, "path", [str(site)])
    assert not has_plugins(spec)
    (package / KERNELS).mkdir(parents=True)
    assert has_plugins(spec)
    (package / KERNELS).rmdir()
    (site / PLUGINS).mkdir(parents=True)
    assert has_plugins(spec)
    (site / PLUGINS).rmdir()
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
        assert has_plugins(spec)
        monkeypatch.delenv(name)
