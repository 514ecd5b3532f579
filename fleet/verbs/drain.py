"""`fab drain HOST` and `fab undrain HOST`: take a host out of the training in order, and have it back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively, start_unless_stopped
from fleet.actions.look_around import observe_with_cost
from fleet.actions.waiting import wait
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts import drains, history
from fleet.hosts.cluster import Cluster
from fleet.hosts.drain_records import describe
from fleet.hosts.drains import is_drained
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.observation import Observation
from fleet.hosts.run import SETTINGS
from fleet.hosts.units import Health
from fleet.planning.cost import Cost
from fleet.site.host_names import find_host
from fleet.site.topology import Task

# A save of a large model, and a model that is laid out again.
LET_GO_SECONDS = 900.0
# A worker is taken in within moments, a ps after the next save.
JOIN_SECONDS = 120.0


def drain(
    cluster: Cluster,
    console: Console,
    host: str,
    reason: str | None = None,
    plan_only: bool = False,
    verb: str = "drain",
    is_soon_back: bool = False,
) -> None:
    """Have a host's tasks leave the training, and keep them down until `undrain`.

    A ps is let go after a save, and the model is laid out over the others. Typed again, it goes on where it was broken
    off. `verb` is which one drains, for the record; of a worker that `is_soon_back` no other reads the data. Raises
    OperatorMistake where the training would not go on.
    """
    host = find_host(cluster.inventory, host, beside=True)
    if host in cluster.inventory.beside:
        _leave_alone(cluster, console, host)
        return
    begin_exclusively(cluster, console, "drain", plan_only)
    seen, cost = observe_with_cost(cluster, [host], in_order=True, goes_off=is_soon_back)
    if is_drained(cluster, seen, host):
        if host != cluster.inventory.chief.host and not (plan_only or is_soon_back):
            drains.announce_drain(cluster, cluster.inventory.tasks_on(host))  # whose data an update has left waiting
        console.print(f"{host} is {describe(seen.drains[host])}. Bring it back: fab undrain {host}")
        _answer(console, "drain", "nothing to do", host, cost)
        return
    if host in seen.unreachable:
        raise HostsUnreachable(
            {host: seen.unreachable[host]},
            f"The training goes on without it. Drain it when it is back, or take it out: fab remove-host {host}",
        )
    if plan_only:
        following = "" if cost.refusals else f". Do it: {with_reason(f'fab drain {host}', reason)}"
        console.print(f"drain {host}\n{cost.render()}\nnothing was done{following}")
        _answer(console, "drain", "refused" if cost.refusals else "planned", host, cost)
    if cost.refusals:
        raise OperatorMistake(f"{host} stays: " + "\n".join(cost.refusals))
    if plan_only:
        return
    with Trail(cluster, console, "drain", reason) as trail:
        trail.begin(hosts=[host], tasks=list(cost.stops))
        after = _leave(cluster, console, seen, host, reason, verb, is_soon_back)
        trail.end(step=after.run.step if after.run else None)
    names = _names(cluster.inventory.tasks_on(host))
    console.print(f"{host} is drained: nothing starts {names} until fab undrain {host}")
    _answer(console, "drain", "done", host, cost)


def _leave_alone(cluster: Cluster, console: Console, host: str) -> None:
    """Say that a host has nothing to drain; raises OperatorMistake where the tasks need what it serves."""
    seen, cost = observe_with_cost(cluster, [host], in_order=False)
    if "nfs_server" in cluster.inventory.services_on(host) and any(unit.up for unit in seen.units.values()):
        raise OperatorMistake(
            f"{host} has no task to drain, and serves the shared path, which every task needs: `fab stop-cluster` "
            f"saves and stops them; `fab update-hosts {host}` updates it beside them"
        )
    console.print(
        f"{host} has no task: there is nothing to drain\n{cost.render()}\nIt may go. When it is back: fab hosts"
    )
    record = {"outcome": "nothing to do", "hosts": [host], "cost": cost.as_json(), "next": "fab hosts"}
    console.print_json("drain", record)


def _leave(
    cluster: Cluster,
    console: Console,
    seen: Observation,
    host: str,
    reason: str | None,
    verb: str,
    is_soon_back: bool,
) -> Observation:
    """Mark a host as drained, step by step, and stop its tasks; returns what is seen then."""
    record = _record(cluster, seen, host, reason, verb)
    tasks = cluster.inventory.tasks_on(host)
    drains.record(cluster, host, record)
    drains.announce_drain(cluster, tasks, is_soon_back)
    _wait_until_let_go(cluster, console, seen, [task for task in tasks if task.job == "ps"])
    drains.mark(cluster, host, record)
    return _stop(cluster, console, seen, host, [tasks])


def _record(cluster: Cluster, seen: Observation, host: str, reason: str | None, verb: str) -> dict[str, Any]:
    """Return what others read of a drain; one that was broken off goes on."""
    earlier = seen.drains.get(host, {})
    return {
        "host": host,
        "since": earlier.get("since", time.time()),
        **history.origin(cluster.inventory),
        "reason": reason or earlier.get("reason"),
        "verb": verb,
    }


def _stop(
    cluster: Cluster, console: Console, seen: Observation, host: str, in_turn: Sequence[Sequence[Task]]
) -> Observation:
    """Stop a host's tasks, some after others; returns what is seen then. Raises ClusterTrouble where one runs on."""
    for some in in_turn:
        if running := [task for task in some if seen.units[task.name].up]:
            console.print(f"stopping {_names(running)}")
            cluster.stop(running)
    tasks = cluster.inventory.tasks_on(host)
    after = cluster.observe(new_is_enough=True)
    if not is_drained(cluster, after, host):
        _reject_away(cluster, after, host)
        up = [task for task in tasks if task.name in after.units and after.units[task.name].up]
        raise ClusterTrouble(f"{_names(up)} on {host} still runs. Look: fab status. Then type it again")
    return after


