"""When members that are added take part in a training that runs; knows no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTED = {
    "input_position": "the places of input_position: exact are those of a number of parts",
    "evaluation": "evaluation: exact has variables on each worker",
}


def why_at_a_save(settings: Mapping[str, Any]) -> str:
    """Say why workers join only at a save with these run settings; nothing where they join those that train."""
    if settings.get("input_sharding") == "dynamic" and settings.get("input", "local") == "local":
        return "input_sharding: dynamic gives files to the workers with which it began"
    return next((why for name, why in COUNTED.items() if settings.get(name) == "exact"), "")
