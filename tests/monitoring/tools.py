"""Prometheus's own programs and the roles' files as Ansible writes them, without a host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from fleet.site.filters import FILTERS

ROOT = Path(__file__).resolve().parents[2]

UNPACKED = ROOT / ".cache" / "monitoring" / "usr" / "bin"


def tool(name: str) -> str:
    """Return the path of promtool, amtool or another of the packages' programs."""
    found = shutil.which(name, path=f"{UNPACKED}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.fail(f"no {name} here: type `make test-monitoring`, which unpacks Debian's packages into .cache")
    return found


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool(name), *map(str, arguments)], capture_output=True, text=True)


def defaults(role: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text()) or {}


def role_vars(role: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "roles" / role / "vars" / "main.yml").read_text())


def rendered(role: str, template: str, values: dict[str, Any]) -> str:
    """Render a role's template as its task does."""
    (delimiters,) = (
        file
        for task in _tasks(yaml.safe_load((ROOT / "roles" / role / "tasks" / "main.yml").read_text()))
        for file in task.get("write_files", {}).get("files", ())
        if file.get("src") == template
    )
    environment = jinja2.Environment(
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        **{key: delimiters[key] for key in ("variable_start_string", "variable_end_string") if key in delimiters},
    )
    environment.filters.update(FILTERS)
    text = (ROOT / "roles" / role / "templates" / template).read_text()
    return environment.from_string(text).render(defaults(role) | role_vars(role) | {"ansible_managed": ""} | values)


def _tasks(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for task in tasks for each in (task, *_tasks(task.get("block", [])))]
