"""What the run settings say of dynamic tables. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

# A layer's name is a part of file names.
LAYER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
MAX_ROWS = 2**40
MAX_STEPS = 2**31 - 1  # the last step of a row is a number of 32 bits


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """One dynamic table: the setting's keys, with their defaults."""

    capacity: int
    """The rows that all ps have room for together."""
    sightings: int = 1
    """In how many steps a key must be seen before it gets a row."""
    evict_after_steps: int = 0
    """How many steps may not train a row before it is removed; 0: rows stay."""
    evict_after_seconds: int = 0
    """How many seconds no step may train a row before it is removed; 0: rows stay."""
    incremental_saves: int = 0
    """How many checkpoints after a whole one write only the rows that have changed, with links to the others."""


LEAST = {"capacity": 1, "sightings": 1, "evict_after_steps": 0, "evict_after_seconds": 0, "incremental_saves": 0}
MOST = {
    "capacity": MAX_ROWS,
    **dict.fromkeys(("sightings", "evict_after_steps", "evict_after_seconds"), MAX_STEPS),
    "incremental_saves": 1000,
}


def tables_of(setting: Mapping[str, Any]) -> dict[str, TableSettings]:
    """Return the tables of a setting that `tables_problem` has nothing against, by their layers' names."""
    return {name: TableSettings(**table) for name, table in setting.items()}


def tables_problem(setting: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the setting; None where it is right."""
    for name, table in setting.items():
        if not isinstance(name, str) or not LAYER_NAME.fullmatch(name):
            return f"{name!r} is no name of a layer: use letters, digits, '_' and '-', at most 100"
        if problem := table_problem(table):
            return f"{name}: {problem}"
    return None


def table_problem(table: object) -> str | None:
    """Say what is wrong with what is set for one table; None where it is right."""
    if not isinstance(table, Mapping):
        return f"expected a mapping such as {{capacity: 1000000}}, not {table!r}"
    for key, value in table.items():
        if key not in LEAST:
            close = difflib.get_close_matches(str(key), LEAST, n=1)
            return f"unknown key {key!r}; " + (f"did you mean {close[0]}?" if close else f"it takes {', '.join(LEAST)}")
        if not isinstance(value, int) or isinstance(value, bool) or not LEAST[key] <= value <= MOST[key]:
            return f"{key} must be a whole number from {LEAST[key]} to {MOST[key]:,}, not {value!r}"
    if "capacity" not in table:
        return "capacity is missing: set the greatest number of rows that you expect, such as capacity: 1000000"
    return None
