"""Which members a cluster had when the history noted it, and what of that a rollback can bring back: no file of a host
says where the tasks are, only the inventory does. So hosts that came since are drained, and the rest is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.actions.look_around import look_around
from fleet.hosts.cluster import Cluster
from fleet.hosts.drains import is_drained
from fleet.hosts.history import members_of
from fleet.hosts.observation import Observation
from fleet.planning.cost import Cost, cost_of

Members = Mapping[str, Sequence[str]]
"""The names of the tasks by host, as fleet/hosts/history.py notes them."""


@dataclass(frozen=True)
class Return:
    """What becomes of the members of now."""

    drained: Members = field(default_factory=dict)
    """Hosts that came since, each with its tasks."""
    stays: Sequence[str] = ()
    """What came since and can't be taken out, each with the reason."""
    gone: Sequence[str] = ()
    """Tasks of then that there are no more."""
    cost: Cost | None = None
    """What the drains cost."""

    def lines(self) -> list[str]:
        """Return what is done and what is not, a line for each thing."""
        return [
            *(
                f"  drain    {host}: {', '.join(names)} came since. Have it back: fab undrain {host}"
                for host, names in self.drained.items()
            ),
            *(f"  stays    {each}" for each in self.stays),
            *(
                f"  gone     {each}: to have it again, add it to the inventory, then `ansible-playbook site.yml` and "
                "`fab start-cluster`"
                for each in self.gone
            ),
        ]


def members_back(cluster: Cluster, seen: Observation, then: Members | None) -> Return:
    """Work out what a rollback to the members of then does; what is drained already is not looked at."""
    if then is None:
        return Return()
    before = {name: host for host, names in then.items() for name in names}
    now = {host: names for host, names in members_of(cluster.inventory).items() if not is_drained(cluster, seen, host)}
    new = {host: names for host, names in now.items() if before.keys().isdisjoint(names)}
    drained, stays, cost = _judge(cluster, new) if new else ({}, [], None)
    stays += [
        f"{name}: {host} has tasks of then too. Take it out of the inventory, then `ansible-playbook site.yml`"
        for host, names in now.items()
        for name in names
        if name not in before and host not in new
    ]
    present = {task.name for task in cluster.inventory.tasks}
    gone = [f"{name} on {host}" for name, host in before.items() if name not in present]
    return Return(drained, stays, gone, cost)


def _judge(cluster: Cluster, new: Members) -> tuple[dict[str, Sequence[str]], list[str], Cost | None]:
    """Return which of the new hosts can be drained, one after the other, of the others why not, and what it costs."""
    seen, checkpoints = look_around(cluster)
    drained: dict[str, Sequence[str]] = {}
    stays, cost = [], None
    for host, names in new.items():
        more = cost_of(cluster.inventory, seen, [*drained, host], checkpoints)
        if more.refusals:
            stays.append(describe_stay(host, "; ".join(more.refusals)))
        else:
            drained[host], cost = names, more
    return drained, stays, cost


def describe_stay(host: str, why: str) -> str:
    """Say why a host that came since stays, and how to drain it later."""
    return f"{host}: {why}. When that is fixed: fab drain {host}"


def read(line: Mapping[str, Any]) -> Members | None:
    """Return the members that a line of the history notes; None where it has none, or another has written it."""
    found = line.get("members")
    if not isinstance(found, dict) or not all(isinstance(names, list) for names in found.values()):
        return None
    return found
