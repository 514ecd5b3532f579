"""What the operator chose last: <shared>/selection.json, laid over the run settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.setting import unknown_key
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.selections.queue import Queue
from trainer.run.selections.search import Search
from trainer.run.selections.sweep import Sweep

log = logging.getLogger(__name__)
KEYS = ["run", "program", "program_args", "sweep", "queue"]


def selection_path(config: Config) -> Path:
    return Path(config.shared_dir) / "selection.json"


def read_selection(config: Config) -> dict[str, Any]:
    """Return what is selected on the shared path; raises ConfigError, naming the file."""
    try:
        return read_record(selection_path(config)) or {}
    except ValueError as error:
        raise ConfigError(f"{error}; choose a run again with start-cluster, or remove the file") from error


def sweep_of(selection: Mapping[str, Any], shared_dir: str | Path) -> Sweep | None:
    """Return the sweep of a selection, or the queue; None where it names one run. Raises ConfigError."""
    if "queue" in selection:
        return Queue.read(shared_dir)
    if "sweep" not in selection:
        return None
    chosen = selection["sweep"]
    kind = Search if isinstance(chosen, dict) and "search" in chosen else Sweep
    return kind.from_selection(selection, shared_dir)


def selected_sweep(config: Config) -> Sweep | None:
    """Return the sweep, or the queue, that is selected and has the run, or None; raises ConfigError."""
    sweep = sweep_of(read_selection(config), config.shared_dir)
    return sweep if sweep and config.run in [point.run for point in sweep.points] else None


def sweep_or_none(config: Config) -> Sweep | None:
    """Return the selected sweep or queue that has the run; what can't be read now is none."""
    try:
        return selected_sweep(config)
    except (ConfigError, OSError) as error:
        log.warning("the selection can't be read: %s", error)
        return None


def apply_selection(config: Config, selection: Mapping[str, Any] | None = None, evaluates: bool = False) -> Config:
    """Return the settings with the selected run, its program and its parameters; raises ConfigError, naming the file.

    A run that is selected without a program keeps the program that it remembers; a new one takes the settings'. A run
    keeps its parameters. A new one takes the settings', where they are for its program, and over them the selection's.
    In a sweep or the queue that is the current point, or, with `evaluates`, the first that is not evaluated to its end.
    `selection` counts instead of the file's, as one that is to be written.
    """
    selection = read_selection(config) if selection is None else selection
    path = selection_path(config)
    for key in selection:
        if key not in KEYS:
            raise ConfigError(f"{path}: {unknown_key(key, KEYS)}")
    try:
        sweep = sweep_of(selection, config.shared_dir)
        if sweep is not None:
            point = (sweep.unevaluated() if evaluates else sweep.present()) or sweep.last
            config = config.replace(**of_the_run(point.settings))
            selection = point.selection
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
    """Return the settings that points keep as they were when they were asked for.

    Whom to notify is the site's to say: no file on the shared path names a command or an address.
    """
    return {key: value for key, value in settings.items() if not key.startswith("notify_")}


def remember(config: Config, program_is_known: bool) -> dict[str, Any]:
    """Return what the run remembers of its beginning, nothing for a new run; raises ConfigError where it is damaged.

    Where the program is known all the same, the coordinator says that, and a run that failed untrained is a new one.
    """
    directory = RunDirectory(config.shared_dir, config.run)
    try:
        return {} if program_is_known and directory.failed_untrained() else directory.read_settings() or {}
    except ValueError as error:
        if program_is_known:
            return {}
        fix = f"remove the file, or put a good one there, and start run {config.run} again with its --program"
        raise ConfigError(f"{error}; {fix}") from error
