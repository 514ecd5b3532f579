"""Refuse hosts that belong to another cluster, as site.yml does (fleet/site/cluster_note.py)."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.errors import OperatorMistake
from fleet.hosts.observation import Observation
from fleet.site.cluster_note import cluster_name, cluster_problems, former_names
from fleet.site.inventory import Inventory


def foreign_hosts(inventory: Inventory, seen: Observation) -> dict[str, str]:
    """Return by host that belongs to another cluster whose it is, and how to take it over."""
    name = cluster_name(inventory.groups, inventory.variables)
    former = former_names(inventory.groups, inventory.variables)
    found = {host: cluster_problems(note, host, name, former) for host, note in seen.clusters.items()}
    return {host: problems[0] for host, problems in found.items() if problems}


def reject_foreign(inventory: Inventory, seen: Observation, hosts: Iterable[str]) -> None:
    """Raise OperatorMistake where one of these hosts belongs to another cluster; hosts that said nothing may."""
    foreign = foreign_hosts(inventory, seen)
    if wrong := [foreign[host] for host in hosts if host in foreign]:
        raise OperatorMistake("\n".join([*wrong, f"Or take it out of {inventory.source}, where it is wrong"]))
