"""What stands in for programs of the machine, and for Ansible around a role's module."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleet.hosts import agent


def put_program(path: Path, text: str) -> Path:
    """Write a program; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def result_of(module: ModuleType, check: bool = False, **asked: Any) -> dict[str, Any]:
    """Run a role's module as fleet/hosts/agent.py does; returns what it answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AnsibleModule", agent.AnsibleModule)
        patch.setattr(agent.AnsibleModule, "asked", asked)
        patch.setattr(agent.AnsibleModule, "check_mode", check)
        with pytest.raises(agent.Done) as done:
            module.main()
    return done.value.result
