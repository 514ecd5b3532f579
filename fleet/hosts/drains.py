"""Hosts that an operator has taken out of the training, and the three places that know it.

- `MARK` on the host itself: its units have a condition on it, so that neither a start, nor a boot, nor `site.yml`
  brings them back.
- `LEAVERS` on the coordinator's host: tasks that the coordinator lets go in order, and doesn't wait for. In `LEAVING`
  they are soon back, and a worker's part of the data waits.
- `drains/HOST.json` on the shared path: what any control machine shows, also of a host that is off.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.drain_records import LEAVERS, LEAVING, MARK
from fleet.hosts.observation import Observation
from fleet.site.inventory import Inventory
from fleet.site.topology import Task


def mark(cluster: Cluster, host: str, record: Mapping[str, Any]) -> None:
    """Keep the host's units down from their next start on, also after a power cut that comes now."""
    text = shlex.quote(json.dumps(record))
    write = f"printf '%s\\n' {text} >{MARK}.new && sync {MARK}.new && mv {MARK}.new {MARK}"
    script = f"umask 022; {write} && sync {PurePath(MARK).parent}"
    _as_root(cluster, host, script, f"{MARK} can't be written")


def unmark(cluster: Cluster, host: str) -> None:
    """Let the host's units start again."""
    _as_root(cluster, host, f"rm -f {MARK}", f"{MARK} can't be removed")


def announce_drain(cluster: Cluster, tasks: Sequence[Task], is_soon_back: bool = False) -> None:
    """Have the coordinator let go of tasks: of a ps after a save.

    Of a worker that `is_soon_back` no other worker reads the data.
    """
    waiting = [task.name for task in tasks if is_soon_back and task.job == "worker"]
    places = {LEAVERS: [task.name for task in tasks if task.name not in waiting], LEAVING: waiting}
    steps = [f"mkdir -p {at} && cd {at} && touch {' '.join(names)} && sync ." for at, names in places.items() if names]
    script = " && ".join(["umask 022", *steps])
    _as_root(cluster, cluster.inventory.chief.host, script, f"{LEAVERS} can't be written")


def announce_return(cluster: Cluster, tasks: Sequence[Task]) -> None:
    """Have the coordinator take these tasks in again as soon as they answer."""
    names = " ".join(task.name for task in tasks)
    script = "; ".join(f"if cd {place} 2>/dev/null; then rm -f {names}; fi" for place in (LEAVERS, LEAVING))
    _as_root(cluster, cluster.inventory.chief.host, script, f"{LEAVERS} can't be written")


def record(cluster: Cluster, host: str, text: Mapping[str, Any]) -> None:
    """Write a host's drain on the shared path."""
    name = f"drains/{host}.json"
    cluster.on_shared(cluster.script_of(name, text), f"{cluster.inventory.shared_dir}/{name} can't be written")


def forget(cluster: Cluster, host: str) -> None:
    """Remove a host's drain from the shared path."""
    name = f"drains/{host}.json"
    cluster.on_shared(cluster.script_of(name, {}), f"{cluster.inventory.shared_dir}/{name} can't be removed")


def tasks_of(inventory: Inventory, hosts: Sequence[str]) -> list[Task]:
    """Return the tasks on these hosts."""
    return [task for task in inventory.tasks if task.host in hosts]


def is_started(inventory: Inventory, seen: Observation) -> bool:
    """Whether the cluster trains, or would but for a drain of the coordinator's host, which an update has begun."""
    chief = inventory.chief
    unit = seen.units[chief.name]
    return not unit.idle or (unit.enabled and chief.host in seen.drains)


def is_drained(cluster: Cluster, seen: Observation, host: str) -> bool:
    """Whether a host knows that it is drained, and runs nothing."""
    units = [seen.units[task.name] for task in cluster.inventory.tasks_on(host) if task.name in seen.units]
    known = host in seen.marked or (host in seen.drains and host in seen.unreachable)
    return known and not any(unit.up for unit in units)


def _as_root(cluster: Cluster, host: str, script: str, trouble: str) -> None:
    answer = cluster.hosts.run({host: f"root sh -c {shlex.quote(script)}"})[host]
    if answer.unreachable:
        raise HostsUnreachable({host: answer.unreachable})
    if answer.code:
        raise ClusterTrouble(f"{trouble} on {host}: {(answer.stderr or answer.stdout).strip()}")
