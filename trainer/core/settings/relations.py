"""Run settings that are right alone and senseless together: each relation with the sentence that refuses it.

Those that decide whether a training is possible at all are in possible.py. docs/run-settings.md has a row
for each of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

# `Config`, which imports this module; any other object with its fields will do.
Config = Any


def relation_problems(config: Config) -> Iterator[str]:
    """Say which settings don't fit together, each with its value, what was expected and the fix."""
    for relation in RELATIONS:
        if problem := relation.problem(config):
            yield problem


@dataclasses.dataclass(frozen=True)
class Relation:
    """Settings that must fit together, and what is refused, in Markdown."""

    settings: str
    refused: str
    problem: Callable[[Config], str | None]


RELATIONS: list[Relation] = []


def relation(settings: str, refused: str) -> Callable[[Callable[[Config], str | None]], Callable[[Config], str | None]]:
    """Make a function a relation, with its row of the page."""

    def add(problem: Callable[[Config], str | None]) -> Callable[[Config], str | None]:
        RELATIONS.append(Relation(settings, refused, problem))
        return problem

    return add


@relation("`checkpoint_steps` above `steps`, with `checkpoint_seconds: 0`", "no checkpoint before the end")
def _checkpoints(config: Config) -> str | None:
    if config.checkpoint_seconds or config.checkpoint_steps <= config.steps:
        return None
    return (
        f"checkpoint_steps is {config.checkpoint_steps:,}, steps is {config.steps:,}, and checkpoint_seconds is 0, so "
        f"that no checkpoint is saved before the end; expected checkpoint_steps of {config.steps:,} at most, or "
        "checkpoint_seconds of more than 0"
    )


@relation(
    "`checkpoints_kept_hours` below `checkpoint_seconds`, without `checkpoint_steps`",
    "every checkpoint would be kept for ever",
)
def _kept_hours(config: Config) -> str | None:
    kept = config.checkpoints_kept_hours * 3600
    if not kept or config.checkpoint_steps or kept >= config.checkpoint_seconds:
        return None
    return (
        f"checkpoints_kept_hours is {config.checkpoints_kept_hours:g} ({kept:g} s), and a checkpoint is saved every "
        f"checkpoint_seconds, {config.checkpoint_seconds:g}, so that each one would be kept for ever; expected more "
        "hours than that, or 0 to keep none besides"
    )


@relation("`epoch_steps` above `steps`", "no epoch would be whole")
def _epochs(config: Config) -> str | None:
    if config.epoch_steps <= config.steps:
        return None
    return (
        f"epoch_steps is {config.epoch_steps:,}, and steps is {config.steps:,}, so that no epoch would ever be whole; "
        f"expected {config.steps:,} at most, or 0: then the whole run is one epoch"
    )


@relation(
    "`partitioner_min_bytes` above `partitioner_max_bytes`",
    "a least size above the largest. The one that the partitioner does not use may keep its default",
)
def _shard_sizes(config: Config) -> str | None:
    least, most = config.partitioner_min_bytes, config.partitioner_max_bytes
    # The size that this partitioner does not use is no mistake while it is the default.
    unused = {"min_size": most == type(config).partitioner_max_bytes}
    unused["max_size"] = least == type(config).partitioner_min_bytes
    if least <= most or unused.get(config.partitioner, False):
        return None
    return (
        f"partitioner_min_bytes is {least:,}, and partitioner_max_bytes is {most:,}; expected a least size that is not "
        "above the largest. Leave out the one that the partitioner does not use"
    )


@relation("`partitioner` with a strategy without parameter servers", "nothing to split over")
def _partitioner(config: Config) -> str | None:
    default = type(config).partitioner
    if config.traits.remote or config.partitioner in (default, "none"):
        return None
    return (
        f"partitioner is {config.partitioner!r}, and strategy {config.strategy} has no parameter servers to split "
        "variables over; expected it to be left out, or strategy parameter_server"
    )


@relation(
    "`member_wait_timeout_seconds` below `ps_grace_seconds`, with `elastic`",
    "the run would end before it goes on without a ps",
)
def _waits(config: Config) -> str | None:
    limit, wait = config.member_wait_timeout_seconds, config.ps_grace_seconds
    if not (config.traits.remote and config.elastic and 0 < limit < wait):
        return None
    return (
        f"member_wait_timeout_seconds is {limit:g}, and ps_grace_seconds is {wait:g}, so that a run would end with an "
        f"error before it goes on without a missing ps; expected {wait:g} or more, or 0 to wait for ever"
    )


@relation(
    "`training_timeout_seconds` or `restoring_timeout_seconds` no longer than `heartbeat_timeout_seconds`",
    "the coordinator would start again before it notices a silent member",
)
def _deadlines(config: Config) -> str | None:
    heartbeat = config.heartbeat_timeout_seconds
    for key in ("restoring_timeout_seconds", "training_timeout_seconds"):
        deadline = getattr(config, key)
        if config.traits.remote and deadline <= heartbeat:
            return (
                f"{key} is {deadline:g}, and heartbeat_timeout_seconds is {heartbeat:g}, so that the coordinator would "
                f"be started again before it notices a silent member; expected {key} of more than {heartbeat:g}"
            )
    return None
