"""`fab gpu-check`: ask each host with GPUs to prove them, and show what they said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import last_line
from fleet.hosts.ssh import Answer
from fleet.output.tables import render_table
from fleet.site.inventory import Inventory

# The first product on a GPU may wait for the driver to translate the wheel's kernels, and MIG instances take turns.
CHECK_SECONDS = 900
# With the rights of a task: roles/gpu has the reason.
_CHECK = "root /usr/local/sbin/psfleet-gpu-check --json"
_HEADER = ("HOST", "GPUS", "MODEL", "DRIVER", "COMPUTES", "STATE")
_UNKNOWN = ("-",) * (len(_HEADER) - 2)


def check_gpus(cluster: Cluster, console: Console) -> None:
    """Show a row for each host of the group gpu; raise when a host isn't as the inventory expects."""
    inventory = cluster.inventory
    hosts = gpu_hosts(inventory)
    if not hosts:
        raise OperatorMistake(
            f"{inventory.source} has no host with a task in the group gpu; expected those with GPUs there (docs/gpu.md)"
        )
    reports, unreachable = ask_gpus(cluster, hosts)
    rows = [row(host, reports[host]) if host in reports else (host, *_UNKNOWN, "unreachable") for host in hosts]
    console.answer("gpu-check", {"hosts": reports, "unreachable": unreachable}, render_table(_HEADER, rows))
    wrong = "\n".join(f"{host}: {problem}" for host, report in reports.items() for problem in report["problems"])
    if unreachable:
        raise HostsUnreachable(unreachable, wrong)
    if wrong:
        raise ClusterTrouble(wrong)


def ask_gpus(cluster: Cluster, hosts: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Have hosts prove their GPUs; returns their reports, and who did not answer and why."""
    answers = cluster.hosts.run(dict.fromkeys(hosts, _CHECK), CHECK_SECONDS)
    reports = {host: read_report(answer) for host, answer in answers.items() if not answer.unreachable}
    return reports, {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}


def gpu_hosts(inventory: Inventory) -> list[str]:
    """Return the hosts of the group gpu that have a task."""
    return [host for host in inventory.groups.get("gpu", ()) if host in inventory.hosts]


def read_report(answer: Answer) -> dict[str, Any]:
    """Read what `trainer.gpu_check --json` printed; what printed none is a problem itself."""
    try:
        report = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        problem = f"the check gave no report: {last_line(Answer(stderr=answer.stderr, code=answer.code))}"
        return {"expected": {}, "module": None, "smi": None, "gpus": [], "devices": [], "problems": [problem]}
    return dict(report)


def row(host: str, report: Mapping[str, Any]) -> tuple[str, ...]:
    """One host's cells, after `_HEADER`."""
    expected = report["expected"]
    wanted = expected.get("gpus") or "?"  # with MIG the inventory names instances, not GPUs
    right = sum(not device["error"] for device in report["devices"])
    versions = dict.fromkeys(filter(None, (report["module"], report["smi"])))
    return (
        host,
        f"{len(report['gpus'])}/{wanted}",
        ", ".join(dict.fromkeys(gpu["name"] for gpu in report["gpus"])) or "-",
        " != ".join(versions) or "-",
        f"{right}/{len(expected.get('devices', ()))}",
        "trouble" if report["problems"] else "ok",
    )
