"""`fab hosts`: each host's state, why and since when, its release and what it has left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.actions.console import Console
from fleet.errors import HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.facts import describe_gpus
from fleet.hosts.foreign_hosts import foreign_hosts
from fleet.hosts.observation import Observation
from fleet.hosts.units import Health
from fleet.output.tables import render_duration, render_table
from fleet.site.inventory import Inventory

GIB = 2**30
# A clock that differs by less than the look took counts as right.
CLOCK_SECONDS = 1.0


def show_hosts(cluster: Cluster, console: Console) -> None:
    """Show a row for each host; raises HostsUnreachable where one is down that isn't drained."""
    begun = time.time()
    seen = cluster.observe(cluster.inventory.everyone, with_facts=True)
    rows = host_rows(cluster.inventory, seen, begun, time.time())
    drained = [row["host"] for row in rows if row["state"] in ("drained", "draining")]
    back = f"\nbring a host back: fab undrain {drained[0]}" if drained else ""
    console.answer("hosts", {"hosts": rows}, render(rows) + back)
    if lost := {host: why for host, why in seen.unreachable.items() if host not in seen.drains}:
        raise HostsUnreachable(lost)


def host_rows(inventory: Inventory, seen: Observation, begun: float, ended: float) -> list[dict[str, Any]]:
    """Return what is known of each host; the look lasted from `begun` to `ended` by this machine's clock."""
    rows = []
    foreign = foreign_hosts(inventory, seen)
    for host in inventory.everyone:
        drain = seen.drains.get(host, {})
        state, why, since = judge_host(inventory, seen, host)
        if host in foreign:  # whose tasks have the same names
            state, why, since = "away", foreign[host].removeprefix(f"host '{host}': ").partition(",")[0], None
        found = seen.facts.get(host, {})
        rows.append(
            {
                "host": host,
                "tasks": [task.name for task in inventory.tasks_on(host)],
                "serves": list(inventory.services_on(host)),
                "state": state,
                "why": why,
                "since": since,
                "by": drain.get("who"),
                "release": seen.releases.get(host),
                "load": found.get("load"),
                "processors": found.get("processors"),
                "memory_available": found.get("memory_available"),
                "memory_total": found.get("memory_total"),
                "disk_free": found.get("disk_free"),
                "shared_free": found.get("shared_free"),
                "clock_offset": _offset(seen.clocks.get(host), begun, ended),
                "up_seconds": found.get("up"),
                "gpus": describe_gpus(found) or None,
            }
        )
    return rows


def judge_host(inventory: Inventory, seen: Observation, host: str) -> tuple[str, str | None, float | None]:
    """Return a host's state, why it is so, and since when (seconds since 1970).

    `ready` (nothing keeps it from training), `draining`, `drained`, `away` (it answers, and a task of it takes no part
    in the training, or a service of it does not run), `new` (it has no release yet), `down` (it does not answer).
    """
    tasks = inventory.tasks_on(host)
    units = [seen.units[task.name] for task in tasks if task.name in seen.units]
    if host in seen.drains:
        drain = seen.drains[host]
        gone = all(unit.health in (Health.STOPPED, Health.FAILED, Health.ABSENT) for unit in units)
        since = drain.get("since")
        return (
            "drained" if gone else "draining",
            drain.get("reason"),
            since if isinstance(since, (int, float)) else None,
        )
    if host in seen.unreachable:
        return "down", seen.unreachable[host], None
    if host in seen.bare(inventory):
        return "new", "nothing is installed there yet: ansible-playbook site.yml", None
    without = seen.run.without if seen.run and seen.run.state in ("training", "waiting") else {}
    if absent := [f"{task.name} is {without[task.name]}" for task in tasks if task.name in without]:
        return "away", ", ".join(absent), max((unit.since for unit in units if unit.since), default=None)
    units = [unit for unit in units if unit.health is Health.FAILED]
    units += [unit for unit in seen.services.get(host, ()) if not unit.up]
    if units:
        why = ", ".join(f"{unit.name} {unit.describe_down()}" for unit in units)
        return "away", why, max((unit.since for unit in units if unit.since), default=None)
    return "ready", None, None


def _offset(clock: float | None, begun: float, ended: float) -> float | None:
    """Return by how many seconds a host's clock is ahead of this machine's, 0 where it counts as right."""
    if not clock:
        return None
    apart = clock - ended if clock > ended else min(0.0, clock - begun)
    return round(apart, 1) if abs(apart) > CLOCK_SECONDS else 0.0


HEADER = (
    "HOST", "TASKS", "STATE", "SERVES", "FOR", "BY", "RELEASE", "LOAD", "MEMORY", "DISK", "SHARED", "CLOCK", "GPU",
    "WHY",
)  # fmt: skip


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    now = time.time()
    cells = [
        [
            row["host"],
            ", ".join(row["tasks"]),
            row["state"],
            ", ".join(row["serves"]),
            render_duration(now - row["since"]) if row["since"] else None,
            row["by"],
            row["release"],
            None if row["load"] is None else f"{row['load']:.2f} of {row['processors'] or 0:.0f}",
            _gib(row["memory_available"], row["memory_total"]),
            _gib(row["disk_free"]),
            _gib(row["shared_free"]),
            None
            if row["clock_offset"] is None
            else f"{row['clock_offset']:+.1f} s"
            if row["clock_offset"]
            else "right",
            row["gpus"],
            row["why"],
        ]
        for row in rows
    ]
    shown = [column for column in range(len(HEADER)) if column < 3 or any(row[column] for row in cells)]
    return render_table([HEADER[column] for column in shown], [[row[column] for column in shown] for row in cells])


def _gib(free: float | None, total: float | None = None) -> str | None:
    if free is None:
        return None
    amount = f"{free / GIB:.1f}"
    return f"{amount} of {total / GIB:.1f} GiB" if total else f"{amount} GiB"
