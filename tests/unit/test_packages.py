"""Packages of hosts that others use too: a lock that is held, and an index that can't be fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from fleet.site.filters import FILTERS
from tests.unit.test_modes import tasks

ROOT = Path(__file__).resolve().parents[2]


def apt_arguments() -> dict[str, dict[str, Any]]:
    """By file and task, what apt is asked for where it may fetch an index."""
    found = {}
    for file in ROOT.glob("roles/*/tasks/*.yml"):
        for task in tasks(yaml.safe_load(file.read_text())):
            given = task.get("ansible.builtin.apt") or task.get("module_defaults", {}).get("ansible.builtin.apt")
            if given and ("name" in given or "name" in task.get("ansible.builtin.package", {})):
                found[f"{file.parent.parent.name}: {task['name']}"] = given
    return found


def test_each_role_waits_for_apts_lock() -> None:
    found = apt_arguments()
    assert [name for name, given in found.items() if "lock_timeout" not in given] == []
    assert len(found) > 7


@pytest.mark.parametrize(
    ("index", "more"),
    [
        ({"rc": 0, "stdout": "", "stderr": ""}, ""),
        (
            {"rc": 100, "stderr": "E: Failed to fetch http://m/ Temporary failure resolving 'm'"},
            "; `apt-get update` there: E: Failed to fetch http://m/ Temporary failure resolving 'm'",
        ),
        ({"rc": 124, "stdout": "", "stderr": ""}, "; `apt-get update` there: it ended with exit code 124"),
    ],
)
def test_an_index_that_cant_be_fetched_is_named(index: dict[str, Any], more: str) -> None:
    main = yaml.safe_load((ROOT / "roles/common/tasks/main.yml").read_text())
    (task,) = [each for each in tasks(main) if each["name"] == "Say why packages can't be installed"]
    environment = Environment()
    environment.filters |= FILTERS
    failed = {"rc": 100, "stderr": "E: Unable to locate package python3-apt"}
    known = {"inventory_hostname": "w", "ansible_failed_result": failed, "__common_index": index}
    text = environment.from_string(task["ansible.builtin.fail"]["msg"]).render(known)
    assert text.startswith(f"host 'w': E: Unable to locate package python3-apt{more}")
