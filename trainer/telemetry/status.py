"""What a run is doing, as others see it: status.json, and the tables of `status` and `runs`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config
from trainer.core.settings.parameters import describe_values
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.records import numbers_of, read_record, write_record
from trainer.telemetry.events import describe_event, read_events
from trainer.telemetry.goodput import describe_ledger
from trainer.telemetry.lookups import describe_lookups

MAX_WAYS_NAMED = 20  # ways that are named in a line
DAMAGE = (AttributeError, TypeError, ValueError)


@dataclasses.dataclass
class Status:
    """The record in status.json; unknown values are None."""

    run: str
    run_dir: str
    program: str | None = None
    program_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: RunState = RunState.NEW
    phase: str | None = None
    message: str = ""
    step: int | None = None
    steps: int | None = None
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    checkpoint: str | None = None
    export: str | None = None
    begun_from: str | None = None
    without: dict[str, str] = dataclasses.field(default_factory=dict)
    ways: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """How each member reaches each other one, as it found last: `ok`, or `broken` and why."""
    workers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Under parameter_server: the `steps` that each worker gave, lost ones among them, its `steps_per_second`, and how
    many updates of others lie between a step's read of the weights and its own update: the mean (`staleness`) and the
    most (`staleness_max`). Its steps waited for their batches for `input_wait_seconds`. The last three are of what
    this process has seen."""
    tables: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Of each dynamic table its `rows`, how many were given and taken away of late (`new_per_minute`,
    `evicted_per_minute`), how many keys found no room (`refused`), and what its rows take (`bytes`)."""
    lookups: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Under parameter_server, of each split and each dynamic table what steps ask of it lately: `ids_per_step`, the
    `rows_per_step` that they ask for, each ps's share of these (`by_ps`), and the hottest keys, each with its share of
    the ids (`hot`)."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Under parameter_server, of the files that `context.files` gives: how many (`files`), their `bytes`, the `largest`
    one and its `largest_bytes`, and the bytes of each worker's part (`parts`), where they are divided."""
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of files that are given out one by one how many are `done`, `under_way` and `found`, and the number of the `pass`
    where each pass has all."""
    faults: int = 0
    """How many were reported, over all of the run's processes."""
    ledger: dict[str, Any] | None = None
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    updated: float | None = None
    host: str | None = None
    pid: int | None = None

    def write(self, directory: RunDirectory) -> None:
        self.updated, self.host, self.pid = time.time(), socket.gethostname(), os.getpid()
        record = dataclasses.asdict(self)
        del record["events"]  # which have a file of their own
        write_record(directory.status, record)

    def line(self) -> str:
        """Say it in one line, as systemd and the log show it."""
        line = f"{self.state} {self.run}"
        if self.step is not None:
            line += f": step {self.step} of {self.steps}"
        if self.state is RunState.TRAINING and self.steps_per_second is not None:
            line += f", {self.steps_per_second:.4g} steps/s"
        return f"{line}: {self.message}" if self.message else line


def read_status(directory: RunDirectory, config: Config | None = None) -> Status:
    """Return a run's status with its newest evaluation and last events.

    Of a run that was never started it is a new one, which will train what `config` says.
    """
    status = Status(run=directory.run, run_dir=str(directory.path))
    if config is not None:
        status.program, status.program_args, status.steps = config.program, dict(config.program_args), config.steps
    # The next coordinator fixes what is damaged; one record's damage must not hide the others, nor other runs.
    try:
        if record := read_record(directory.status):
            status = parse_status(record)
    except DAMAGE as error:
        status = Status(directory.run, "", state=RunState.UNKNOWN, message=damage_of(directory.status, error))
    status.run_dir = str(directory.path)
    with contextlib.suppress(ValueError):  # a coordinator says that it is damaged
        status.begun_from = (read_record(directory.settings) or {}).get("from")
    evaluation = None
    try:
        evaluation = read_record(directory.evaluation)
        metrics = numbers_of((evaluation or {}).get("metrics") or {})
    except DAMAGE as error:
        evaluation, status.message = None, status.message or damage_of(directory.evaluation, error)
    if evaluation is not None:
        if evaluation.get("step") != -1:  # as long as no evaluation has worked
            status.evaluation = {"step": evaluation.get("step"), "metrics": metrics}
        why = f"not evaluated: {evaluation['failed']}" if "failed" in evaluation else evaluation.get("trouble", "")
        if why not in status.message:
            status.message = ". ".join(filter(None, (status.message, why)))
    status.events = read_events(directory.event_log)
    return status


def parse_status(record: Mapping[str, Any]) -> Status:
    """Make a status of a record, whose keys of a newer version are passed over."""
    known = {field.name for field in dataclasses.fields(Status)}
    status = Status(**{key: value for key, value in record.items() if key in known})
    status.state = RunState.read(status.state)
    status.loss = None if status.loss is None else float(status.loss)
    status.metrics = numbers_of(status.metrics)
    status.updated = None if status.updated is None else float(status.updated)
    return status


def damage_of(path: Path, error: Exception) -> str:
    return str(error) if str(path) in str(error) else f"{path} holds what no psfleet has written: {error}"


