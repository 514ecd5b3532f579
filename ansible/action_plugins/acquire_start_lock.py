"""Keep `fab`'s changes of the cluster, and other playbooks, away until this run of Ansible is over."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ansible.context import CLIARGS
from ansible.plugins.action import ActionBase

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))
from fleet import places  # noqa: E402
from fleet.errors import OperatorMistake  # noqa: E402
from fleet.site.routes import Host, ssh_host  # noqa: E402


def host_of(name: str, variables: Mapping[str, Any]) -> Host:
    """Say how Ansible reaches a host, by its variables and then by what the command line says."""
    words = {
        "ansible_user": "remote_user",
        "ansible_private_key_file": "private_key_file",
        "ansible_ssh_common_args": "ssh_common_args",
    }
    options = {variable: value for variable, word in words.items() if (value := CLIARGS.get(word))}
    return ssh_host(name, ChainMap(cast(dict[str, Any], variables), options))


class ActionModule(ActionBase):
    """Ansible's entry point. The lock ends with the connection, and so a process of its own has it, not this worker.

    `listed` are hosts of which none may have been taken out of the cluster, but for those that come `back`. With
    --check no lock is taken, and the rest is the same.
    """

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Refuse where another is at work; warn where the chief's host can't be asked, which ends nothing here.

        A machine that is the whole cluster may have `ansible_connection: local`: `fab`, which knows SSH, starts none.
        """
        variables = task_vars or {}
        name = str(variables["groups"]["chief"][0])
        try:
            chief = dataclasses.asdict(host_of(name, variables["hostvars"][name]))
        except OperatorMistake as mistake:
            return {"skipped": True, "msg": str(mistake)}
        playbook = Path(*(CLIARGS.get("args") or ["site.yml"])[:1]).name
        asked = {"what": f"run of {playbook}", "process": os.getppid(), "listed": [], "back": [], "chief": chief,
                 "plan": bool(variables.get("ansible_check_mode")), **self._task.args}  # fmt: skip
        with tempfile.TemporaryFile("w+") as errors:
            holder = subprocess.Popen(
                [sys.executable, "-m", "fleet.hosts.lock"],
                cwd=places.CODE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for Ansible, whose end it waits for
            )
            assert holder.stdin
            assert holder.stdout
            with holder.stdin as stdin, holder.stdout as stdout:
                json.dump(asked, stdin, default=str)
                stdin.close()
                line = stdout.readline()
            errors.seek(0)
            why = (errors.read().splitlines() or ["its process ended"])[-1]
            answer = json.loads(line) if line else {"warning": why}
        if "refused" in answer:
            return {"failed": True, "msg": answer["refused"]}
        warning = answer.get("busy") or (
            f"other starts are not kept away from this run, since {name} can't be asked: {answer.get('warning')}. "
            "Begin none until it is over"
        )
        return {"changed": False, "warnings": [warning] if answer else []}
