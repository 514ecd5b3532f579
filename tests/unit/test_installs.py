"""What roles install is what they name and what that needs: wireguard-tools recommends a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from test_modes import tasks

ROOT = Path(__file__).resolve().parents[2]
DRIVER = "nvidia_driver"  # has packages that need what they recommend, and stays at a reset


def installs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return each task that installs packages on Debian: what it is, its arguments, and its defaults for apt."""
    for file in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        for task in tasks(yaml.safe_load(file.read_text())):
            for module in ("ansible.builtin.apt", "ansible.builtin.package"):
                arguments = task.get(module)
                if isinstance(arguments, dict) and "name" in arguments and arguments.get("state") != "absent":
                    defaults = task.get("module_defaults", {}).get("ansible.builtin.apt", {})
                    yield f"{file.relative_to(ROOT)}: {task.get('name')}", arguments, defaults


def test_what_is_merely_recommended_is_not_installed() -> None:
    found = list(installs())
    assert len(found) > 7
    assert [what for what, *given in found if not any(each.get("install_recommends") is False for each in given)] == []


def test_the_reset_knows_what_the_tunnel_needs() -> None:
    known = yaml.safe_load((ROOT / "roles/wireguard/vars/main.yml").read_text())["__wireguard_packages"]
    names = re.findall(r"'([a-z-]+)'", known)
    assert names == ["wireguard-tools", "wireguard-go"]
    assert not [name for name in names if f"'{name}'" not in (ROOT / "ansible/tasks/reset.yml").read_text()]
