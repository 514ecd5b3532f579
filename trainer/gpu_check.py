"""Prove that this machine's GPUs can be trained on: `python -m trainer.gpu_check`.

What counts is what runs: the loaded module, nvidia-smi, TensorFlow's list, and on each GPU a compiled product of
matrices and a convolution with the right numbers. /etc/trainer/gpu.json, which the role `gpu` writes, says what the
inventory expects.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.core.contracts import Tensor

EXPECTED = Path("/etc/trainer/gpu.json")
FIELDS = ("index", "name", "uuid", "driver_version", "compute_cap", "mig.mode.current")
# The first product on a GPU may have to wait for the driver to translate the wheel's kernels.
COMPUTE_SECONDS = 240
SIZE = 512
CUDA_DEVICE = "dev/nvidia-uvm"
# `nvidia-smi -L`: "  MIG 1g.5gb     Device  0: (UUID: MIG-fb42055e-9e53-5764-9278-438605a3014c)"
_MIG = re.compile(r"^\s*MIG \S+\s+Device\s+\d+: \(UUID: (MIG-[0-9a-f-]+)\)", re.MULTILINE)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def main(argv: Sequence[str]) -> int:
    """Check and tell; returns 0 when all is as expected, else 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.gpu_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--expected", type=Path, default=EXPECTED, metavar="FILE", help="what the inventory expects")
    parser.add_argument("--compute", action="store_true", help=argparse.SUPPRESS)  # this module's own question
    options = parser.parse_args(argv)
    if options.compute:
        print(json.dumps(compute()))
        return 0
    try:
        expected = json.loads(options.expected.read_text())
    except FileNotFoundError as error:
        print(f"{error}. Run `ansible-playbook site.yml` with this host in the group gpu", file=sys.stderr)
        return 1
    report = check(expected, Path("/"), run_command)
    print(json.dumps(report) if options.json else describe(report))
    return 1 if report["problems"] else 0


