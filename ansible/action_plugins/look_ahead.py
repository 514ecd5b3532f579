"""See in one look whether a role's tasks would find anything to do on a host.

What they would make of it is read from the tasks themselves (fleet/rollout/roles.py). There, fleet/hosts/agent.py looks
at all of it in one process. Whatever can't be known so is left to the tasks.
"""

from __future__ import annotations

import base64
import json
import runpy
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.template import Templar

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))
from fleet.errors import first_line  # noqa: E402
from fleet.hosts.agent_request import RECEIVE, feed, sources  # noqa: E402
from fleet.rollout.desired_state import UnknownTask  # noqa: E402
from fleet.rollout.roles import Ahead  # noqa: E402
from fleet.site.reader import plain_value  # noqa: E402

MAX_TEXT = 300


class ActionModule(ActionBase):
    """Ansible's entry point. `tasks` names the role's file of tasks, by default `main`; nothing is changed."""

    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `right`: the tasks would change nothing, refuse nothing and say nothing. `msg` says what differs."""
        super().run(tmp, task_vars)
        variables = self._with_inputs({"ansible_managed": "Ansible managed", **(task_vars or {})})
        leads = variables["inventory_hostname"] == variables["ansible_play_hosts"][0]
        role = Ahead(Path(self._task._role._role_path), self._renderer(variables), leads)
        tasks = str(self._task.args.get("tasks", "main"))
        try:
            wanted = role.question(tasks)
            question = wanted.question()
        except UnknownTask as unknown:
            return _result(str(unknown))
        except Exception as error:  # whatever a template raises, the task itself says it
            return _result(f"what the host should hold can't be worked out: {first_line(error)}")
        question["sources"] = sources(question["steps"])
        question["blobs"] = {name: base64.b64encode(data).decode() for name, data in wanted.blobs.items()}
        answer = self._ask(question, variables)
        if isinstance(answer, str):
            return _result(f"the host can't be looked at: {answer}")
        try:
            return _result(role.difference(tasks, answer))
        except UnknownTask as unknown:
            return _result(str(unknown))
        except Exception as error:
            return _result(f"what the host should hold can't be worked out: {first_line(error)}")

    def _with_inputs(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Render what the play gives to the role once, and not at each use: with a thousand hosts it is long."""
        render = self._renderer(variables)
        found = {}
        for name in variables:
            if name.startswith(f"{self._task._role.get_name()}_"):
                try:
                    found[name] = plain_value(render(variables[name], {}))
                except Exception:  # an input that nothing reads may fail
                    continue
        return {**variables, **found}

    def _renderer(self, variables: dict[str, Any]) -> Any:
        def render(value: Any, more: Mapping[str, Any], **options: Any) -> Any:
            return Templar(loader=self._loader, variables={**variables, **more}).template(value, **options)

        return render

    def _ask(self, question: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any] | str:
        """Have the agent look; returns what it says, or why it can't. Raises what Ansible raises of a connection."""
        become = self._connection.become
        if not self._connection.has_pipelining or (become and not become.pipelining):
            return "what is asked can't be sent through this connection, or this way to become root"
        facts = variables.get("ansible_facts", {})
        python = str(self._templar.template(variables.get("ansible_python_interpreter", "auto")))
        if python.startswith("auto"):
            python = str(facts.get("discovered_interpreter_python", "/usr/bin/python3"))
        command = f"{shlex.quote(python)} -c {shlex.quote(RECEIVE)}"
        answer = self._low_level_execute_command(command, in_data=feed(question))
        if answer["rc"]:
            return (
                str(answer["stderr"] or answer["stdout"]).strip()[-MAX_TEXT:] or f"{python} ended with {answer['rc']}"
            )
        try:
            found: dict[str, Any] = json.loads(answer["stdout"].splitlines()[-1])
        except (IndexError, ValueError):
            return f"the look at the host says no JSON: {answer['stdout'][-MAX_TEXT:]!r}"
        return found


def _result(why: str | None) -> dict[str, Any]:
    return {"changed": False, "right": not why, **({"msg": why} if why else {})}
