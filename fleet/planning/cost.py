"""What a verb costs a training, worked out from what the cluster says just now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fleet.hosts.drains import tasks_of
from fleet.hosts.observation import Observation
from fleet.hosts.run import Run
from fleet.output.tables import render_duration
from fleet.planning.quorum import COUNTED_JOBS, minimum
from fleet.site.cluster_note import cluster_name, takes_over_option
from fleet.site.gpus import count_devices
from fleet.site.inventory import Inventory
from fleet.site.topology import Task
from trainer.core.joining import forms_again_without
from trainer.core.settings.config import Config
from trainer.core.settings.strategies import STRATEGIES

GIB = 2**30
# Of what a host has left, so much is not the model's to take.
MARGIN = 0.9
NOTHING_TRAINS: tuple[str, int | None, str] = ("none: nothing of it trains", 0, "no step")
STARTS: tuple[str, int | None, str] = ("some seconds more until the first step: a start is under way", 0, "no step")
NOT_KNOWN: tuple[str, int | None, str] = (
    "not known",
    None,
    "not known: the coordinator's host does not say what trains",
)
RESTART = "until TensorFlow is up again, or some seconds where the kit is the same"
# By group: what is missing while a host of it is away.
SERVED = {
    "nfs_server": "the shared path: what reads or writes there waits, saves too, and no task starts",
    "tensorboard": "TensorBoard: its page is away",
    "prometheus": "Prometheus: it keeps no metrics and raises no alert",
    "alertmanager": "Alertmanager: it sends no alert",
}


@dataclass(frozen=True)
class Cost:
    """What stops, for how long, and what is lost."""

    hosts: Sequence[str]
    stops: Sequence[str]
    """Tasks that run now and will not, or start again."""
    pause: str
    """How long the training stands still, in words."""
    steps_lost: int | None
    """None where that is unknown: no checkpoint, or no step."""
    lost: str
    """The same in words."""
    serves: Sequence[str] = ()
    """A line for each thing that its hosts serve beside their tasks, and that is away with them."""
    room: Sequence[str] = ()
    """A line for each host of a ps that stays."""
    away: Sequence[str] = ()
    """The other members that take no part, each with why."""
    refusals: Sequence[str] = field(default_factory=list)
    """Why it must not be done; empty where it may."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """Return a line for each thing that is to know."""
        lines = [
            f"  stops   {', '.join(self.stops) or 'nothing'}",
            self.render_loss(),
            *(f"  serves  {line}" for line in self.serves),
            *(f"  room    {line}" for line in self.room),
            *(f"  away    {line}" for line in self.away),
            *(f"  refused {line}" for line in self.refusals),
        ]
        return "\n".join(lines)

    def render_loss(self) -> str:
        """Return what the training loses, a line each."""
        return f"  pause   {self.pause}\n  lost    {self.lost}"


def training(inventory: Inventory, seen: Observation) -> Run | None:
    """Return the run that a coordinator trains now, or waits to; None where none does."""
    run, chief = seen.run, seen.units.get(inventory.chief.name)
    return run if run and run.state in ("training", "waiting") and chief and chief.up else None


def cost_of(
    inventory: Inventory,
    seen: Observation,
    hosts: Sequence[str],
    checkpoints: Sequence[Mapping[str, Any]],
    in_order: bool = True,
    goes_off: bool = False,
) -> Cost:
    """Work out what it costs to take hosts away: `in_order`, as `fab drain` does, or by pulling their plugs now.

    A host that is drained serves on, unless it `goes_off` then, for a moment: a worker's data wait.
    """
    run = training(inventory, seen)
    tasks = tasks_of(inventory, hosts)
    stops = [task.name for task in tasks if task.name in seen.units and seen.units[task.name].up]
    gone = absentees(inventory, seen)
    away = [f"{task}: {why}" for task, why in gone.items() if inventory.task(task).host not in hosts]
    stopping = [task for task in tasks if task.name in stops]
    refusals = [*find_chief(inventory, hosts, run is not None), *find_shortages(inventory, hosts, gone)]
    room: list[str] = []
    if run and any(task.job == "ps" for task in stopping):
        room, full = find_room(inventory, seen, hosts, gone, checkpoints)
        refusals += full
    pause, steps, lost = _loss(run, stopping, checkpoints, in_order, inventory, seen, goes_off)
    served = dict.fromkeys(group for host in hosts for group in inventory.services_on(host))
    serves = [SERVED[group] for group in served] if goes_off or not in_order else []
    if SERVED["nfs_server"] in serves and run and not stopping:
        pause = "of what reads or writes the shared path, until it is back"
    return Cost(hosts, stops, pause, steps, lost, serves, room, away, refusals)


def cost_of_restart(
    inventory: Inventory,
    seen: Observation,
    tasks: Sequence[Task],
    checkpoints: Sequence[Mapping[str, Any]],
) -> Cost:
    """Work out what it costs that tasks end in order, and start again."""
    stopping = [task for task in tasks if task.name in seen.units and seen.units[task.name].up]
    run, chief = training(inventory, seen), inventory.chief
    pause, steps, lost = NOTHING_TRAINS
    if chief.host in seen.unreachable or (chief in stopping and seen.run is None):
        pause, steps, lost = NOT_KNOWN
    elif run and any(task.trains for task in stopping):
        pause, steps, lost = RESTART, 0, "no step: it saves before it stops"
    elif run and any(task.job == "ps" for task in stopping):
        pause = f"{run.pause}: the model is laid out again from the newest checkpoint"
        steps, lost = _since_checkpoint(run, checkpoints, seen, inventory)
    elif run:
        pause = "none: what trains goes on"
    away = [f"{task}: {why}" for task, why in absentees(inventory, seen).items()]
    hosts = list(dict.fromkeys(task.host for task in stopping))
    return Cost(hosts, [task.name for task in stopping], pause, steps, lost, away=away)


def absentees(inventory: Inventory, seen: Observation) -> dict[str, str]:
    """Return the tasks that take no part, each with why: drained, unreachable, down, or left out by the coordinator."""
    without = seen.run.without if seen.run and seen.run.state in ("training", "waiting") else {}
    started = seen.units.get(inventory.chief.name)
    found = {}
    for task in inventory.tasks:
        unit = seen.units.get(task.name)
        if task.host in seen.drains:
            found[task.name] = "drained"
        elif task.host in seen.unreachable:
            found[task.name] = "its host does not answer"
        elif task.name in without:
            found[task.name] = without[task.name]
        elif started and started.up and unit and not unit.up and task.server:
            found[task.name] = unit.health.value
    return found


def find_chief(inventory: Inventory, hosts: Collection[str], trains: bool) -> list[str]:
    """Say that the coordinator's host can't be taken out, and what to do."""
    chief = inventory.chief
    if chief.host not in hosts:
        return []
    stop = "`fab stop-cluster` saves and stops; the run goes on at the next start"
    name = cluster_name(inventory.groups, inventory.variables)
    takes = takes_over_option(name, inventory.variables[chief.host].get("cluster_name", ""))
    move = f"or name another chief in the inventory, then `ansible-playbook site.yml{takes}` and `fab start-cluster`"
    which = "the training stands still without it" if trains else "no training can be started without it"
    return [f"{chief.host} has the coordinator, and {which}: {stop}; {move}"]


def find_shortages(inventory: Inventory, hosts: Collection[str], gone: Collection[str]) -> list[str]:
    """Say which jobs would have fewer members than the training needs."""
    found = []
    for job in COUNTED_JOBS:
        members = [task for task in inventory.tasks if task.job == job]
        if job == "chief" or not any(task.host in hosts for task in members):
            continue
        left = [task for task in members if task.host not in hosts and task.name not in gone]
        least = minimum(inventory, job, len(members))
        if len(left) < least:
            strategy = inventory.run_settings.get("strategy", Config.strategy)
            why = f"{len(left)} of {len(members)} {job} tasks would be left, and the training needs {least}"
            fix = "bring another host back (fab hosts), add one, or lower cluster_minimum"
            if STRATEGIES[strategy].in_step or not inventory.run_settings.get("elastic", Config.elastic):
                fix = "its members wait for one another: `fab stop-cluster` first"
            found.append(f"{why}: {fix}")
    return found


def find_room(
    inventory: Inventory,
    seen: Observation,
    hosts: Collection[str],
    gone: Collection[str],
    checkpoints: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[str]]:
    """Say what each ps that stays will hold and what its host has left; and which hosts are too small."""
    staying = [t for t in inventory.tasks if t.job == "ps" and t.host not in hosts and t.name not in gone]
    size = checkpoints[-1].get("size") if checkpoints else None
    if not staying:
        return [], []
    if not size:
        return ["no checkpoint says yet how large the model is"], []
    share = size / len(staying)
    lines, full = [], []
    for host in dict.fromkeys(task.host for task in staying):
        need = share * sum(task.host == host for task in staying)
        free = seen.facts.get(host, {}).get("memory_available")
        if free is None:
            lines.append(f"{host} will hold {need / GIB:.2f} GiB; its memory is not known")
            continue
        line = f"{host} will hold {need / GIB:.2f} GiB of the model, and has {free / GIB:.2f} GiB left"
        lines.append(line)
        if need > MARGIN * free:
            full.append(f"{line}: take a larger host, or more of them, for ps")
    return lines, full


def _loss(
    run: Run | None,
    stopping: Sequence[Task],
    checkpoints: Sequence[Mapping[str, Any]],
    in_order: bool,
    inventory: Inventory,
    seen: Observation,
    goes_off: bool,
) -> tuple[str, int | None, str]:
    """Return the pause and the steps lost, each in words, and the steps as a number."""
    if run is None or not stopping:
        chief = seen.units.get(inventory.chief.name)
        begins = chief is not None and chief.up and not (seen.run and seen.run.state == "finished")
        return STARTS if begins and any(task.server or task.job == "chief" for task in stopping) else NOTHING_TRAINS
    if any(task.job == "chief" for task in stopping):
        wait = "until the coordinator is back"
        return (
            (wait, 0, "no step: it saves before it stops")
            if in_order
            else (wait, *_since_checkpoint(run, checkpoints, seen, inventory))
        )
    is_ps, is_worker = (any(task.job == job for task in stopping) for job in ("ps", "worker"))
    gpus = max(count_devices(task.devices) for task in stopping)
    if not is_ps and is_worker and in_order and not goes_off and forms_again_without(inventory.run_settings, gpus):
        return f"{run.pause}: the data are divided again, from a checkpoint that is saved first", 0, "no step"
    if not is_ps:
        return "none: the others train on", 0, "no step; calls in flight there are run again by others"
    if in_order:
        return f"{run.pause}: the model is laid out again from a checkpoint that is saved first", 0, "no step"
    settings = inventory.run_settings
    seconds = settings.get("heartbeat_timeout_seconds", Config.heartbeat_timeout_seconds)
    seconds += settings.get("ps_grace_seconds", Config.ps_grace_seconds)
    pause = f"{render_duration(seconds)} until it is done without, then {run.pause} for the layout"
    return (pause, *_since_checkpoint(run, checkpoints, seen, inventory))


def _since_checkpoint(
    run: Run, checkpoints: Sequence[Mapping[str, Any]], seen: Observation, inventory: Inventory
) -> tuple[int | None, str]:
    if not checkpoints or run.step is None:
        return None, "all steps: there is no checkpoint yet"
    newest = checkpoints[-1]
    steps = max(0, run.step - newest["step"])
    now = seen.clocks.get(inventory.chief.host)
    age = f", saved {render_duration(now - newest['created'])} ago" if now and newest.get("created") else ""
    return steps, f"{steps} steps: the newest checkpoint has step {newest['step']}{age}"
