"""What to stop, start and report: pure functions of what was observed, so that tests need no host."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import OperatorMistake
from fleet.hosts.observation import Observation
from fleet.hosts.run import Run
from fleet.hosts.units import Health, Unit, find_trouble
from fleet.site.inventory import Inventory
from fleet.site.schema.problems import show
from fleet.site.sweep_file import is_same
from fleet.site.topology import Task
from trainer.core.settings.config import Config
from trainer.core.settings.formats import NO_PROGRAM_NAME, RUN_NAME, SOURCE, program_name_problem

# A server that systemd calls running has its port within this time.
PORT_SECONDS = 30


@dataclass(frozen=True)
class RunChoice:
    """The run and program that the cluster is to train; `new` when the coordinator's present ones are others."""

    selection: Mapping[str, Any]
    write: bool
    new: bool


def check_names(run_name: str | None, program: str | None, flag: str = "--run") -> None:
    """Raise OperatorMistake for a name that can't be a run's, which `flag` gives, or a program's."""
    if run_name is not None and not RUN_NAME.fullmatch(run_name):
        raise OperatorMistake(
            f"{flag} {show(run_name)} can't name a run: its directory gets the name. Use letters, digits, dot, dash "
            f"and underscore, at most 100, starting with a letter or digit, such as {flag} digits-2"
        )
    if program is not None and (problem := program_name_problem(program)):
        example = "expected package.module:Name, such as --program trainer.examples.digits:Digits"
        problem = f"names no program; {example}" if problem == NO_PROGRAM_NAME else problem
        raise OperatorMistake(f"--program {show(program)} {problem}")


def choose(
    run_name: str | None,
    program: str | None,
    selection: Mapping[str, Any],
    present: Run | None,
    inventory_run: str | None = None,
    program_args: Mapping[str, Any] | None = None,
) -> RunChoice:
    """Lay what the operator gave over what was selected before.

    A run that is named without a program drops the program selected for another: the trainer takes the one that the
    run remembers, and for a new run the inventory's. So it is with the program's parameters, which a run keeps: another
    value is refused where the release is proven. Where no run was ever selected, `inventory_run` counts.

    Raises OperatorMistake for a name that can't be a run's or a program's.
    """
    check_names(run_name, program)
    if run_name is None and "queue" in selection and (program or program_args):
        raise OperatorMistake(
            "the queue is selected, and each of its runs has its own program and parameters: add one with "
            "fab queue-add RUN, or name a run that goes before all of them with --run NAME"
        )
    if run_name is None and "sweep" in selection and (program or program_args):
        raise OperatorMistake(
            f"the sweep {selection['sweep']['name']} is selected, and its file has its program and parameters: name a "
            "run of your own with --run NAME"
        )
    given: dict[str, Any] = {"run": run_name, "program": program}
    given = {key: value for key, value in given.items() if value is not None}
    wanted = dict(given) if run_name is not None else {**selection, **given}
    if program_args:
        wanted["program_args"] = {**wanted.get("program_args", {}), **program_args}
    now = {"run": present.run, "program": present.program} if present else dict(selection)
    unselected = not {"run", "sweep", "queue"} & wanted.keys()
    coming = {"run": inventory_run, **given} if unselected and inventory_run is not None else given
    new = any(now.get(key) is not None and now[key] != value for key, value in coming.items())
    if present and program_args:
        new = new or any(present.program_args.get(name) != value for name, value in program_args.items())
    return RunChoice(wanted, write=wanted != dict(selection), new=new)


def check_source(source: str | None, run_name: str | None) -> None:
    """Raise OperatorMistake for a checkpoint to begin from that names none, or names no new run to begin."""
    if source is None:
        return
    found = SOURCE.fullmatch(source)
    if found is None:
        raise OperatorMistake(
            f"--from {show(source)} names no checkpoint; expected RUN@STEP, such as --from digits-1@2000: "
            "`fab checkpoints --run digits-1` lists them"
        )
    if run_name is None or run_name == found["run"]:
        raise OperatorMistake(f"--from {source} begins a new run: name it, with --run NAME")


