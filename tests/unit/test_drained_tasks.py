"""What a host keeps of the tasks that a planned reboot stops, and what it starts again: the roles' own scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleet.hosts.lock import STOPPED
from fleet.places import CODE
from tests.unit.stand_ins import put_program

ROLE = Path(__file__).parents[2] / "roles" / "trainer" / "tasks"
SYSTEMCTL = """#!/bin/sh
echo "$*" >>"$CALLS"
case $1 in
  list-units) for unit in $UNITS; do echo "trainer@$unit.service loaded active running psfleet training task"; done ;;
  is-enabled) [ "$2" != trainer@ps-0.service ] && echo enabled || { echo disabled; exit 1; } ;;
esac
"""


class Host:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("opt/trainer", "run", "bin"):
            (root / name).mkdir(parents=True)
        put_program(root / "bin/systemctl", SYSTEMCTL)

    def run(self, file: str, name: str, units: str = "") -> tuple[list[str], list[str]]:
        """Run a task's script; return what it printed, and what it asked of systemd."""
        tasks = yaml.safe_load((ROLE / file).read_text())
        tasks += [task for block in tasks for part in ("block", "rescue") for task in block.get(part, [])]
        [script] = [task["ansible.builtin.shell"] for task in tasks if task["name"] == name]
        for place in ("/opt/trainer", "/run/"):
            script = script.replace(place, f"{self.root}{place}")
        calls = self.root / "calls"
        calls.write_text("")
        environment = {"PATH": f"{self.root}/bin:{os.environ['PATH']}", "CALLS": str(calls), "UNITS": units}
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines(), calls.read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


FORGET = "Forget what still runs"
KEEP, STOP = "Keep which tasks run", "Stop the tasks, and keep them down at the next boot"
READ, START = "Read which tasks are to come back", "Start the tasks again"


def test_what_ran_is_kept_stopped_and_started_again(host: Host) -> None:
    assert host.run("leave.yml", KEEP, "chief-0 ps-0 worker-12")[0] == ["chief-0", "ps-0", "worker-12"]
    _, asked = host.run("leave.yml", STOP)
    assert asked[:2] == ["stop trainer@chief-*.service", "stop trainer@*.service"]
    assert asked[2] == "disable --quiet trainer@chief-0.service trainer@ps-0.service trainer@worker-12.service"
    # A run that was broken off here: the next one finds nothing that runs, and keeps what it must start.
    assert host.run("leave.yml", KEEP, "worker-13")[0] == ["chief-0", "ps-0", "worker-12", "worker-13"]
    assert host.run("take_back.yml", READ)[0] == ["chief-0", "ps-0", "worker-12", "worker-13"]
    _, asked = host.run("take_back.yml", START)
    assert asked == [
        "enable --quiet trainer@chief-0.service trainer@worker-12.service trainer@worker-13.service",
        "start --no-block trainer@chief-0.service trainer@ps-0.service trainer@worker-12.service "
        "trainer@worker-13.service",
    ]
    assert host.run("take_back.yml", READ)[0] == []


def test_a_host_that_can_t_leave_keeps_what_an_earlier_run_has_stopped(host: Host) -> None:
    host.run("leave.yml", KEEP, "worker-1")
    host.run("leave.yml", FORGET)
    assert not (host.root / "opt/trainer/drained").exists()
    host.run("leave.yml", KEEP, "ps-1 worker-1")
    host.run("leave.yml", KEEP, "worker-1 worker-12")  # ps-1 is down by now
    host.run("leave.yml", FORGET)
    assert host.run("take_back.yml", READ)[0] == ["ps-1"]


def test_a_host_on_which_nothing_runs_keeps_nothing(host: Host) -> None:
    assert host.run("leave.yml", KEEP)[0] == []
    assert host.run("take_back.yml", READ) == ([], [])
    assert not (host.root / "opt/trainer/drained").exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_host_that_booted_while_the_cluster_was_stopped_starts_nothing(host: Host, stopped: bool) -> None:
    """By Ansible, as a whole, but for the wait for the training."""
    host.run("leave.yml", KEEP, "ps-1 worker-1")
    text = (ROLE / "take_back.yml").read_text()
    assert STOPPED in text
    for place in ("/opt/trainer", "/run/"):
        text = text.replace(place, f"{host.root}{place}")
    (host.root / "opt/trainer/current").symlink_to("releases/one")
    if stopped:
        (host.root / STOPPED[1:]).write_text("a stop-cluster of ann@laptop at 10:41:07 UTC\n")
    tasks = yaml.safe_load(text)
    tasks[-1]["block"] = [task for task in tasks[-1]["block"] if "ansible.builtin.shell" in task]
    play = {"hosts": "localhost", "gather_facts": False, "tasks": tasks}
    play["vars"] = {"trainer_coordinator": {"name": "chief-0", "host": "localhost"}}
    (host.root / "play.yml").write_text(yaml.safe_dump([play]))
    calls = host.root / "calls"
    calls.write_text("")
    environment = os.environ | {"PATH": f"{host.root}/bin:{os.environ['PATH']}", "CALLS": str(calls)}
    command = ["ansible-playbook", "-i", "localhost,", "-c", "local", str(host.root / "play.yml")]
    command += ["-e", f"ansible_python_interpreter={sys.executable}"]
    environment["ANSIBLE_CONFIG"] = str(CODE / "ansible.cfg")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [call.split()[0] for call in calls.read_text().splitlines()] == ([] if stopped else ["enable", "start"])
    assert not (host.root / "opt/trainer/drained").exists()  # no later run starts them either
