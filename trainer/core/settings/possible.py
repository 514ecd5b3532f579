"""Run settings with which no training is possible: each with the sentence that refuses it.

trainer/core/settings/relations.py has those with which a training is possible and makes no sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SERVICE_SHARDINGS = ("off", "dynamic")

# `Config`, which imports this module; any other object with its fields will do.
Config = Any


def impossibilities(config: Config) -> Iterator[str]:
    """Say what stands against a training, each with the value, what was expected and the fix."""
    of_input = (_service, _sharding, _position, _new_files)
    of_tables = (_lazy, _ahead, _incremental_saves, _tables)
    for impossibility in (_checkpoints, _best, _run_directory, *of_input, *of_tables, _ps_recovery):
        if problem := impossibility(config):
            yield problem


def _checkpoints(config: Config) -> str | None:
    if config.checkpoint_steps or config.checkpoint_seconds:
        return None
    return (
        "checkpoint_steps and checkpoint_seconds are both 0, so that a crash would lose the whole run: "
        "set at least one of them"
    )


def _best(config: Config) -> str | None:
    if config.checkpoints_kept_best and config.evaluation == "none":
        return (
            f"checkpoints_kept_best is {config.checkpoints_kept_best}, but evaluation is none, so that no "
            "checkpoint can be ranked: choose another evaluation, or set checkpoints_kept_best to 0"
        )
    if config.checkpoints_kept_best and not config.best_mode:
        return (
            "checkpoints_best_mode: auto can't tell by the name whether the least or the greatest "
            f"{config.checkpoints_best_metric!r} is the best: write min or max"
        )
    return None


def _run_directory(config: Config) -> str | None:
    if not (config.local_run_dir and config.traits.in_step):
        return None
    return (
        f"local_run_dir: with strategy {config.strategy} every member reads the run directory: "
        "give all hosts a shared path, or choose parameter_server"
    )


def _service(config: Config) -> str | None:
    if config.input != "service":
        return None
    if config.input_position == "exact":
        return (
            "input: service: the hosts of the group data know no position to go on from: leave input_position "
            "out, or have each worker read its own part with input: local"
        )
    if config.input_sharding not in SERVICE_SHARDINGS:
        return (
            f"input: service: input_sharding is {config.input_sharding!r}; expected dynamic (the hosts of the group "
            "data divide the data) or off (each of them reads all)"
        )
    if config.traits.in_step:
        return (
            f"input: service: with strategy {config.strategy} each member reads for itself: leave input out, or "
            "choose another strategy"
        )
    if config.local_run_dir:
        return (
            "input: service: the hosts of the group data learn on the shared path when a run ends, and "
            "local_run_dir says that there is none: give all hosts a shared path, or leave input out"
        )
    return None


def _sharding(config: Config) -> str | None:
    if config.input == "service":
        return None
    if config.input_sharding == "dynamic" and config.traits.remote:
        return None
    if config.input_sharding == "dynamic":
        return (
            f"input_sharding: dynamic gives files to the workers of parameter servers, and strategy {config.strategy} "
            "has none: choose parameter_server, set input: service, or leave input_sharding out"
        )
    if config.traits.remote and config.input_sharding != "program":
        return (
            f"input_sharding: {config.input_sharding!r} does nothing under {config.strategy}: TensorFlow ignores "
            "the options of a worker's dataset: leave it out, and shard by the context in train_dataset"
        )
    return None


def _position(config: Config) -> str | None:
    if config.input_position != "exact" or config.traits.remote:
        return None
    return (
        f"input_position: exact is for workers of parameter servers, and strategy {config.strategy} has none: "
        "leave it out, or choose parameter_server"
    )


def _new_files(config: Config) -> str | None:
    if config.input_no_files_seconds and not config.input_new_files_seconds:
        return (
            f"input_no_files_seconds is {config.input_no_files_seconds:g}, and input_new_files_seconds 0, so that no "
            "new file is looked for: set how often to look, or leave both out"
        )
    if config.input_new_files_seconds and (config.input_sharding != "dynamic" or config.input != "local"):
        return (
            f"input_new_files_seconds is {config.input_new_files_seconds:g}, which is for files that are given to the "
            f"workers, and input_sharding is {config.input_sharding!r}, input {config.input}: set input_sharding: "
            "dynamic and input: local, or leave it out"
        )
    return None


def _without_servers(config: Config, setting: str, what: str) -> str | None:
    if config.traits.remote:
        return None
    return (
        f"{setting}: it is for {what} on parameter servers, and strategy {config.strategy} has none: "
        "leave it out, or choose parameter_server"
    )


def _lazy(config: Config) -> str | None:
    return _without_servers(config, "lazy_optimizers", "tables") if config.lazy_optimizers else None


def _incremental_saves(config: Config) -> str | None:
    return _without_servers(config, "incremental_saves", "variables") if config.incremental_saves else None


def _ahead(config: Config) -> str | None:
    if not config.weights_ahead:
        return None
    if problem := _without_servers(config, "weights_ahead", "weights"):
        return problem
    if config.input_new_files_seconds:
        return (
            "weights_ahead: with input_new_files_seconds a worker does not know whether a step follows: leave one of "
            "the two out"
        )
    return None


def _ps_recovery(config: Config) -> str | None:
    if config.ps_recovery == "all":
        return None
    return _without_servers(config, "ps_recovery", "variables")


def _tables(config: Config) -> str | None:
    if not config.dynamic_tables:
        return None
    if not config.traits.remote:
        return f"dynamic_tables: strategy {config.strategy} has no parameter servers: choose parameter_server"
    if config.evaluation == "exact":
        return "dynamic_tables: evaluation is 'exact', which copies the model: take distributed, inline or sidecar"
    if config.initial_weights:
        return (
            f"dynamic_tables: initial_weights is {config.initial_weights!r}, expected none: it fills tables of rows, "
            "and keys have first values of their own. Leave it out"
        )
    return None
