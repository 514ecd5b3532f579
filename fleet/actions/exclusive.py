"""One change of the cluster at a time, and what a plan and a stop do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble
from fleet.hosts.cluster import Cluster
from fleet.hosts.lock import describe_others, note_stop, who_is_at_work
from fleet.site.topology import Task


def begin_exclusively(cluster: Cluster, console: Console, what: str, plan_only: bool) -> None:
    """Keep others away; a plan changes nothing, and only says who is at work.

    Raises OthersAtWork where one is. A verb within another one is kept by the other's lock.
    """
    if cluster.keep_start_lock():
        return
    chief = cluster.inventory.chief.host
    if not plan_only:
        if why := cluster.acquire_start_lock(what):
            console.print(f"others are not kept away from this cluster, since {chief} can't be asked: {why}")
    elif who := who_is_at_work(cluster.hosts, chief):
        console.print(describe_others(who))


def stop_others(cluster: Cluster, console: Console) -> bool:
    """Have what is at work start no task any more: a stop waits for nobody. Returns whether anything is."""
    if cluster.keep_start_lock():
        return False
    if who := note_stop(cluster.hosts, cluster.inventory.chief.host):
        console.print(f"{who} is at work on this cluster; it starts no task any more")
    return who is not None


def describe_stop(who: str) -> str:
    """Say why nothing is started."""
    return f"{who} came meanwhile, and so no task is started. Look: fab history"


def reject_stopped(cluster: Cluster) -> None:
    """Raise ClusterTrouble where another operator has stopped the cluster since this verb has its lock.

    Raises OthersAtWork where the lock was lost, and another has it.
    """
    cluster.keep_start_lock()
    if who := cluster.observe([cluster.inventory.chief.host], new_is_enough=True).stopped:
        raise ClusterTrouble(describe_stop(who))


def start_unless_stopped(cluster: Cluster, tasks: Sequence[Task]) -> None:
    """Start tasks; raises ClusterTrouble where the cluster was stopped meanwhile."""
    reject_stopped(cluster)
    cluster.start(tasks)


def start_again(cluster: Cluster, tasks: Sequence[Task], start: Callable[[], None]) -> None:
    """Start what ran before; raises ClusterTrouble where the cluster was stopped meanwhile, which it stays.

    `tasks` are those that what was put back would start at the next boot.
    """
    try:
        reject_stopped(cluster)
    except ClusterTrouble:
        cluster.disable(tasks)
        raise
    start()


def restart_previous(cluster: Cluster, hosts: Sequence[str]) -> None:
    """Start what hosts remember as running, unless the cluster was stopped meanwhile."""
    tasks = [task for task in cluster.inventory.tasks if task.host in hosts]
    start_again(cluster, tasks, partial(cluster.restart_previous, hosts))
