"""Bring a release's archive to the host for the module of the same name."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Ansible's entry point. It takes the module's arguments; `archive` is a path on the control machine."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Copy the archive to a directory that goes with the task, and call the module."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        directory = self._make_tmp_path() if arguments.get("archive") else None
        try:
            if directory:
                there = self._connection._shell.join_path(directory, "release.tar.gz")
                arguments["archive"] = self._transfer_file(arguments["archive"], there)
                self._fixup_perms2((directory, there))
            found: dict[str, Any] = self._execute_module(
                "host_release", module_args=arguments, task_vars=task_vars or {}
            )
            return found
        finally:
            if directory:
                self._remove_tmp_path(directory)
