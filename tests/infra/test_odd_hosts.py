"""Hosts as strangers have them are named with the fix, before anything on them is changed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from testinfra.host import Host

from tests.hosts import ROOT
from tests.infra.conftest import copy_inventory, play

SECOND = "10.0.3.121"  # of ps-1
NAME = "head.odd.example"


def with_terminal(truth: dict[str, Any], host: str, command: str) -> None:
    """Run a command as root of a host whose sudo wants a terminal."""
    values = truth["_meta"]["hostvars"][host]
    options = values["ansible_ssh_common_args"].split()
    login = ["-i", str(ROOT / values["ansible_ssh_private_key_file"]), f"admin@{values['ansible_host']}"]
    subprocess.run(["ssh", "-tt", *options, *login, f"sudo {command}"], check=True, capture_output=True)


@pytest.fixture
def odd_inventory(lab: dict[str, Host], truth: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    """One oddity on each of four hosts, and an inventory that goes with them."""
    lab["worker-1"].run_expect([0], "sed -i '1i echo Welcome' ~/.bashrc")
    with lab["ps-1"].sudo():
        lab["ps-1"].run_expect([0], f"ip address add {SECOND}/24 dev eth0")
    with lab["ps-0"].sudo():
        lab["ps-0"].run_expect([0], f"cp /etc/hosts /etc/hosts.right; echo 127.0.1.1 {NAME} >>/etc/hosts")
    with lab["worker-0"].sudo():
        lab["worker-0"].run_expect([0], "echo Defaults:admin requiretty >/etc/sudoers.d/zz-odd")
    inventory = copy_inventory(tmp_path / "lab", truth["_meta"]["hostvars"]["head"]["trainer_run"])
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text())
    hosts["ps"]["hosts"]["ps-1"]["cluster_address"] = SECOND
    hosts["chief"]["hosts"]["head"]["cluster_address"] = NAME
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    yield inventory
    with_terminal(truth, "worker-0", "rm /etc/sudoers.d/zz-odd")
    with lab["ps-0"].sudo():
        lab["ps-0"].run_expect([0], "cp /etc/hosts.right /etc/hosts && rm /etc/hosts.right")
    with lab["ps-1"].sudo():
        lab["ps-1"].run_expect([0], f"ip address del {SECOND}/24 dev eth0")
    lab["worker-1"].run_expect([0], "sed -i 1d ~/.bashrc")


def test_odd_hosts_are_named_with_the_fix_and_nothing_is_changed(odd_inventory: Path) -> None:
    run = play("site.yml", "--tags", "host_check", inventory=odd_inventory)
    reasons = dict(run.failed)
    assert "prints 'Welcome'" in reasons["worker-1"]
    assert "put the line `case $- in *i*) ;; *) return ;; esac` above it" in reasons["worker-1"]
    assert "`Defaults:admin !requiretty` into /etc/sudoers.d/psfleet" in reasons["worker-0"]
    assert "leave from 10.0.3.21" in reasons["ps-1"]
    assert f"know it as {SECOND}" in reasons["ps-1"]
    assert "src 10.0.3.121" in reasons["ps-1"]
    assert f"{NAME}, the name of head, means a loopback address here" in reasons["ps-0"]
    assert run.changed == []
    assert run.code != 0
