"""Waiting for what the coordinator says."""

from __future__ import annotations

from collections.abc import Callable

from fleet.actions.console import Console
from fleet.actions.watch import RUN_SECONDS
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation


def wait(
    cluster: Cluster,
    console: Console,
    what: str,
    happened: Callable[[Observation], bool],
    seconds: float,
    looks: int = 2,
) -> bool:
    """Look at the coordinator's host until something has happened; False where it does not in so many seconds.

    What is seen at so many `looks` counts: what is seen once may be what a process said that has just gone.
    """
    chief, end, times = cluster.inventory.chief.host, console.clock() + seconds, 0
    with console.progress() as progress:
        while console.clock() < end:
            progress.show(what)
            console.sleep(RUN_SECONDS)
            now = cluster.observe([chief], new_is_enough=True)
            times = times + 1 if chief not in now.unreachable and happened(now) else 0
            if times == looks:
                return True
        return False