def set_aside(cluster: Cluster, console: Console, host: str, reason: str | None, verb: str) -> None:
    """Have the coordinator save and end, then what else runs on its host, and keep all down until `undrain`.

    The others wait for it. Typed again, it goes on where it was broken off.
    """
    seen = cluster.observe(new_is_enough=True)
    _reject_away(cluster, seen, host)
    if is_drained(cluster, seen, host):
        return
    tasks, record = cluster.inventory.tasks_on(host), _record(cluster, seen, host, reason, verb)
    with Trail(cluster, console, "drain", reason) as trail:
        trail.begin(hosts=[host], tasks=[task.name for task in tasks])
        drains.record(cluster, host, record)
        drains.mark(cluster, host, record)
        leads = [task for task in tasks if task.job == "chief"]
        after = _stop(cluster, console, seen, host, [leads, [task for task in tasks if task not in leads]])
        trail.end(step=after.run.step if after.run else None)


def _reject_away(cluster: Cluster, seen: Observation, host: str) -> None:
    """Raise HostsUnreachable where a host, or the coordinator's, which knows of its drain, does not answer now."""
    if away := {
        each: seen.unreachable[each] for each in (host, cluster.inventory.chief.host) if each in seen.unreachable
    }:
        raise HostsUnreachable(away, "It answered before. Look: fab hosts. When it is back, type it again")


def undrain(
    cluster: Cluster,
    console: Console,
    host: str,
    reason: str | None = None,
    plan_only: bool = False,
    patience: float = JOIN_SECONDS,
) -> bool:
    """Have a drained host back: its tasks start where the cluster is started, and join the training.

    Returns whether they were seen to join within `patience` seconds; True where nothing is to join.
    """
    host = find_host(cluster.inventory, host, beside=True)
    begin_exclusively(cluster, console, "undrain", plan_only)
    seen = cluster.observe(new_is_enough=True)
    chief = cluster.inventory.chief
    if chief.host in seen.unreachable:
        why = {chief.host: seen.unreachable[chief.host]}
        raise HostsUnreachable(why, f"Without it, what to start is unknown: fab undrain {host} when it is back")
    reject_foreign(cluster.inventory, seen, {chief.host, host})
    tasks = cluster.inventory.tasks_on(host)
    starts = tasks if drains.is_started(cluster.inventory, seen) else []
    cost = Cost([host], [], _pause_of_joining(starts, seen.run.pause if seen.run else "some seconds"), 0, "no step")
    if host not in seen.drains:
        console.print(f"{host} is not drained. Look: fab hosts")
        _answer(console, "undrain", "nothing to do", host, cost)
        return True
    if host in seen.unreachable:
        raise HostsUnreachable({host: seen.unreachable[host]}, f"It stays drained: fab undrain {host} when it is back")
    if tasks:
        _reject_other_release(cluster, seen, host)
        _reject_other_settings(cluster, host)
    if plan_only:
        coming = _names(starts) or "nothing: the cluster is stopped"
        console.print(f"undrain {host}\n  starts  {coming}\n{cost.render()}")
        console.print(f"nothing was done. Do it: {with_reason(f'fab undrain {host}', reason)}")
        _answer(console, "undrain", "planned", host, cost)
        return True
    joined = _bring_back(cluster, console, host, starts, reason, patience)
    idle = host in cluster.inventory.beside
    console.print(
        f"{host} is drained no more, and has no task. Look: fab hosts"
        if idle
        else _describe_return(host, tasks if starts else [], joined)
    )
    _answer(console, "undrain", "done", host, cost)
    return joined


def _bring_back(
    cluster: Cluster, console: Console, host: str, starts: Sequence[Task], reason: str | None, patience: float
) -> bool:
    """Take a host's drain back, and start tasks; returns whether they were seen to join in time."""
    tasks = cluster.inventory.tasks_on(host)
    with Trail(cluster, console, "undrain", reason) as trail:
        trail.begin(hosts=[host], tasks=[task.name for task in starts])
        drains.unmark(cluster, host)
        drains.announce_return(cluster, tasks)
        if starts:
            start_unless_stopped(cluster, starts)
        drains.forget(cluster, host)
        joined = not starts or _wait_until_joined(cluster, console, tasks, patience)
        if not joined:
            _reject_down(cluster, host, tasks)
        trail.end(joined=joined)
    return joined


