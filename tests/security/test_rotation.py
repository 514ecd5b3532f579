"""The playbook that changes the keys, run by Ansible on members in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.site import wireguard
from tests.hosts import ROOT
from tests.security.hosts import GROUPS, MEMBERS
from tests.security.wire import Wire


class Cluster:
    """Members that Ansible reaches by shells of their own; the files lie where the tests put them."""

    def __init__(self, directory: Path) -> None:
        self.wire = Wire(4, directory)
        self._inventory = directory / "inventory"
        self._inventory.mkdir()
        hosts = {}
        for host, values in self.wire.hostvars().items():
            shell = directory / f"shell-{host}"
            words = " ".join(self.wire.networks.under(host))
            shell.write_text(f'#!/bin/sh\nPATH={directory}/tools:$PATH exec {words} /bin/sh "$@"\n')
            shell.chmod(0o755)
            hosts[host] = values | {"ansible_shell_executable": str(shell)}
        site = {
            "ansible_become": False,
            "ansible_python_interpreter": "/usr/bin/python3",
            "cluster_uid": 6006,
            "cluster_shared_dir": "/srv/trainer",
            "cluster_nfs_dir": "/srv/nfs/trainer",
        }
        groups: dict[str, Any] = {group: {"hosts": dict.fromkeys(names)} for group, names in GROUPS.items()}
        (self._inventory / "hosts.yml").write_text(yaml.safe_dump(groups | {"all": {"vars": site, "hosts": hosts}}))
        self.keys = self._inventory / wireguard.KEYS_FILE
        own = {
            "__wireguard_directory": f"{directory}/wire-{{{{ inventory_hostname }}}}",
            "__wireguard_program": f"{directory}/wire-{{{{ inventory_hostname }}}}/psfleet-wireguard",
        }
        self._own = json.dumps(own)

    def build(self) -> None:
        self.wire.build()
        self.keys.write_text(wireguard.keys_text(self.wire.keys))

    def rotate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            "ansible-playbook", "ansible/rotate_keys.yml", "--inventory", str(self._inventory),
            "--connection", "ansible.builtin.local", "--extra-vars", self._own, *arguments,
            # After preflight, which refuses these shells, and the lock, which has no SSH here.
            "--start-at-task", "Refuse to leave hosts behind",
        ]  # fmt: skip
        environment = os.environ | {"_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    def used(self) -> dict[str, str]:
        """The public key that each host uses."""
        return {host: self.wire.wire(host, "public") for host in MEMBERS}


@pytest.fixture
def cluster(_namespaces: None, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.build()
        yield made
    finally:
        made.wire.end()


def test_all_keys_change_with_a_gap_of_less_than_a_second(cluster: Cluster) -> None:
    wire, before = cluster.wire, cluster.used()
    with wire.asking("gamma", "beta") as gap:
        done = cluster.rotate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert gap.seconds < 1
    after = cluster.used()
    assert not set(before.values()) & set(after.values())
    assert wireguard.read_keys(cluster.keys.read_text()) == after
    for host in MEMBERS:
        wire.wire(host, "check")
        assert wire.wire(host, "met") == ""
        # As site.yml would write it: the next one changes nothing.
        written = (wire.place(host) / "peers.conf").read_text().partition("\n")[2]
        assert written == wire.rendered(host, after)["peers.conf"].partition("\n")[2]


def test_nothing_changes_where_hosts_are_left_out_and_not_named(cluster: Cluster) -> None:
    before, kept = cluster.used(), cluster.keys.read_text()
    done = cluster.rotate("--limit", "all:!gamma")
    assert done.returncode != 0
    assert "-e rotate_without=" in done.stdout
    assert (cluster.used(), cluster.keys.read_text()) == (before, kept)


def test_a_host_that_is_named_as_absent_keeps_its_key(cluster: Cluster) -> None:
    before = cluster.used()
    cluster.wire.stop("gamma")
    done = cluster.rotate("--extra-vars", "rotate_without=gamma")
    assert done.returncode == 0, done.stdout + done.stderr
    after = cluster.used()
    assert {host for host in MEMBERS if after[host] == before[host]} == {"gamma"}
    assert wireguard.read_keys(cluster.keys.read_text()) == after


def test_nobody_switches_where_one_can_not_be_told(cluster: Cluster) -> None:
    """Beta's clock is ahead by more than the time until the switch."""
    before, kept = cluster.used(), cluster.keys.read_text()
    program = cluster.wire.place("beta") / "psfleet-wireguard"
    program.write_text(program.read_text().replace("$(date +%s)", "$(($(date +%s) + 1000))"))
    done = cluster.rotate()
    assert done.returncode != 0
    assert "the keys stay as they are: beta: psfleet-wireguard: the switch is -9" in done.stdout.replace("\n", "")
    assert (cluster.used(), cluster.keys.read_text()) == (before, kept)


def test_nothing_changes_where_a_tunnel_is_down(cluster: Cluster) -> None:
    before, kept = cluster.used(), cluster.keys.read_text()
    cluster.wire.stop("beta")
    done = cluster.rotate()
    assert done.returncode != 0
    assert "there is no interface psfleet0" in done.stdout
    assert (cluster.used(), cluster.keys.read_text()) == (before, kept)
