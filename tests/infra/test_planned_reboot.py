"""A host that needs a reboot leaves the training in order, and is back in it before the next one leaves.

What needs the reboot is a stand-in (planned_reboot.yml), since no lab has a GPU. All else is what ansible/gpu.yml does.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleet.rollout.release import Recap, parse_recap
from tests.hosts import ROOT, answer, wait_until
from tests.lost_hosts import inside

from .conftest import LONG_RUN, status, units, wait_for_progress

pytestmark = pytest.mark.slow
DRAINED = "/opt/trainer/drained"
FAULTS = {
    *("member-lost", "ps-lost", "member-silent", "member-given-up", "phase-overdue", "lease-taken", "save-failed"),
    *("checkpoint-set-aside", "failed"),
}


@dataclass
class Run:
    """What a run of the stand-in's playbook did, and what the training did meanwhile."""

    code: int
    output: str
    events: list[dict[str, Any]]
    steps: list[int]
    rebooted: set[str]
    units_before: dict[str, str] = field(default_factory=dict)
    units_after: dict[str, str] = field(default_factory=dict)

    @property
    def recaps(self) -> dict[str, Recap]:
        return parse_recap(self.output)

    @property
    def faults(self) -> list[dict[str, Any]]:
        lost = [event for event in self.events if event.get("steps_lost")]
        return [event for event in self.events if event["event"] in FAULTS] + lost

    def events_of(self, task: str) -> list[str]:
        return [event["event"] for event in self.events if event.get("task") == task]

    @property
    def started_again(self) -> set[str]:
        return {task for task, after in self.units_after.items() if self.units_before.get(task) != after}


def crashes() -> list[int]:
    record = json.loads(inside("head", "cat", f"/srv/trainer/runs/{LONG_RUN}/attempts.json"))
    return [record.get("crashes", 0), record.get("troubles", 0)]


def events() -> list[dict[str, Any]]:
    log = inside("head", "cat", f"/srv/trainer/runs/{LONG_RUN}/events.jsonl")
    return [json.loads(line) for line in log.splitlines()]


def boots(lab: dict[str, Any]) -> dict[str, str]:
    return {name: answer(host, "ps --pid 1 --format lstart=") for name, host in lab.items()}


