"""Leave a host out from here on, as one that can't be reached: the run goes on for the others and ends with 4."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Ansible's entry point. A plain failure would end with 2, and end the run where a whole batch has failed."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Say that the host is lost; why was said when it was."""
        return {"unreachable": True, "msg": "left out: what it was lost to is above"}
