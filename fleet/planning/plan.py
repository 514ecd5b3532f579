"""What a start will do, worked out before anything is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from fleet.hosts.drain_records import describe
from fleet.hosts.observation import Observation
from fleet.hosts.units import Health
from fleet.planning.decision import RunChoice, pick_restarts
from fleet.site.inventory import Inventory
from fleet.site.sweep_file import size_of
from fleet.site.topology import Task
from trainer.core.joining import why_at_a_save
from trainer.core.settings.config import Config
from trainer.core.settings.parameters import describe_values
from trainer.core.settings.strategies import STRATEGIES

MAX_NAMES = 8
MAX_REASONS = 3
AT_ONCE = "within seconds, while the others train on"
AT_A_SAVE = "at the next save, after which the training pauses for some seconds"
NEVER = "once the coordinator starts again: elastic is false"


@dataclass(frozen=True)
class Plan:
    inventory: Inventory
    release: str
    choice: RunChoice
    behind: Mapping[str, str | None]  # by host: the release that it has instead
    stop: Sequence[Task]
    start: Sequence[Task]
    """Those that don't run, are parked, or will be stopped."""
    missing: Mapping[str, str]  # by host that is left out: why
    untried: bool
    """Whether no run has trained a step with this choice of run and program."""
    by_ansible: Mapping[str, str] = field(default_factory=dict)
    """By host: what only Ansible can fix there. Where there is nothing, `fab` ships by itself."""
    drained: Mapping[str, str] = field(default_factory=dict)
    """By host that gets the release and starts no task: why an operator has taken it out."""

    @property
    def hosts(self) -> list[str]:
        """The hosts that take part."""
        return [host for host in self.inventory.hosts if host not in self.missing]

    @property
    def tasks(self) -> list[Task]:
        """The tasks that are to run."""
        away = {*self.missing, *self.drained}
        return [task for task in self.inventory.tasks if task.host not in away]

    def as_json(self) -> dict[str, Any]:
        return {
            "release": self.release,
            "ship": list(self.behind),
            "by_ansible": dict(self.by_ansible),
            "select": dict(self.choice.selection) if self.choice.write else None,
            "stop": [task.name for task in self.stop],
            "start": [task.name for task in self.start],
            "missing": dict(self.missing),
            "drained": dict(self.drained),
            "join": self.joining,
        }

    @property
    def joining(self) -> dict[str, str]:
        """When each worker and ps that starts takes part in the training; nothing where the coordinator starts too."""
        chief, settings = self.inventory.chief, self.inventory.run_settings
        if chief not in self.tasks or chief in self.start or chief.host in self.behind or self.choice.write:
            return {}
        if not STRATEGIES[settings.get("strategy", Config.strategy)].remote:
            return {}
        why = why_at_a_save(settings)
        later = AT_A_SAVE if settings.get("elastic", Config.elastic) else NEVER
        when = {"worker": f"{later}: {why}" if why else AT_ONCE, "ps": later}
        return {task.name: when[task.job] for task in self.start if task.job in when}

    def without(self, lost: Mapping[str, str]) -> Plan:
        """Return the plan without hosts that are lost, each with why."""
        return replace(
            self,
            behind={host: release for host, release in self.behind.items() if host not in lost},
            stop=[task for task in self.stop if task.host not in lost],
            start=[task for task in self.start if task.host not in lost],
            missing={**self.missing, **lost},
            by_ansible={host: reason for host, reason in self.by_ansible.items() if host not in lost},
        )


def make_plan(
    inventory: Inventory,
    before: Observation,
    release: str,
    choice: RunChoice,
    restart: bool,
) -> Plan:
    """Work out what a start has to do, from what the hosts said."""
    down = (Health.STOPPED, Health.FAILED, Health.ABSENT)
    present = [task for task in inventory.tasks if task.name in before.units and task.host not in before.drains]
    running = [task for task in present if before.units[task.name].health not in down]
    stop = running if restart else pick_restarts(inventory, before.units, choice.new)
    start = [task for task in present if task in stop or before.units[task.name].idle]
    behind = {host: found for host, found in before.releases.items() if found != release}
    untried = choice.write or before.run is None or not before.run.step
    drained = {host: describe(drain) for host, drain in before.drains.items() if host not in before.unreachable}
    missing = dict(before.unreachable)
    return Plan(inventory, release, choice, behind, stop, start, missing, untried, drained=drained)


def render_plan(plan: Plan) -> str:
    """One line for each thing that will be done, and one for what is left out."""
    lines = [f"  ship    {_describe_release(plan)}", *_describe_way(plan)]
    if plan.choice.write:
        texts = {key: value for key, value in plan.choice.selection.items() if key in ("run", "program")}
        chosen = ", ".join(f"{key} {value}" for key, value in texts.items())
        if values := plan.choice.selection.get("program_args"):
            chosen += f"{', ' if chosen else ''}with {describe_values(values)}"
        lines.append(f"  select  {chosen}")
        if sweep := plan.choice.selection.get("sweep"):
            lines[-1] += f"{', ' if chosen else ''}sweep {sweep['name']} of {size_of(sweep)} points"
        if "queue" in plan.choice.selection:
            lines[-1] += "the queue"
    elif (run := plan.choice.selection.get("run")) not in (None, plan.inventory.run_name):
        named = plan.inventory.run_name
        lines.append(f"  run     {run}, chosen before; the inventory names {named} (--run {named})")
    if plan.stop:
        lines.append(f"  stop    {_names(task.name for task in plan.stop)}")
    if going := [task for task in plan.tasks if task not in plan.start and task.host in plan.behind]:
        lines.append(f"  restart {_names(task.name for task in going)} (on the new release)")
    lines.append(
        f"  start   {_names(task.name for task in plan.start)}" if plan.start else "  start   nothing: all run"
    )
    for when, joining in groupby(sorted(plan.joining, key=plan.joining.__getitem__), plan.joining.__getitem__):
        lines.append(f"  join    {_names(joining)} {when}")
    for host, reason in plan.missing.items():
        away = _names(task.name for task in plan.inventory.tasks_on(host))
        lines.append(f"  without {away} on {host}: {reason}")
    for host, reason in plan.drained.items():
        away = _names(task.name for task in plan.inventory.tasks_on(host))
        lines.append(f"  without {away} on {host}: {reason} (fab undrain {host})")
    return "\n".join(["plan", *lines])


def _describe_release(plan: Plan) -> str:
    if not plan.behind:
        return f"release {plan.release}: every host has it"
    return f"release {plan.release} to {_names(plan.behind)}"


def _describe_way(plan: Plan) -> list[str]:
    """Say whether fab ships by itself, or why Ansible must, which takes minutes."""
    reasons = [f"{host}: {reason}" for host, reason in plan.by_ansible.items()]
    more = [f"and {len(reasons) - MAX_REASONS} more hosts"] if len(reasons) > MAX_REASONS else []
    if not reasons:
        return ["  way     fab by itself: all but code, settings and choice is as it should be"]
    return [f"  way     by Ansible: {line}" for line in [*reasons[:MAX_REASONS], *more]]


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - MAX_NAMES
    return ", ".join(listed[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
