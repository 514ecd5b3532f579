"""The proof's judgement, with nvidia-smi's words (tests/gpu/records/smi.yml says whose) and TensorFlow's pretended."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.gpu import machines
from trainer.gpu_check import EXPECTED, check, describe, main, run_command
from trainer.process.gpus import find_missing
from trainer.telemetry.gpu_use import GpuUse, parse

ROOT = Path(__file__).parents[2]
SMI = yaml.safe_load((machines.RECORDS / "smi.yml").read_text())
MIG = ["MIG-fb42055e-9e53-5764-9278-438605a3014c", "MIG-3d4db13e-c42d-5555-98f4-8b50389791bc"]
TWO = {"driver": "580.95.05", "gpus": 2, "devices": ["0", "1"]}


class Machine:
    """Answers as nvidia-smi and as the proof's own child process, and keeps what the child was shown."""

    def __init__(self, root, query="query", module="580.95.05", code=0, computed=None):
        self.root, self.query, self.code, self.computed = root, query, code, computed
        self.shown = []
        machines.write(root / "dev/nvidia-uvm", "")
        if module:
            machines.load(root, module)

    def run(self, command, env=None, timeout=None):
        if command[0] == "nvidia-smi":
            out = SMI["mig_list" if command[1] == "-L" else self.query]["stdout"]
            return subprocess.CompletedProcess(command, self.code, out, "")
        assert command[-1] == "--compute"
        self.shown.append(env["CUDA_VISIBLE_DEVICES"])
        names = env["CUDA_VISIBLE_DEVICES"].split(",")
        found = [{"name": f"/device:GPU:{number}", "error": None} for number in range(len(names))]
        return self.computed or subprocess.CompletedProcess(command, 0, f"chatter\n{json.dumps(found)}\n", "")

    def check(self, expected):
        return check(expected, self.root, self.run)


def only(report):
    (problem,) = report["problems"]
    return problem


def test_gpus_as_expected_are_proven(tmp_path):
    machine = Machine(tmp_path)
    report = machine.check(TWO)
    assert report["problems"] == []
    assert (report["module"], report["smi"]) == ("580.95.05", "580.95.05")
    assert [gpu["compute_cap"] for gpu in report["gpus"]] == ["7.5", "7.5"]
    assert machine.shown == ["0,1"]
    assert describe(report).splitlines()[-1] == "computes 1: right"


def test_a_real_machines_words_are_understood(tmp_path):
    machine = Machine(tmp_path, query="h200", module=None)
    machines.write(tmp_path / "proc/driver/nvidia/version", SMI["h200"]["module"])
    report = machine.check({"driver": "580.159.04", "gpus": 1, "devices": ["0"]})
    assert report["problems"] == []
    assert (report["module"], report["smi"]) == ("580.159.04",) * 2
    assert [(gpu["name"], gpu["compute_cap"]) for gpu in report["gpus"]] == [("NVIDIA H200", "9.0")]
    assert parse(SMI["h200"]["use"].splitlines(), "0") == GpuUse(0, 0)


def test_each_mig_instance_is_computed_on_in_a_process_of_its_own(tmp_path):
    machine = Machine(tmp_path, query="query_mig")
    report = machine.check({"driver": "", "gpus": None, "devices": MIG})
    assert report["problems"] == []
    assert machine.shown == MIG


def test_mig_without_named_instances_is_refused(tmp_path):
    report = Machine(tmp_path, query="query_mig").check({"driver": "", "gpus": 1, "devices": ["0"]})
    assert "GPU 0 is cut into MIG instances" in only(report)
    assert "nvidia-smi -i 0 -mig 0" in only(report)


def test_an_instance_that_is_gone_is_named(tmp_path):
    gone = "MIG-00000000-9e53-5764-9278-438605a3014c"
    report = Machine(tmp_path, query="query_mig").check({"driver": "", "gpus": None, "devices": [MIG[0], gone]})
    assert only(report).startswith(f"{gone} of gpu_devices is missing")
    assert only(report).endswith("MIG instances end with each boot: docs/gpu.md")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"driver": "580.173.02"}, "the loaded module is 580.95.05; site.yml pinned 580.173.02"),
        ({"gpus": 8}, "nvidia-smi shows 2 GPUs and the inventory says gpu_count: 8"),
    ],
)
def test_what_differs_from_the_inventory_is_named_and_nothing_computed(tmp_path, expected, message):
    machine = Machine(tmp_path)
    assert message in only(machine.check(TWO | expected))
    assert machine.shown == []


def test_a_library_of_another_version_than_the_module_is_named(tmp_path):
    report = Machine(tmp_path, module="580.173.02").check(TWO | {"driver": "580.173.02"})
    assert only(report) == "nvidia-smi says driver 580.95.05 and the loaded module is 580.173.02"


def test_nvidia_smi_that_fails_is_quoted(tmp_path):
    record = SMI["mismatch"]
    machines.write(tmp_path / "proc/driver/nvidia/version", record["module"])
    report = Machine(tmp_path, query="mismatch", module=None, code=record["code"]).check(TWO | {"driver": ""})
    assert report["module"] == "580.173.02"
    assert only(report).startswith(
        "nvidia-smi ends with 18: Failed to initialize NVML: Driver/library version mismatch"
    )


