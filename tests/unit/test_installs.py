"""What roles install is what they name and what that needs: wireguard-tools recommends a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from test_modes import tasks

ROOT = Path(__file__).resolve().parents[2]
DRIVER = "nvidia_driver"  # has packages that need what they recommend, and stays at a reset


def apt_tasks() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return each task that asks apt on Debian: what it is, the task, and its arguments."""
    for file in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        for task in tasks(yaml.safe_load(file.read_text())):
            for module in ("ansible.builtin.apt", "ansible.builtin.package"):
                if isinstance(arguments := task.get(module), dict):
                    yield f"{file.relative_to(ROOT)}: {task.get('name')}", task, arguments


def installs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return each task that installs packages on Debian: what it is, its arguments, and its defaults for apt."""
    for what, task, arguments in apt_tasks():
        if "name" in arguments and arguments.get("state") != "absent":
            yield what, arguments, task.get("module_defaults", {}).get("ansible.builtin.apt", {})


def test_what_is_merely_recommended_is_not_installed() -> None:
    found = list(installs())
    assert len(found) > 7
    assert [what for what, *given in found if not any(each.get("install_recommends") is False for each in given)] == []


def test_a_fresh_host_is_looked_at_in_check_mode_without_what_apt_needs() -> None:
    """Ansible's module fails there without python3-apt, which a fresh host gets by the role `common`."""
    found = [
        (what, task) for what, task, _ in apt_tasks() if not what.startswith((f"roles/{DRIVER}/", "roles/common/"))
    ]
    assert len(found) >= 7
    for what, task in found:
        for checks, fails in ((True, True), (True, False), (False, True), (False, False)):
            known = {"ansible_check_mode": checks, task.get("register", ""): {"failed": fails, "changed": False}}
            templar = Templar(loader=DataLoader(), variables=known)
            failed = templar.evaluate_conditional(trust_as_template(task.get("failed_when", str(fails))))
            changed = templar.evaluate_conditional(trust_as_template(task.get("changed_when", "false")))
            assert (failed, changed) == (fails and not checks, checks), what


def test_the_reset_knows_what_the_tunnel_needs() -> None:
    known = yaml.safe_load((ROOT / "roles/wireguard/vars/main.yml").read_text())["__wireguard_packages"]
    names = re.findall(r"'([a-z-]+)'", known)
    assert names == ["wireguard-tools", "wireguard-go"]
    assert not [name for name in names if f"'{name}'" not in (ROOT / "ansible/tasks/reset.yml").read_text()]
