"""What the hosts say before some of them are taken away, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.errors import FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.observation import Observation
from fleet.planning.cost import Cost, cost_of


def observe_with_cost(
    cluster: Cluster, hosts: Sequence[str], in_order: bool, goes_off: bool = False
) -> tuple[Observation, Cost]:
    """Ask the hosts, and work out what it costs to take some away. Raises OperatorMistake for another cluster's."""
    seen, checkpoints = look_around(cluster, hosts)
    reject_foreign(cluster.inventory, seen, {cluster.inventory.chief.host, *hosts})
    return seen, cost_of(cluster.inventory, seen, hosts, checkpoints, in_order, goes_off)


def look_around(cluster: Cluster, besides: Sequence[str] = ()) -> tuple[Observation, list[dict[str, Any]]]:
    """Ask the hosts, and the coordinator's for the checkpoints of what trains; raises HostsUnreachable without it.

    Of hosts without a task those `besides` are asked.
    """
    seen = cluster.observe(dict.fromkeys([*cluster.inventory.hosts, *besides]), with_facts=True)
    chief = cluster.inventory.chief.host
    if chief in seen.unreachable:
        raise HostsUnreachable({chief: seen.unreachable[chief]}, "Without it, what the training does is unknown")
    return seen, checkpoints_of(cluster, seen)


def checkpoints_of(cluster: Cluster, seen: Observation) -> list[dict[str, Any]]:
    """Ask the coordinator's host for the checkpoints of what trains."""
    if seen.run and seen.run.state in ("training", "waiting"):
        try:
            return cluster.list_checkpoints()
        except FleetError:
            return []  # the run has not saved yet, or its host does not answer: the cost says so
    return []


def observe_own(cluster: Cluster, hosts: Sequence[str]) -> Observation:
    """Ask some hosts; raises OperatorMistake where one of them, and so what it has, belongs to another cluster."""
    seen = cluster.observe(hosts, new_is_enough=True)
    reject_foreign(cluster.inventory, seen, hosts)
    return seen
