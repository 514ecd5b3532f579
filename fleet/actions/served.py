"""What a host serves beside its tasks, as `update-hosts` waits for it: a save before, and its services after."""

from __future__ import annotations

import shlex

from fleet.actions.console import Console
from fleet.actions.waiting import wait
from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import REMOUNT
from fleet.hosts.observation import Observation
from fleet.hosts.run import on_path
from fleet.output.tables import render_duration
from trainer.core.settings.config import Config

LOOK_SECONDS = 5.0
SERVICE_SECONDS = 120.0  # until a service runs
SAVE_SECONDS = 900.0  # beyond the time between two saves: a large model, on a slow path
GOES_ON_SECONDS = 900.0


def serves_path(cluster: Cluster, host: str) -> bool:
    """Whether the shared path is away with a host."""
    return "nfs_server" in cluster.inventory.services_on(host)


def wait_for_save(cluster: Cluster, console: Console, seen: Observation) -> bool:
    """Wait until what trains has saved once more; False where it does not in time, True where nothing trains."""
    chief = cluster.inventory.chief.name
    runs = [seen.run] if seen.run else []  # the first has the save before

    def is_saved(now: Observation) -> bool:
        if now.run is None or not now.units[chief].up:
            return not now.units[chief].up
        runs.append(now.run)
        return now.run.state != "training" or now.run.checkpoint != runs[0].checkpoint

    every = cluster.inventory.run_settings.get("checkpoint_seconds", Config.checkpoint_seconds)
    return wait(cluster, console, "the coordinator saves", is_saved, every + SAVE_SECONDS)


def wait_for_services(cluster: Cluster, console: Console, seen: Observation, host: str, again: str) -> None:
    """Wait until what a host has served before runs again.

    Raises ClusterTrouble where it does not in time, HostsUnreachable where the host says nothing then.
    """
    ran = {unit.name for unit in seen.services.get(host, ()) if unit.up}
    end = console.clock() + SERVICE_SECONDS
    while ran:
        now = cluster.observe([host])
        down = [unit for unit in now.services.get(host, ()) if unit.name in ran and not unit.up]
        if not now.unreachable and not down:
            return
        if console.clock() > end:
            if now.unreachable:
                raise HostsUnreachable(now.unreachable, f"It is updated. When it is back: {again}")
            why = ", ".join(f"{unit.name} {unit.describe_down()}" for unit in down)
            raise ClusterTrouble(f"{host} is updated, and {why}. Look: fab doctor. Then {again}")
        console.sleep(LOOK_SECONDS)


def wait_for_path(cluster: Cluster, console: Console, host: str, patience: float, again: str) -> None:
    """Wait until the shared path answers again, and what trains goes on; raises ClusterTrouble where it does not.

    For a while after its start a server lets only those in that had files open before.
    """
    chief, path = cluster.inventory.chief, cluster.inventory.shared_dir
    ask = f"{REMOUNT}; {on_path('ls')} {shlex.quote(path)} >/dev/null"
    end = console.clock() + patience
    while (answer := cluster.hosts.run({chief.host: ask})[chief.host]).unreachable or answer.code:
        if console.clock() > end:
            waited = render_duration(patience)
            raise ClusterTrouble(
                f"{host} is updated, and {path} gives {chief.host} no answer after {waited}. Look: fab doctor. "
                f"Then {again}"
            )
        console.sleep(LOOK_SECONDS)
    first = cluster.observe([chief.host], new_is_enough=True).run

    def goes_on(now: Observation) -> bool:
        run = now.run
        trains = run is not None and run.state in ("training", "waiting") and now.units[chief.name].up
        return run is None or not trains or first is None or run.updated != first.updated

    if not wait(cluster, console, "the training goes on", goes_on, GOES_ON_SECONDS):
        raise ClusterTrouble(f"{host} is updated, and the training does not go on. Look: fab status. Then {again}")
