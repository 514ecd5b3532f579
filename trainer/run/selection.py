"""What the operator chose last: <shared>/selection.json, laid over the run settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config, ConfigError, unknown_key
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record

KEYS = ["run", "program"]


def selection_path(config: Config) -> Path:
    return Path(config.shared_dir) / "selection.json"


def apply_selection(config: Config, selection: Mapping[str, Any] | None = None) -> Config:
    """Return the settings with the selected run and program; raises ConfigError, naming the file.

    A run that is selected without a program keeps the program that it remembers; a new one takes the settings'.
    `selection` counts instead of the file's, as one that is to be written.
    """
    path = selection_path(config)
    if selection is None:
        try:
            selection = read_record(path) or {}
        except ValueError as error:
            raise ConfigError(f"{error}; choose a run again with start-cluster, or remove the file") from error
    for key in selection:
        if key not in KEYS:
            raise ConfigError(f"{path}: {unknown_key(key, KEYS)}")
    try:
        chosen = config.replace(**selection)
        if "run" in selection and "program" not in selection:
            return chosen.replace(program=remembered_program(chosen) or chosen.program)
        return chosen
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def remembered_program(config: Config) -> str | None:
    """Return the program that the run began with, None for a new run; raises ConfigError."""
    path = RunDirectory(config.shared_dir, config.run).settings
    try:
        record = read_record(path) or {}
    except ValueError as error:
        mend = f"remove the file, or put a good one there, and start run {config.run} again with its --program"
        raise ConfigError(f"{error}; {mend}") from error
    return record.get("program")
