"""How a training that runs takes members that are added, and goes on without drained ones; knows no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.core.settings.config import Config

COUNTED = {
    "input_position": "the places of input_position: exact are those of a number of parts",
    "evaluation": "evaluation: exact has variables on each worker",
}


def why_at_a_save(settings: Mapping[str, Any]) -> str:
    """Say why workers join only at a save with these run settings; nothing where they join those that train."""
    if _gives_files(settings):
        return "input_sharding: dynamic gives files to the workers with which it began"
    return next((why for name, why in COUNTED.items() if settings.get(name) == "exact"), "")


def forms_again_without(settings: Mapping[str, Any], gpus: int) -> bool:
    """Return whether a drained worker's part of the data costs a save and a new generation with these run settings.

    `gpus` is how many a worker has.
    """
    has_parts = settings.get("input") != "service" and not _gives_files(settings)
    can_divide = settings.get("input_position") != "exact" and gpus <= 1
    return has_parts and not can_divide and settings.get("elastic", Config.elastic)


def _gives_files(settings: Mapping[str, Any]) -> bool:
    return settings.get("input_sharding") == "dynamic" and settings.get("input", "local") == "local"
