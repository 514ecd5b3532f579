"""`fab rollback`: the earlier code, environment and run settings, from what the hosts have kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively, restart_previous, start_unless_stopped
from fleet.actions.noted_members import Members, Return, describe_stay, members_back
from fleet.actions.noted_members import read as read_members
from fleet.actions.older_queue import reject_unread_queue
from fleet.actions.waiting import wait
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake, first_line
from fleet.hosts import history
from fleet.hosts.agent_request import sources
from fleet.hosts.cluster import Cluster
from fleet.hosts.drains import announce_drain, announce_return
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.host_scripts import RELEASES
from fleet.hosts.observation import Observation
from fleet.hosts.run import SETTINGS
from fleet.planning.cost import Cost, cost_of_restart
from fleet.planning.decision import is_done
from fleet.rollout.short_way import SWITCH_SECONDS, leave_stale, reject_failures
from fleet.signals import undisturbed
from fleet.site.schema.problems import show
from fleet.site.topology import Task
from fleet.verbs.drain import drain
from fleet.verbs.history import SWITCHES, changed_settings

# These acts have brought a release and its settings to the hosts.
SHIPPING = (*SWITCHES, "site.yml")
TRAIN_SECONDS = 300.0


@dataclass(frozen=True)
class DeployedState:
    """A release with its run settings and members; None where they were not written down."""

    release: str
    settings: Mapping[str, Any] | None
    members: Members | None = None
    act: str | None = None
    """The `id` of what has brought it in the history; None where nothing noted did."""

    def differs(self, other: DeployedState) -> bool:
        """Whether going to the other changes a file."""
        return self.release != other.release or (other.settings is not None and self.settings != other.settings)

    @classmethod
    def read(cls, act: Mapping[str, Any]) -> DeployedState:
        """Read what an act of the history has brought."""
        return cls(str(act["release"]), act.get("settings"), read_members(act), act["id"])


@dataclass(frozen=True)
class RollbackWork:
    """What a rollback does."""

    hosts: Sequence[str]
    present: DeployedState
    target: DeployedState
    again: bool
    """Whether it is the target of the last rollback."""
    files: bool
    """Whether a host has another release or other settings."""
    restarts: Sequence[Task]
    back: Return
    cost: Cost
    leaving: Sequence[Task] = ()
    """What runs on hosts that came since and lack the release: the older coordinator would only wait for it."""

    def describe(self) -> str:
        """Return what is done, a line for each thing."""
        if not self.files and not self.back.drained:
            more = ". The last rollback brought them: to go elsewhere, fab rollback --to RELEASE (fab history)"
            known = f"the hosts have release {self.target.release} and these settings already{more * self.again}"
            return "\n".join([known, *self.back.lines()])
        more = " to the target of the last one. To go elsewhere, fab rollback --to RELEASE (fab history)"
        lines = [f"rollback{more * self.again}"]
        lines += describe(self.present, self.target, self.restarts) if self.files else ["  restart  nothing"]
        lines += [*self.back.lines(), f"  pause    {self.cost.pause}", f"  lost     {self.cost.lost}"]
        return "\n".join([*lines, *(f"  room     {line}" for line in self.cost.room)])

    def describe_end(self, trained: bool) -> str:
        """Say what is so now."""
        if not self.files:
            return "release and settings are as they were. Look: fab hosts"
        return (
            f"release {self.target.release} is on {len(self.hosts)} hosts"
            + (", and the training goes on" if trained else "")
            + ". The checkout may still have what was rolled back: the next fab start-cluster ships it again. "
            "Look: fab history"
        )


def rollback(
    cluster: Cluster, console: Console, to: str | None = None, reason: str | None = None, plan_only: bool = False
) -> None:
    """Switch the hosts to what they had before, or to a release that they have kept; then drain those that came since.

    The run goes on: the coordinator saves, and each task restarts on the older files. Raises OperatorMistake where
    nothing is known of it, or hosts don't have it any more.
    """
    begin_exclusively(cluster, console, "rollback", plan_only)
    seen = cluster.observe(new_is_enough=True)
    reject_foreign(cluster.inventory, seen, cluster.inventory.hosts)
    work = plan(cluster, seen, to)
    console.print(work.describe())
    if not work.files and not work.back.drained:
        _answer(console, "nothing to do", work)
        return
    if plan_only:
        console.print(f"nothing was done. Do it: {with_reason('fab rollback' + (f' --to {to}' if to else ''), reason)}")
        _answer(console, "planned", work)
        return
    with Trail(cluster, console, "rollback", reason, settings=True) as trail:
        run = seen.run
        about = {"run": run.run, "training": run.numbers, "accounted": run.accounted} if run else {"run": None}
        states = {"release": work.target.release, "before": work.present.release, "target": work.target.act}
        trail.begin(partial(cluster.save_state, work.hosts) if work.files else None, **states, **about)
        trained = work.files and _switch_and_wait(cluster, console, seen, work, trail)
        work = replace(work, back=_drain_new(cluster, console, work.back, reason))
        trail.end()
    console.print(work.describe_end(trained))
    _answer(console, "done", work)


def _drain_new(cluster: Cluster, console: Console, plan: Return, reason: str | None) -> Return:
    """Drain the hosts that came since, one after the other; one that can't be is said, and holds up nothing."""
    drained, stays = {}, list(plan.stays)
    for host, names in plan.drained.items():
        try:
            drain(cluster, replace(console, json_out=None), host, reason, verb="rollback")
            drained[host] = names
        except FleetError as error:
            stays.append(describe_stay(host, first_line(error).removeprefix(f"{host} stays: ")))
            console.print(f"  stays    {stays[-1]}")
    return Return(drained, stays, plan.gone)


