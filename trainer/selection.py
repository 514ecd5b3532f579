"""What the operator chose last: <shared>/selection.json, laid over the run settings."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoints import RunDirectory
from trainer.config import Config, ConfigError, unknown_key
from trainer.records import read_record

KEYS = ["run", "program"]


def selection_path(config: Config) -> Path:
    return Path(config.shared_dir) / "selection.json"


def apply_selection(config: Config) -> Config:
    """Return the settings with the selected run and program; raises ConfigError, naming the file.

    A run that is selected without a program keeps the program that it remembers; a new one takes the settings'.
    """
    path = selection_path(config)
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
            record = read_record(RunDirectory(chosen.shared_dir, chosen.run).settings) or {}
            return chosen.replace(program=record.get("program", chosen.program))
        return chosen
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