def _describe_return(host: str, tasks: Sequence[Task], joined: bool) -> str:
    if not tasks:
        return f"{host} is ready; the cluster is stopped. Start it: fab start-cluster"
    if joined:
        return f"{host} is back with {_names(tasks)}. Look: fab hosts"
    return f"{_names(tasks)} run, and join at the next checkpoint. Look: fab status"


def _wait_until_let_go(cluster: Cluster, console: Console, seen: Observation, tasks: Sequence[Task]) -> None:
    """Wait until the coordinator has saved and trains without these ps; where it does not run, nothing is to wait."""
    names = [task.name for task in tasks if seen.units[task.name].up]
    if not names or not seen.units[cluster.inventory.chief.name].up:
        return

    def is_gone(now: Observation) -> bool:
        run = now.run
        if not now.units[cluster.inventory.chief.name].up:
            return True
        return run is not None and run.state == "training" and all(name in run.without for name in names)

    what = f"the coordinator saves, and lays the model out without {', '.join(names)}"
    if not wait(cluster, console, what, is_gone, LET_GO_SECONDS):
        host = tasks[0].host
        drains.announce_return(cluster, cluster.inventory.tasks_on(host))
        drains.forget(cluster, host)
        raise ClusterTrouble(
            f"{host} stays: the coordinator did not let go of {', '.join(names)} in {LET_GO_SECONDS:.0f} s. See "
            "whether it can save: fab logs --task chief-0"
        )


def _wait_until_joined(cluster: Cluster, console: Console, tasks: Sequence[Task], patience: float) -> bool:
    """Wait until a training has these tasks again; False where it does not in time."""
    names = [task.name for task in tasks if task.server]
    leads = any(task.job == "chief" for task in tasks)

    def is_back(now: Observation) -> bool:
        run, units = now.run, now.units
        if leads and (run is None or run.state in ("new", "stopped")):  # what it said when it stopped
            return False
        if run is None or run.state not in ("training", "waiting"):
            return True
        here = all(task.name not in units or units[task.name].up for task in tasks)
        return here and run.state == "training" and not any(name in run.without for name in names)

    return wait(cluster, console, f"{_names(tasks) if leads else ', '.join(names)} joins", is_back, patience)


def _reject_down(cluster: Cluster, host: str, tasks: Sequence[Task]) -> None:
    """Raise ClusterTrouble where tasks of a host that is back don't run."""
    units = cluster.observe([host], new_is_enough=True).units
    found = {}
    for task in tasks:
        unit = units.get(task.name)
        if unit and unit.health not in (Health.RUNNING, Health.STARTING):
            found[task] = f"is {unit.active}" if unit.health is Health.STOPPED else unit.describe_failure()
    if found:
        raise ClusterTrouble(f"{host} is drained no more, and not all of it runs", cluster.trouble(found))


def _reject_other_release(cluster: Cluster, seen: Observation, host: str) -> None:
    """Raise OperatorMistake where a host missed a release meanwhile: its tasks would not be taken in."""
    there, here = seen.releases.get(host), seen.releases.get(cluster.inventory.chief.host)
    if there != here:
        raise OperatorMistake(
            f"{host} has release {there}, and the cluster runs {here}: `ansible-playbook site.yml --limit {host}` "
            f"brings it to the checkout's release, `fab start-cluster` all. Then fab undrain {host} again"
        )


def _reject_other_settings(cluster: Cluster, host: str) -> None:
    """Raise OperatorMistake where a host was off while the run settings of all were changed."""
    chief = cluster.inventory.chief.host
    answers = cluster.hosts.run(dict.fromkeys([host, chief], f"cat {SETTINGS}"))
    try:
        own, theirs = (json.loads(answers[each].stdout) for each in (host, chief))
    except ValueError:  # one that can't be read: its tasks say so
        return
    if own != theirs:
        raise OperatorMistake(
            f"{host} has other run settings than {chief}: it was off when they changed. "
            f"`ansible-playbook site.yml --limit {host}` brings them. Then fab undrain {host} again"
        )


def _pause_of_joining(tasks: Sequence[Task], pause: str) -> str:
    if any(task.job == "chief" for task in tasks):
        return "it ends: the coordinator goes on"
    if any(task.job == "ps" for task in tasks):
        return f"{pause}, after the next save: the model is laid out over one more"
    return "none; or some seconds after a save, where the cluster was formed again meanwhile" if tasks else "none"


def _names(tasks: Sequence[Task]) -> str:
    return ", ".join(task.name for task in tasks)


def _answer(console: Console, verb: str, outcome: str, host: str, cost: Cost) -> None:
    drained = verb == "drain" and outcome != "refused"
    following = f"fab {verb} {host}" if outcome == "planned" else f"fab undrain {host}" if drained else "fab hosts"
    record: dict[str, Any] = {"outcome": outcome, "hosts": [host], "cost": cost.as_json(), "next": following}
    console.print_json(verb, record)
