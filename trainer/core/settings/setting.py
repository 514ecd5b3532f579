"""What a run setting is: its default, what it means, and which values are right."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.core.settings.parameters import plain_number

REQUIRED: Any = dataclasses.MISSING
# More is a mistake of the hand; and what is added to them stays in TensorFlow's 64 bits.
MAX_SECONDS = 315_360_000  # ten years
MAX_WHOLE = 10**15
# Less than a millisecond, or its part of an hour, is no duration that anything here keeps to.
MIN_SECONDS = MIN_HOURS = 0.001
# So many known names a message has; more hide what it says.
MAX_LISTED = 12
Check = Callable[[str, Any], str | None]
"""Says what is wrong with a setting's value, by its key; None where it is right. The value has the setting's type."""
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    Mapping: "a mapping of names to values",
}


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of a setting beside its name, its type and its default."""

    meaning: str
    """For docs/run-settings.md, in Markdown."""
    check: Check | None = None
    choices: tuple[str, ...] = ()
    """The values that it may have, where these are few."""


def setting(default: Any, meaning: str, check: Check | None = None, *, choices: Collection[str] = ()) -> Any:
    """Declare a setting as a field of a dataclass; `default` is REQUIRED for none, and `dict` for an empty mapping.

    Where there are `choices`, the check is that the value is one of them, unless another is given.
    """
    check = one_of(choices) if choices and check is None else check
    metadata = {"setting": Setting(meaning, check, tuple(choices))}
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Return what a field was declared with."""
    declared: Setting = field.metadata["setting"]
    return declared


def check_that(holds: Callable[[Any], bool], expected: str) -> Check:
    """Return the check that `holds`; `expected` begins with "must"."""
    return lambda key, value: None if holds(value) else f"{key}: {expected}, not {value!r}"


above_zero = check_that(lambda value: value > 0, "must be more than 0")


def empty_or(holds: Callable[[Any], bool], expected: str) -> Check:
    """Return the check that `holds` of a text which is not empty."""
    return check_that(lambda value: value == "" or holds(value), expected)


def at_least(least: int, why: str = "") -> Check:
    """Return the check of the smallest value, with why it is that."""
    return check_that(lambda value: value >= least, f"must be at least {least}{why}")


def from_zero(zero: str = "") -> Check:
    """Return the check of a value that is not negative; `zero` is what 0 means."""
    return check_that(lambda value: value >= 0, f"must be 0 ({zero}) or more" if zero else "must be 0 or more")


def one_of(choices: Collection[str], more: str = "") -> Check:
    """Return the check of a choice."""
    return check_that(lambda value: value in choices, f"must be one of {', '.join(choices)}{more}")


def found(problem: Callable[[Any], str | None]) -> Check:
    """Return the check that a function finds no problem."""
    return lambda key, value: f"{key}: {message}" if (message := problem(value)) else None


def value_problem(key: str, value: object, kinds: tuple[type, ...], declared: Setting) -> str | None:
    """Say what is wrong with one setting by itself; None where it is right."""
    if problem := type_problem(key, value, kinds):
        return problem
    if isinstance(value, (int, float)) and (problem := number_problem(key, value)):
        return problem
    return declared.check(key, value) if declared.check else None


def number_problem(key: str, value: float) -> str | None:
    """Say why a number is none that any setting may have."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key}: must be a finite number, not {value!r}; docs/run-settings.md says which value is for ever"
    most = MAX_SECONDS if key.endswith("_seconds") else MAX_WHOLE
    if abs(value) > most:
        return f"{key}: must be at most {most:,}"
    least = MIN_SECONDS if key.endswith("_seconds") else MIN_HOURS if key.endswith("_hours") else 0
    if 0 < value < least:
        return f"{key}: must be at least {least:g}, not {value!r}"
    return None


def type_problem(key: str, value: object, kinds: tuple[type, ...]) -> str | None:
    """Say why the value lacks the type; a whole number will do where a number is expected."""
    accepted = (*kinds, int) if float in kinds else kinds
    if isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool)):
        return None
    wanted = " or ".join(TYPE_NAMES[kind] for kind in kinds)
    fix = f"; {fix}" if isinstance(value, str) and (fix := text_fix(key, value, kinds)) else ""
    if isinstance(value, datetime.date):
        written = value.isoformat()
        return f'{key}: expected {wanted}, not the date {written}; YAML reads it so: write it in quotes, "{written}"'
    if isinstance(value, bool) and str in kinds:
        fix = '; YAML reads off, no, on and yes as that: write them in quotes, as "off"'
    elif isinstance(value, (int, float)) and kinds == (str,):
        fix = f'; write it in quotes, "{value}"'
    return f"{key}: expected {wanted}, not {value!r}{fix}"


def text_fix(key: str, text: str, kinds: tuple[type, ...]) -> str:
    """Say how to write what a text was meant for; nothing where that can't be known."""
    if is_number(text):
        return number_fix(text, kinds)
    if bool in kinds and (word := text.lower()) in ("true", "yes", "on", "false", "no", "off"):
        return f"write {'true' if word in ('true', 'yes', 'on') else 'false'} without quotes"
    duration = DURATION.fullmatch(text.lower())
    if duration and key.endswith("_seconds"):
        return f"it is in seconds: write {plain_number(float(duration[1]) * UNITS[duration[2][0]])}"
    digits = text.replace(",", "")
    return f"write {digits}" if int in kinds and text != digits and digits.isdecimal() else ""


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def number_fix(text: str, kinds: tuple[type, ...]) -> str:
    """Say how to write the number that a text is: YAML reads 1e6 as a text, with quotes and without."""
    if "e" not in text.lower():
        return "write it without quotes"
    number = float(text)
    if not number.is_integer() and float not in kinds:
        return "write a whole number in digits alone"
    return f"YAML takes it for a text: write {plain_number(number)}"


def unknown_key(key: object, known: list[str]) -> str:
    """Say that a key is unknown, and which ones may have been meant."""
    begin = f"unknown key {key!r} in the run settings"
    word = str(key).lower()
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.8) or difflib.get_close_matches(word, known):
        return f"{begin}: did you mean {' or '.join(map(repr, close))}?"
    if len(known) <= MAX_LISTED:
        return f"{begin}; the keys are {', '.join(known)}"
    return f"{begin}; docs/run-settings.md lists them. A parameter of the program itself belongs in program_args"
