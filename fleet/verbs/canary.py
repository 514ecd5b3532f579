"""`fab canary HOST`: try the checkout's release and settings on one host, before all are switched to them.

A worker of a live training runs the graphs that the coordinator traced, so that it can't try another program. The trial
is a run of its own: it goes on from a copy of the live run's newest checkpoint, beside what runs on the host.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively
from fleet.actions.run_work import render_bytes
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.host_scripts import CURRENT
from fleet.hosts.observation import Observation, last_line, load_json
from fleet.hosts.run import SETTINGS, Run
from fleet.output.tables import ProgressLine, render_table
from fleet.rollout import trial
from fleet.rollout.release import STAGE, Shipment
from fleet.rollout.roles import Role
from fleet.rollout.short_way import ShortWay
from fleet.rollout.trial import TrialRun, TrialState
from fleet.signals import undisturbed
from fleet.site.host_names import find_host
from trainer.telemetry.status import render_metrics, render_number

GIB = 2**30
# The part of the host's free memory that the trial may take.
SHARE = 0.8
# TensorFlow in five processes that share most of it; and the model, its gradients and what saves it.
MIN_MEMORY, MODELS = GIB, 3
LOOK_SECONDS = 2.0
# A host that does not answer for so long: the trial is given up, and ends there by its own limit.
SILENT_SECONDS = 60.0
RELEASES = "/opt/trainer/releases"
NEXT = "fab start-cluster --detach"


@dataclass(frozen=True)
class CanaryRequest:
    """What the operator asks of a canary."""

    host: str
    steps: int = 200
    loss_factor: float = 2.0
    minutes: float = 15.0
    reason: str | None = None
    plan_only: bool = False


@dataclass(frozen=True)
class Canary:
    """What is tried, and what that costs."""

    host: str
    release: str
    before: str
    files: Mapping[str, Sequence[str]]
    """By part of the release (program, kit, environment): the files that differ."""
    settings: Mapping[str, Sequence[Any]]
    """By run setting that differs: before, and after."""
    by_ansible: str | None
    """Why only Ansible can stage the release on the host."""
    run: str
    step: int
    steps: int
    bytes: int
    """Of the checkpoint."""
    memory: int
    drained: bool
    refusals: Sequence[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        return self.release != self.before or bool(self.settings)

    def render(self) -> str:
        """Return a line for each thing that is to know."""
        way = f"by Ansible ({self.by_ansible})" if self.by_ansible else "by fab itself"
        beside = "on all its processors" if self.drained else "on the processor time that its tasks leave"
        rows = [
            ("release", f"{self.before} -> {self.release}"),
            *((part, _some(names)) for part, names in self.files.items()),
            *(
                ("setting", f"{key}: {json.dumps(was)} -> {json.dumps(now)}")
                for key, (was, now) in self.settings.items()
            ),
            ("stage", f"on {self.host} alone, {way}; no host is switched"),
            ("trial", f"{self.steps} steps of a copy of run {self.run} from step {self.step}, {beside}"),
            ("room", f"{render_bytes(self.bytes)} for each checkpoint, at most {self.memory / GIB:.1f} GiB of memory"),
            ("lost", "no step: what runs goes on"),
            *(("refused", why) for why in self.refusals),
        ]
        return "\n".join([f"canary {self.host}", *(f"  {name:<11} {text}" for name, text in rows)])


def canary(cluster: Cluster, console: Console, ask: CanaryRequest) -> None:
    """Stage and prove the checkout's release on one host, and have it train there from a copy of a checkpoint.

    Nothing is switched, and no task restarts. Raises ClusterTrouble where the trial fails, OperatorMistake where there
    is nothing to try it with.
    """
    inventory = cluster.inventory
    host = find_host(inventory, ask.host)
    release = console.build(inventory)
    begin_exclusively(cluster, console, "canary", ask.plan_only)
    short = ShortWay(cluster)
    seen = _observe(cluster, short, host)
    plan = _plan(cluster, console, short, seen, host, release, ask)
    again = with_reason(f"fab canary {host}", ask.reason)
    if not plan.changes:
        console.print(f"the hosts have release {release} and these settings already: there is nothing to try")
        _answer(console, "nothing to do", plan, "fab status")
        return
    console.print(plan.render())
    if ask.plan_only:
        console.print(f"nothing was done. Do it: {again}")
        _answer(console, "refused" if plan.refusals else "planned", plan, again)
    if plan.refusals:
        raise OperatorMistake(f"nothing was done: {'; '.join(plan.refusals)}")
    if ask.plan_only:
        return
    _carry_out(cluster, console, ask, short, seen, plan)
    console.print(
        f"the canary passed on {host}, which keeps the release; no host was switched. Switch all of them: "
        f"{with_reason(NEXT, ask.reason)}. The way back from there: fab rollback"
    )


def _carry_out(
    cluster: Cluster, console: Console, ask: CanaryRequest, short: ShortWay, seen: Observation, plan: Canary
) -> None:
    """Stage, try and judge; raises ClusterTrouble where the trial fails."""
    run = seen.run
    assert run is not None
    about = {"hosts": [plan.host], "release": plan.release, "before": plan.before, "run": run.run}
    with Trail(cluster, console, "canary", ask.reason) as trail:
        trail.begin(**about, training=run.numbers)
        with _undone_where_it_fails(cluster, console, seen, plan):
            _stage(cluster, console, short, seen, plan)
            asked, limit = _prepare(cluster, run, plan, ask)
            found = _try(cluster, console, asked, plan.host)
            problems = trial.judge(asked, found, limit)
            after = cluster.observe([cluster.inventory.chief.host], new_is_enough=True).run
            result = describe(run, asked, found, limit, after)
            console.print(render(result))
            again = f"fab canary {plan.host}"
            _answer(console, "failed" if problems else "passed", plan, again if problems else NEXT, result, problems)
            if problems:
                lines = [f"  | {line}" for line in trial.last_words(found)] if found.code else []
                why = "\n".join([*problems, *lines])
                raise ClusterTrouble(f"the canary failed on {plan.host}: {why}\nfix it, then {again}")
        trail.end(step=found.step)


@contextmanager
def _undone_where_it_fails(cluster: Cluster, console: Console, seen: Observation, plan: Canary) -> Iterator[None]:
    """Take the release off the host where the canary fails, unless the host had it before: others are kept by age."""
    try:
        yield
    except FleetError:
        console.print("nothing was switched or stopped: what ran goes on")
        if plan.release not in _list_releases(seen, plan.host):
            place = f"{RELEASES}/{plan.release}"
            script = f"[ {CURRENT} -ef {place} ] || rm -rf {place}"
            with undisturbed():
                cluster.hosts.run({plan.host: f"root sh -c {shlex.quote(script)}"})
        raise


def _list_releases(seen: Observation, host: str) -> list[str]:
    names: Mapping[str, list[str]] = seen.looks.get(host, {}).get("names", {})
    return [*names.get(RELEASES, []), seen.releases.get(host) or ""]


def _observe(cluster: Cluster, short: ShortWay, host: str) -> Observation:
    chief = cluster.inventory.chief.host
    questions = short.questions()
    looks = {each: questions[each] for each in dict.fromkeys((chief, host)) if each in questions}
    if chief in looks:
        looks[chief]["read"].append(SETTINGS)
    if host in looks:
        room = ["sh", "-c", "df -Pk /var/cache | sed -n '2s/  */ /gp' | cut -d' ' -f4"]
        looks[host]["steps"].append({"name": "room", "command": room})
        looks[host]["list"].append(RELEASES)
    seen = cluster.observe(looks=looks, with_facts=True)
    if lost := {each: seen.unreachable[each] for each in (chief, host) if each in seen.unreachable}:
        raise HostsUnreachable(lost, "Nothing was done. Name another host, or wait until it is back")
    cluster.reject_when_not_installed(seen)
    reject_foreign(cluster.inventory, seen, (chief, host))
    return seen


def _plan(
    cluster: Cluster, console: Console, short: ShortWay, seen: Observation, host: str, release: str, ask: CanaryRequest
) -> Canary:
    inventory, run = cluster.inventory, seen.run
    chief = inventory.chief.host
    by_ansible = short.judge(seen.looks, [host]).get(host)
    checkpoints = cluster.list_checkpoints(run.run) if run and run.step else []
    if run is None or not checkpoints or run.program is None:
        fix = (
            f"Wait until run {run.run} has: fab checkpoints"
            if run and run.state in ("training", "waiting")
            else "Begin: fab start-cluster"
        )
        raise OperatorMistake(f"there is no checkpoint to go on from: a canary is for a run that has saved one. {fix}")
    console.check_program(inventory, run.program, list(run.program_args))
    now = settings_of(cluster)
    was = load_json(str(seen.looks.get(chief, {}).get("texts", {}).get(SETTINGS) or ""))
    was = was if isinstance(was, dict) else now  # unknown: the release decides
    newest = checkpoints[-1]
    size = int(newest.get("size") or 0)
    memory = int(SHARE * (seen.facts.get(host, {}).get("memory_available") or 0))
    return Canary(
        host,
        release,
        seen.releases.get(host) or "",
        short.differences(host) if host in seen.looks else {},
        {key: [was.get(key), now.get(key)] for key in sorted({*was, *now}) if was.get(key) != now.get(key)},
        by_ansible,
        run.run,
        int(newest["step"]),
        ask.steps,
        size,
        memory,
        host in seen.drains,
        _find_obstacles(cluster, seen, host, size, memory),
    )


def _find_obstacles(cluster: Cluster, seen: Observation, host: str, size: int, memory: int) -> list[str]:
    """Say why the host can't have a trial of a model with checkpoints of this size, and what to do."""
    inventory, chief = cluster.inventory, cluster.inventory.chief.host
    found = []
    if not inventory.is_shared and host != chief:
        found.append(f"the run lies on {chief} alone: fab canary {chief}")
    if inventory.variables[host].get("trainer_secrets") and all(task.server for task in inventory.tasks_on(host)):
        found.append(f"the program reads secrets, which {host} has not: fab canary {chief}")
    needed = MIN_MEMORY + MODELS * size
    if memory < needed:
        has = f"{host} has {memory / GIB:.1f} GiB of memory for it, and {needed / GIB:.1f} are needed"
        found.append(f"{has}: fab drain {host} first")
    room = _room(seen, host)
    if room is not None and room < MODELS * size:
        has = f"{host} has {render_bytes(room)} free in /var/cache, and {render_bytes(MODELS * size)} are needed"
        found.append(f"{has}: make room, or name another host")
    return found