def plan(cluster: Cluster, seen: Observation, to: str | None) -> RollbackWork:
    """Work out what a rollback does.

    Members alone make no earlier state a target: a plain rollback is for code and settings. Raises HostsUnreachable
    where a host is away that is not drained, and OperatorMistake where there is nothing to go to.
    """
    if lost := {host: why for host, why in seen.unreachable.items() if host not in seen.drains}:
        first = next(iter(lost))
        out = f"replace-host {first} NEW" if first == cluster.inventory.chief.host else f"remove-host {first}"
        why = "Nothing was changed. Only a drained host may be away: bring these back, or take them out"
        raise HostsUnreachable(lost, f"{why}: fab {out}")
    hosts = [host for host in cluster.inventory.hosts if host not in seen.unreachable]
    kept, settings = _observe(cluster, hosts)
    present = DeployedState(seen.releases[cluster.inventory.chief.host] or "", settings)
    acts = history.read(cluster)[0]
    last = last_target(acts, present) if to is None else None
    target = last or choose(acts, present, to, kept)
    back = members_back(cluster, seen, target.members)
    # Who came since, or was away, may never have had the release: out of the training it needs none.
    hosts = [host for host in hosts if target.release in kept[host] or host not in {*seen.drains, *back.drained}]
    reject_missing(target, {host: kept[host] for host in hosts})
    reject_unread_queue(cluster, seen, target.release, target.settings)
    lost_in_switch = is_lost_in_switch(acts, target)
    files = lost_in_switch or present.differs(target) or {seen.releases.get(host) for host in hosts} != {target.release}
    up = {name for name, unit in seen.units.items() if unit.up or (lost_in_switch and _is_due(cluster, seen, name))}
    restarts = [task for task in cluster.inventory.tasks if files and task.name in up and task.host in hosts]
    new = [task for task in cluster.inventory.tasks if task.host in back.drained and task.host not in hosts]
    leaving = [task for task in new if files and task.name in up]
    cost = _cost_of_all(cost_of_restart(cluster.inventory, seen, restarts, []), back.cost)
    return RollbackWork(hosts, present, target, last is not None, files, restarts, back, cost, leaving)


def _is_due(cluster: Cluster, seen: Observation, task: str) -> bool:
    """Whether a task is to run: a switch whose control machine was lost may have stopped it and not started it."""
    unit = seen.units[task]
    return unit.enabled and not is_done(unit, seen.run) and cluster.inventory.task(task).host not in seen.drains


def last_target(acts: Sequence[Mapping[str, Any]], present: DeployedState) -> DeployedState | None:
    """Return the target of the last rollback, where nothing else was brought since.

    One that is done leaves its members be: who has a host back keeps it. One that is not is to go on.
    """
    brought = [
        act
        for act in acts
        if act.get("verb") in SHIPPING
        and act.get("release")
        and (act.get("outcome") == "done" or act.get("switched") or "target" in act)
    ]
    if not brought or brought[-1]["verb"] != "rollback":
        return None
    act = brought[-1]
    if act.get("outcome") == "done":
        return None if present.differs(DeployedState.read(act)) else present
    noted = [DeployedState.read(each) for each in acts if each["id"] == act.get("target") and each.get("release")]
    target = noted[-1] if noted else DeployedState(str(act["release"]), None)
    return None if act.get("switched") and present.differs(target) else target


