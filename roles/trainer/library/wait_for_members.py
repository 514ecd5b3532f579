#!/usr/bin/python
"""Wait until the coordinator does without some tasks, or trains with them again.

Runs on the coordinator's host, and asks what the run's status says. Where the coordinator does not run, there is
nothing to wait for. One that came back and has failed is an error.

Returns:
    run: What the run's status said last. Empty where the coordinator does not run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

LOOK_SECONDS = 2.0
STATUS = ["env/bin/python", "-m", "trainer", "status", "--json", "--settings", "/etc/trainer/run.json"]
AS_TRAINER = ["setpriv", "--reuid=trainer", "--regid=trainer", "--init-groups", "--"]


def has_happened(run: dict[str, Any], tasks: list[str], state: str, unit: str, processes: Path = Path("/proc")) -> bool:
    """Whether the tasks are absent, or present in a training; what a process said that is gone counts for nothing."""
    without = run.get("without") or {}
    if not is_of(unit, processes / str(run.get("pid"))):
        return False
    if state == "absent":
        return all(task in without for task in tasks)
    return run.get("state") == "training" and not any(task in without for task in tasks)


def is_of(unit: str, process: Path) -> bool:
    """Whether a process is the unit's: after a boot its number may be another's."""
    try:
        return f"/{unit}" in (process / "cgroup").read_text()
    except OSError:
        return False


def is_down(unit: dict[str, str]) -> bool:
    """Whether a unit neither runs nor waits to be started."""
    return unit.get("ActiveState", "") in ("", "inactive", "failed") and unit.get("Job", "") in ("", "0")


def describe(run: dict[str, Any], tasks: list[str]) -> str:
    """Say what the run does, and what it says of the tasks."""
    without = run.get("without") or {}
    members = ", ".join(f"{task} ({without[task]})" for task in tasks if task in without)
    text = f"run {run.get('run')} is {run.get('state')}"
    text += f": {run['message']}" if run.get("message") else ""
    return f"{text}; without {members}" if members else text


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The coordinator's task, such as `chief-0`.
            "coordinator": {"type": "str", "required": True},
            # The tasks that leave or come back.
            "tasks": {"type": "list", "elements": "str", "required": True},
            # `absent` when none of them takes part, `present` when all do and steps are trained.
            "state": {"type": "str", "choices": ["absent", "present"], "required": True},
            # For how many seconds at most.
            "timeout": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    tasks, state, timeout = (module.params[name] for name in ("tasks", "state", "timeout"))
    coordinator = module.params["coordinator"]
    unit, begun = f"trainer@{coordinator}.service", time.monotonic()
    while True:
        _code, shown, _error = module.run_command(["systemctl", "show", "--property=ActiveState,Job", unit])
        properties = dict(line.partition("=")[::2] for line in shown.splitlines())
        if is_down(properties):
            if state == "present" and coordinator in tasks and properties.get("ActiveState") == "failed":
                module.fail_json(
                    msg=f"the coordinator {coordinator} was started again and has failed; expected that it trains. Its "
                    f"journal says why: journalctl --unit {unit}"
                )
            module.exit_json(changed=False, run={})
        code, output, error = module.run_command([*AS_TRAINER, *STATUS], cwd="/opt/trainer/current")
        run = json.loads(output) if code == 0 else {}
        if run and has_happened(run, tasks, state, unit):
            module.exit_json(changed=False, run=run)
        if time.monotonic() - begun > timeout:
            seen = describe(run, tasks) if run else f"the run's status can't be read: {error.strip()}"
            wanted = "goes on without" if state == "absent" else "trains with"
            module.fail_json(
                msg=f"the coordinator {coordinator} was not seen in {timeout} s that it {wanted} "
                f"{', '.join(tasks)} (trainer_return_seconds): {seen}",
                run=run,
            )
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
