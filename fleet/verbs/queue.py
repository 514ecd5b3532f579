"""`fab queue`, `queue-add`, `queue-move` and `queue-remove`: what the cluster trains, one after the other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.look_around import observe_own
from fleet.actions.watch import RUN_SECONDS
from fleet.errors import HostsUnreachable, OperatorMistake, OthersAtWork
from fleet.hosts import history
from fleet.hosts.cluster import Cluster
from fleet.hosts.history import MAX_TEXT, Trail
from fleet.hosts.observation import Observation
from fleet.planning.cost import NOTHING_TRAINS, Cost
from fleet.planning.decision import check_names
from fleet.site.origin import operator
from fleet.verbs.start import StartRequest, check_program, start_cluster
from fleet.verbs.sweep import reject_unevaluated
from trainer.telemetry.queue import describe_queue

# A coordinator that ends one run begins the next, or ends, within so long.
TURN_SECONDS = 60.0
NO_COST = Cost([], [], "none: what trains goes on", 0, "no step")
IDLE_COST = Cost([], [], *NOTHING_TRAINS)


@dataclass(frozen=True)
class QueueRequest:
    """A run or a sweep that is to be trained in its turn."""

    name: str
    program: str | None = None
    program_args: Mapping[str, Any] = field(default_factory=dict)
    points: Sequence[Mapping[str, Any]] | None = None
    """Of a sweep."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Run settings of its own."""
    priority: int = 0
    minutes: float = 0.0
    """How long the cluster may work on it; 0 for as long as it takes."""
    reason: str | None = None
    sweep_file: str | None = None
    search: Mapping[str, Any] | None = None
    """What a sweep without points chooses them from."""

    def command(self, as_shipped: bool) -> str:
        """Return what adds it, as it is typed."""
        words = ["fab", "queue-add", *(["--sweep", self.sweep_file] if self.sweep_file else [self.name])]
        own = {} if self.sweep_file else self.program_args
        words += ["--program", self.program] if self.program and not self.sweep_file else []
        for flag, values in (("--set", own), ("--setting", self.settings)):
            for key, value in values.items():
                words += [flag, f"{key}={json.dumps(value)}"]
        words += ["--minutes", f"{self.minutes:g}"] if self.minutes else []
        words += [f"--priority={self.priority}"] if self.priority else []
        return with_reason(shlex.join([*words, *(["--as-shipped"] if as_shipped else [])]), self.reason)

    @property
    def selection(self) -> dict[str, Any]:
        """What would be selected to train it alone."""
        own: dict[str, Any] = {"program_args": dict(self.program_args)} if self.program_args else {}
        if self.program is not None:
            own["program"] = self.program
        if self.points is None:
            return {"run": self.name, **own}
        search = {"search": dict(self.search)} if self.search else {}
        return {**own, "sweep": {"name": self.name, "attempt": 1, "points": list(self.points), **search}}

    def entry(self, cluster: Cluster) -> dict[str, Any]:
        """Return it as the queue has it."""
        trained = {key: value for key, value in self.selection.items() if key in ("program", "program_args")}
        if self.search:
            trained["search"] = dict(self.search)
        if self.points is not None:  # a release that knows no searches in the queue refuses one for its lack of points
            trained["points"] = list(self.points)
        origin = history.origin(cluster.inventory)
        about: dict[str, Any] = {"owner": origin["who"], "from": origin["from"], "priority": self.priority}
        if self.reason:
            about["reason"] = self.reason[:MAX_TEXT]
        return {
            "name": self.name, **trained, "settings": dict(self.settings), "seconds": 60 * self.minutes, **about,
        }  # fmt: skip


def show_queue(cluster: Cluster, console: Console) -> None:
    """Show what trains, what waits and what has ended."""
    queue = cluster.ask_queue("list", [])
    following = "" if queue["followed"] else "\ngo on with it: fab start-cluster --queue"
    following = "\nadd a run: fab queue-add RUN" if queue["over"] else following
    console.answer("queue", {"queue": queue}, describe_queue(queue) + following)


