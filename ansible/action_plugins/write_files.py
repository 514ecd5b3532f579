"""Write the files and directories of several tasks in one run, of the module many_files.

    write_files:
      directories: [/etc/one]  # 0755, or {path: ..., mode: ..., owner: ..., group: ...}
      files:
        - {dest: /etc/one/text, src: text.j2, mode: "0644"}

A file has a `src`, of the role's templates where it ends with .j2, else of its files; or `content`. It may have
`owner`, `group` and `validate`, and `vars`, `variable_start_string` and `variable_end_string` for its template.
`paths` has what was changed.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.template import Templar

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))
from fleet.rollout.desired_state import Pass, TaskCall  # noqa: E402
from fleet.rollout.readers import write_files  # noqa: E402

MODULE = "many_files"


class ActionModule(ActionBase):
    """Ansible's entry point."""

    _requires_connection = True
    _supports_check_mode = True
    _VALID_ARGS = frozenset({"directories", "files"})

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render what is to be written as the look ahead does, and send it."""
        super().run(tmp, task_vars)
        variables = {"ansible_managed": "Ansible managed", **(task_vars or {})}

        def render(value: Any, more: Mapping[str, Any], **options: Any) -> Any:
            return Templar(loader=self._loader, variables={**variables, **more}).template(value, **options)

        place = Path(self._task._role._role_path)
        now = Pass({}, whole=True)
        write_files(TaskCall(place, {"name": self._task.name}, self._task.args, {}, now, render))
        checks = {each["dest"]: each.get("validate") for each in self._task.args.get("files", ())}
        files = []
        for path, state in now.wanted.files.items():
            mode, _, *owners = state or ()
            named = dict(zip(("owner", "group"), owners, strict=False))
            text = now.wanted.texts.get(path)
            files.append({"path": path, "mode": mode, "content": text, "validate": checks.get(path), **named})
        quiet = {**(task_vars or {}), "ansible_no_target_syslog": True}  # the host's journal would have the texts
        found: dict[str, Any] = self._execute_module(MODULE, module_args={"files": files}, task_vars=quiet)
        return found
