"""`fab status`: each task, the hosts' code and the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.observation import Observation
from fleet.output.terminal import is_terminal
from fleet.site.inventory import Inventory
from fleet.status import status_text
from fleet.status.status_text import status_record


def show_status(cluster: Cluster, console: Console, deep: bool = False) -> None:
    """Show each task and the run; raise when a task that should run doesn't.

    `deep` has each host compare its code and its environment, byte by byte, with what was installed there.
    """
    observation = cluster.observe(running=True)
    inventory = cluster.inventory
    rows = status_text.task_rows(inventory, observation)
    damage = _look_deeply(inventory, console, observation) if deep else {}
    if console.json_out is not None:
        console.print_json("status", status_record(inventory, observation) | ({"damage": dict(damage)} if deep else {}))
    else:
        _say_status(inventory, console, observation, rows)
    _reject_trouble(cluster, observation, rows, damage)
    if deep and console.json_out is None:
        console.print(f"code and environment on {len(observation.releases)} hosts are as they were installed")


def _say_status(inventory: Inventory, console: Console, observation: Observation, rows: list[dict[str, Any]]) -> None:
    if is_terminal(console.out):
        from fleet.status.status_view import draw, screen_of  # its library takes longer than all that a pipe needs

        screen_of(console.out).print(draw(inventory, observation))
        return
    console.print(status_text.render_tasks(rows))
    console.print(status_text.render_release(observation))
    console.print(status_text.render_run(observation.run))
    for line in status_text.render_pointers(observation.selection, observation.run):
        console.print(line)
    if account := status_text.render_account(observation.run):
        console.print(account)


def _reject_trouble(
    cluster: Cluster, observation: Observation, rows: list[dict[str, Any]], damage: Mapping[str, str]
) -> None:
    """Raise for hosts that don't answer or are another cluster's, tasks that don't run, and damaged files (by host)."""
    wrong = [row for row in rows if row["trouble"] and row["state"] != "unreachable"]
    named = ", ".join(f"{row['task']} on {row['host']}" for row in wrong)
    damaged = [f"{host}: {line}" for host, lines in damage.items() for line in lines.splitlines()]
    # One that is drained may be off.
    lost = {host: why for host, why in observation.unreachable.items() if host not in observation.drains}
    if lost:
        more = [f"and not as they should be: {named}"] if named else []
        raise HostsUnreachable(lost, "\n".join(more + damaged))
    reject_foreign(cluster.inventory, observation, cluster.inventory.hosts)
    cluster.reject_when_not_installed(observation)
    cluster.reject_when_not_configured(observation)
    if observation.run_error:
        raise observation.run_error
    if wrong:
        first = wrong[0]["task"]
        damaged.insert(0, f"not as they should be: {named} (look: fab logs --task {first})")
    if damaged:
        raise ClusterTrouble("\n".join(damaged))


def _look_deeply(inventory: Inventory, console: Console, observation: Observation) -> Mapping[str, str]:
    """Have the hosts that answered look at every byte; returns what is wrong by host."""
    if not observation.releases:
        return {}
    with console.progress() as progress:
        return console.verify_hosts(inventory, list(observation.unreachable), progress)