def queue_add(
    cluster: Cluster, console: Console, asked: QueueRequest, plan_only: bool = False, as_shipped: bool = False
) -> None:
    """Add a run or a sweep; where the cluster has nothing left to train, start it.

    Beside a training it is proven on the coordinator's host, with the release that the hosts have. Raises
    OperatorMistake for what can't be trained.
    """
    check_program(cluster.inventory, console, asked.selection)
    if asked.search:
        reject_unevaluated(cluster.inventory)
    release = console.build(cluster.inventory)
    seen = _observe(cluster)
    words = ["--entry", json.dumps(asked.entry(cluster))]
    planned = cluster.ask_queue("add", [*words, "--plan"])
    is_new = planned["outcome"] != "there already"
    runs = seen.units[cluster.inventory.chief.name].up
    if is_new and runs:
        _reject_other_release(seen.releases.get(cluster.inventory.chief.host), release, as_shipped)
    if plan_only:
        cost = NO_COST if runs else IDLE_COST
        console.print(
            f"{f'would add {asked.name}' if is_new else f'{asked.name} waits already'} {_after(planned['ahead'])}\n"
            f"{cost.render_loss()}\nnothing was done. Do it: {asked.command(as_shipped)}"
        )
        _answer(console, "queue-add", {**planned, "started": False, "cost": cost.as_json()})
        return
    if is_new and runs:
        _prove(cluster, console, str(seen.releases[cluster.inventory.chief.host]), asked)
    answer = planned
    if is_new:
        with Trail(cluster, console, "queue-add", asked.reason) as trail:
            trail.begin(**({"sweep": asked.name} if asked.points is not None else {"run": asked.name}))
            answer = cluster.ask_queue("add", words)
    console.print(f"{asked.name} {'is added' if is_new else 'waits already'} {_after(answer['ahead'])}")
    started = _start_where_idle(cluster, console, asked, answer, is_new)
    console.print("look: fab queue")
    _answer(console, "queue-add", {**answer, "started": started})


def _start_where_idle(
    cluster: Cluster, console: Console, asked: QueueRequest, answer: Mapping[str, Any], is_new: bool
) -> bool:
    """Start the cluster where its tasks have ended by themselves; returns whether that was done."""
    chief = cluster.inventory.chief
    unit = _observe(cluster).units[chief.name]
    end = console.clock() + TURN_SECONDS
    # The coordinator may have found the queue empty just before: it ends, or begins with what was added.
    while not unit.idle and not answer["busy"] and console.clock() < end:
        console.sleep(RUN_SECONDS)
        unit = _observe(cluster).units[chief.name]
        answer = {"busy": any(entry["state"] != "queued" for entry in _left(cluster))}
    if not unit.idle:
        return False
    if not unit.enabled:
        console.print("the cluster is stopped: `fab start-cluster` proves what waits, and works it off")
        return False
    console.print("the cluster has nothing else to train: it is started")
    try:
        start_cluster(
            cluster, replace(console, json_out=None), StartRequest(queue=True, detach=True, reason=asked.reason)
        )
    except OthersAtWork as error:
        console.print(f"{error}\n{asked.name} waits. If nothing begins it: fab start-cluster --queue")
        return False
    except OperatorMistake:
        if is_new:
            cluster.ask_queue("remove", ["--name", asked.name, "--stop", "--who", operator()])
            console.print(f"{asked.name} is taken back")
        raise
    return True


