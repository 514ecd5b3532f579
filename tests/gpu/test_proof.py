"""The role `gpu` on a chroot: nvidia-smi, the module and what a GPU would compute are pretended, the rest is real.

But for systemd: the rights that the proof runs with are shown in tests/gpu/test_reboot.py.
"""

import json
import re
import shutil

import pytest
import yaml

from tests.gpu import machines
from tests.gpu.chroot import ROOT, Machine

SMI = yaml.safe_load((machines.RECORDS / "smi.yml").read_text())
PYTHON = """\
case "$*" in *--compute*) echo '[{"name": "", "error": null}, {"name": "", "error": %s}]'; exit;; esac
exec -a "$0" /usr/bin/python3 "$@"
"""
# Drops the options.
SYSTEMD_RUN = """\
while case $1 in --*) true;; *) false;; esac; do shift; done
cd /opt/trainer/current && exec setpriv --reuid=trainer --regid=trainer --init-groups "$@"
"""


@pytest.fixture(scope="module")
def machine():
    made = Machine("proof")
    made.do("useradd", "--system", "--create-home", "trainer")
    shutil.copytree(ROOT / "trainer", made.root / "opt/trainer/current/trainer")
    machines.write(made.root / "smi", SMI["query"]["stdout"])
    made.script("/usr/local/bin/systemd-run", SYSTEMD_RUN)
    made.script("/usr/local/bin/nvidia-smi", 'if [ "$1" != -L ]; then cat /smi; fi')
    return made


def play(machine, *playbooks, module="580.95.05", error="null", check=True, **variables):
    machines.load(machine.root, module)
    machine.script("/opt/trainer/current/env/bin/python", PYTHON % error)
    python = machine.root / "opt/trainer/current/env/bin/python"
    python.write_text(python.read_text().replace("#!/bin/sh", "#!/bin/bash"))
    output = machine.play(*(playbooks or ["tests/gpu/proof.yml"]), check=check, **variables)
    return " ".join(output.split())


def test_gpus_as_expected_are_proven_and_a_second_run_changes_nothing(machine):
    play(machine)
    expected = json.loads((machine.root / "etc/trainer/gpu.json").read_text())
    assert expected == {"driver": "580.95.05", "gpus": 2, "devices": ["0", "1"]}
    assert re.search(r"changed=0 .* failed=0", play(machine))


def test_another_module_than_the_pinned_one_ends_the_play_with_the_hosts_name(machine):
    output = play(machine, module="580.82.07", check=False)
    assert "host 'machine':" in output
    assert "the loaded module is 580.82.07; site.yml pinned 580.95.05" in output


def test_a_gpu_that_computes_wrong_ends_the_play(machine):
    output = play(machine, error='"a convolution: 3 of 25088 numbers are wrong"', check=False)
    assert "1: a convolution: 3 of 25088 numbers are wrong" in output


def test_site_s_playbooks_prove_the_driver_that_they_found_on_the_gpus_that_the_inventory_names(machine):
    """With the driver that the machine came with."""
    machine.do("rm", "-rf", "/etc/trainer/gpu.json", "/sys/bus")
    machines.lay_out(machine.root, "tesla-t4")
    playbooks = ("ansible/gpu.yml", "ansible/gpu_proof.yml")
    variables = {"nvidia_driver_source": "none", "nvidia_driver_version": "580.95.05"}
    play(machine, *playbooks, **variables)
    expected = json.loads((machine.root / "etc/trainer/gpu.json").read_text())
    assert expected == {"driver": "580.95.05", "gpus": 2, "devices": ["0", "1"]}
    assert re.search(r"changed=0 .* failed=0", play(machine, *playbooks, **variables))
    output = play(machine, *playbooks, error='"1 of 16 numbers is wrong"', check=False, **variables)
    assert "host 'machine':" in output
    assert "1: 1 of 16 numbers is wrong" in output