def check(expected: Mapping[str, Any], root: Path, run: Run) -> dict[str, Any]:
    """Compare what is there with what is expected: `{"driver", "gpus", "devices"}`, of which `driver` may be empty."""
    report: dict[str, Any] = {
        "expected": dict(expected),
        "module": read_module(root),
        "smi": None,
        "gpus": [],
        "devices": [],
        "problems": [],
    }
    problems: list[str] = report["problems"]
    if report["module"] is None:
        problems.append("no NVIDIA kernel module is loaded. Run `ansible-playbook site.yml`, or: dmesg | grep NVRM")
    elif expected["driver"] and report["module"] != expected["driver"]:
        problems.append(
            f"the loaded module is {report['module']}; site.yml pinned {expected['driver']}. Run it again: it reboots"
        )
    asked = run(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"])
    if asked.returncode:
        lines = (asked.stdout + asked.stderr).strip().splitlines() or ["nothing"]
        problems.append(f"nvidia-smi ends with {asked.returncode}: {' '.join(lines)}")
        return report
    report["gpus"] = parse_gpus(asked.stdout)
    versions = sorted({gpu["driver_version"] for gpu in report["gpus"]})
    report["smi"] = versions[0] if len(versions) == 1 else ", ".join(versions) or None
    if report["module"] and report["smi"] != report["module"]:
        problems.append(f"nvidia-smi says driver {report['smi']} and the loaded module is {report['module']}")
    instances = _MIG.findall(run(["nvidia-smi", "-L"]).stdout)
    problems += compare_devices(expected, report["gpus"], instances)
    if not problems:
        report["devices"], wrong = try_devices(expected["devices"], run)
        problems += wrong
        if wrong and not (root / CUDA_DEVICE).exists():
            problems.append(f"there is no /{CUDA_DEVICE}, which CUDA needs: systemctl status psfleet-nvidia-devices")
    return report


def read_module(root: Path) -> str | None:
    """Tell the version of the module that the kernel runs."""
    for path, pattern in (
        ("sys/module/nvidia/version", r"(\S+)"),
        ("proc/driver/nvidia/version", r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s"),
    ):
        try:
            found = re.search(pattern, (root / path).read_text())
        except OSError:
            continue
        if found:
            return found[1]
    return None


def parse_gpus(text: str) -> list[dict[str, str]]:
    """Read nvidia-smi's lines, one a GPU, with FIELDS."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(FIELDS, (cell.strip() for cell in row), strict=True)) for row in rows if row]


def compare_devices(
    expected: Mapping[str, Any], gpus: Sequence[Mapping[str, str]], instances: Sequence[str]
) -> list[str]:
    """Say which of the expected GPUs and MIG instances are missing."""
    problems = []
    if expected["gpus"] is not None and len(gpus) != expected["gpus"]:
        problems.append(
            f"nvidia-smi shows {len(gpus)} GPUs and the inventory says gpu_count: {expected['gpus']}. A GPU that fell "
            "off is in: dmesg | grep Xid"
        )
    there = {gpu["uuid"] for gpu in gpus} | set(instances)
    for device in expected["devices"]:
        if not device.isdecimal() and device not in there:
            problems.append(
                f"{device} of gpu_devices is missing; nvidia-smi -L shows {', '.join(sorted(there))}"
                + (". MIG instances end with each boot: docs/gpu.md" if device.startswith("MIG-") else "")
            )
    sliced = {gpu["index"] for gpu in gpus if gpu["mig.mode.current"] == "Enabled"}
    for device in expected["devices"]:
        if device in sliced:
            problems.append(
                f"GPU {device} is cut into MIG instances, of which the inventory names none. Name them in gpu_devices, "
                f"or turn MIG off there: nvidia-smi -i {device} -mig 0"
            )
    return problems


def try_devices(devices: Sequence[str], run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """Compute on each device, in a process of its own for each MIG instance: CUDA shows a process one of them."""
    sliced = [device for device in devices if device.startswith("MIG-")]
    whole = [device for device in devices if device not in sliced]
    results: list[dict[str, Any]] = []
    problems: list[str] = []
    for visible in filter(None, (whole, *([each] for each in sliced))):
        names = ",".join(visible)
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}
        answer = run([sys.executable, "-m", "trainer.gpu_check", "--compute"], env=environment, timeout=COMPUTE_SECONDS)
        if answer.returncode:
            lines = [line for line in answer.stderr.splitlines() if line.strip()]
            problems.append(
                f"TensorFlow ended with {answer.returncode} on {names}: {' | '.join(lines[-3:]) or 'no word'}"
            )
            continue
        found = json.loads(answer.stdout.splitlines()[-1])
        if len(found) != len(visible):
            hint = [line for line in answer.stderr.splitlines() if "Cannot dlopen" in line or "CUDA_ERROR" in line]
            problems.append(
                f"TensorFlow sees {len(found)} GPUs of {len(visible)} ({names}). "
                + (hint[0].strip() if hint else "Has its environment the CUDA wheels?")
            )
        for device, result in zip(visible, found, strict=False):
            results.append({"device": device, **result})
            if result["error"]:
                problems.append(f"{device}: {result['error']}")
    return results, problems


def compute(kind: str = "GPU") -> list[dict[str, Any]]:
    """Compute on each device that TensorFlow sees; returns each one's name and error, if any."""
    import tensorflow as tf

    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)  # there may be a training beside it
    return [
        {"name": device.name, "error": try_product(device.name) or try_convolution(device.name)}
        for device in tf.config.list_logical_devices(kind)
    ]


def try_product(device: str) -> str | None:
    """Multiply matrices, which XLA compiles for the device."""
    import numpy as np
    import tensorflow as tf

    # Whole numbers up to 7: exact in any float that a GPU multiplies in, TF32 too, and so are their sums of SIZE.
    numbers = np.random.default_rng(7).integers(0, 8, (2, SIZE, SIZE))
    left, right = numbers.astype(np.float32)
    expected = (numbers[0] @ numbers[1]).astype(np.float32)
    wrong = run_on(device, lambda: multiply()(tf.constant(left), tf.constant(right)), expected, 0)
    return wrong and f"a compiled product of matrices: {wrong}"


def try_convolution(device: str) -> str | None:
    """Convolve, which a GPU does with cuDNN: another library than the product's, with its own list of GPUs."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(7)
    images = generator.integers(0, 8, (2, 30, 30, 8)).astype(np.float32)
    filters = generator.integers(0, 8, (3, 3, 8, 16)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    expected = np.einsum("nhwcij,ijcf->nhwf", windows, filters)
    # cuDNN may take an algorithm that divides in between: its numbers are near, and not the same.
    wrong = run_on(device, lambda: convolve(tf.constant(images), tf.constant(filters)), expected, 0.01)
    return wrong and f"a convolution: {wrong}"


def run_on(device: str, compute_there: Callable[[], Any], expected: Any, tolerance: float) -> str | None:
    """Compute on a device and say what is wrong, or None."""
    import tensorflow as tf

    try:
        with tf.device(device):
            computed = compute_there()
        if not computed.device.endswith(device):
            return f"it was computed on {computed.device}"
        return judge(computed.numpy(), expected, tolerance)
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {error.message.splitlines()[0]}"


def multiply() -> Tensor:
    """Make the function, compiled by XLA: that is where a wheel without code for a GPU fails."""
    import tensorflow as tf

    return tf.function(tf.matmul, jit_compile=True)


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Make the convolution."""
    import tensorflow as tf

    return tf.nn.conv2d(images, filters, 1, "VALID")


def judge(computed: Any, expected: Any, tolerance: float) -> str | None:
    """Say how many numbers are off by more than a part of the greatest, or None."""
    wrong = int((~(abs(computed - expected) <= tolerance * expected.max())).sum())  # so that no number is wrong too
    if wrong:
        return f"{wrong} of {expected.size} numbers are wrong"
    return None


def describe(report: Mapping[str, Any]) -> str:
    """Lay a report out for a terminal."""
    lines = [
        f"driver   module {report['module'] or '-'}, nvidia-smi {report['smi'] or '-'}, pinned "
        f"{report['expected']['driver'] or '(not by psfleet)'}"
    ]
    lines += [f"GPU {gpu['index']}    {gpu['name']}, compute capability {gpu['compute_cap']}" for gpu in report["gpus"]]
    lines += [f"computes {each['device']}: {each['error'] or 'right'}" for each in report["devices"]]
    return "\n".join(lines + [f"problem  {problem}" for problem in report["problems"]])


def run_command(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command; one that is missing or doesn't end is one that failed."""
    try:
        return subprocess.run(command, env=env, timeout=timeout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no {command[0]}")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {timeout:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