def is_lost_in_switch(acts: Sequence[Mapping[str, Any]], target: DeployedState) -> bool:
    """Whether the last rollback went there, and its control machine was lost before all tasks were started again."""
    act: Mapping[str, Any] = next((act for act in reversed(acts) if act.get("verb") in SHIPPING), {})
    unfinished = act.get("verb") == "rollback" and act.get("outcome") == history.BEGUN and not act.get("switched")
    return unfinished and act.get("release") == target.release


def choose(
    acts: Sequence[Mapping[str, Any]], present: DeployedState, to: str | None, kept: Mapping[str, Sequence[str]]
) -> DeployedState:
    """Return the state to go to: the last one before the present, or the last one of release `to`.

    `kept` has the releases of each host. Raises OperatorMistake where there is none.
    """
    states = [
        DeployedState.read(act)
        for act in acts
        if act.get("verb") in SHIPPING and act.get("outcome") == "done" and act.get("release")
    ]
    everywhere = set.intersection(*map(set, kept.values())) if kept else set()
    if to is not None:
        found = [state for state in states if state.release.startswith(to)]
        names = {state.release for state in found} or {name for name in everywhere if name.startswith(to)}
        if not names:
            raise OperatorMistake(
                f"--to {show(to)} names no release that the history or the hosts know; the hosts have "
                f"{', '.join(sorted(everywhere)) or 'none in common'}: fab history shows when each came"
            )
        if len(names) > 1:
            raise OperatorMistake(f"--to {show(to)} names {', '.join(sorted(names))}: give more of it")
        target = found[-1] if found else DeployedState(names.pop(), None)
    else:
        earlier = [state for state in states if present.differs(state)]
        if not earlier:
            raise OperatorMistake(
                "the history has nothing before the present release and settings: name a release, --to RELEASE; the "
                f"hosts have {', '.join(sorted(everywhere)) or 'none in common'}"
            )
        target = earlier[-1]
    return target


def reject_missing(target: DeployedState, kept: Mapping[str, Sequence[str]]) -> None:
    """Raise OperatorMistake where a host lacks the release to go to."""
    if without := [host for host, names in kept.items() if target.release not in names]:
        raise OperatorMistake(
            f"{', '.join(without)} has release {target.release} no more (release_keep): check that commit out and run "
            "`fab start-cluster`"
        )


def describe(present: DeployedState, target: DeployedState, running: Sequence[Task]) -> list[str]:
    """Return what becomes of the files and the tasks, a line for each thing."""
    changes = f"{present.release} -> " if present.release != target.release else ""
    lines = [f"  release  {changes}{target.release}"]
    if target.settings is None:
        lines.append("  settings stay: the history has none with this release")
    else:
        lines += [f"  setting  {each}" for each in changed_settings(present.settings or {}, target.settings)]
    lines.append(f"  restart  {', '.join(task.name for task in running) or 'nothing: nothing runs'}")
    return lines


def _cost_of_all(restart: Cost, drains: Cost | None) -> Cost:
    """Add to what the restart costs what the drains do, which come after it."""
    if drains is None:
        return restart
    if not restart.stops:
        return drains
    pause = restart.pause if drains.pause.startswith("none") else f"{restart.pause}; then {drains.pause}"
    hosts = list(dict.fromkeys([*restart.hosts, *drains.hosts]))
    stops = list(dict.fromkeys([*restart.stops, *drains.stops]))
    return replace(drains, hosts=hosts, stops=stops, pause=pause, steps_lost=restart.steps_lost, lost=restart.lost)


def _observe(cluster: Cluster, hosts: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, Any] | None]:
    """Return the releases that each host has whole, and the run settings of the chief's."""
    # One that an installation left half has no link to its environment.
    script = f'for each in {RELEASES}/*/env; do [ -d "$each/" ] && basename "${{each%/env}}"; done; true'
    chief = cluster.inventory.chief.host
    scripts = dict.fromkeys(hosts, script)
    scripts[chief] += f"; echo @settings; cat {SETTINGS}"
    answers = cluster.hosts.run(scripts)
    if lost := {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}:
        raise HostsUnreachable(lost)
    kept = {host: answer.stdout.partition("@settings")[0].split() for host, answer in answers.items()}
    try:
        settings = json.loads(answers[chief].stdout.partition("@settings")[2])
    except ValueError:
        settings = None
    return kept, settings if isinstance(settings, dict) else None


def _switch_and_wait(cluster: Cluster, console: Console, seen: Observation, work: RollbackWork, trail: Trail) -> bool:
    """Switch, and return whether the training was seen to go on; False where nothing trained before."""
    _switch(cluster, console, work)
    trail.begin(switched=True)  # so that a second call does not go back, whatever becomes of this one
    return _wait_for_a_step(cluster, console, seen, [*work.back.drained])


