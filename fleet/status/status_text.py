"""What the verbs say about tasks and runs, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet.hosts.drain_records import describe
from fleet.hosts.observation import Observation
from fleet.hosts.run import Run
from fleet.hosts.units import Health
from fleet.output.tables import render_duration, render_table
from fleet.output.terminal import one_line, set_off
from fleet.planning.decision import judge_task
from fleet.site.inventory import Inventory
from fleet.site.sweep_file import size_of
from fleet.site.topology import Task
from trainer.core.settings.parameters import describe_values
from trainer.telemetry.events import describe_event
from trainer.telemetry.goodput import describe_ledger
from trainer.telemetry.lookups import describe_lookups
from trainer.telemetry.status import (
    describe_absent,
    describe_files,
    describe_table,
    describe_ways,
    has_broken,
    render_metrics,
    render_number,
)

NOTE_WIDTH = 60
MAX_PACES = 8


def render_progress(run: Run, stalled_seconds: float = 0.0) -> str:
    """One line: step, steps/s, loss, evaluation, time left."""
    parts = [f"step {run.step if run.step is not None else '?'}" + (f"/{run.steps}" if run.steps else "")]
    if run.steps_per_second is not None:
        parts.append(f"{render_number(run.steps_per_second)} steps/s")
    if run.loss is not None:
        parts.append(f"loss {render_number(run.loss)}")
    if run.evaluation:
        parts.append(f"evaluated at {run.evaluation.step}: {render_metrics(run.evaluation.metrics)}")
    if run.eta_seconds is not None:
        parts.append(f"{render_duration(run.eta_seconds)} left")
    if stalled_seconds >= 10:
        parts.append(f"no new step for {render_duration(stalled_seconds)}")
    return "  ".join(parts)


def render_waiting(inventory: Inventory, observation: Observation) -> str:
    """One line for the time before the first step: who isn't running yet, and what the coordinator says."""
    late = []
    wanted = [task for task in inventory.tasks if task.host not in observation.drains]
    for task in wanted:
        unit = observation.units.get(task.name)
        if unit is None:
            late.append(f"{task.name} unreachable")
        elif unit.health is not Health.RUNNING:
            late.append(f"{task.name} {unit.health.value}")
    count = len(wanted)
    text = f"{count - len(late)} of {count} tasks run"
    if late:
        text += f" ({', '.join(late[:4])}{', ...' if len(late) > 4 else ''})"
    run = observation.run
    chief = observation.units.get(inventory.chief.name)
    message = (run.message if run and run.state == "waiting" else "") or (chief.status_text if chief else "")
    return f"{text}; coordinator: {message}" if message else text


def task_rows(
    inventory: Inventory, observation: Observation, quiet: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """One row a task, in the inventory's order; `trouble` says whether it is as it should be.

    Of a host that is `quiet` for so many seconds, it is how it was.
    """
    rows = []
    for task in inventory.tasks:
        row: dict[str, Any] = {"task": task.name, "host": task.host}
        unit = observation.units.get(task.name)
        if unit is None:
            reason = observation.unreachable.get(task.host, "no answer")
            if drain := observation.drains.get(task.host):
                rows.append({**row, "state": "drained", "trouble": False, "note": f"{describe(drain)}; {reason}"})
                continue
            rows.append({**row, "state": "unreachable", "trouble": True, "note": reason})
            continue
        state, trouble = judge_task(task, observation)
        if quiet and task.host in quiet:
            state, trouble = f"no answer for {render_duration(quiet[task.host])}", True
        listens = observation.listening.get(task.name)
        row |= {
            "state": state,
            "enabled": unit.enabled,
            "seconds": observation.clocks[task.host] - unit.since if unit.since else None,
            "restarts": unit.restarts,
            "port": task.port,
            "listens": listens,
            "note": _note(task, observation),
            "trouble": trouble,
        }
        rows.append(row)
    return rows


def _note(task: Task, observation: Observation) -> str:
    """Say what the task tells systemd, and first, where its process runs other code than its host has, which.

    Of one that ends before it tells anything, and is started again and again, it is how it ended.
    """
    unit = observation.units[task.name]
    running = observation.running.get(task.name)
    current = observation.releases[task.host]
    has_failed = unit.health is Health.RESTARTING and unit.result != "success"  # which SIGTERM is, too
    text = unit.status_text or (unit.describe_failure() if has_failed else "")
    if drain := observation.drains.get(task.host):
        text = describe(drain) if unit.health is Health.STOPPED else f"draining; {text}"
    if running is None or running == current:
        return text
    old = f"runs release {running}, current is {current}"
    return f"{old}; {text}" if text else old


def render_tasks(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["task"],
            row["host"],
            row["state"],
            {True: "yes", False: "no", None: None}[row.get("enabled")],
            render_duration(row.get("seconds")),
            row.get("restarts"),
            f"{row['port']} {'open' if row['listens'] else 'closed'}" if row.get("port") is not None else None,
            _cut(row.get("note") or ""),
        ]
        for row in rows
    ]
    return render_table(["TASK", "HOST", "STATE", "ENABLED", "FOR", "RESTARTS", "PORT", "NOTE"], cells)


def _cut(note: str) -> str:
    """Keep a long note from wrapping the table; `--json` and the journal have all of it."""
    return note if len(note) <= NOTE_WIDTH else f"{note[: NOTE_WIDTH - 3]}..."


