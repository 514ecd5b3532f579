"""The table of what fits, held against the wheel and pci.ids where they are here, and what it refuses."""

import re
from pathlib import Path

import pytest
import yaml

from fleet.site.nvidia import find_gpu, nvidia_driver, read_table, runs_on
from tests.gpu.machines import MACHINES, RECORDS

ROOT = Path(__file__).parents[2]
PCI_IDS = RECORDS / "pci.ids-10de.txt"
DEBIAN = {"name": "box", "system": "Debian 12", "python": "3.11.2"}


def seen(*devices, **facts):
    gpus = [{"address": f"0000:{number:02x}:00.0", "device": device} for number, device in enumerate(devices)]
    nothing = {"nvswitches": [], "loaded": None, "secure_boot": None, "key_enrolled": False}
    return {"gpus": gpus, **nothing, **facts}


def plan(*devices, source="nvidia", branch="580", flavour="auto", machine=None, capability="", **facts):
    return nvidia_driver(seen(*devices, **facts), source, branch, flavour, DEBIAN | (machine or {}), capability)


def only(*devices, **kwargs):
    (problem,) = plan(*devices, **kwargs)["problems"]
    return problem


@pytest.mark.parametrize("device", ["1eb8", "20b2", "2330", "27b8"])
def test_usual_gpus_pass_with_nvidias_580(device):
    assert plan(device)["problems"] == []


@pytest.mark.parametrize(
    ("device", "name"), [("15f8", "Pascal"), ("1b38", "Pascal"), ("1db1", "Volta"), ("1db4", "Volta")]
)
def test_a_gpu_that_cudnn_has_no_code_for_is_refused(device, name):
    problem = only(device)
    assert f"10de:{device} ({name}, compute capability" in problem
    assert "cuDNN 9.28 of locks/cuda has no code for it (from 7.5 on): a convolution would fail" in problem
    assert "nvidia-cudnn-cu12<9.11" in problem


def test_what_cudnn_runs_on_is_known_of_the_locks_version():
    locks = sorted((ROOT / "locks").glob("cuda-*.txt"))
    versions = {re.search(r"^nvidia-cudnn-cu12==(\d+\.\d+)\.", lock.read_text(), re.MULTILINE)[1] for lock in locks}
    assert versions == {read_table()["cudnn"]["version"]}, "another cuDNN: ask its support matrix for the oldest GPU"


def test_what_tensorflow_runs_on_is_known_of_the_locks_version():
    locks = sorted((ROOT / "locks").glob("cuda-*.txt"))
    versions = {re.search(r"^tensorflow==(\d+\.\d+)\.", lock.read_text(), re.MULTILINE)[1] for lock in locks}
    wheel = read_table()["tensorflow"]["version"]
    assert versions == {wheel}, "another TensorFlow: make venv-tf TF_LOCK=locks/cuda-3.11.txt, then make test-gpu"


def test_a_host_without_a_gpu_is_refused_by_name():
    problem = only()
    assert problem.startswith("host 'box' is in the group gpu and has no NVIDIA GPU")
    assert "Take it out of the group" in problem


def test_a_gpu_newer_than_the_wheel_is_refused():
    problem = only("2b85")
    assert "10de:2b85 (Blackwell, compute capability 12.0)" in problem
    assert "runs on 6.0 to 9.0" in problem


def test_one_bad_gpu_among_good_ones_is_enough():
    assert "10de:2b85" in only("2582", "2b85")


def test_an_old_gpu_is_refused_once_its_capability_is_known():
    assert "which ansible/nvidia_compatibility.yml doesn't know" in only("1180")
    assert "compute capability 3.0" in only("1180", capability="3.0")
    assert plan("ffff", capability="8.6")["problems"] == []


