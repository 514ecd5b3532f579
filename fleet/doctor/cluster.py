"""What is wrong with the cluster as a whole: the control machine, the release, the tasks, the run."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.doctor.examination import Examination
from fleet.doctor.finding import CONTROL, ERROR, WARNING, Finding
from fleet.errors import FleetError
from fleet.hosts import history
from fleet.hosts.drains import tasks_of
from fleet.output.tables import render_duration
from fleet.rollout.release import find_ansible
from fleet.site.inventory import Inventory
from fleet.site.schema.problems import Problem, name_some
from fleet.status import status_text
from trainer.telemetry.status import describe_ways, has_broken

LITTLE_BYTES = 5 * 10**9  # the wheels of both sets take 4
# Reasons of fleet/rollout/short_way.py that say nothing is wrong.
NO_DIFFERENCE = ("it has no task", "what it should hold can't", "roles/", "it can't be looked at")
LATE_SECONDS = 600.0
# What changes the cluster, and so what a later one has gone on from, or replaced.
CHANGES = (
    "start-cluster", "restart-cluster", "stop-cluster", "sweep", "rollback", "canary", "drain", "undrain",
    "update-hosts", "remove-host", "replace-host", "prune", "delete-run", "drill", "site.yml",
)  # fmt: skip
# After Ctrl-C what was there before is put back, or what was started goes on.
_WHOLE = ("start-cluster", "restart-cluster", "sweep", "canary", "drill")


def judge_control(site: Path, inventory: Inventory | None, problems: list[Problem]) -> list[Finding]:
    """Return what is wrong with this machine and with the inventory."""
    found = [Finding(ERROR, "inventory", "inventory", str(each), "fab validate") for each in problems]
    try:
        find_ansible()
    except FleetError as error:
        found.append(Finding(ERROR, CONTROL, "Ansible", str(error), "pipx install . or make venv, in a checkout"))
    if site.stat().st_mode & stat.S_IWOTH:
        what = f"everybody may write to {site}, and so Ansible reads no ansible.cfg there"
        found.append(Finding(ERROR, CONTROL, "rights", what, f"chmod o-w {site}"))
    free = shutil.disk_usage(site).free
    if free < LITTLE_BYTES:
        what = f"{free / 1e9:.1f} GB are free for wheels and releases"
        found.append(Finding(WARNING, CONTROL, "room", what, f"du -xh {site / '.cache'} | sort -h | tail"))
    keys = {host.key_file for host in inventory.everyone.values() if host.key_file} if inventory else set()
    return [*found, *(finding for key in sorted(keys) for finding in _key(key))]


def _key(key: Path) -> list[Finding]:
    """Return what is wrong with a private key."""
    try:
        there = key.stat()
    except OSError as error:
        return [
            Finding(
                ERROR,
                CONTROL,
                "keys",
                f"{key} can't be read: {error.strerror}",
                "name another ansible_ssh_private_key_file",
            )
        ]
    if there.st_mode & 0o077 and there.st_uid == os.getuid():
        what = f"others may read the key {key} (mode {stat.S_IMODE(there.st_mode):04o}), and so ssh refuses it"
        return [Finding(ERROR, CONTROL, "keys", what, f"chmod 600 {key}")]
    return []


def judge_look(inventory: Inventory, look: Examination, release: str | None) -> list[Finding]:
    """Return what is wrong with the release, the ways, the tasks and the run; `release` is the checkout's."""
    found = [Finding(ERROR, CONTROL, "release", look.unfit, "fab validate")] if look.unfit else []
    for host, why in look.broken.items():
        found.append(
            Finding(
                ERROR, host, "look", f"it could not be looked at: {why}", f"ansible-playbook site.yml --limit {host}"
            )
        )
    for host, seen in look.ways.items():
        for problem in seen["problems"]:
            part = "clock" if "its clock is" in problem else "addresses and routes"
            what, _, fix = problem.partition(": ")[2].partition(". ")
            found.append(Finding(ERROR, host, part, what, fix))
    return [*found, *_release(inventory, look, release), *_tasks(inventory, look), *_run(inventory, look)]