def find_source(source: str, runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the run that a new one begins from; raises OperatorMistake where there is no such run."""
    name = source.partition("@")[0]
    found = {str(run.get("run")): run for run in runs}
    if name not in found or found[name].get("program") is None:
        listed = ", ".join(found) or "none"
        raise OperatorMistake(f"--from {source}: there is no run {name}; the runs are {listed}")
    return found[name]


def reject_other_source(run: str, source: str, runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Raise OperatorMistake where a run exists and did not begin from this checkpoint, or would train no step."""
    found = {str(each.get("run")): each for each in runs}.get(run, {})
    step, steps = int(source.rpartition("@")[2]), settings.get("steps", Config.steps)
    if not found and step >= steps:
        raise OperatorMistake(
            f"--from {source}: run {run} would begin at step {step}, and steps is {steps}, so nothing would be "
            f"trained. Steps count on: raise steps in trainer_run, as to {step + steps}"
        )
    if found.get("program") is not None and found.get("begun_from") != source:  # without one it is half begun
        raise OperatorMistake(f"run {run} exists already and did not begin from {source}: choose another --run NAME")


def reject_templates(values: Mapping[str, Any]) -> None:
    """Raise OperatorMistake where Ansible, which ships the choice, would read a value as a template."""
    for mark in ("{{", "{%", "{#"):
        if mark in json.dumps(values):
            raise OperatorMistake(
                f"a parameter has {mark}, which Ansible would read as a template: put the text into a file that the "
                "program reads"
            )


def choose_sweep(
    asked: Mapping[str, Any],
    selection: Mapping[str, Any],
    runs: bool,
    known: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> RunChoice:
    """Choose a sweep; one that runs is looked on at, any other is another attempt at what has not been finished.

    `runs` says whether the coordinator does, `known` is what the chief's host knows of a sweep of this name. The
    program and the parameters of the run `settings` go with it: a later change of them is not for its later points.
    """
    if runs and is_same(asked, selection):
        return RunChoice(selection, write=False, new=False)
    attempt = (known["attempt"] if known else 0) + 1
    given = {key: settings[key] for key in ("program", "program_args") if key in settings}
    began: dict[str, Any] = {"program_args": {}, **given}
    return RunChoice(
        {**asked, "sweep": {**asked["sweep"], "attempt": attempt, "settings": began}}, write=True, new=True
    )


def is_finished(run: Run, inventory: Inventory) -> bool:
    """Whether nothing is left to do: no step that the inventory wants by now, no evaluation of the last one."""
    if run.state != "finished" or run.step is None:
        return False
    return inventory.steps <= run.step and (inventory.evaluator is None or is_evaluated(run))


def is_evaluated(run: Run) -> bool:
    """Whether there is an evaluation of the last step."""
    return run.step is not None and run.evaluation is not None and run.evaluation.step >= run.step


def pick_restarts(inventory: Inventory, units: Mapping[str, Unit], new_run: bool) -> list[Task]:
    """Which tasks must be stopped before the start: for a new run all that read which run it is.

    A server serves the next run too: its coordinator frees what the one before left on it. A host that wasn't asked has
    no units here.
    """
    readers = [task for task in inventory.tasks if task.name in units and not task.server]
    return [task for task in readers if new_run and units[task.name].up]


def find_troubles(
    tasks: Sequence[Task], units: Mapping[str, Unit], restarts_before: Mapping[str, int], run: Run | None
) -> dict[Task, str]:
    """Which of the tasks won't run, and why; of a coordinator that failed, what it wrote about it.

    The tasks that it names are among them: the reason may stand in their journals alone.
    """
    found = {}
    message = run.message if run and run.state == "failed" else ""
    for task in tasks:
        trouble = find_trouble(units[task.name], restarts_before.get(task.name, 0))
        if trouble and task.job == "chief" and message:
            trouble = f"{trouble}: {message}"
        elif not trouble and re.search(rf"\b{re.escape(task.name)}\b", message):
            trouble = "is named by the failed run"
        if trouble:
            found[task] = trouble
    return found


def is_done(unit: Unit, run: Run | None) -> bool:
    """Whether a task is down because there is nothing left to do for it."""
    return unit.health is Health.STOPPED and unit.result == "success" and run is not None and run.state == "finished"


def judge_task(task: Task, observation: Observation) -> tuple[str, bool]:
    """Say how a task is, as `fab status` shows it, and whether that is trouble."""
    unit = observation.units[task.name]
    if task.host in observation.drains and unit.health is Health.STOPPED:
        return "drained", False
    if unit.health is Health.ABSENT or not observation.configured[task.name]:
        return "not installed", True
    if unit.health is Health.FAILED:
        return f"failed ({unit.result} {unit.exit_status})", True
    if unit.enabled and is_done(unit, observation.run):
        return "finished", False
    state = f"{unit.active} ({unit.sub})"
    if unit.health is Health.RUNNING:
        now = observation.clocks[task.host]
        if (seconds := unit.silent(now)) is not None:
            return f"{state}, no sign of life for {seconds:.0f} s", True
        # One that trains listens only while its strategy lives.
        deaf = observation.listening.get(task.name) is False and task.server
        return state, deaf and unit.since is not None and now - unit.since > PORT_SECONDS
    if unit.health is Health.STARTING:
        return state, False
    idle = unit.health is Health.STOPPED and observation.run is not None and observation.run.state == "finished"
    return state, unit.enabled and not idle
