"""Which members a cluster had when the history noted it, and what of that a rollback can bring back: no file of a host
says where the tasks are, only the inventory does. So hosts that came since are drained, and the rest is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.cluster import Cluster
from fleet.verbs import Desk
from fleet.verbs.drain import drain
from fleet.verbs.ok_to_stop import look

Members = Mapping[str, Sequence[str]]
"""The names of the tasks by host, as fleet/history.py notes them."""


@dataclass(frozen=True)
class Return:
    """What becomes of the members of now."""

    drained: Members = field(default_factory=dict)
    """Hosts that came since, each with its tasks."""
    stays: Sequence[str] = ()
    """What came since and can't be taken out, each with the reason."""
    gone: Sequence[str] = ()
    """Tasks of then that there are no more."""

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


def came_since(now: Members | None, then: Members | None) -> dict[str, Sequence[str]]:
    """Return the hosts that have no task of then, with their tasks; none where one of both is not known."""
    names = {name for each in (then or {}).values() for name in each}
    return {host: own for host, own in (now or {}).items() if then is not None and names.isdisjoint(own)}


def members_back(cluster: Cluster, now: Members, then: Members | None) -> Return:
    """Work out what a rollback to the members of then does; `now` has those that are not drained."""
    if then is None:
        return Return()
    new = came_since(now, then)
    before = {name: host for host, names in then.items() for name in names}
    present = {task.name for task in cluster.inventory.tasks}
    stays = [
        f"{name}: {host} has tasks of then too. Take it out of the inventory, then `ansible-playbook site.yml`"
        for host, names in now.items()
        for name in names
        if name not in before and host not in new
    ]
    gone = [f"{name} on {host}" for name, host in before.items() if name not in present]
    if refusals := look(cluster, [*new], in_order=True)[1].refusals if new else []:
        why = "; ".join(refusals)
        return Return({}, [*(f"{host}: {why}" for host in new), *stays], gone)
    return Return(new, stays, gone)


def drain_new(cluster: Cluster, desk: Desk, plan: Return, reason: str | None) -> None:
    """Drain the hosts that came since, one after the other."""
    for host in plan.drained:
        drain(cluster, replace(desk, answers=None), host, reason, verb="rollback")


def read(line: Mapping[str, Any]) -> Members | None:
    """Return the members that a line of the history notes; None where it has none, or another has written it."""
    found = line.get("members")
    if not isinstance(found, dict) or not all(isinstance(names, list) for names in found.values()):
        return None
    return found
