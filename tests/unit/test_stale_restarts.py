"""The handlers that restart stale tasks: what an operator has stopped since the look stays down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleet.hosts.lock import STOPPED
from fleet.places import CODE as ROOT
from tests.unit.stand_ins import put_program

TASKS = ("chief-0", "evaluator-0", "worker-0", "worker-1")
# What units do, each with its state in a file. With STOPS, an operator stops all while the coordinator saves.
SYSTEMCTL = """#!/bin/sh
cd "$STATES"
echo "$*" >>calls
verb=$1; shift
case $verb in
  show) echo LoadState=loaded; echo "ActiveState=$(cat "$1")" ;;
  stop)
    echo inactive >"$1"
    [ -z "$STOPS" ] || for unit in trainer@*; do echo inactive >"$unit"; done
    [ -z "$STOPS" ] || : >"$STOPS"
    ;;
  start) for unit; do echo active >"$unit"; done ;;
  restart) for unit; do echo restarted >"$unit"; done ;;
  try-restart) for unit; do [ "$(cat "$unit")" != active ] || echo restarted >"$unit"; done ;;
esac
"""


@pytest.mark.parametrize("stops", [False, True])
def test_what_was_stopped_since_the_look_stays_down(tmp_path: Path, stops: bool) -> None:
    units, note = tmp_path / "units", tmp_path / "stopped"
    units.mkdir()
    for task in TASKS:
        (units / f"trainer@{task}.service").write_text("active\n")
    put_program(tmp_path / "bin/systemctl", SYSTEMCTL)
    handlers = (ROOT / "roles/trainer/handlers/main.yml").read_text()
    assert STOPPED in handlers
    stale = {task: "its environment file" for task in TASKS if task != "evaluator-0"}
    play = {
        "hosts": "localhost", "gather_facts": False,
        "vars": {"__trainer_stale": {"tasks": stale}, "__trainer_retired": [], "__trainer_units": str(tmp_path)},
        "tasks": [{"ansible.builtin.command": "true", "changed_when": True, "notify": "Restart stale tasks"}],
        "handlers": yaml.safe_load(handlers.replace(STOPPED, str(note))),
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    environment = {
        **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "STATES": str(units),
        "STOPS": str(note) if stops else "", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
    }  # fmt: skip
    command = [
        "ansible-playbook",
        "-i",
        "localhost,",
        "-c",
        "local",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    done = subprocess.run([*command, tmp_path / "play.yml"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {task: (units / f"trainer@{task}.service").read_text().strip() for task in TASKS}
    if stops:
        assert states == dict.fromkeys(TASKS, "inactive")
    else:
        assert states == {
            "chief-0": "active",
            "evaluator-0": "active",
            "worker-0": "restarted",
            "worker-1": "restarted",
        }
        assert "start trainer@chief-0.service" in (units / "calls").read_text().splitlines()
