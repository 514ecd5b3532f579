"""How a start brings code and settings to the hosts, and what it says of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fleet.actions.console import Console
from fleet.actions.exclusive import describe_stop
from fleet.actions.look_around import checkpoints_of
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import RELEASE, SELECTION, Cluster
from fleet.hosts.history import Trail
from fleet.hosts.host_scripts import REMOUNT
from fleet.hosts.observation import Observation
from fleet.hosts.run import PATH_SECONDS
from fleet.hosts.ssh import ANSWER_SECONDS
from fleet.planning.cost import Cost, cost_of_restart, training
from fleet.planning.plan import AT_A_SAVE, Plan
from fleet.planning.quorum import chosen_minimum, find_shortages
from fleet.rollout.release import CHANGES, SWITCH, Shipment, ShipmentResult
from fleet.site.inventory import Inventory
from fleet.status import status_text

# For a script that writes on the shared path and then looks at it: both may hang.
BOTH_SECONDS = ANSWER_SECONDS + 2 * PATH_SECONDS
NOTHING_DONE = "nothing was stopped, switched or selected: what ran goes on"


def agree_on_missing(
    inventory: Inventory, console: Console, missing: Mapping[str, str], allowed: bool, drained: Collection[str] = ()
) -> None:
    """Raise unless a start may go on without hosts that don't answer, and without those that were drained.

    It may where each job has its minimum, and the operator says so: with cluster_minimum, with `allowed`, or when asked
    on a terminal. For a drained host the operator has agreed already.
    """
    shortages = find_shortages(inventory, {*missing, *drained})
    if shortages and not missing:
        raise OperatorMistake(
            f"nothing was started: {'; '.join(shortages)}, and {', '.join(drained)} is drained. Bring a host back: "
            f"fab undrain {next(iter(drained))}"
        )
    missing = {host: why for host, why in missing.items() if host not in drained or shortages}
    if not missing:
        return
    if shortages:
        raise HostsUnreachable(
            missing,
            f"Nothing was started: {'; '.join(shortages)}. Bring the host back, take it out of the inventory and run "
            "`ansible-playbook site.yml`, or lower cluster_minimum",
        )
    away = ", ".join(task.name for task in inventory.tasks if task.host in missing)
    if allowed or chosen_minimum(inventory):
        return
    if not console.ask(f"{', '.join(missing)} can't be reached. Start without {away}? [y/N] "):
        raise HostsUnreachable(
            missing,
            f"Nothing was started. Bring the host back, or start without {away}: --allow-missing, or cluster_minimum "
            "in the inventory",
        )


def save_state(cluster: Cluster, console: Console, trail: Trail, plan: Plan, before: Observation) -> None:
    """Have the hosts keep what they have, and leave the first line of the history."""
    try:
        cluster.reject_when_others_may_start()  # before the notes of another's start would be overwritten
        trail.begin(partial(cluster.save_state, plan.hosts), **_describe_choice(plan, before))
    except BaseException:
        console.print(NOTHING_DONE)
        raise


def _describe_choice(plan: Plan, before: Observation) -> dict[str, Any]:
    """Say for the history what a start changes."""
    chosen = {key: plan.choice.selection[key] for key in ("run", "program") if key in plan.choice.selection}
    if sweep := plan.choice.selection.get("sweep"):
        chosen["sweep"] = sweep["name"]
    if "queue" not in plan.choice.selection and not chosen and before.run:
        chosen["run"] = before.run.run
    was = before.releases.get(plan.inventory.chief.host)
    training: dict[str, Any] = {}
    if before.run and before.run.state == "training":
        run = before.run  # in a queue or a sweep no run is chosen, and a chosen one may be another
        training = {"trained": run.run, "training": run.numbers, "accounted": run.accounted}
    return {**chosen, "release": plan.release, "before": was, "without": list(plan.missing), **training}


def select_and_observe(cluster: Cluster, console: Console, plan: Plan) -> Observation:
    """Publish the release and select what is chosen, then observe the hosts that take part; one script does all.

    Raises ClusterTrouble where the shared path can't be written. Shows what is known and raises when a host is away.
    """
    chief = cluster.inventory.chief.host
    records: dict[str, Mapping[str, Any]] = {SELECTION: plan.choice.selection} if plan.choice.write else {}
    if not plan.by_ansible and cluster.inventory.is_shared:  # else a role has published it
        records[RELEASE] = {"release": plan.release}
    write = " && ".join(cluster.script_of(name, record) for name, record in records.items())
    first = {chief: f"{REMOUNT}; {write}"} if write else None
    # Without Ansible the trainer has proven the choice a moment ago, with the settings that were written since.
    proven = not plan.by_ansible
    seen = cluster.observe(
        plan.hosts,
        settings=True,
        by_trainer=not proven,
        new_is_enough=proven,
        first=first,
        first_seconds=BOTH_SECONDS,
    )
    if seen.unreachable:
        console.print(status_text.render_tasks(status_text.task_rows(cluster.inventory, seen)))
        raise HostsUnreachable(seen.unreachable, "It answered before. Start again when it is back, or without it")
    if seen.stopped:
        raise ClusterTrouble(describe_stop(seen.stopped))
    if why := seen.failed.get(chief):
        paths = " and ".join(f"{cluster.inventory.shared_dir}/{name}" for name in records)
        raise ClusterTrouble(f"{paths} can't be written on {chief}: {why}")
    return seen


def _ship(console: Console, plan: Plan, playbooks: Sequence[str], check: bool = False) -> ShipmentResult:
    """Run playbooks on the hosts that take part, and show meanwhile what they do."""
    shipment = Shipment(
        plan.inventory,
        playbooks,
        plan.release,
        plan.choice.selection,
        untried=plan.untried,
        without=list(plan.missing),
        check=check,
    )
    with console.progress() as progress:
        return console.ship(shipment, progress)


def ship_to_present(
    console: Console, plan: Plan, playbooks: Sequence[str], allowed: bool
) -> tuple[Plan, ShipmentResult]:
    """Ship; go on without a host that dies meanwhile, where a start may. Return the plan without it."""
    while True:
        try:
            return plan, _ship(console, plan, playbooks)
        except HostsUnreachable as error:
            lost = {host: reason for host, reason in error.reasons.items() if host in plan.hosts}
            if not lost:
                raise
            agree_on_missing(plan.inventory, console, {**plan.missing, **lost}, allowed, plan.drained)
            plan = plan.without(lost)
            console.print(f"going on without {', '.join(lost)}")


def show_plan(cluster: Cluster, console: Console, before: Observation, plan: Plan) -> dict[str, Any]:
    """Say what the switch would change on the hosts, and what that costs; return both for `--json`, with the plan.

    Nothing is done, and nothing is shipped that could be proven.
    """
    changes = _ship(console, plan, SWITCH, check=True).changes
    for task, hosts in changes.items():
        console.print(f"  change  {task}: {', '.join(hosts)}")
    cost = _cost_of_start(cluster, before, plan, changes)
    if training(plan.inventory, before):
        console.print(cost.render_loss())
    console.print("nothing was done, and nothing is proven yet: that needs the release on the hosts")
    return {"plan": plan.as_json(), "changes": changes, "cost": cost.as_json()}


def _cost_of_start(cluster: Cluster, before: Observation, plan: Plan, changes: Mapping[str, Sequence[str]]) -> Cost:
    """Work out what a start costs what trains now: a task restarts where its release or its settings change."""
    settings = changes.get(CHANGES[-1], ())
    ending = [
        task
        for task in plan.inventory.tasks
        if task in plan.stop or task.host in plan.behind or (task.host in settings and not task.server)
    ]
    cost = cost_of_restart(plan.inventory, before, ending, checkpoints_of(cluster, before))
    run = training(plan.inventory, before)
    if run is None:
        return cost
    if plan.choice.new:
        return replace(cost, pause=f"run {run.run} ends; to go on with it: fab start-cluster --run {run.run}")
    if cost.steps_lost == 0 and any(when.startswith(AT_A_SAVE) for when in plan.joining.values()):
        cost = replace(cost, pause=f"{run.pause}, at the next save")
    more = "; a task restarts too where its other files change" if changes.keys() - {*CHANGES} else ""
    return replace(cost, pause=cost.pause + more)


def compare(
    cluster: Cluster, console: Console, before: Observation, after: Observation, shipped: ShipmentResult
) -> bool:
    """Say what the switch to a release and its settings changed; return whether that is anything."""
    recaps = shipped.recaps
    changed = [host for host, recap in recaps.items() if recap.changed and host in cluster.inventory.hosts]
    moved = {host for host, release in after.releases.items() if release != before.releases[host]}
    configured = {host for host, settings in after.settings.items() if settings != before.settings[host]}
    touched = {*changed, *moved, *configured}
    if not after.release:
        raise ClusterTrouble(f"after shipping, the hosts' code differs: {status_text.render_release(after)}")
    what = " and ".join(name for name, hosts in (("code", moved), ("settings", configured)) if hosts)
    text = f"shipped to {len(touched)} of {len(after.releases)} hosts" + (f" ({what})" if what else "")
    console.print(f"release {after.release}: {text if touched else 'unchanged'}")
    return bool(moved or configured)