def render_run(run: Run | None) -> str:
    """The run in one line; what ended a run that failed, with the user's own line, stands on the next."""
    if run is None:
        return "run: unknown"
    text = f"run {run.run}: {run.state}"
    failed = run.state == "failed"
    if run.message and not failed:
        text += f" ({run.message})"
    if run.program_args:
        text += f", {describe_values(run.program_args)}"
    if run.step is not None:
        progress = render_progress(run if run.state == "training" else _without_pace(run))
        text += f", {progress}"
    text = one_line(text)
    if run.without and run.state in ("waiting", "training"):
        text += f"\n  without {one_line(describe_absent(run.without))}"
    if has_broken(run.ways) and run.state in ("waiting", "training"):
        text += f"\n  ways: {one_line(describe_ways(run.ways))}"
    return f"{text}\n  {set_off(run.message)}" if run.message and failed else text


def render_pointers(selection: Mapping[str, Any], run: Run | None) -> list[str]:
    """Say of which sweep the run is a point, whether the queue has it trained, and what says by whom it was stopped."""
    sweep = selection.get("sweep")
    lines = [f"a point of sweep {sweep['name']}, which has {size_of(sweep)}: fab sweep --status"] if sweep else []
    lines += ["of the queue: fab queue"] if "queue" in selection else []
    return [*lines, "by whom it was stopped, and why: fab history"] if run and run.state == "stopped" else lines


def render_account(run: Run | None) -> str:
    """The workers' pace, where the run's time went, and what befell it last; nothing of a run that never began."""
    lines = [render_paces(run.workers), render_staleness(run.workers)] if run and run.state == "training" else []
    lines += [one_line(f"{name}: {describe_table(table)}") for name, table in sorted(run.tables.items())] if run else []
    lines += [one_line(line) for line in describe_lookups(run.lookups)] if run else []
    lines += [describe_files(run.files)] if run and run.files else []
    lines += [describe_ledger(run.ledger)] if run and run.ledger else []
    if run and run.events:
        lines += ["last events", *(f"  {one_line(describe_event(event))}" for event in run.events)]
    return "\n".join(filter(None, lines))


def render_paces(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """Each worker's steps per second in one line; of many the slowest."""
    paces = {
        task: each["steps_per_second"] for task, each in workers.items() if each.get("steps_per_second") is not None
    }
    if not paces:
        return ""
    shown, of_all = paces, ""
    if len(paces) > MAX_PACES:
        shown = dict(sorted(paces.items(), key=lambda item: item[1])[:MAX_PACES])
        of_all = f"slowest of {len(paces)} workers, of which the fastest has {render_number(max(paces.values()))}: "
    return one_line(f"steps/s: {of_all}" + ", ".join(f"{task} {render_number(pace)}" for task, pace in shown.items()))


def render_staleness(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """How many updates of others lie between a worker's read of the weights and its own update; of many the most."""
    found = {task: each for task, each in workers.items() if each.get("staleness") is not None}
    most = sorted(found.items(), key=lambda item: -item[1]["staleness"])[:MAX_PACES]
    shown = (f"{task} {render_number(each['staleness'])} (most {each['staleness_max']})" for task, each in most)
    return one_line("staleness: " + ", ".join(shown)) if most else ""


def _without_pace(run: Run) -> Run:
    """Leave out what only a running training has."""
    return replace(run, steps_per_second=None, eta_seconds=None)


def render_release(observation: Observation) -> str:
    """Which code the hosts have, in one line; the odd ones out by name."""
    if not observation.releases:
        return "release: unknown"
    if observation.release:
        return f"release {observation.release} on {len(observation.releases)} hosts"
    parts = [f"{host} {release or 'none'}" for host, release in observation.releases.items()]
    return f"release differs: {', '.join(parts)}"


def render_summary(
    inventory: Inventory, run: Run, seconds: float | None = None, steps_per_second: float | None = None
) -> str:
    """What was trained, how fast, how well, and where everything is."""
    trained = f"{run.step} steps"
    if run.steps_per_second or steps_per_second:
        trained += f", {render_number(run.steps_per_second or steps_per_second)} steps/s"
    if seconds is not None:
        trained += f", {render_duration(seconds)} from start to end"
    host = inventory.chief.host
    rows = [["program", run.program or "?"], ["trained", trained]]
    if run.program_args:
        rows.insert(1, ["parameters", describe_values(run.program_args)])
    if run.ledger:
        rows.append(["time", describe_ledger(run.ledger)])
    if run.evaluation:
        rows.append(["evaluated", f"{render_metrics(run.evaluation.metrics)} (step {run.evaluation.step})"])
    newest = (run.checkpoint or "none").rpartition("/")[2]
    rows.append(["checkpoints", f"{host}:{run.run_dir}/checkpoints (newest: {newest})"])
    rows.append(["SavedModel", f"{host}:{run.export}" if run.export else "none"])
    if inventory.tensorboard_url:
        rows.append(["TensorBoard", f"fab tensorboard ({inventory.tensorboard_url})"])
    rows.append(["logs", f"fab logs --task {inventory.chief.name}"])
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"run {run.run} finished", *(f"  {name.ljust(width)}  {text}" for name, text in rows)])


def status_record(
    inventory: Inventory, observation: Observation, quiet: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return what `--json` says of the cluster."""
    return {
        "inventory": inventory.source,
        "releases": observation.releases,
        "tasks": task_rows(inventory, observation, quiet),
        "run": observation.run.as_json() if observation.run else None,
        "unreachable": dict(observation.unreachable)
        | {host: f"no answer for {render_duration(seconds)}" for host, seconds in (quiet or {}).items()},
    }
