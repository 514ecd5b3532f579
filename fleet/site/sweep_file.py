"""A sweep: from the operator's file to the selection that the cluster follows, and looking on while it does."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import OperatorMistake, first_line
from fleet.site.schema.inventory_reading import plain
from fleet.site.schema.problems import show
from trainer.core.settings.formats import NO_PROGRAM_NAME, RUN_NAME, program_name_problem
from trainer.core.settings.parameters import values_problem
from trainer.core.settings.search_space import KEYS as SEARCH_KEYS
from trainer.core.settings.search_space import SearchSpace, search_problem

KEYS = ("name", "program", "program_args", "grid", "points", "search")
MAX_POINTS = 1000
# It travels on command lines, the longest of which Linux takes has 131,071 bytes.
LONGEST = 50_000
MAX_CHARACTERS = 1_000_000  # of the file, with its comments
EXPECTED = "expected a mapping of `grid` (each name with a list of values), `points` (a list of mappings) or `search`"


class Loader(yaml.SafeLoader):
    """YAML 1.1, which alone would read 1e-3 as a text."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_sweep_file(path: Path) -> dict[str, Any]:
    """Return the selection that a sweep's file asks for; raises OperatorMistake."""
    try:
        if path.exists() and not path.is_file():  # a device has no end
            raise ValueError("it is no regular file")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
        content = plain(yaml.load(text, Loader=Loader))  # which refuses anchors that multiply
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        fix = "Name a YAML file (docs/sweeps.md)"
        raise OperatorMistake(f"the sweep {show(str(path))} can't be read: {why}. {fix}") from error
    except yaml.YAMLError as error:
        raise OperatorMistake(f"the sweep {path} is no YAML: {error}") from error
    if problem := file_problem(content, path.stem):
        raise OperatorMistake(f"{path}: {problem}")
    grid = content.get("grid")
    number = len(content.get("points", [])) + (math.prod(map(len, grid.values())) if grid else 0)
    if number > MAX_POINTS:
        raise OperatorMistake(f"{path}: {number:,} points, and {MAX_POINTS:,} is the most: make several files of it")
    points = list(list_points(content))
    common, seen = content.get("program_args", {}), set()
    for point in points:
        if problem := values_problem({**common, **point}):
            raise OperatorMistake(f"{path}: {problem}")
        text = json.dumps(point, sort_keys=True)  # which tells true from 1
        if text in seen:
            raise OperatorMistake(f"{path}: the point {json.dumps(point)} stands twice; each is trained once")
        seen.add(text)
    selection = {key: content[key] for key in ("program", "program_args") if key in content}
    selection["sweep"] = {"name": str(content.get("name", path.stem)), "points": points, **search_in(content)}
    length = len(json.dumps(selection))
    if length > LONGEST:
        raise OperatorMistake(
            f"{path}: its points are {length:,} characters long, and {LONGEST:,} is the most. Put what they have in "
            "common into program_args, or make several files of it"
        )
    return selection


def file_problem(content: Any, stem: str) -> str | None:
    """Say what is wrong with a sweep's file; None where nothing is."""
    if not isinstance(content, dict):
        return EXPECTED
    for key in content:
        if key in SEARCH_KEYS and "search" not in content:
            return f"{key} is of a search: add search: optuna"
        if key not in (*KEYS, *SEARCH_KEYS):
            return f"unknown key {show(key)}; the keys are {', '.join(KEYS)}, and of a search {', '.join(SEARCH_KEYS)}"
    name, grid, points = content.get("name", stem), content.get("grid", {}), content.get("points", [])
    if not isinstance(name, str) or not RUN_NAME.fullmatch(f"{name}-{MAX_POINTS}"):
        return f"name is {show(name)}: the runs are called after it; use letters, digits, '.', '_' and '-'"
    if not isinstance(program := content.get("program", "p:P"), str) or program_name_problem(program):
        more = program_name_problem(program) if isinstance(program, str) else NO_PROGRAM_NAME
        return f"program is {show(program)}: " + (
            "expected package.module:Name" if more == NO_PROGRAM_NAME else f"it {more}"
        )
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        return f"grid is {show(grid)}: expected a list of values for each name, such as learning_rate: [0.1, 0.01]"
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        return f"points is {show(points)}: expected a list of mappings, such as - {{learning_rate: 0.1}}"
    if not grid and not points and "search" not in content:
        return EXPECTED
    common = content.get("program_args", {})
    if not isinstance(common, dict):
        return f"program_args is {show(common)}: expected a mapping of names to values"
    return choosing_problem(content, common) if "search" in content else None


def choosing_problem(content: Mapping[str, Any], common: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a search in a sweep's file; None where nothing is."""
    if content["search"] != "optuna":
        return f"search is {show(content['search'])}: expected optuna"
    if listed := [key for key in ("grid", "points") if key in content]:
        return f"it has a search and {listed[0]}: make two files of it, since a search chooses its points itself"
    search = search_of(content)
    if problem := search_problem(search):
        return problem
    if problem := values_problem(SearchSpace.from_record(search).first()):
        return problem
    for name, asked in search["parameters"].items():
        for choice in asked.get("choices", []):
            if problem := values_problem({name: choice}):
                return problem
    doubled = [name for name in search["parameters"] if name in common]
    return f"{doubled[0]} is in program_args and in parameters: leave one of them out" if doubled else None


def search_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sweep's file has of a search, empty of a file without one."""
    return {key: content[key] for key in SEARCH_KEYS if key in content}


def search_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a search adds to a selection's sweep."""
    return {"search": search_of(content)} if "search" in content else {}


def size_of(sweep: Mapping[str, Any]) -> int:
    """Return how many points a selection's sweep has, with those that are still to be chosen."""
    return int(sweep["search"]["trials"]) if "search" in sweep else len(sweep["points"])


def list_points(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the grid's combinations, the last name changing first, then the points."""
    grid = content.get("grid", {})
    if grid:
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))
    yield from content.get("points", [])


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two selections are of the same sweep, whatever attempt they are."""
    return without_attempt(one) == without_attempt(other)


def without_attempt(selection: Mapping[str, Any]) -> dict[str, Any]:
    sweep = {key: value for key, value in selection.get("sweep", {}).items() if key not in ("attempt", "settings")}
    return {**selection, "sweep": sweep}
