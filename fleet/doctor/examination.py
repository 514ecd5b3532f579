"""Ask the hosts, all at once, for what the judges need."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.errors import FleetError, first_line
from fleet.hosts.agent_request import sources
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CURRENT
from fleet.hosts.observation import Observation
from fleet.hosts.run import SETTINGS
from fleet.rollout.short_way import ShortWay
from fleet.site.inventory import Inventory

PROBE = Path(__file__).with_name("probe.py")
UNPACED = {"disk_pace": None, "memory_pace": None, "shared": None}
PATH_CHECK = "/usr/local/sbin/psfleet-check-shared-path"
# What a task reads before anything else.
READABLE = (SETTINGS, f"{CURRENT}/trainer/__main__.py", f"{CURRENT}/env/bin/python")


@dataclass
class Examination:
    """What was found: what `fab status` sees, each host's facts, and how each differs from the inventory."""

    observation: Observation
    facts: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by host: what probe.py and host_pace return, `unmeasured`, `apart` and `listeners`
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)  # by host: `problems` and `notes` of host_look
    differs: Mapping[str, str] = field(default_factory=dict)  # by host: what only Ansible can bring right
    broken: dict[str, str] = field(default_factory=dict)  # by host: why it could not be probed
    unfit: str = ""  # why the checkout makes no release


def examine(cluster: Cluster) -> Examination:
    """Have every host look and measure; raises for none."""
    short, unfit = ShortWay(cluster), ""
    try:
        questions = short.questions()
    except FleetError as error:
        questions, unfit = {}, str(error)
    now = time.time()
    everyone = cluster.inventory.everyone
    asked = {host: _with_probe(cluster, host, questions.get(host, {}), now) for host in everyone}
    observation = cluster.observe(everyone, running=True, looks=asked, by_trainer=True)
    look = Examination(observation, unfit=unfit, broken=dict(observation.blind))
    apart = clocks_apart(cluster)
    for host, answer in observation.looks.items():
        steps = answer["steps"]
        if steps["doctor"].get("failed"):
            look.broken[host] = str(steps["doctor"]["msg"])
        else:
            look.facts[host] = {**steps["doctor"], **_paces(steps.get("pace", UNPACED)), "apart": apart.get(host)}
            look.facts[host]["listeners"] = steps["ways"].get("listeners", {})
        if not steps["ways"].get("failed"):
            look.ways[host] = steps["ways"]
    if not unfit:
        look.differs = _judged(short, cluster.inventory, observation)
    return look


def _paces(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return what host_pace returned, and in `unmeasured` why it did not."""
    if step.get("failed"):
        return {"disk_pace": None, "memory_pace": None, "shared": None, "unmeasured": str(step["msg"])}
    return {**step, "unmeasured": ""}


def clocks_apart(cluster: Cluster) -> dict[str, float]:
    """Return by how many seconds each host's clock is ahead of this machine's, by connections that are open already."""
    begun = time.time()
    answers = cluster.hosts.run(dict.fromkeys(cluster.inventory.everyone, "date +%s.%N"))
    middle = (begun + time.time()) / 2
    return {host: float(answer.stdout) - middle for host, answer in answers.items() if answer.stdout.strip()}


def _judged(short: ShortWay, inventory: Inventory, observation: Observation) -> Mapping[str, str]:
    hosts = [host for host in observation.looks if host in inventory.hosts]
    try:
        return short.judge(observation.looks, hosts)
    except FleetError as error:
        return dict.fromkeys(hosts, first_line(error))


def _path_of_runs(inventory: Inventory, host: str) -> str:
    """Return where a host has the runs, of which it needs room: on a server of the path what it serves."""
    if host in inventory.groups.get("nfs_server", ()) and host in inventory.beside:
        return str(inventory.variables[host].get("cluster_nfs_dir"))
    has_path = host in inventory.hosts and inventory.is_shared
    return inventory.shared_dir if has_path or host == inventory.chief.host else "/var"


def _with_probe(cluster: Cluster, host: str, question: Mapping[str, Any], now: float) -> dict[str, Any]:
    inventory = cluster.inventory
    tasks = inventory.tasks_on(host)
    probe = {
        "shared_dir": _path_of_runs(inventory, host),
        "path_check": PATH_CHECK,
        "units": [task.unit for task in tasks],
        "readable": list(READABLE),
    }
    ports = [each.port for each in inventory.listeners_on(host)]
    members = {task.host: task.address for task in inventory.tasks}
    steps: list[dict[str, Any]] = [
        {"name": "doctor", "module": "doctor", "arguments": {"asked": probe}, "check": True},
        {
            "name": "ways",
            "module": "host_look",
            "arguments": {"name": host, "members": members, "now": now, "ports": ports},
            "check": True,
        },
    ]
    if host in inventory.hosts:  # the others are no peers of theirs
        # The last, since it notes what it measures, and a step that writes and fails ends the others.
        path = inventory.shared_dir * inventory.is_shared
        steps.append({"name": "pace", "module": "host_pace", "arguments": {"path": path}})
    known = sources(steps[1:]) | {"doctor": PROBE.read_text(encoding="utf-8")}
    return {
        **question,
        "steps": [*question.get("steps", ()), *steps],
        "sources": {**question.get("sources", {}), **known},
    }
