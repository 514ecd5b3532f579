"""What a search asks for: from where the points of a sweep are chosen, and by which number.

The control machine checks it with this, and each task reads it. Optuna is needed by the coordinator alone
(trainer/run/selections/study.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DIRECTIONS = ("minimize", "maximize")
PRUNERS = ("median", "none")
RANGE, CHOICES = ("low", "high", "log", "step"), ("choices",)
EXPECTED = "expected {low: 1e-4, high: 1e-1, log: true} or {choices: [32, 64]}"
MAX_TRIALS = 1000


@dataclass(frozen=True)
class SearchSpace:
    """A search as a sweep's file has it; `search_problem` says what is wrong with one."""

    trials: int
    """How many points it has."""
    metric: str
    """Of the evaluation."""
    parameters: Mapping[str, Mapping[str, Any]]
    """Of each parameter a range (`low`, `high`, `log`, `step`), or its `choices`."""
    direction: str = "minimize"
    pruner: str = "median"
    n_startup_trials: int = 5
    """So many points finish before one is stopped early."""
    n_warmup_steps: int = 0
    """No point is stopped before this step."""
    seed: int = 0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SearchSpace:
        """Read a search; raises ValueError."""
        if problem := search_problem(record):
            raise ValueError(problem)
        return cls(**record)

    def first(self) -> dict[str, Any]:
        """Return the first point, which needs nothing before it: the middle of each range, the first of the choices."""
        return {name: middle(asked) for name, asked in self.parameters.items()}

    def holds(self, point: Mapping[str, Any]) -> bool:
        """Whether a point, perhaps with other parameters as well, can have been chosen by this search."""
        return all(name in point and holds(asked, point[name]) for name, asked in self.parameters.items())


KEYS = tuple(field.name for field in dataclasses.fields(SearchSpace))


def search_problem(asked: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a search; None where nothing is."""
    if unknown := [key for key in asked if key not in KEYS]:
        return f"unknown key {unknown[0]!r}; the keys of a search are {', '.join(KEYS)}"
    for key, why in (("trials", "how many points it trains"), ("metric", "a metric of the evaluation, such as loss")):
        if key not in asked:
            return f"a search needs {key}: {why}"
    return _numbers_problem(asked) or _words_problem(asked) or _parameters_problem(asked.get("parameters"))


def _numbers_problem(asked: Mapping[str, Any]) -> str | None:
    least = {"trials": 1, "n_startup_trials": 1, "n_warmup_steps": 0, "seed": 0}
    for key, low in least.items():
        if key in asked and not (is_whole(asked[key]) and asked[key] >= low):
            return f"{key} is {asked[key]!r}: expected a whole number of at least {low}"
    if asked["trials"] > MAX_TRIALS:
        return f"trials is {asked['trials']:,}, and {MAX_TRIALS:,} is the most"
    return None


def _words_problem(asked: Mapping[str, Any]) -> str | None:
    if not isinstance(asked["metric"], str) or not asked["metric"]:
        return f"metric is {asked['metric']!r}: expected the name of a metric of the evaluation, such as loss"
    for key, words in (("direction", DIRECTIONS), ("pruner", PRUNERS)):
        if asked.get(key, words[0]) not in words:
            return f"{key} is {asked[key]!r}: expected {' or '.join(words)}"
    return None


def _parameters_problem(parameters: object) -> str | None:
    if not isinstance(parameters, dict) or not parameters:
        return f"parameters is {parameters!r}: {EXPECTED} for each name"
    found = (problem for name, asked in parameters.items() if (problem := distribution_problem(asked, name)))
    return next(found, None)


def distribution_problem(asked: object, name: str) -> str | None:
    """Say what is wrong with a parameter's range or choices; None where nothing is."""
    if not isinstance(asked, dict) or ("choices" in asked) == bool({"low", "high"} & asked.keys()):
        return f"parameter {name} is {asked!r}: {EXPECTED}"
    keys = CHOICES if "choices" in asked else RANGE
    if unknown := [key for key in asked if key not in keys]:
        return f"parameter {name} has the unknown key {unknown[0]!r}; the keys are {', '.join(keys)}"
    if keys is RANGE:
        return _range_problem(asked, name)
    choices = asked["choices"]
    if not isinstance(choices, list) or not choices:
        return f"choices of {name} is {choices!r}: expected a list of values, such as [32, 64]"
    texts = [json.dumps(choice, sort_keys=True, default=str) for choice in choices]
    doubled = next((text for text in texts if texts.count(text) > 1), None)
    return f"choices of {name} has {doubled} twice: name each value once" if doubled else None


def _range_problem(asked: Mapping[str, Any], name: str) -> str | None:
    for key in ("low", "high", "step"):
        if (key != "step" or "step" in asked) and not is_number(asked.get(key)):
            return f"{key} of {name} is {asked.get(key)!r}: expected a number"
    low, high, log, step = asked["low"], asked["high"], asked.get("log", False), asked.get("step")
    if low >= high:
        return f"{name} goes from low {low!r} to high {high!r}: expected a low that is smaller than high"
    if not isinstance(log, bool):
        return f"log of {name} is {log!r}: expected true or false"
    if log and low <= 0:
        return f"low of {name} is {low!r}: with log: true expected more than 0"
    if log and step is not None:
        return f"{name} has log: true and a step: expected one of them"
    if step is not None and not 0 < step <= high - low:
        return f"step of {name} is {step!r}: expected more than 0, and at most {high - low!r}"
    return None


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def has_whole_numbers(asked: Mapping[str, Any]) -> bool:
    """Whether a range is one of whole numbers: all of its numbers are."""
    return all(is_whole(asked[key]) for key in ("low", "high", "step") if key in asked)


def middle(asked: Mapping[str, Any]) -> Any:
    """Return the first choice, or a range's middle: of a logarithmic one the geometric mean."""
    if "choices" in asked:
        return asked["choices"][0]
    low, high, step = asked["low"], asked["high"], asked.get("step")
    if step is not None:
        return low + step * math.floor((high - low) / step / 2)
    value = math.sqrt(low) * math.sqrt(high) if asked.get("log") else low + (high - low) / 2
    return int(value) if has_whole_numbers(asked) else value


def holds(asked: Mapping[str, Any], value: object) -> bool:
    """Whether a parameter can have this value."""
    if "choices" in asked:
        return json.dumps(value, sort_keys=True) in [json.dumps(each, sort_keys=True) for each in asked["choices"]]
    is_kind = is_whole(value) if has_whole_numbers(asked) else is_number(value)
    if not is_kind or not asked["low"] <= value <= asked["high"]:
        return False
    steps = (value - asked["low"]) / asked["step"] if "step" in asked else 0
    return abs(steps - round(steps)) < 1e-8
