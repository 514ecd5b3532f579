"""Load a host's packet filter on trial, come back through a new connection, and keep it.

Host by host, within one task: with a task for each part, the last of many hosts would be confirmed too late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

MODULE = "firewall_table"
MARGIN_SECONDS = 5  # between the last try to come back and the timer of the host
PAUSE_SECONDS = 1.0


class ActionModule(ActionBase):
    """Ansible's entry point. It takes firewall_table's arguments, without `state`."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Try, come back, keep; or say why no connection came back, when the table before is loaded again."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        seconds = int(self._task.args["seconds"])
        before = self._connection_seen()
        tried = self._ask("tried", variables)
        if tried.get("failed") or not tried.get("changed") or self._task.check_mode:
            return tried
        ends = self.clock() + seconds - MARGIN_SECONDS
        # What is done on the machine itself comes through no connection.
        is_remote = self._connection.transport != "local"
        while True:
            try:
                why = self._come_back(before) if is_remote else ""
                if not why:
                    kept = self._ask("confirmed", variables)
                    return kept if kept.get("failed") else tried
            except AnsibleConnectionFailure as failure:
                why = " ".join(str(failure).split())
            if self.clock() > ends:
                break
            self.sleep(PAUSE_SECONDS)
        return {"failed": True, "msg": f"{why}. {self._after(ends + MARGIN_SECONDS)}"}

    def _come_back(self, before: str) -> str:
        """Connect again; return why that is no proof, or nothing."""
        self._connection.reset()
        now = self._connection_seen()
        if not now:
            return "the host does not say which SSH connection is asked through (SSH_CONNECTION)"
        return "the same SSH connection was used again, which proves nothing" if now == before else ""

    def _connection_seen(self) -> str:
        """Return the client and its port, as the login's shell knows them; sudo would take them away."""
        answer = self._low_level_execute_command('echo "$SSH_CONNECTION"', sudoable=False)
        return str(answer.get("stdout", "")).strip()

    def _ask(self, state: str, variables: dict[str, Any]) -> dict[str, Any]:
        arguments = {**self._task.args, "state": state}
        found: dict[str, Any] = self._execute_module(MODULE, module_args=arguments, task_vars=variables)
        return found

    def _after(self, ends: float) -> str:
        """Wait until the host answers again, and say so."""
        while self.clock() < ends + 3 * MARGIN_SECONDS:
            self.sleep(PAUSE_SECONDS)
            if self.clock() < ends:
                continue
            try:
                self._connection.reset()
                if self._connection_seen():
                    return (
                        "With the new table no new SSH connection came through, so the host has loaded the one before "
                        "again. Its SSH port and firewall_open are to be looked at; then run site.yml again"
                    )
            except AnsibleConnectionFailure:
                continue
        return "The host does not answer after its trial either (firewall_confirm_seconds): look at its console"
