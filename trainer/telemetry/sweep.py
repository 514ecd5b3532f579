"""How far a sweep is: its table, from the records of the sweep and of its points' runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.parameters import describe_values
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.selections.search import RecordedSearch
from trainer.run.selections.selection import read_selection, sweep_of
from trainer.run.selections.sweep import PRUNED, Point, Sweep
from trainer.telemetry.status import lay_out, read_status, render_metrics

ENDS = (RunState.FINISHED, PRUNED, RunState.FAILED)
"""The states of a point that has ended."""


def read_sweep(config: Config, name: str | None = None) -> dict[str, Any]:
    """Return a sweep and its points for `python -m trainer sweep --json`: the one that is named, selected or the last.

    Raises ConfigError where there is none.
    """
    sweep = find_sweep(config, name)
    ends = sweep.ends()
    present = sweep.present()
    return {
        "name": sweep.name,
        "attempt": sweep.attempt,
        "over": sweep.is_over(),
        "present": present.run if present else None,
        "evaluated": sweep.unevaluated() is None,
        "size": sweep.size,
        "points": [read_point(sweep, point, ends.get(point.run)) for point in sweep.points],
    }


def find_sweep(config: Config, name: str | None) -> Sweep:
    selection = read_selection(config)
    if "sweep" in selection:
        selected = sweep_of(selection, config.shared_dir)
        if selected is not None and name in (None, selected.name):
            return selected
    directory = Path(config.shared_dir) / "sweeps"
    files = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
    files = [path for path in files if name in (None, path.stem)]
    if not files:
        raise ConfigError(f"there is no sweep{f' {name}' if name else ''} in {directory}; begin one: fab sweep FILE")
    try:
        record = read_record(files[-1]) or {}
        points = [Point(point["run"], point["program_args"]) for point in record["points"]]
        about = (record["name"], points, record["attempt"], Path(config.shared_dir))
        return RecordedSearch(*about, trials=int(record["trials"])) if "trials" in record else Sweep(*about)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{files[-1]} is no record of a sweep ({error!r}): remove it") from error


def read_point(sweep: Sweep, point: Point, end: Mapping[str, Any] | None) -> dict[str, Any]:
    status = read_status(RunDirectory(sweep.shared_dir, point.run))
    began = status.state not in (RunState.NEW, RunState.FAILED)  # one that failed before is tried again
    evaluation = status.evaluation or {}
    return {
        "run": point.run,
        "program_args": dict(point.program_args),
        "state": end["state"] if end else str(status.state) if began else "new",
        "message": (end or {}).get("message") or status.message,
        "step": status.step,
        "steps": status.steps,
        "evaluation": evaluation.get("metrics") or {},
        "evaluated_step": evaluation.get("step"),
        "goodput": status.ledger.get("goodput") if status.ledger else None,
    }


def describe_sweep(summary: Mapping[str, Any]) -> str:
    """Lay a sweep out as a table; below it why a point failed, and what else was said of one that has ended."""
    rows = [("PARAMETERS", "STATE", "EVALUATION", "STEPS", "GOODPUT", "RUN")]
    for point in summary["points"]:
        goodput = "-" if point["goodput"] is None else f"{100 * point['goodput']:.1f} %"
        steps = "-" if point["step"] is None else f"{point['step']}/{point['steps']}"
        evaluation = render_metrics(point["evaluation"]) or "-"
        parameters = describe_values(point["program_args"]) or "-"
        rows.append((parameters, point["state"], evaluation, steps, goodput, point["run"]))
    ended = [point for point in summary["points"] if point["state"] in ENDS]
    failed = [point for point in summary["points"] if point["state"] == RunState.FAILED]
    state = "over" if summary["over"] else f"{len(ended)} of {summary['size']} points have ended"
    lines = [f"sweep {summary['name']}: {state}" + (f", {len(failed)} failed" if failed else ""), lay_out(rows)]
    for point in ended:
        if point["message"]:
            message = point["message"].replace("\n", "\n  ")
            lines.append(f"{point['run']}{' failed' if point in failed else ''}: {message}")
    return "\n".join(lines)