def settings_of(cluster: Cluster) -> dict[str, Any]:
    """Return the run settings that a start would bring."""
    role = Role(cluster.inventory, cluster.inventory.chief.host, "release", "release.yml", "prove")
    return dict(role.value("release_settings"))


def _room(seen: Observation, host: str) -> int | None:
    text = seen.looks.get(host, {}).get("steps", {}).get("room", {}).get("stdout", "").strip()
    return int(text) * 1024 if text.isdecimal() else None


def _stage(cluster: Cluster, console: Console, short: ShortWay, seen: Observation, plan: Canary) -> None:
    """Bring the release to the canary's host, beside what runs there, and prove it."""
    inventory = cluster.inventory
    others = [host for host in inventory.hosts if host != plan.host]
    shipment = Shipment(inventory, STAGE, plan.release, seen.selection, without=others)
    with console.progress() as progress:
        if plan.by_ansible:
            console.ship(shipment, progress)
        else:
            short.stage_alone(plan.host, shipment, progress)


def _prepare(cluster: Cluster, run: Run, plan: Canary, ask: CanaryRequest) -> tuple[TrialRun, float | None]:
    """Return the trial, and the most that its loss may be: both by what the run has now."""
    checkpoints = cluster.list_checkpoints(run.run)
    step = int(checkpoints[-1]["step"])
    settings = trial.settings_of(settings_of(cluster), str(run.program), run.program_args, step, ask.steps)
    shared = cluster.inventory.shared_dir
    asked = TrialRun(plan.release, run.run, step, shared, settings, plan.memory, 60 * ask.minutes)
    numbers = cluster.on_shared(trial.live_losses(shared, run.run), "the run's history can't be read").stdout
    return asked, trial.most_loss([loss for _, loss in trial.read_numbers(numbers, "loss")], ask.loss_factor)


