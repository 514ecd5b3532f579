"""What psfleet-gpu-metrics writes for the node exporter. nvidia-smi is a script here: there is no GPU to ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gpu.machines import RECORDS
from tests.unit.stand_ins import put_program

SCRIPT = Path(__file__).resolve().parents[2] / "roles" / "node_exporter" / "files" / "psfleet-gpu-metrics"
TWO = """\
0, GPU-aa, NVIDIA H100 80GB HBM3, 98, 1000, 81559, 61, 412.25, 0x0000000000000000
1, GPU-bb, NVIDIA H100 80GB HBM3, 0, 0, 81559, 88, [N/A], 0x0000000000000048
"""


@pytest.fixture
def written(tmp_path: Path):
    """Run the script beside an nvidia-smi; returns its samples by name and labels."""

    def run(nvidia_smi: str | None, *arguments: str) -> dict[tuple[str, ...], float]:
        if nvidia_smi is not None:
            put_program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}\n")
        out = tmp_path / "psfleet-gpus.prom"
        command = [sys.executable, str(SCRIPT), str(out), *arguments]
        subprocess.run(command, check=True, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, timeout=60)
        assert [path.name for path in tmp_path.iterdir() if path.name != "nvidia-smi"] == [out.name]
        return {
            (sample.name, *(sample.labels[key] for key in ("gpu", "reason") if key in sample.labels)): sample.value
            for family in text_string_to_metric_families(out.read_text())
            for sample in family.samples
        }

    return run


def print_answer(answer: str) -> str:
    return f"cat <<'END'\n{answer}END"


def test_each_gpu_is_told_in_prometheus_units(written) -> None:
    found = written(print_answer(TWO), "2")
    assert (found["psfleet_gpus",], found["psfleet_gpus_expected",]) == (2, 2)
    assert found["psfleet_gpu_utilization_ratio", "0"] == 0.98
    assert found["psfleet_gpu_memory_used_bytes", "0"] == 1000 * 2**20
    assert found["psfleet_gpu_memory_size_bytes", "1"] == 81559 * 2**20
    assert found["psfleet_gpu_temperature_celsius", "1"] == 88
    assert found["psfleet_gpu_power_watts", "0"] == 412.25


def test_what_a_gpu_does_not_tell_is_left_out(written) -> None:
    assert ("psfleet_gpu_power_watts", "1") not in written(print_answer(TWO), "2")


def test_a_gpu_that_protects_itself_says_why(written) -> None:
    found = written(print_answer(TWO))
    reasons = {key[1:] for key, value in found.items() if key[0] == "psfleet_gpu_throttled" and value}
    assert reasons == {("1", "hw_slowdown"), ("1", "hw_thermal")}
    assert ("psfleet_gpus_expected",) not in found


@pytest.mark.parametrize(
    "nvidia_smi",
    [None, "echo 'Unable to determine the device handle' >&2; exit 15", print_answer("")],
    ids=["none", "fails", "empty"],
)
def test_without_an_answer_there_are_no_gpus(written, nvidia_smi: str | None) -> None:
    assert written(nvidia_smi, "8") == {("psfleet_gpus",): 0, ("psfleet_gpus_expected",): 8}


def test_a_real_machines_words_are_understood(written) -> None:
    answer = yaml.safe_load((RECORDS / "smi.yml").read_text())["h200"]["metrics"]
    found = written(print_answer(answer), "1")
    assert found["psfleet_gpu_memory_size_bytes", "0"] == 143771 * 2**20
    assert found["psfleet_gpu_power_watts", "0"] == 81.3
    assert {found["psfleet_gpu_throttled", "0", reason] for reason in ("hw_slowdown", "sw_thermal")} == {0}
