"""What the operator chose last: <shared>/selection.json, laid over the run settings."""

from __future__ import annotations

from pathlib import Path

from trainer.config import Config, ConfigError, unknown_key
from trainer.records import read_record

KEYS = ["run", "program"]


def selection_path(config: Config) -> Path:
    return Path(config.shared_dir) / "selection.json"


def apply_selection(config: Config) -> Config:
    """Return the settings with the selected run and program; raises ConfigError, naming the file."""
    path = selection_path(config)
    try:
        selection = read_record(path) or {}
    except ValueError as error:
        raise ConfigError(f"{error}; choose a run again with start-cluster, or remove the file") from error
    for key in selection:
        if key not in KEYS:
            raise ConfigError(f"{path}: {unknown_key(key, KEYS)}")
    try:
        return config.replace(**selection)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
