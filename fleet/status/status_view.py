"""`fab status` on a terminal: the same as its text, with colours, a bar, and each worker's pace.

The text (status_text.py) is laid out apart from this: it does without rich, whose import takes longer than a look.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleet.hosts.observation import Observation
from fleet.hosts.run import Run
from fleet.output.tables import render_duration
from fleet.output.terminal import one_line
from fleet.site.inventory import Inventory
from fleet.status import status_text
from trainer.core.settings.parameters import describe_values
from trainer.telemetry.events import FAULTS, describe_event
from trainer.telemetry.goodput import describe_ledger
from trainer.telemetry.status import describe_absent, describe_ways, has_broken, render_metrics, render_number

COLOURS = {
    "training": "green",
    "finished": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
    "unknown": "red",
}
HEADER = ("TASK", "HOST", "STATE", "FOR", "RESTARTS", "STEPS/S", "STEPS", "NOTE")
# Beside the tasks: title, bar, numbers, goodput, head of the table, and events with theirs.
OTHER_LINES = 16
STRAGGLES = 0.5  # of the median worker's pace


def screen_of(stream: TextIO) -> Console:
    """Return what draws on a terminal; without colours where NO_COLOR says so (no-color.org)."""
    return Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False, legacy_windows=False)


def draw(
    inventory: Inventory, observation: Observation, quiet: Mapping[str, float] | None = None, lines: int = 0
) -> RenderableType:
    """Lay out the run and its tasks.

    `quiet` has the seconds for which a host has said nothing, though it was asked. With `lines`, the terminal's height,
    tasks that are as they should be are left out where they don't fit.
    """
    rows = status_text.task_rows(inventory, observation, quiet or {})
    chief = inventory.chief.host
    parts = _run_parts(observation)
    if chief in (quiet or {}) or (observation.run and chief in observation.unreachable):
        parts.insert(1, _plain(f"{chief} does not answer: the run is shown as it was", "yellow"))
    parts.append(_tasks(rows, observation.run, lines))
    if away := [*observation.unreachable, *(quiet or {})]:
        parts.append(_plain(f"{', '.join(away)} can't be reached", "bold red"))
    parts.append(_plain(status_text.render_release(observation), "" if observation.release else "yellow"))
    if observation.run and observation.run.events:
        parts += [_plain("last events", "dim"), *(_event(each) for each in observation.run.events)]
    return Group(*parts)


def _plain(text: str, style: str = "") -> Text:
    """Text of hosts and runs: one line, and nothing in it steers the terminal."""
    return Text(one_line(text), style, no_wrap=True, overflow="ellipsis")


def _run_parts(observation: Observation) -> list[RenderableType]:
    """Say what is trained, and how far and how well."""
    run = observation.run
    if run is None:
        reason = str(observation.run_error) if observation.run_error else "unknown"
        return [_plain(f"run: {reason}", "red" if observation.run_error else "")]
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(one_line(f"run {run.run} "), "bold")
    title.append(one_line(run.state), COLOURS.get(run.state, ""))
    if run.program:
        title.append(one_line(f"  {run.program}"), "dim")
    if run.program_args:
        title.append(one_line(f"  {describe_values(run.program_args)}"), "dim")
    parts: list[RenderableType] = [title]
    if run.message:
        parts.append(Text(one_line(run.message), "red" if run.state == "failed" else "yellow"))
    if run.step is not None and run.steps:
        parts.append(_bar(run))
    if numbers := _numbers(run):
        parts.append(_plain("  ".join(numbers)))
    if run.without and run.state in ("waiting", "training"):
        parts.append(_plain(f"without {describe_absent(run.without)}", "yellow"))
    if has_broken(run.ways) and run.state in ("waiting", "training"):
        parts.append(_plain(f"ways: {describe_ways(run.ways)}", "yellow"))
    parts += map(_plain, status_text.render_pointers(observation.selection, observation.run))
    if run.ledger:
        parts.append(_plain(describe_ledger(run.ledger), "dim"))
    return [*parts, Text()]


def _bar(run: Run) -> RenderableType:
    step, steps = run.step or 0, run.steps or 1
    done = min(1.0, step / steps)
    line = Table.grid(padding=(0, 2))
    line.add_column(max_width=30)
    cells = [f"{100 * done:.0f} %", f"step {step}/{steps}"]
    if run.state == "training":
        if run.steps_per_second is not None:
            cells.append(f"{render_number(run.steps_per_second)} steps/s")
        if run.eta_seconds is not None:
            cells.append(f"{render_duration(run.eta_seconds)} left")
    for _ in cells:
        line.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=done, complete_style="green", finished_style="green")
    line.add_row(bar, *(Text(cell, "bold" if number == 0 else "") for number, cell in enumerate(cells)))
    return line


def _numbers(run: Run) -> list[str]:
    numbers = [] if run.loss is None else [render_metrics({"loss": run.loss, **run.metrics})]
    if run.evaluation:
        numbers.append(f"evaluated at {run.evaluation.step}: {render_metrics(run.evaluation.metrics)}")
    if run.faults:
        numbers.append(f"{run.faults} faults")
    return numbers


def _tasks(rows: Sequence[Mapping[str, Any]], run: Run | None, lines: int) -> RenderableType:
    shown = list(rows)
    room = max(3, lines - OTHER_LINES)
    if lines and len(rows) > room:  # those in trouble first, and the others in their order
        shown = sorted(rows, key=lambda row: not row["trouble"])[:room]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in HEADER:
        right = name in ("RESTARTS", "STEPS/S", "STEPS")
        # On a narrow terminal the widest other column shrinks first.
        table.add_column(_plain(name), justify="right" if right else "left", no_wrap=name == "TASK")
    workers = run.workers if run else {}
    paces = [pace for each in workers.values() if (pace := each.get("steps_per_second"))]
    median = statistics.median(paces) if paces else 0.0
    for row in shown:
        worker = workers.get(row["task"], {})
        pace, steps = worker.get("steps_per_second"), worker.get("steps")
        straggles = pace is not None and run is not None and run.state == "training" and pace < STRAGGLES * median
        table.add_row(
            _plain(row["task"]),
            _plain(row["host"]),
            _state(row),
            Text(render_duration(row.get("seconds"))),
            Text(str(row.get("restarts", "")), "yellow" if row.get("restarts") else ""),
            Text("" if pace is None else render_number(pace), "yellow" if straggles else ""),
            Text("" if steps is None else str(steps)),
            _plain(_note(row), "dim"),
        )
    if len(shown) == len(rows):
        return table
    return Group(table, Text(f"and {len(rows) - len(shown)} more tasks", "dim"))


def _state(row: Mapping[str, Any]) -> Text:
    state = row["state"]
    if row["trouble"]:
        return _plain(state, "bold red")
    if state.startswith("active"):
        return _plain(state, "green")
    return _plain(state, "" if state == "finished" else "yellow" if "activating" in state else "dim")


def _note(row: Mapping[str, Any]) -> str:
    """Return what is worth a word, and last what the task tells systemd."""
    notes = [row.get("note") or ""]
    if row["state"].startswith("active"):
        if row.get("enabled") is False:
            notes.insert(0, "not enabled")
        if row.get("listens") is False and row["trouble"]:
            notes.insert(0, f"port {row['port']} closed")
    return "; ".join(filter(None, notes))


def _event(event: Mapping[str, Any]) -> Text:
    style = "yellow" if event.get("event") in FAULTS else "dim"
    return _plain(f"  {describe_event(event)}", style)
