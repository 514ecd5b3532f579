"""What is read of a real GPU, its driver and its device files, held against NVML. `make test-gpu` runs it.

It needs a machine with NVIDIA's driver, and `nvidia-ml-py`. Each other test of GPUs has a stand-in for nvidia-smi.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.hosts import facts
from fleet.site.gpus import host_devices
from fleet.site.nvidia import find_gpu, runs_on
from trainer import gpu_check
from trainer.telemetry.gpu_use import read_gpu_use

ROOT = Path(__file__).resolve().parents[2]
if shutil.which("nvidia-smi") is None:
    pytest.skip("this machine has no nvidia-smi", allow_module_level=True)
pynvml = pytest.importorskip("pynvml", reason="NVML is asked beside nvidia-smi: pip install nvidia-ml-py")
COMPUTE = """
import sys
try:
    import tensorflow as tf
    def work(n=tf.random.normal((4096, 4096))): return tf.reduce_sum(n @ n).numpy()
except ImportError:
    import torch
    def work(n=torch.randn(4096, 4096, device="cuda")): return (n @ n).sum().item()
work(); print("ready", flush=True)
while True: work()
"""


@pytest.fixture(scope="module")
def gpus() -> list[object]:
    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


@contextmanager
def computing() -> Iterator[None]:
    """Have the first GPU compute."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    process = subprocess.Popen([sys.executable, "-c", COMPUTE], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(3)  # nvidia-smi's use is that of the last second or less
        yield
    finally:
        process.kill()
        process.wait()


def test_the_kernel_shows_as_many_gpus_as_nvml(gpus: list[object]) -> None:
    nvidia_facts = pytest.importorskip("nvidia_facts", reason="it needs ansible-core")
    seen = nvidia_facts.collect_facts(Path("/"), lambda _command: (1, ""), os.uname().release)
    addresses = [re.sub(r"^0000(?=\w{4}:)", "", pynvml.nvmlDeviceGetPciInfo(gpu).busId.lower()) for gpu in gpus]
    assert [gpu["address"] for gpu in seen["gpus"]] == sorted(addresses)
    assert seen["loaded"] == pynvml.nvmlSystemGetDriverVersion()
    assert seen["loaded_open"] is not None
    for gpu, shown in zip(gpus, seen["gpus"], strict=True):
        known = find_gpu(shown["device"])
        assert known is not None, shown
        assert known["capability"] == ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(gpu)))
        assert runs_on(known["capability"])


def test_the_proof_finds_driver_and_gpus(gpus: list[object]) -> None:
    uuids = [pynvml.nvmlDeviceGetUUID(gpu) for gpu in gpus]
    assert host_devices("this", {"gpu_devices": uuids}) == uuids
    expected = {"driver": pynvml.nvmlSystemGetDriverVersion(), "gpus": len(gpus), "devices": uuids}
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[0] != "nvidia-smi":  # TensorFlow's own part
            asked.append(command)
            return subprocess.CompletedProcess(command, 0, json.dumps([{"error": None}] * len(gpus)), "")
        return gpu_check.run_command(command)

    report = gpu_check.check(expected, Path("/"), run)
    assert report["problems"] == []
    assert len(asked) == 1
    assert (report["module"], report["smi"]) == (expected["driver"],) * 2
    names = [(gpu["name"], gpu["uuid"]) for gpu in report["gpus"]]
    assert names == [(pynvml.nvmlDeviceGetName(gpu), pynvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus]
    one_more = {**expected, "gpus": len(gpus) + 1, "driver": "1.2.3", "devices": [*uuids, uuids[0][:-12] + "0" * 12]}
    assert len(gpu_check.check(one_more, Path("/"), run)["problems"]) == 3


def test_a_tasks_use_and_a_hosts_are_what_nvml_says(gpus: list[object]) -> None:
    with computing():
        use = read_gpu_use({"CUDA_VISIBLE_DEVICES": "0"})
        by_uuid = read_gpu_use({"CUDA_VISIBLE_DEVICES": pynvml.nvmlDeviceGetUUID(gpus[0])})
        text = subprocess.run(
            ["sh", "-c", facts.script("/tmp")], capture_output=True, text=True, timeout=60, check=True
        )
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpus[0])
    assert use is not None
    assert by_uuid is not None
    assert use.busy > 0.5
    assert use.memory > 50 * 2**20
    assert read_gpu_use({"CUDA_VISIBLE_DEVICES": "-1"}) is None
    found = facts.parse(text.stdout)
    name, busy, used, total = (cell.strip() for cell in found["gpus"][0].split(","))
    assert name == pynvml.nvmlDeviceGetName(gpus[0])
    assert int(busy) > 50
    assert int(used) == pytest.approx(use.memory / 2**20, rel=0.2)
    assert int(total) == pytest.approx(memory.total / 2**20, rel=0.02)


def test_the_metrics_are_what_nvml_says(gpus: list[object], tmp_path: Path) -> None:
    script = ROOT / "roles/node_exporter/files/psfleet-gpu-metrics"
    out = tmp_path / "gpus.prom"
    with computing():
        subprocess.run([sys.executable, str(script), str(out), str(len(gpus))], check=True, timeout=60)
        watts = pynvml.nvmlDeviceGetPowerUsage(gpus[0]) / 1000
        degrees = pynvml.nvmlDeviceGetTemperature(gpus[0], pynvml.NVML_TEMPERATURE_GPU)
    found = dict(re.findall(r'^(\w+)(?:\{gpu="0",[^}]*?(?:,reason="\w+")?\})? (\S+)$', out.read_text(), re.MULTILINE))
    assert float(found["psfleet_gpus"]) == float(found["psfleet_gpus_expected"]) == len(gpus)
    assert float(found["psfleet_gpu_utilization_ratio"]) > 0.5
    assert float(found["psfleet_gpu_power_watts"]) == pytest.approx(watts, rel=0.3)
    assert float(found["psfleet_gpu_temperature_celsius"]) == pytest.approx(degrees, abs=10)
    assert out.read_text().count("psfleet_gpu_throttled{") == 4 * len(gpus)


def test_a_units_device_classes_are_the_kernels() -> None:
    unit = (ROOT / "roles/gpu/templates/psfleet-gpu.conf.j2").read_text()
    characters = Path("/proc/devices").read_text().partition("Block devices:")[0]
    classes = {int(number): name for number, name in re.findall(r"^ *(\d+) (\S+)$", characters, re.MULTILINE)}
    allowed = set(re.findall(r"DeviceAllow=char-(\S+) rw", unit))
    files = {
        path.name: classes[os.major(path.stat().st_rdev)]
        for path in Path("/dev").glob("nvidia*")
        if path.is_char_device()
    }
    assert "nvidiactl" in files
    assert {name: kind for name, kind in files.items() if kind not in allowed and "modeset" not in name} == {}
