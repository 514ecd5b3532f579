"""Stopping tasks in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.actions.console import Console
from fleet.errors import FleetError
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.units import Health
from fleet.site.topology import Task

DOWN = (Health.STOPPED, Health.FAILED, Health.ABSENT)


def stop_tasks(
    cluster: Cluster,
    console: Console,
    seen: Observation,
    tasks: Sequence[Task] | None = None,
    stop: Callable[[Sequence[Task]], None] | None = None,
) -> None:
    """Stop tasks (every one that isn't down when none are given): those that train, the evaluator, then the servers.

    `stop` is how: the cluster's own `stop`, or `park`.

    What trains stops at once: each of several members that train in step saves and stops when one of them is asked to,
    and systemd starts again those that it wasn't told to stop.
    """
    candidates = [
        task
        for task in (cluster.inventory.tasks if tasks is None else tasks)
        if task.name in seen.units and seen.units[task.name].health not in DOWN
    ]
    errors: list[FleetError] = []
    training = [task for task in candidates if task.trains]
    evaluating = [task for task in candidates if task.job == "evaluator"]
    serving = [task for task in candidates if task.server]
    for stopping in filter(None, (training, evaluating, serving)):
        saving = " (a checkpoint is saved first)" if stopping is training else ""
        console.print(f"stopping {', '.join(task.name for task in stopping)}{saving}")
        try:
            (stop or cluster.stop)(stopping)
        except FleetError as error:
            errors.append(error)
    if errors:
        raise errors[0]