def _release(inventory: Inventory, look: Examination, release: str | None) -> list[Finding]:
    found = []
    if bare := look.observation.bare(inventory):
        fix = "ansible-playbook site.yml"
        found.append(Finding(ERROR, name_some(bare), "release", "nothing is installed there yet", fix))
    for host, has in look.observation.releases.items():
        if host in inventory.beside:  # which needs none
            continue
        if has is not None and release is not None and has != release:
            what = f"it has release {has}, and this folder makes {release}"
            found.append(Finding(WARNING, host, "release", what, "fab start-cluster --plan, then without --plan"))
    for host, why in look.differs.items():
        if why.startswith(NO_DIFFERENCE) or look.observation.releases.get(host) is None:
            continue
        firewall = "firewall" in why or "packet filter" in why
        fix = f"ansible-playbook site.yml --limit {host} --diff"
        found.append(
            Finding(ERROR, host, "firewall" if firewall else "files", f"not as the inventory says: {why}", fix)
        )
    return found


def _tasks(inventory: Inventory, look: Examination) -> list[Finding]:
    found = []
    for row in status_text.task_rows(inventory, look.observation):
        if row["trouble"] and row["state"] != "unreachable":
            note = f": {row['note']}" if row.get("note") else ""
            fix = f"fab logs --task {row['task']}; then fab start-cluster"
            found.append(Finding(ERROR, row["host"], "units", f"{row['task']} is {row['state']}{note}", fix))
    return found


def _run(inventory: Inventory, look: Examination) -> list[Finding]:
    found = []
    observation, run = look.observation, look.observation.run
    if observation.run_error is not None:
        found.append(Finding(ERROR, "run", "run", str(observation.run_error), "fab start-cluster --run NAME"))
    if run is None:
        return found
    where = f"run {run.run}"
    if run.state == "failed":
        found.append(
            Finding(ERROR, where, "run", f"it failed: {run.message}", "fix the program, then fab start-cluster")
        )
    drained = {task.name for task in tasks_of(inventory, [*observation.drains])}
    for task, why in run.without.items():
        if task in drained:
            continue
        found.append(
            Finding(WARNING, where, "run", f"it goes on without {task}, which is {why}", f"fab logs --task {task}")
        )
    if has_broken(run.ways):
        broken = any(how.startswith("broken") for row in run.ways.values() for how in row.values())
        level = ERROR if broken else WARNING  # or slow, which a look at a busy host may find too
        found.append(Finding(level, where, "addresses and routes", describe_ways(run.ways), "fab ways"))
    now = observation.clocks.get(inventory.chief.host, 0.0)  # whose clock the run's time is of
    return [*found, *_silence(now, run.state, run.updated, where)]


def _silence(now: float, state: str, updated: float | None, where: str) -> list[Finding]:
    """Return that the status of a run that trains is old."""
    if state != "training" or updated is None or now - updated < LATE_SECONDS:
        return []
    what = f"its status says that it trains, and is {render_duration(now - updated)} old"
    return [Finding(ERROR, where, "run", what, "fab start-cluster, which goes on with it")]


def judge_history(acts: Sequence[Mapping[str, Any]], now: float) -> list[Finding]:
    """Return the last change of the cluster where it has not ended, as when its control machine was lost."""
    changes = [act for act in acts if act.get("verb") in CHANGES]
    act = changes[-1] if changes else {}
    broken_off = (history.BEGUN,) if act.get("verb") in _WHOLE else (history.BEGUN, history.LEFT)
    if act.get("outcome") not in broken_off:
        return []
    hosts = act.get("hosts")
    about = f" of {name_some(map(str, hosts))}" if isinstance(hosts, list) else ""
    who, since = f"{act.get('who', '?')}@{act.get('from', '?')}", render_duration(max(0.0, now - act["time"]))
    what = f"{act['verb']}{about}, begun by {who} {since} ago, has not ended"
    return [Finding(WARNING, "history", "history", what, f"fab history --verb {act['verb']}; typed again it goes on")]
