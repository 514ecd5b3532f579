"""One start, drill or other change at a time, and what a plan says meanwhile."""

from __future__ import annotations

from fleet.actions.console import Console
from fleet.hosts.cluster import Cluster
from fleet.hosts.lock import who_is_at_work


def begin_exclusively(cluster: Cluster, console: Console, what: str, plan_only: bool) -> None:
    """Keep others away; a plan changes nothing, and only says who is at work. Raises OperatorMistake where one is."""
    if not plan_only:
        cluster.acquire_start_lock(what)
    elif who := who_is_at_work(cluster.hosts, cluster.inventory.chief.host):
        console.print(
            f"this cluster is taken by {who}. Until that is over nothing else begins, and it may change this plan"
        )