def reboot(
    lab: dict[str, Any],
    inventory: Path,
    due: list[str],
    broken: tuple[str, ...] = (),
    missed: tuple[str, ...] = (),
    **more: Any,
) -> Run:
    """Run the playbook, and look at the run's step all the while."""
    command = ["ansible-playbook", "--inventory", inventory, "tests/infra/planned_reboot.yml"]
    command += ["--extra-vars", json.dumps({"due": due, "broken": list(broken), "missed": list(missed), **more})]
    steps: list[int] = []
    over = threading.Event()

    def look() -> None:
        path = f"/srv/trainer/runs/{LONG_RUN}/status.json"
        while not over.wait(0.5):
            try:
                record = json.loads(inside("head", "cat", path))
            except (subprocess.CalledProcessError, ValueError):  # head itself reboots
                continue
            if record["state"] == "training" and record["step"] is not None:
                steps.append(record["step"])

    seen, before, units_before = len(events()), boots(lab), units(lab)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        environment = os.environ | {"ANSIBLE_NOCOLOR": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    finally:
        over.set()
        looking.join()
    after = boots(lab)
    rebooted = {name for name in lab if after[name] != before[name]}
    return Run(done.returncode, done.stdout, events()[seen:], steps, rebooted, units_before, units(lab))


@pytest.fixture
def trains(lab: dict[str, Any], long_run: Path) -> Iterator[Path]:
    """A training with all of its members, none of which crashed meanwhile."""
    wait_for_progress(lab)
    wait_until(lambda: status(lab)["without"] == {}, 120, "all members train")
    before = crashes()
    yield long_run
    assert crashes() == before
    for name, host in lab.items():
        assert answer(host, f"ls {DRAINED} /run/psfleet-leaving/* 2>/dev/null") == "", name


def test_a_worker_leaves_and_is_back_while_the_others_train(lab, trains):
    run = reboot(lab, trains, ["worker-1"])
    assert run.code == 0, run.output
    assert run.rebooted == {"worker-1"}
    assert run.started_again == {"worker-1"}
    assert run.events_of("worker-1") == ["member-left", "member-back"]
    assert {event["event"] for event in run.events} <= {"member-left", "member-back", "checkpoint-saved", "evaluated"}
    assert run.steps == sorted(run.steps)
    assert run.steps[-1] > run.steps[0]
    with lab["worker-1"].sudo():
        assert lab["worker-1"].service("trainer@worker-1").is_running
        assert lab["worker-1"].service("trainer@worker-1").is_enabled
    assert status(lab)["without"] == {}
    again = reboot(lab, trains, [])
    assert (again.code, again.rebooted, again.started_again) == (0, set(), set())
    assert {host: recap.changed for host, recap in again.recaps.items()} == dict.fromkeys(lab, 0), again.output


def test_a_ps_leaves_after_a_save_and_nothing_is_trained_twice(lab, trains, truth):
    run = reboot(lab, trains, ["ps-1"])
    assert run.code == 0, run.output
    assert run.rebooted == {"ps-1"}
    assert run.started_again == {"ps-1"}
    assert run.faults == []
    assert "member-left" in run.events_of("ps-1")
    assert [event["message"] for event in run.events if event["event"] == "formed"] == [
        f"without ps-1 ({truth['_meta']['hostvars']['ps-1']['ansible_host']}:2300)",
        "all members",
    ]
    assert run.steps == sorted(run.steps)
    assert run.steps[-1] > run.steps[0]


def test_the_coordinator_s_host_stops_with_a_save_and_goes_on(lab, trains):
    run = reboot(lab, trains, ["head"])
    assert run.code == 0, run.output
    assert run.rebooted == {"head"}
    assert run.started_again == {"chief-0", "evaluator-0"}
    assert run.faults == []
    assert "stopped" in [event["event"] for event in run.events]
    assert run.steps == sorted(run.steps)


def test_a_host_whose_proof_fails_stays_out_and_no_other_follows_it(lab, trains):
    run = reboot(lab, trains, ["worker-0", "worker-1"], broken=("worker-0",))
    assert run.code == 4, run.output
    assert run.rebooted == {"worker-0"}
    assert "3 of 5 hosts are right" in run.output
    assert "has a broken stand-in: fix it" in run.output.partition("hosts are right")[2]
    assert "worker-1' is not rebooted for a test: worker-0 did not come back" in run.output
    assert "left: head ps-0 ps-1" in run.output
    assert run.faults == []
    worker = lab["worker-0"]
    assert answer(worker, "systemctl is-active trainer@worker-0") == "inactive"
    assert answer(worker, "systemctl is-enabled trainer@worker-0") == "disabled"
    assert status(lab)["without"] == {"worker-0": "away"}
    wait_for_progress(lab)
    fixed = reboot(lab, trains, [])
    assert (fixed.code, fixed.rebooted, fixed.started_again) == (0, set(), {"worker-0"}), fixed.output
    assert answer(worker, "systemctl is-enabled trainer@worker-0") == "enabled"
    assert "member-back" in fixed.events_of("worker-0")


def test_a_host_that_missed_a_release_is_taken_back_when_it_has_it(lab, trains):
    run = reboot(lab, trains, ["worker-0", "worker-1"], missed=("worker-0",))
    # While worker-0 is away, no other host is rebooted.
    assert (run.code, run.rebooted, run.started_again) == (4, {"worker-0"}, {"worker-0"}), run.output
    assert "worker-1' is not rebooted for a test: worker-0 did not come back" in run.output
    assert run.events_of("worker-0") == ["member-left", "member-back"]
    assert run.faults == []


@pytest.fixture
def cannot_save(trains):
    """No checkpoint can be saved."""
    place = f"/srv/trainer/runs/{LONG_RUN}/checkpoints"
    # Made read-only elsewhere first: what reaches the tasks' own view is one mount, with its flags.
    shut = "mkdir -p /run/shut && mount --bind {0} /run/shut && mount -o remount,bind,ro /run/shut"
    inside("head", "sh", "-c", f"{shut} && mount --bind /run/shut {{0}}".format(place))
    yield trains
    inside("head", "umount", "--lazy", place, "/run/shut")


def test_a_ps_stays_where_the_coordinator_can_t_save(lab, cannot_save):
    run = reboot(lab, cannot_save, ["ps-1"], trainer_return_seconds=15)
    assert (run.code, run.rebooted, run.started_again) == (4, set(), set()), run.output
    why = " ".join(run.output.partition("hosts are right")[2].split())
    assert "host 'ps-1' can't leave the training, and is not rebooted: the coordinator chief-0 was not seen" in why
    assert run.events_of("ps-1") == []
    assert run.steps[-1] > run.steps[0]
