"""Hosts as tests see them: over SSH, through the inventory that Ansible reads."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]


def hosts_of(group: str) -> dict[str, Host]:
    return {name_of(host): host for host in testinfra.get_hosts([f"ansible://{group}"])}


def name_of(host: Host) -> str:
    """The host's name in the inventory."""
    return host.backend.get_pytest_id().removeprefix("ansible://")


def answer(host: Host, command: str) -> str:
    """What a command prints as root, or nothing while the host can't be reached."""
    try:
        with host.sudo():
            return host.run(command).stdout.strip()
    except RuntimeError:
        return ""


def listed_inventory() -> dict[str, Any]:
    """The inventory as Ansible lists it: groups and hostvars."""
    listed = subprocess.run(["ansible-inventory", "--list"], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(listed.stdout)


def adding_journals(journal: Callable[[Host], str]) -> Callable[[pytest.Item], Iterator[None]]:
    """Return the hook `pytest_runtest_makereport` that adds the journals of a failed test's hosts to its report."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.failed and hasattr(item, "funcargs"):
            host = item.funcargs.get("host")
            for name, one in ({name_of(host): host} if host else hosts_of("all")).items():
                report.sections.append((f"journal of {name}", journal(one)))
        return report

    return pytest_runtest_makereport


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until `true()` is; its value is returned. Fails with `what` after the deadline."""
    return until(true, what, seconds, pause=0.5)