def _try(cluster: Cluster, console: Console, asked: TrialRun, host: str) -> TrialState:
    """Have the host train, until that is over; nothing of it is left there, also when the operator leaves."""
    end = {"name": "end", "command": ["sh", "-c", trial.END]}  # of one whose control machine was lost
    begin = {"name": "begin", "command": trial.command_of(asked, cluster.inventory, host)}
    try:
        with console.progress() as progress:
            begun = cluster.act({host: {"steps": [end, begin]}}, SILENT_SECONDS)[host]["steps"]["begin"]
            if begun["rc"]:
                raise ClusterTrouble(f"{host}: the trial can't be started: {begun['stderr'].strip()}")
            return _follow(cluster, console, asked, host, progress)
    finally:
        with undisturbed():
            cluster.hosts.run({host: f"root sh -c {shlex.quote(trial.END)}"}, SILENT_SECONDS)


def _follow(cluster: Cluster, console: Console, asked: TrialRun, host: str, progress: ProgressLine) -> TrialState:
    script, heard = trial.status_script(asked), console.clock()
    while True:
        answer = cluster.hosts.run({host: script})[host]
        mute = "" if "ActiveState=" in answer.stdout else f"it says nothing of the trial: {last_line(answer)}"
        if why := answer.unreachable or mute:
            if console.clock() - heard > SILENT_SECONDS:
                raise HostsUnreachable({host: why}, "The trial there ends by itself")
        else:
            heard, found = console.clock(), trial.read(answer.stdout)
            if found.over:
                return found
            done = "begins" if found.step is None else f"step {found.step} of {asked.until}"
            progress.show(f"the canary trains on {host}: {done}")
        console.sleep(LOOK_SECONDS)


