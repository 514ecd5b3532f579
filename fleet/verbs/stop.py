"""`fab stop-cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import stop_others
from fleet.actions.stopping import DOWN, stop_tasks
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.foreign_hosts import foreign_hosts, reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.observation import Observation
from fleet.hosts.units import Health
from fleet.planning.cost import cost_of_restart, training
from fleet.site.topology import Task
from fleet.status import status_text
from fleet.status.status_text import status_record


def stop_cluster(cluster: Cluster, console: Console, reason: str | None = None, plan_only: bool = False) -> None:
    """Stop and disable every task; what trains saves a checkpoint before the servers go.

    Raises HostsUnreachable after the others are stopped, or shown where it is to `plan_only`.
    """
    before = cluster.observe(new_is_enough=True)
    reject_foreign(cluster.inventory, before, [cluster.inventory.chief.host])
    if not plan_only and stop_others(cluster, console):
        before = cluster.observe(new_is_enough=True)  # they may have started tasks since
    installed = _own_tasks(cluster, console, before)
    if plan_only:
        _show_plan(cluster, console, before, installed, with_reason("fab stop-cluster", reason))
        return
    with Trail(cluster, console, "stop-cluster", reason) as trail:
        trail.begin(run=before.run.run if before.run else None)
        errors: list[FleetError] = []
        try:
            stop_tasks(cluster, console, before, [task for task in installed if task.trains])
        except FleetError as error:
            errors.append(error)
        others = [task for task in installed if not task.trains and before.units[task.name].health not in DOWN]
        if others:
            console.print(f"stopping {', '.join(task.name for task in others)}")
        after = cluster.take_down(others, installed)
        if after.failed:
            errors.append(
                ClusterTrouble("\n".join(f"{host}: systemctl failed: {why}" for host, why in after.failed.items()))
            )
        rows = status_text.task_rows(cluster.inventory, after)
        console.print(status_text.render_tasks(rows))
        if after.run:
            console.print(status_text.render_run(after.run))
        console.print_json("stop-cluster", {**status_record(cluster.inventory, after), "planned": None, "cost": None})
        _reject_away(after)
        if errors:
            raise errors[0]
        _reject_running(cluster, after)
        trail.end(step=after.run.step if after.run else None)
    console.print("start it again: fab start-cluster")


def _show_plan(cluster: Cluster, console: Console, seen: Observation, installed: Sequence[Task], command: str) -> None:
    running = [task for task in installed if seen.units[task.name].health not in DOWN]
    console.print("stop-cluster")
    saving, others = ([task.name for task in running if task.trains is trains] for trains in (True, False))
    for what, names in (("stops after a checkpoint", saving), ("then stops", others)):
        console.print(f"  {what:<24}  {', '.join(names) or 'nothing'}")
    cost = cost_of_restart(cluster.inventory, seen, running, [])
    if training(cluster.inventory, seen):
        cost = replace(cost, pause="until the next fab start-cluster")
    console.print(f"{cost.render_loss()}\nnothing was done. Do it: {command}")
    record = {**status_record(cluster.inventory, seen), "planned": [*saving, *others], "cost": cost.as_json()}
    console.print_json("stop-cluster", record)
    _reject_away(seen)


def _reject_away(seen: Observation) -> None:
    if away := {host: why for host, why in seen.unreachable.items() if host not in seen.drains}:
        raise HostsUnreachable(away, "What runs there goes on until `fab stop-cluster` reaches it")


def _own_tasks(cluster: Cluster, console: Console, before: Observation) -> list[Task]:
    """Return the installed tasks, but for those on hosts of another cluster."""
    foreign = foreign_hosts(cluster.inventory, before)
    for what in foreign.values():
        console.print(f"left alone: {what}")
    there = [task for task in cluster.inventory.tasks if task.host not in foreign and task.name in before.units]
    return [task for task in there if before.units[task.name].health is not Health.ABSENT]


def _reject_running(cluster: Cluster, after: Observation) -> None:
    foreign = foreign_hosts(cluster.inventory, after)
    found: dict[Task, str] = {}
    for task in cluster.inventory.tasks:
        unit = after.units.get(task.name)  # none on a drained host that is off
        if unit and task.host not in foreign and unit.health not in (Health.STOPPED, Health.ABSENT):
            found[task] = unit.describe_failure() if unit.health is Health.FAILED else f"is still {unit.active}"
    if found:
        raise ClusterTrouble("", cluster.trouble(found))
