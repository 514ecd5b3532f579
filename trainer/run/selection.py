"""What the operator chose last: <shared>/selection.json, laid over the run settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.config import Config, ConfigError
from trainer.core.setting import unknown_key
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.sweep import Point, Sweep

KEYS = ["run", "program", "program_args", "sweep"]


def selection_path(config: Config) -> Path:
    return Path(config.shared_dir) / "selection.json"


def read_selection(config: Config) -> dict[str, Any]:
    """Return what is selected on the shared path; raises ConfigError, naming the file."""
    try:
        return read_record(selection_path(config)) or {}
    except ValueError as error:
        raise ConfigError(f"{error}; choose a run again with start-cluster, or remove the file") from error


def selected_sweep(config: Config) -> Sweep | None:
    """Return the sweep that is selected and has the run, or None; raises ConfigError."""
    selection = read_selection(config)
    sweep = Sweep.of(selection, config.shared_dir) if "sweep" in selection else None
    return sweep if sweep and config.run in [point.run for point in sweep.points] else None


def select_point(selection: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return the selection of one point of a sweep, as if it were chosen by itself."""
    program = {"program": selection["program"]} if "program" in selection else {}
    return {"run": point.run, **program, "program_args": point.program_args}


def apply_selection(config: Config, selection: Mapping[str, Any] | None = None, evaluates: bool = False) -> Config:
    """Return the settings with the selected run, its program and its parameters; raises ConfigError, naming the file.

    A run that is selected without a program keeps the program that it remembers; a new one takes the settings'. A run
    keeps its parameters. A new one takes the settings', where they are for its program, and over them the selection's.
    Of a sweep it is the present point; for who `evaluates`, the first one with something left to evaluate.
    `selection` counts instead of the file's, as one that is to be written.
    """
    selection = read_selection(config) if selection is None else selection
    path = selection_path(config)
    for key in selection:
        if key not in KEYS:
            raise ConfigError(f"{path}: {unknown_key(key, KEYS)}")
    sweep = None
    try:
        if "sweep" in selection:
            sweep = Sweep.of(selection, config.shared_dir)
            config = config.replace(**of_the_run(selection["sweep"].get("settings", {})))
            point = sweep.unevaluated() if evaluates else sweep.present()
            selection = select_point(selection, point or sweep.points[-1])
        chosen = config.replace(**selection)
        # A sweep says what each of its runs began with.
        record = remember(chosen, "program" in selection or sweep is not None)
        if "run" in selection and "program" not in selection:
            chosen = chosen.replace(program=record.get("program", chosen.program))
        given = dict(selection.get("program_args", {}))
        if chosen.program == config.program and not ("run" in selection and record):
            given = {**config.program_args, **given}
        return chosen.replace(program_args={**record.get("program_args", {}), **given})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def of_the_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a sweep's points keep as they were when it was begun.

    Whom to notify is the site's to say: no file on the shared path names a command or an address.
    """
    return {key: value for key, value in settings.items() if not key.startswith("notify_")}


def remember(config: Config, program_is_known: bool) -> dict[str, Any]:
    """Return what the run remembers of its beginning, nothing for a new run; raises ConfigError where it is damaged.

    Where the program is known all the same, the coordinator says that.
    """
    path = RunDirectory(config.shared_dir, config.run).settings
    try:
        return read_record(path) or {}
    except ValueError as error:
        if program_is_known:
            return {}
        mend = f"remove the file, or put a good one there, and start run {config.run} again with its --program"
        raise ConfigError(f"{error}; {mend}") from error
