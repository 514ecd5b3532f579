"""Values of records, which may be damaged: as a page can show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.telemetry.goodput import KINDS
from trainer.telemetry.history import number_of

LAST_TIME = 253_402_300_799.0  # of the year 9999


def mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    return "" if value is None else str(value)


def int_or_none(value: object) -> int | None:
    number = number_of(value)
    return int(number) if number is not None and math.isfinite(number) else None


def finite_or_none(value: object) -> float | None:
    """Return a number that a curve can show, in the digits that it shows; None where it is none."""
    number = number_of(value)
    return float(f"{number:.5g}") if number is not None and math.isfinite(number) else None


def time_of(value: object) -> float | None:
    """Return a time that a clock may have shown; None where it is none."""
    number = number_of(value)
    return number if number is not None and 0 < number < LAST_TIME else None


def json_number(value: object) -> float | str | None:
    """Return a number as JSON has it: NaN and infinite ones are texts."""
    number = number_of(value)
    if number is None:
        return None
    return finite_or_none(number) if math.isfinite(number) else "NaN" if math.isnan(number) else str(number)


def read_ledger(record: Any) -> dict[str, float]:
    """Return the seconds of each kind that there are."""
    found = {}
    for kind in KINDS:
        seconds = number_of(mapping(record).get(kind))
        if seconds is not None and math.isfinite(seconds) and seconds > 0:
            found[kind] = seconds
    return found
