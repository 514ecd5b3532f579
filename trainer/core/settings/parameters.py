"""The parameters of a user's program, as text and in settings.

Their values are what JSON can say, so that settings, records and other machines tell the same.
"""

from __future__ import annotations

import datetime
import json
import keyword
import math
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 10_000  # characters of JSON: they travel on command lines, and stand in tables


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE of a command line; raises ValueError. A value that is no JSON is a text."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: expected NAME=VALUE, as in --set learning_rate=0.01")
        if name in values:
            raise ValueError(f"--set {name} is given twice, and one of the two would be lost: give it once")
        values[name] = parse_value(value)
    if problem := values_problem(values):
        raise ValueError(f"--set: {problem}")
    return values


def parse_value(text: str) -> Any:
    """Return what a text says as JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def values_problem(values: Mapping[Any, object]) -> str | None:
    """Say what is wrong with parameters whatever program they are for; None where nothing is."""
    try:
        return _values_problem(values)
    except RecursionError:
        return "they are nested too deeply: name a file that the program reads"


def _values_problem(values: Mapping[Any, object]) -> str | None:
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            return f"{name!r} can't name a parameter of a constructor: use letters, digits and underscore"
        if (date := find_date(value)) is not None:
            written = date.isoformat()
            return f'{name} has the date {written}; expected what JSON can say: write it in quotes, "{written}"'
        if not is_json(value):
            return (
                f"{name} is {value!r}: expected what JSON can say, which is a text, a finite number, true, false, "
                "null, a list, or a mapping with texts as keys"
            )
    length = len(json.dumps(dict(values)))
    if length > LONGEST:
        return f"they are {length:,} characters long, and {LONGEST:,} is the most: name a file that the program reads"
    return None


def is_json(value: object) -> bool:
    """Return whether JSON brings the value back as it is."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(each) for key, each in value.items())
    return value is None or isinstance(value, (str, int))


def find_date(value: object) -> datetime.date | None:
    """Return the first date in a value: YAML makes one of 2024-01-01 without quotes."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, datetime.date):
        return value
    return next((found for part in parts if (found := find_date(part)) is not None), None)


def plain_number(value: float) -> str:
    """Write a number as each version of YAML reads it: 0.001, 1000000, 1.0e-12."""
    if value.is_integer() and abs(value) <= 10**15:
        return str(int(value))
    digits, e, exponent = repr(value).partition("e")
    if not e:
        return digits
    return f"{digits if '.' in digits else digits + '.0'}e{int(exponent):+d}"


def describe_values(values: Mapping[str, Any]) -> str:
    """Say parameters in one line, each as `--set` takes it."""
    return ", ".join(f"{name}={describe_value(value)}" for name, value in values.items())


def describe_value(value: object) -> str:
    plain = isinstance(value, str) and parse_value(value) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