def _switch(cluster: Cluster, console: Console, work: RollbackWork) -> None:
    """Switch, and restart what ran; a failure before the tasks start puts back what was there."""
    try:
        steps = {host: _steps(cluster, host, work.present, work.target) for host in work.hosts}
        answers = cluster.act(steps, SWITCH_SECONDS)
        reject_failures(answers)
        cluster.publish_release(work.target.release)
        leave_stale(cluster, answers)
        if work.leaving:
            cluster.stop(work.leaving)  # the coordinator has saved with them
        if work.restarts:
            start_unless_stopped(cluster, work.restarts)
        if work.leaving:
            announce_drain(cluster, work.leaving)
    except BaseException:
        with undisturbed():
            console.print("the rollback is broken off: what was there before is put back")
            _restore(cluster, console, work)
        raise


def _restore(cluster: Cluster, console: Console, work: RollbackWork) -> None:
    """Put back what was there before, and start what ran; a host that is lost keeps no other from it."""
    steps = {
        "put back release and settings": lambda: cluster.restore_state(work.hosts),
        "name the release to the tasks": lambda: cluster.publish_release(work.present.release),
        "start what ran before": lambda: restart_previous(cluster, work.hosts),
    }
    if work.leaving:
        steps["start what ran on new hosts"] = lambda: start_unless_stopped(cluster, work.leaving)
        steps["have it join again"] = lambda: announce_return(cluster, work.leaving)
    for what, step in steps.items():
        try:
            step()
        except FleetError as error:
            console.print(f"could not {what}: {error}\nwhen that is fixed: fab rollback --to {work.present.release}")


def _steps(cluster: Cluster, host: str, present: DeployedState, target: DeployedState) -> dict[str, Any]:
    """Return what fleet/hosts/agent.py does on a host; the modules are the roles' own."""
    readers = [task.name for task in cluster.inventory.tasks_on(host) if not task.server]
    steps: list[dict[str, Any]] = [
        {"name": "switch", "module": "host_release", "arguments": {"state": "current", "id": target.release}}
    ]
    # A file that is written again, with the same content, would make its readers restart.
    if target.settings is not None and target.settings != present.settings:
        text = json.dumps(target.settings, indent=4, sort_keys=True) + "\n"  # as Ansible's to_nice_json
        steps.append({"name": "settings", "write": SETTINGS, "text": text})
    look = {
        "root": "/opt/trainer",
        "config_dir": "/etc/trainer",
        "unit": "/etc/systemd/system/trainer@.service",
        "settings_readers": readers,
    }
    steps.append({"name": "stale", "module": "stale_tasks", "arguments": look})
    return {"steps": steps, "sources": sources(steps), "alone": True}


def _wait_for_a_step(cluster: Cluster, console: Console, seen: Observation, newcomers: Sequence[str]) -> bool:
    """Wait until a step is trained on what was switched to; False where nothing trained before.

    Raises ClusterTrouble where none is in time; it names the command that drains the `newcomers` after all.
    """
    run = seen.run
    if run is None or run.state not in ("training", "waiting") or not seen.units[cluster.inventory.chief.name].up:
        return False
    begun = cluster.observe([cluster.inventory.chief.host], new_is_enough=True)
    before = max(run.step or 0, (begun.run.step or 0) if begun.run else 0)

    def trains(now: Observation) -> bool:
        return now.run is not None and now.run.state == "training" and (now.run.step or 0) > before

    # One look is enough: what has gone had said its last before `begun`.
    if not wait(cluster, console, "the training goes on", trains, TRAIN_SECONDS, looks=1):
        chief = cluster.inventory.chief
        then = f". Not drained yet: {', '.join(newcomers)}, new since. When it trains: fab rollback" * bool(newcomers)
        raise ClusterTrouble(
            f"no step was trained in {TRAIN_SECONDS:.0f} s; the tasks go on trying{then}",
            cluster.trouble({chief: "has trained no step since the rollback"}),
        )
    return True


def _answer(console: Console, outcome: str, work: RollbackWork) -> None:
    release = {"release": work.target.release, "before": work.present.release}
    back = {"drains": [*work.back.drained], "stays": list(work.back.stays), "gone": list(work.back.gone)}
    changes = {"settings": work.target.settings, "restarts": [task.name for task in work.restarts]}
    record = {"outcome": outcome, **release, **changes, **back, "cost": work.cost.as_json(), "next": "fab history"}
    console.print_json("rollback", record)
