"""A run that is broken off after it wrote a file: the next one finds what is owed, though each file is right."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.places import CODE as ROOT
from fleet.rollout.desired_state import Pass, load
from fleet.rollout.roles import Ahead, Role
from fleet.rollout.short_way import ShortWay
from fleet.site.inventory import load_inventory
from fleet.site.owed_restarts import owed
from tests.rendered_firewall import FACTS
from tests.unit.stand_ins import put_program

HOST = "alpha"
SERVICES = ("tensorboard", "prometheus", "alertmanager")
MACHINE = {
    "os_family": "Debian", "distribution": "Debian", "virtualization_role": "host", "virtualization_type": "kvm",
}  # fmt: skip
UNIT = {"ActiveState": "active", "UnitFileState": "enabled"}
USER = {
    "trainer": {"uid": 6006, "group": "trainer", "home": "/var/lib/trainer", "shell": "/usr/sbin/nologin"},
    "prometheus": {"home": "/var/lib/prometheus", "shell": "/usr/sbin/nologin"},
}
PACKAGES = ("acl", "ca-certificates", "nftables", "rsync", "procps", "python3-apt", "chrony")
TEXTS = {
    "/proc/sys/net/ipv4/tcp_retries2": "6\n",
    "/etc/sysctl.d/60-psfleet.conf": "net.ipv4.tcp_retries2=6\n",
}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Its first host serves everything."""
    copy = tmp_path / "site"
    shutil.copytree(ROOT / "inventory/three-machines", copy)
    hosts = yaml.safe_load((copy / "hosts.yml").read_text())
    hosts |= {service: {"hosts": {HOST: None}} for service in SERVICES}
    (copy / "hosts.yml").write_text(yaml.safe_dump(hosts))
    return copy


@pytest.fixture(autouse=True)
def _roles_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """fab asks none of these roles, and reads those of others only where there are any."""
    monkeypatch.setattr("fleet.rollout.roles.load", lambda path: load(path) if path.exists() else {})


GPU_TIMER = "/etc/systemd/system/psfleet-gpu-metrics.timer"


def left(
    inventory: Path,
    name: str,
    playbook: str,
    tasks: str = "main",
    missing: str = GPU_TIMER,
    **answers: str | dict[str, Any],
) -> str | None:
    """Return in what a host differs that is right, where its commands and modules answer so; else they say nothing."""
    role = Role(
        load_inventory(str(inventory)), HOST, name, playbook, ansible_facts=MACHINE, ansible_play_hosts=[HOST],
        ansible_play_hosts_all=[HOST],
    )  # fmt: skip
    ahead = Ahead(role.place, role._render, leads=True)
    question = ahead.question(tasks)
    steps = {key: answer_to(step, answers) for key, step in question.steps.items()}
    there = {path: ["0755", "directory", "root 0", "root 0"] for path in question.looks if path != missing}
    answer: dict[str, Any] = {"files": there, "texts": TEXTS, "steps": steps}
    now = Pass({}, whole=True, answer=answer)
    ahead._read_all(ahead._coming(tasks), now)
    answer["files"] = {**now.wanted.files, **there}
    return ahead.difference(tasks, answer)


def answer_to(step: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    if "command" in step:
        text = " ".join(step["command"])
        said = next((given for word, given in answers.items() if word in text and isinstance(given, str)), "")
        packages = "".join(f"installed {package}\n" for package in PACKAGES)
        return {"rc": 0, "stdout": packages if "dpkg-query" in text else said, "stderr": ""}
    if "user" in step:
        return USER[step["user"]] | {"password": "!"}
    if "group" in step:
        return {"gid": 6006}
    given = answers.get(step.get("module", ""), {})
    return {"changed": False, **given} if "module" in step else UNIT


@pytest.mark.parametrize(
    ("role", "playbook", "said"),
    [
        ("tensorboard", "monitoring.yml", "restarted\n"),
        ("node_exporter", "monitoring.yml", "restarted\n"),
        ("prometheus", "monitoring.yml", "restarted\n"),
        ("prometheus", "monitoring.yml", "reloaded\n"),
        ("alertmanager", "monitoring.yml", "restarted\n"),
        ("common", "base.yml", "restarted\n"),
    ],
)
def test_a_service_that_began_before_its_files_is_found(inventory: Path, role: str, playbook: str, said: str) -> None:
    assert left(inventory, role, playbook) is None
    assert "does not run as it should" in str(left(inventory, role, playbook, newermt=said))


@pytest.mark.parametrize(
    ("written", "states"),
    [
        ({}, []),
        ({"unit.conf": 150}, ["restarted"]),
        ({"alerts.yml": 150}, []),  # it was read again at 200
        ({"alerts.yml": 250}, ["reloaded"]),
        ({"unit.conf": 250, "alerts.yml": 250}, ["restarted", "reloaded"]),
    ],
)
def test_a_file_is_compared_with_when_its_service_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, int], states: list[str]
) -> None:
    systemctl(tmp_path, monkeypatch, "case $* in *ActiveEnter*) echo @100 ;; *) echo @200 ;; esac")
    assert printed(tmp_path, {"unit.conf": 50, "a config.yml": 50, "alerts.yml": 50, **written}) == states


def test_a_service_that_never_ran_starts_with_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch, "echo")
    assert "restarted" in printed(tmp_path, {"unit.conf": 50, "a config.yml": 50, "alerts.yml": 50})


def systemctl(path: Path, monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    put_program(path / "systemctl", f"#!/bin/sh\n{answers}\n")
    monkeypatch.setenv("PATH", str(path), prepend=os.pathsep)


def printed(path: Path, written: dict[str, int]) -> list[str]:
    for name, seconds in written.items():
        (path / name).touch()
        os.utime(path / name, (seconds, seconds))
    command = owed("a.service", *(str(path / name) for name in written))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_reported_gpus_goes_with_them(inventory: Path) -> None:
    """Else the alert of a GPU that is gone would fire on, though the host was taken out of the group for it."""
    assert left(inventory, "node_exporter", "monitoring.yml") is None
    found = left(inventory, "node_exporter", "monitoring.yml", missing="")
    assert found == "psfleet-gpu-metrics.timer does not run as it should"


def test_lists_of_addresses_that_systemd_has_not_read_are_found(inventory: Path) -> None:
    """Else the tasks' units would keep out a member that has come, and let in one that has left."""
    facts = {**FACTS, "first": False}
    assert left(inventory, "firewall", "training.yml", "close", firewall_facts={**facts, "unread": False}) is None
    found = left(inventory, "firewall", "training.yml", "close", firewall_facts={**facts, "unread": True})
    assert found == "psfleet-firewall.service does not run as it should"
    start = object.__new__(ShortWay)
    start._firewalls = {HOST: object()}  # type: ignore[dict-item]
    assert "systemd has yet to read" in str(
        start._firewall_difference(HOST, {"steps": {"facts": {**facts, "unread": True}}})
    )