def read_all(shared_dir: Path) -> list[Status]:
    """Return the status of every run on the shared path, oldest update first."""
    found = []
    for directory in run_directories(shared_dir):
        try:
            found.append(read_status(directory))
        except OSError as error:  # of a run that may not be read
            found.append(Status(directory.run, str(directory.path), state=RunState.UNKNOWN, message=str(error)))
    return sorted(found, key=lambda status: (status.updated or 0.0, status.run))


def describe(status: Status) -> str:
    """Lay a status out for a terminal."""
    rows = [
        ("run", status.run),
        ("state", status.state),
        ("program", status.program),
        ("parameters", describe_values(status.program_args)),
        ("begun from", status.begun_from),
    ]
    if status.message:
        rows.append(("message", status.message))
    if status.without and not status.state.ended:
        rows.append(("without", describe_absent(status.without)))
    if status.ways and not status.state.ended:
        rows.append(("ways", describe_ways(status.ways)))
    if status.step is not None:
        rows.append(("step", f"{status.step} of {status.steps}"))
    if status.steps_per_second is not None:
        rows.append(("speed", f"{status.steps_per_second:.4g} steps/s"))
    if status.state is RunState.TRAINING and status.eta_seconds is not None:
        rows.append(("time left", f"{status.eta_seconds:.0f} s"))
    if status.loss is not None:
        rows.append(("training", render_metrics({"loss": status.loss, **status.metrics})))
    if status.evaluation and status.evaluation["metrics"]:
        evaluated = render_metrics(status.evaluation["metrics"])
        rows.append(("evaluation", f"{evaluated} (step {status.evaluation['step']})"))
    rows += [("table", f"{name}: {describe_table(table)}") for name, table in sorted(status.tables.items())]
    rows += [("lookups", line) for line in describe_lookups(status.lookups)]
    if status.files:
        rows.append(("files", describe_files(status.files)))
    if status.ledger:
        rows.append(("time", describe_ledger(status.ledger)))
    rows += [("checkpoint", status.checkpoint), ("export", status.export), ("directory", status.run_dir)]
    rows += [("" if number else "events", describe_event(event)) for number, event in enumerate(status.events)]
    return "\n".join(f"{name:<11} {value}" for name, value in rows if value)


def describe_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lay runs out as a table, each as JSON has its status; the release of a host may know less of one."""
    rows = [("RUN", "STATE", "STEP", "EVALUATION", "UPDATED", "MODEL", "PROGRAM", "PARAMETERS")]
    for run in runs:
        evaluation, step, updated = run.get("evaluation") or {}, run.get("step"), run.get("updated")
        evaluated = render_metrics(evaluation.get("metrics") or {})
        rows.append(
            (
                run["run"],
                run["state"],
                f"{'-' if step is None else step}/{run.get('steps') or '?'}",
                f"{evaluated} (step {evaluation.get('step')})" if evaluated else "",
                render_time(updated) if updated else "",
                "export" if run.get("export") else "",
                run.get("program") or "",
                describe_values(run.get("program_args") or {}),
            )
        )
    return lay_out(rows)


def render_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def lay_out(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out as a table, the first as its head; a row is one line, and none ends in blanks."""
    lines = [[cell.replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def describe_table(table: Mapping[str, Any]) -> str:
    """Say what a dynamic table holds, and how it changes."""
    refused = f", {table['refused']:,} keys without room" if table["refused"] else ""
    return (
        f"{table['rows']:,} rows, {table['bytes'] / 2**20:,.4g} MiB, {table['new_per_minute']:,.4g} new and "
        f"{table['evicted_per_minute']:,.4g} evicted a minute{refused}"
    )


def describe_files(files: Mapping[str, int]) -> str:
    """Say how far the files are read that are given out one by one."""
    which = f"pass {files['pass'] + 1}: " if "pass" in files else ""
    return f"{which}{files['done']:,} of {files['found']:,} files are trained, {files['under_way']:,} under way"


def describe_absent(without: Mapping[str, str]) -> str:
    """Name the members that take no part, each with what the coordinator knows of it."""
    return ", ".join(f"{task} ({state})" for task, state in sorted(without.items()))


def describe_ways(ways: Mapping[str, Mapping[str, str]]) -> str:
    """Say how many ways between the members work, and name those that are broken or slow."""
    cells = [(task, other, how) for task, row in ways.items() for other, how in row.items()]
    odd = [f"{task} to {other}: {how}" for task, other, how in cells if not how.startswith(("ok", "closed"))]
    broken = sum(how.startswith("broken") for _, _, how in cells)
    more = [f"And {len(odd) - MAX_WAYS_NAMED} more"] if len(odd) > MAX_WAYS_NAMED else []
    return ". ".join([f"{len(cells) - broken} of {len(cells)} work", *odd[:MAX_WAYS_NAMED], *more])


def has_broken(ways: Mapping[str, Mapping[str, str]]) -> bool:
    return any(not how.startswith(("ok", "closed")) for row in ways.values() for how in row.values())


def render_number(value: float | str | None) -> str:
    """Four significant digits, as many as an operator reads; whole numbers from a thousand to ten million.

    A text is one that JSON has no word for (`trainer.run.records.to_json`).
    """
    if value is None:
        return "?"
    number = float(value)
    return f"{number:.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.4g}"


def render_metrics(metrics: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {render_number(value)}" for name, value in metrics.items())