def test_hopper_needs_a_driver_that_translates_the_wheels_ptx():
    problem = only("2330", source="distribution", branch="")
    assert "PTX of CUDA 12.5" in problem
    assert "driver 535 can't translate: it needs 555 or newer" in problem
    assert plan("2330", branch="555")["problems"] == []
    assert plan("20b2", source="distribution", branch="")["problems"] == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"branch": "470"}, "driver 470 is too old: TensorFlow 2.21 is built for CUDA 12.5, which needs 525"),
        ({"machine": {"python": "3.9.2"}}, "host 'box' has Python 3.9.2; TensorFlow 2.21 has wheels for 3.10 to 3.13"),
        ({"machine": {"python": "3.14.0"}}, "host 'box' has Python 3.14.0"),
        ({"source": "ubuntu", "branch": ""}, "runs Debian 12; nvidia_driver_source: ubuntu is made for Ubuntu"),
        ({"machine": {"system": "Rocky 9.4"}}, "runs Rocky 9.4; nvidia_driver_source: nvidia is made for Debian 12"),
        ({"source": "distribution", "branch": "", "nvswitches": [{}, {}]}, "2 NVSwitches, which need NVIDIA's fabric"),
        ({"secure_boot": True}, "has Secure Boot on: its kernel loads no module that was built on the machine"),
        ({"source": "none", "branch": ""}, "nvidia_driver_source: none and no NVIDIA module is loaded"),
        ({"source": "none", "branch": "", "loaded": "470.1.2"}, "driver 470 is too old"),
        ({"source": "none", "branch": "535", "loaded": "580.1"}, "came with driver 580.1, and nvidia_driver_branch is"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(kwargs, message):
    assert message in only("1eb8", **kwargs)


def test_secure_boot_is_no_obstacle_to_signed_modules():
    assert plan("1eb8", secure_boot=True, key_enrolled=True)["problems"] == []
    ubuntu = {"system": "Ubuntu 24.04", "python": "3.12.3"}
    assert plan("1eb8", source="ubuntu", machine=ubuntu, secure_boot=True)["problems"] == []
    assert "Ubuntu's signed modules" in only("1eb8", machine=ubuntu, secure_boot=True)
    assert "mokutil --import /var/lib/shim-signed/mok/MOK.der;" in only("1eb8", machine=ubuntu, secure_boot=True)
    assert "mokutil --import /var/lib/dkms/mok.pub;" in only("1eb8", secure_boot=True)


def test_a_machines_own_driver_is_only_looked_at():
    own = plan("1eb8", source="none", branch="", loaded="550.54.15", machine={"system": "Rocky 9.4"})
    assert (own["problems"], own["branch"]) == ([], "550")


@pytest.mark.parametrize(
    ("devices", "branch", "flavour", "is_open"),
    [
        (["1eb8"], "580", "auto", True),
        (["1db6"], "580", "auto", False),  # Volta
        (["1eb8", "1db6"], "580", "auto", False),
        (["1eb8"], "535", "auto", False),  # NVIDIA's default from 560 on
        (["1eb8"], "535", "open", True),
        (["1eb8"], "580", "proprietary", False),
    ],
)
def test_the_open_module_is_taken_where_gpus_and_branch_allow(devices, branch, flavour, is_open):
    assert plan(*devices, branch=branch, flavour=flavour)["open"] is is_open


def test_open_modules_for_an_old_gpu_are_refused():
    assert "which NVIDIA's open kernel modules don't know" in plan("1db6", flavour="open")["problems"][1]
    assert "the last driver for it is 580, and nvidia_driver_branch is 590" in plan("1db6", branch="590")["problems"][1]


@pytest.mark.parametrize(
    ("capability", "how"),
    [
        ("5.2", None),
        ("6.1", "binary"),
        ("7.5", "binary"),
        ("8.9", "binary"),
        ("9.0", "ptx"),
        ("10.0", None),
        ("12.0", None),
    ],
)
def test_the_wheel_runs_on_what_it_has_code_for(capability, how):
    assert runs_on(capability) == how


def test_the_recorded_machines_gpus_are_in_the_table():
    for name, machine in MACHINES.items():
        for device in re.findall(r"\[03(?:00|02)\]: .*\[10de:([0-9a-f]{4})\]", machine["lspci"]):
            assert find_gpu(device), f"{name}: {device}"


def test_the_table_agrees_with_pci_ids_on_every_chip():
    chips = {chip: kind for kind in read_table()["gpus"] for chip in kind["chips"]}
    wrong, known = [], 0
    for line in PCI_IDS.read_text().splitlines():
        if line.startswith("#"):
            continue
        device, chip = line.split()
        if chip in chips:
            known += 1
            if find_gpu(device) is not chips[chip]:
                wrong.append(line)
        elif find_gpu(device):
            wrong.append(line)
    assert wrong == []
    assert known > 300


def test_each_source_of_the_role_has_its_packages_file():
    role = ROOT / "roles" / "nvidia_driver"
    for source in read_table()["branches"]:
        names = yaml.safe_load((role / "vars" / f"{source}.yml").read_text())
        assert {"__nvidia_driver_together", "__nvidia_driver_others", "__nvidia_driver_fabric_manager"} <= set(names)


@pytest.mark.parametrize("capability", ["sm_86", "8", "8.6a"])
def test_a_capability_that_is_none_is_refused_by_value(capability):
    assert f"nvidia_driver_capability is '{capability}'; expected a compute" in only("ffff", capability=capability)


def test_numbers_that_yaml_made_of_versions_are_taken():
    assert plan("ffff", branch=580, capability=8.6) == plan("ffff", branch="580", capability="8.6")
