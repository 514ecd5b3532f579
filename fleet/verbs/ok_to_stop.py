"""`fab ok-to-stop HOST...`: may these hosts be taken away now, without a drain before?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet.actions.console import Console
from fleet.actions.look_around import observe_with_cost
from fleet.errors import ClusterTrouble
from fleet.hosts.cluster import Cluster
from fleet.planning.cost import Cost
from fleet.site.host_names import find_hosts


def ok_to_stop(cluster: Cluster, console: Console, hosts: Sequence[str]) -> None:
    """Say what stops, for how long and what is lost; raises ClusterTrouble where the hosts must not go now.

    They may where the training goes on without a pause and loses no step.
    """
    chosen = find_hosts(cluster.inventory, hosts, beside=True)
    seen, cost = observe_with_cost(cluster, chosen, in_order=False)
    problems = problems_of(cost, [host for host in chosen if host in cluster.inventory.hosts])
    servers = [host for host in cluster.inventory.groups.get("nfs_server", ()) if host in chosen]
    if servers and any(unit.up for unit in seen.units.values()):
        problems += [f"{servers[0]} serves the shared path, and nothing goes on without it: `fab stop-cluster` first"]
    # Where nothing runs, what a training would lack then is no reason to stay.
    later = "; no training can be started until they are back" if cost.refusals and not problems else ""
    cost = cost if problems else replace(cost, refusals=[])
    record = {"ok": not problems, "cost": cost.as_json(), "problems": problems}
    console.answer("ok-to-stop", record, f"{', '.join(chosen)}, taken away now\n{cost.render()}")
    if problems:
        raise ClusterTrouble("not now: " + "\n".join(problems))
    console.print(f"yes: {', '.join(chosen)} may be taken away now{later}")


def problems_of(cost: Cost, hosts: Sequence[str]) -> list[str]:
    """Say why the hosts must not go now, each with what to do."""
    if not cost.stops:
        return []
    if cost.refusals:
        return list(cost.refusals)
    if cost.steps_lost != 0 or not cost.pause.startswith("none"):
        reason = f"a pause of {cost.pause}" if cost.steps_lost == 0 else cost.lost
        return [f"{reason}. Nothing is lost after: {', then '.join(f'fab drain {host}' for host in hosts)}"]
    return []