def queue_move(
    cluster: Cluster, console: Console, name: str, to: str, reason: str | None = None, plan_only: bool = False
) -> None:
    """Move an entry that waits; `to` is first, last, before:NAME or priority:N."""
    check_names(name, None, "queue-move")
    if to.startswith("before:"):
        check_names(to.removeprefix("before:"), None, "--before")
    _observe(cluster)
    words = ["--name", name, "--to", to]
    if plan_only:
        answer = cluster.ask_queue("move", [*words, "--plan"])
        command = with_reason(f"fab queue-move {name} --{to.replace(':', '=', 1)}", reason)
        console.print(f"the order would be {', '.join(answer['order'])}\n{NO_COST.render_loss()}")
        console.print(f"nothing was done. Do it: {command}")
        answer = {**answer, "cost": NO_COST.as_json()}
    else:
        with Trail(cluster, console, "queue-move", reason) as trail:
            trail.begin(run=name, words=to)
            answer = cluster.ask_queue("move", words)
        console.print(f"the order is {', '.join(answer['order'])}\nlook: fab queue")
    _answer(console, "queue-move", answer)


def queue_remove(
    cluster: Cluster,
    console: Console,
    name: str,
    stop: bool = False,
    reason: str | None = None,
    plan_only: bool = False,
) -> None:
    """Take an entry out; with `stop` also the one that trains, which is saved. Its files stay."""
    check_names(name, None, "queue-remove")
    _observe(cluster)
    words = ["--name", name, "--who", operator(), *(["--stop"] if stop else [])]
    answer = cluster.ask_queue("remove", [*words, "--plan"])
    if answer["outcome"] == "not there":
        console.print(f"{name} does not wait in the queue, and does not train\nlook: fab queue")
    elif plan_only:
        cost = _cost_of_removal(_left(cluster), name)
        console.print(f"would take {name} out\n{cost.render_loss()}")
        command = with_reason(f"fab queue-remove {name}{' --stop' * stop}", reason)
        console.print(f"nothing was done. Do it: {command}")
        answer = {**answer, "cost": cost.as_json()}
    else:
        with Trail(cluster, console, "queue-remove", reason) as trail:
            trail.begin(run=name)
            answer = cluster.ask_queue("remove", words)
        console.print(f"{name} is taken out; what it has trained stays: fab runs\nlook: fab queue")
    _answer(console, "queue-remove", answer)


def _cost_of_removal(left: Sequence[Mapping[str, Any]], name: str) -> Cost:
    """Work out what it costs to take out one of what is `left`: only what trains is ended, and no task."""
    if not any(each["name"] == name and each["state"] != "queued" for each in left):
        return NO_COST
    following = next((each["name"] for each in left if each["name"] != name), None)
    pause = f"{following} follows" if following else "nothing is left to train: the tasks end"
    return Cost([], [], pause, 0, f"no step: {name} is saved first, and goes on where it is added again")


def _observe(cluster: Cluster) -> Observation:
    chief = cluster.inventory.chief
    seen = observe_own(cluster, [chief.host])
    if chief.host in seen.unreachable:
        raise HostsUnreachable(seen.unreachable, "the queue lies with the coordinator's host")
    cluster.reject_when_not_installed(seen)
    return seen


def _prove(cluster: Cluster, console: Console, release: str, asked: QueueRequest) -> None:
    with console.progress() as progress:
        progress.show(f"proving {asked.name} with release {release}")
        console.prove(cluster, release, asked.selection, progress)


def _left(cluster: Cluster) -> list[Mapping[str, Any]]:
    return [entry for entry in cluster.ask_queue("list", [])["entries"] if not entry["over"]]


def _reject_other_release(there: str | None, here: str, as_shipped: bool) -> None:
    """Raise OperatorMistake where what would be trained is not what the operator has before them."""
    if there != here and not as_shipped:
        raise OperatorMistake(
            f"the hosts train with release {there}, and this checkout is {here}: all that waits is trained with the "
            "hosts' release. Add it as that has it: --as-shipped. Or ship this checkout to all: `fab start-cluster`, "
            "which restarts the tasks once, from a checkpoint"
        )


def _after(ahead: Sequence[str]) -> str:
    return f"after {', '.join(ahead)}" if ahead else "as the next"


def _answer(console: Console, verb: str, answer: Mapping[str, Any]) -> None:
    console.print_json(verb, {**answer, "next": "fab queue"})
