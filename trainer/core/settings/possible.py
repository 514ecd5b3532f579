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
    yield from _of_checkpoints(config)
    if config.local_run_dir and config.traits.in_step:
        yield (
            f"local_run_dir: with strategy {config.strategy} every member reads the run directory: "
            "give all hosts a shared path, or choose parameter_server"
        )
    yield from _of_the_service(config) if config.input == "service" else _of_sharding(config)
    yield from _of_files(config)
    yield from _of_servers(config)
    yield from _of_tables(config) if config.dynamic_tables else ()


def _of_checkpoints(config: Config) -> Iterator[str]:
    if not (config.checkpoint_steps or config.checkpoint_seconds):
        yield (
            "checkpoint_steps and checkpoint_seconds are both 0, so that a crash would lose the whole run: "
            "set at least one of them"
        )
    if config.checkpoints_kept_best and config.evaluation == "none":
        yield (
            f"checkpoints_kept_best is {config.checkpoints_kept_best}, but evaluation is none, so that no "
            "checkpoint can be ranked: choose another evaluation, or set checkpoints_kept_best to 0"
        )
    if config.checkpoints_kept_best and not config.best_mode:
        yield (
            "checkpoints_best_mode: auto can't tell by the name whether the least or the greatest "
            f"{config.checkpoints_best_metric!r} is the best: write min or max"
        )


def _of_the_service(config: Config) -> Iterator[str]:
    if config.input_position == "exact":
        yield (
            "input: service: the hosts of the group data know no position to go on from: leave input_position "
            "out, or have each worker read its own part with input: local"
        )
    if config.input_sharding not in SERVICE_SHARDINGS:
        yield (
            f"input: service: input_sharding is {config.input_sharding!r}; expected dynamic (the hosts of the group "
            "data divide the data) or off (each of them reads all)"
        )
    if config.traits.in_step:
        yield (
            f"input: service: with strategy {config.strategy} each member reads for itself: leave input out, or "
            "choose another strategy"
        )
    if config.local_run_dir:
        yield (
            "input: service: the hosts of the group data learn on the shared path when a run ends, and "
            "local_run_dir says that there is none: give all hosts a shared path, or leave input out"
        )


def _of_sharding(config: Config) -> Iterator[str]:
    if config.input_sharding == "dynamic" and not config.traits.remote:
        yield (
            f"input_sharding: dynamic gives files to the workers of parameter servers, and strategy {config.strategy} "
            "has none: choose parameter_server, set input: service, or leave input_sharding out"
        )
    if config.traits.remote and config.input_sharding not in ("program", "dynamic"):
        yield (
            f"input_sharding: {config.input_sharding!r} does nothing under {config.strategy}: TensorFlow ignores "
            "the options of a worker's dataset: leave it out, and shard by the context in train_dataset"
        )


def _of_files(config: Config) -> Iterator[str]:
    if config.input_position == "exact" and not config.traits.remote:
        yield (
            f"input_position: exact is for workers of parameter servers, and strategy {config.strategy} has none: "
            "leave it out, or choose parameter_server"
        )
    if config.input_no_files_seconds and not config.input_new_files_seconds:
        yield (
            f"input_no_files_seconds is {config.input_no_files_seconds:g}, and input_new_files_seconds 0, so that no "
            "new file is looked for: set how often to look, or leave both out"
        )
    if config.input_new_files_seconds and (config.input_sharding != "dynamic" or config.input != "local"):
        yield (
            f"input_new_files_seconds is {config.input_new_files_seconds:g}, which is for files that are given to the "
            f"workers, and input_sharding is {config.input_sharding!r}, input {config.input}: set input_sharding: "
            "dynamic and input: local, or leave it out"
        )


def _of_servers(config: Config) -> Iterator[str]:
    wanted = (
        (config.lazy_optimizers, "lazy_optimizers", "tables"),
        (config.weights_ahead, "weights_ahead", "weights"),
        (config.incremental_saves, "incremental_saves", "variables"),
        (config.ps_recovery != "all", "ps_recovery", "variables"),
    )
    for is_wanted, setting, what in wanted:
        if is_wanted and not config.traits.remote:
            yield (
                f"{setting}: it is for {what} on parameter servers, and strategy {config.strategy} has none: "
                "leave it out, or choose parameter_server"
            )
    if config.weights_ahead and config.input_new_files_seconds:
        yield (
            "weights_ahead: with input_new_files_seconds a worker does not know whether a step follows: leave one of "
            "the two out"
        )


def _of_tables(config: Config) -> Iterator[str]:
    if not config.traits.remote:
        yield f"dynamic_tables: strategy {config.strategy} has no parameter servers: choose parameter_server"
    if config.evaluation == "exact":
        yield "dynamic_tables: evaluation is 'exact', which copies the model: take distributed, inline or sidecar"
    if config.initial_weights:
        yield (
            f"dynamic_tables: initial_weights is {config.initial_weights!r}, expected none: it fills tables of rows, "
            "and keys have first values of their own. Leave it out"
        )