def test_a_machine_without_driver_says_so(tmp_path):
    report = check(TWO, tmp_path, lambda *_args, **_kw: run_command(["/nowhere/nvidia-smi"]))
    assert report["problems"][0].startswith("no NVIDIA kernel module is loaded")
    assert "there is no /nowhere/nvidia-smi" in report["problems"][1]


def test_tensorflow_that_sees_too_few_is_quoted(tmp_path):
    complaint = "W0000 Cannot dlopen some GPU libraries. Please make sure the missing libraries mentioned above"
    computed = subprocess.CompletedProcess([], 0, "[]\n", f"chatter\n{complaint}\n")
    report = Machine(tmp_path, computed=computed).check(TWO)
    assert only(report) == f"TensorFlow sees 0 GPUs of 2 (0,1). {complaint}"


def test_a_missing_device_file_is_named_where_tensorflow_sees_too_few(tmp_path):
    machine = Machine(tmp_path, computed=subprocess.CompletedProcess([], 0, "[]\n", ""))
    (tmp_path / "dev/nvidia-uvm").unlink()
    assert machine.check(TWO)["problems"][1].startswith("there is no /dev/nvidia-uvm, which CUDA needs: systemctl")


def test_a_wrong_product_and_a_process_that_dies_are_problems(tmp_path):
    error = "a compiled product of matrices: 7 of 262144 numbers are wrong"
    wrong = [{"name": "/device:GPU:0", "error": error}, {"name": "", "error": None}]
    report = Machine(tmp_path, computed=subprocess.CompletedProcess([], 0, json.dumps(wrong), "")).check(TWO)
    assert only(report) == f"0: {error}"
    # What XLA of this wheel says of a GPU after 9.0 (tensorflow/tensorflow#111958), and how it ends: by abort.
    death = "LLVM ERROR: PTX version 8.5 does not support target 'sm_120'"
    report = Machine(tmp_path, computed=subprocess.CompletedProcess([], -6, "", death)).check(TWO)
    assert only(report) == f"TensorFlow ended with -6 on 0,1: {death}"


def test_the_program_ends_with_1_where_something_is_wrong(tmp_path, capsys):
    expected = tmp_path / "gpu.json"
    expected.write_text(json.dumps(TWO))
    assert main(["--json", "--expected", str(expected)]) == 1  # no machine of the tests has two T4
    assert json.loads(capsys.readouterr().out)["problems"]


def test_a_machine_that_was_never_set_up_is_told_how(capsys, tmp_path):
    assert main(["--expected", str(tmp_path / "nothing")]) == 1
    assert "Run `ansible-playbook site.yml`" in capsys.readouterr().err
    assert str(EXPECTED) == "/etc/trainer/gpu.json"


def test_a_command_that_does_not_end_is_a_failure():
    answer = run_command(["sleep", "5"], timeout=0.05)
    assert (answer.returncode, answer.stderr) == (124, "no answer in 0.05 s")


def test_a_task_without_gpus_of_its_own_asks_tensorflow_nothing():
    assert find_missing({}) is None
    assert find_missing({"CUDA_VISIBLE_DEVICES": "-1"}) is None


def sandbox_of_the_tasks():
    unit = (ROOT / "roles/trainer/templates/trainer@.service.j2").read_text()
    block = unit.partition("# What a task may touch")[2].partition("\n\n")[0].splitlines()[1:]
    return [line for line in block if not line.startswith("#")]


def test_the_proof_of_a_release_has_the_rights_of_a_task():
    proof = yaml.safe_load((ROOT / "roles/release/vars/main.yml").read_text())["__release_sandbox"]
    assert proof == sandbox_of_the_tasks()
    assert "NoNewPrivileges=yes" in proof


def test_the_proof_of_the_gpus_has_the_rights_of_a_task_with_gpus():
    proof = yaml.safe_load((ROOT / "roles/gpu/vars/main.yml").read_text())["__gpu_sandbox"]
    more = (ROOT / "roles/gpu/templates/psfleet-gpu.conf.j2").read_text().partition("PrivateDevices=no")
    changes = "".join(more[1:]).splitlines()
    changed = {line.partition("=")[0] for line in changes}
    kept = [line for line in sandbox_of_the_tasks() if line.partition("=")[0] not in changed]
    assert sorted(proof) == sorted(kept + changes)
    assert [line for line in proof if "SystemCallFilter" in line] == [line for line in kept if "SystemCallF" in line]


def test_tasks_and_proof_keep_what_the_driver_translates_in_one_place():
    proof = (ROOT / "roles/gpu/templates/psfleet-gpu-check.j2").read_text()
    task = (ROOT / "roles/trainer/templates/task.env.j2").read_text()
    settings = (ROOT / "roles/gpu/templates/psfleet-gpu.conf.j2").read_text()
    for name in ("CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE"):
        (value,) = re.findall(rf"^{name}=(\S+)$", task, re.MULTILINE)
        assert f"--setenv={name}={value}" in proof
    assert (
        re.findall(r"CacheDirectory=(\S+)", proof) == re.findall(r"CacheDirectory=(\S+)", settings) == ["trainer-cuda"]
    )
    assert "CUDA_CACHE_PATH=/var/cache/trainer-cuda\n" in task
