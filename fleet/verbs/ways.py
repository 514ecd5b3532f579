"""`fab ways`: have each host try its ways to the other members, with a large packet, and show them as a matrix."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CURRENT
from fleet.hosts.run import AS_TRAINER
from fleet.hosts.ssh import Answer
from fleet.output.tables import render_table
from fleet.site.inventory import Inventory
from trainer.cluster.reach.ways import Way, cell, describe, targets

# A way that is silent takes 6 s, and eight are tried at once.
SECONDS = 120
MEMBERS = ("chief", "ps", "worker")


def show_ways(cluster: Cluster, console: Console) -> None:
    """Show how each member's host reaches the others; raise where a way is broken or a host did not answer."""
    found, unreachable, wrong = try_ways(cluster)
    console.answer("ways", as_json(found, unreachable), matrix(found, addresses(cluster.inventory)))
    if unreachable:
        raise HostsUnreachable(unreachable, "\n".join(wrong))
    if wrong:
        raise ClusterTrouble("\n".join(wrong))


def try_ways(cluster: Cluster) -> tuple[dict[str, dict[str, Way]], dict[str, str], list[str]]:
    """Have each member's host try its ways; returns them by task, who did not answer and why, and what is wrong."""
    members = addresses(cluster.inventory)
    scripts: dict[str, str] = {}
    for task in [task for task in cluster.inventory.tasks if task.job in MEMBERS]:
        words = shlex.join(f"{name}={address}" for name, address in targets(task.name, members).items())
        line = f"{AS_TRAINER} env/bin/python -m trainer ways --json --source {task.name} {words}"
        scripts[task.host] = f"{scripts.get(task.host, f'cd {CURRENT} || exit 1')}\n{line}"
    answers = cluster.hosts.run(scripts, SECONDS)
    unreachable = {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}
    found: dict[str, dict[str, Way]] = {}
    wrong = []
    for host, answer in answers.items():
        if not answer.unreachable:
            rows = read(answer)
            found |= rows
            wrong += [] if rows else [f"{host}: {last_line(answer)}"]
    wrong += [describe(one, other, way) for one, row in found.items() for other, way in row.items() if not way.works]
    return found, unreachable, wrong


def addresses(inventory: Inventory) -> dict[str, str]:
    """Return the members' addresses (host:port) by task; raises OperatorMistake where there are no ps."""
    tasks = [task for task in inventory.tasks if task.job in MEMBERS and task.port is not None]
    if not any(task.job == "ps" for task in tasks):
        raise OperatorMistake(
            f"{inventory.source} has no ps: ways are those of parameter servers. Expected strategy: parameter_server"
        )
    return {task.name: task.endpoint for task in tasks}


def read(answer: Answer) -> dict[str, dict[str, Way]]:
    """Read what `python -m trainer ways --json` printed, a line for each task."""
    found: dict[str, dict[str, Way]] = {}
    for line in answer.stdout.splitlines():
        try:
            record = json.loads(line)
            found[record["source"]] = {other: Way.read(way) for other, way in record["ways"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def last_line(answer: Answer) -> str:
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the check printed nothing, exit code {answer.code}"


def matrix(found: Mapping[str, Mapping[str, Way]], members: Mapping[str, str]) -> str:
    """Lay the ways out: a row for each member that tried, a column for each other one."""
    rows = [
        [task, *((cell(way) if way.works else "BROKEN") if (way := row.get(other)) else "-" for other in members)]
        for task in members
        if (row := found.get(task)) is not None
    ]
    return render_table(["FROM", *members], rows)


def as_json(found: Mapping[str, Mapping[str, Way]], unreachable: Mapping[str, str]) -> dict[str, Any]:
    ways = {
        task: {
            other: {"works": way.works, "listens": not way.refused, "why": way.why, "source": way.source}
            | {"address": way.address, "seconds": round(way.seconds, 3)}
            for other, way in row.items()
        }
        for task, row in found.items()
    }
    return {"ways": ways, "unreachable": dict(unreachable)}