def describe(before: Run, asked: TrialRun, found: TrialState, limit: float | None, after: Run | None) -> dict[str, Any]:
    """Return what the trial reported, and beside it what the live run reports, before and meanwhile."""
    losses = [loss for _, loss in found.losses]
    return {
        "trial": {
            "checkpoint": asked.step,
            "step": found.step,
            "loss": statistics.median(losses) if losses else None,
            "evaluation": dict(found.evaluation.get("metrics") or {}),
            "steps_per_second": found.speed,
        },
        "live": {
            "loss": before.loss,
            "most_loss": limit,
            "evaluation": dict(before.evaluation.metrics) if before.evaluation else {},
            "steps_per_second": speed_of_a_worker(before),
            "step": before.step,
            "step_after": after.step if after else None,
            "speed": before.steps_per_second,
            "speed_meanwhile": speed_between(before, after),
        },
    }


def speed_of_a_worker(run: Run) -> float | None:
    """Return how many steps a second one worker of a run gives, on the average; None where that is unknown."""
    speeds = [each["steps_per_second"] for each in run.workers.values() if each.get("steps_per_second")]
    if speeds or run.steps_per_second is None:
        return statistics.mean(speeds) if speeds else None
    return run.steps_per_second / max(1, len(run.workers))


def speed_between(before: Run, after: Run | None) -> float | None:
    """Return the steps per second between two looks at a run; None where they are unknown."""
    if after is None or None in (before.step, before.updated, after.step, after.updated):
        return None
    seconds = float(after.updated or 0) - float(before.updated or 0)
    return (int(after.step or 0) - int(before.step or 0)) / seconds if seconds > 0 else None


def render(result: Mapping[str, Any]) -> str:
    """Lay trial and live run out line by line."""
    new, live = result["trial"], result["live"]
    most = "" if live["most_loss"] is None else f"; at most {render_number(live['most_loss'])} passes"
    rows = [("", "canary", "live run")]
    rows.append(("loss", render_number(new["loss"]), render_number(live["loss"]) + most))
    rows.append(("evaluation", render_metrics(new["evaluation"]), render_metrics(live["evaluation"])))
    speeds = [f"{render_number(each['steps_per_second'])} steps/s a worker" for each in (new, live)]
    rows.append(("speed", f"{speeds[0]}, beside other work", speeds[1]))
    meanwhile = f"step {live['step']} to {live['step_after']}, {render_number(live['speed_meanwhile'])} steps/s"
    rows.append(("meanwhile", "", f"{meanwhile}; before {render_number(live['speed'])}"))
    return render_table(rows[0], rows[1:])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _answer(
    console: Console,
    outcome: str,
    plan: Canary,
    following: str,
    result: Mapping[str, Any] | None = None,
    problems: Sequence[str] = (),
) -> None:
    values = {"trial": None, "live": None, **(result or {})}
    record = {"outcome": outcome, "plan": asdict(plan), **values, "problems": list(problems), "next": following}
    console.print_json("canary", record)
