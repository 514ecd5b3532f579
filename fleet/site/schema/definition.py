"""The groups and variables of fleet/site/schema/inventory.yml, and the check of one value by its JSON Schema."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fleet.site.schema.formats import FORMATS
from trainer.core.settings.config import Config
from trainer.core.settings.search_space import is_number, is_whole

# Ansible imports this again in the process of each host's task, and jsonschema takes most of that time.
if TYPE_CHECKING:
    from jsonschema import FormatChecker, ValidationError

FILE = Path(__file__).with_name("inventory.yml")
# Beside trainer_run instead of in it they would set nothing.
RUN_SETTINGS = frozenset(Config.__dataclass_fields__)
# Two names that differ in no more than these characters are easily taken for one another.
_ALIKE = re.compile("[-_. ]")
_NUMBER = re.compile(r"(\w+ )?from (\d+) to (\d+)(, .*)?")
_CLOSE = 0.7
_VERY_CLOSE = 0.9


@dataclass(frozen=True)
class Variable:
    """One variable: its JSON Schema, and what psfleet says of it beside."""

    name: str
    schema: Mapping[str, Any]

    @property
    def scope(self) -> str:
        return str(self.schema["scope"])

    @property
    def description(self) -> str:
        return str(self.schema["description"])

    @property
    def expected(self) -> str:
        return str(self.schema["expected"])

    @property
    def role(self) -> str | None:
        role: str | None = self.schema.get("role")
        return role

    @property
    def secret(self) -> bool:
        """Whether no message may show its value."""
        return bool(self.schema.get("secret"))

    @property
    def mandatory(self) -> bool:
        return bool(self.schema.get("mandatory"))

    def reason_against(self, value: object) -> str | None:
        """Say why a value is refused, perhaps in no words; None where it is right."""
        try:
            error = next(_validator(self.name).iter_errors(value), None)
        # A message has the value, and Python writes no number of more than 4300 digits; a key may be no text.
        except (TypeError, ValueError):
            return ""
        return None if error is None else _reason(error)


@dataclass(frozen=True)
class Definition:
    """The whole of inventory.yml."""

    prefixes: tuple[str, ...]
    groups: Mapping[str, Mapping[str, Any]]
    variables: Mapping[str, Variable]
    listeners: Mapping[int, str]

    def named(self, scope: str) -> list[str]:
        return [name for name, variable in self.variables.items() if variable.scope == scope]

    def is_ours(self, name: str) -> bool:
        """Whether psfleet has a say in a variable of this name: it is known, or nobody else may use it."""
        return (
            name in self.variables
            or name in RUN_SETTINGS
            or name.startswith(self.prefixes)
            or name in _misspelt()
            or very_close(name) is not None
        )


@cache
def definition() -> Definition:
    """Read inventory.yml, once."""
    content = yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Definition(
        prefixes=tuple(content["prefixes"]),
        groups=content["groups"],
        variables={name: Variable(name, _spelt_out(schema)) for name, schema in content["variables"].items()},
        listeners={each["port"]: each["what"] for each in content["listeners"]},
    )


def _spelt_out(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a variable's schema with its scope, and what its `from` and its `number` stand for."""
    if "from" in schema:
        return {**schema, "scope": "derived", "mandatory": "role" in schema and "default" not in schema}
    schema = {"scope": "host", **schema}
    found = _NUMBER.fullmatch(schema.get("number", ""))
    if found is None:
        return schema
    expected = f"a number {'of ' if found[1] else ''}{schema['number']}"
    bounds = {"minimum": int(found[2]), "maximum": int(found[3])}
    return {**schema, "type": "integer", **bounds, "expected": expected}


@cache
def _misspelt() -> Mapping[str, str]:
    return {name: each.name for each in definition().variables.values() for name in each.schema.get("misspelt", ())}


def meant_variable(name: str) -> str | None:
    """Which variable was probably meant by an unknown name."""
    known = definition().variables
    if name in _misspelt():
        return _misspelt()[name]
    settable = [each for each, variable in known.items() if variable.scope != "derived"]
    return _closest(name, settable, _CLOSE)


def meant_group(name: str) -> str | None:
    """Which group was probably meant by an unknown name."""
    known = definition().groups
    for group, description in known.items():
        if name.lower() in description.get("misspelt", ()):
            return group
    return _closest(name, known, _CLOSE)


@cache
def very_close(name: str) -> str | None:
    """Which variable a name is, but for a character or its case, whatever its prefix."""
    if not isinstance(name, str) or len(name) > 60:
        return None
    names = [each for each in definition().variables if abs(len(each) - len(name)) <= 1]
    return _closest(name, names, _VERY_CLOSE) if name not in names else None


def _closest(name: str, names: Iterable[str], cutoff: float) -> str | None:
    plain = _ALIKE.sub("", name[:100].lower())
    found = {_ALIKE.sub("", each): each for each in names}
    if plain in found:
        return found[plain]
    close = difflib.get_close_matches(plain, found, n=1, cutoff=cutoff)
    return found[close[0]] if close else None


_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_UNQUOTED = """write it without quotes; -e makes a text of all but JSON, such as -e '{{"name": {}}}'"""
_BOOLEAN = "write {} without quotes, in an INI file {}; -e makes a text of all but JSON, such as -e '{{\"name\": {}}}'"


def _reason(error: ValidationError) -> str:
    """What a format's function said, or that quotes are too many; empty where the expectation says it all."""
    for each in (error, *(error.context or ())):
        if each.cause is not None:
            return str(each.cause)
    value, kinds = error.instance, str(error.schema)
    if isinstance(value, str) and "'integer'" in kinds and re.fullmatch("[0-9]{1,20}", value):
        zeros = f"write {int(value)}, without zeros before it; " if str(int(value)) != value else ""
        return zeros + _UNQUOTED.format(int(value))
    if isinstance(value, str) and "'boolean'" in kinds and value.lower() in _TRUE + _FALSE:
        right = value.lower() in _TRUE
        return _BOOLEAN.format(str(right).lower(), right, str(right).lower())
    if isinstance(value, datetime.date):
        return "YAML reads it as a date; write it in quotes where you mean a text"
    if isinstance(value, (int, float)) and "'string'" in kinds and "'integer'" not in kinds:
        return "write it in quotes"
    return ""


@cache
def _format_checker() -> FormatChecker:
    from jsonschema import FormatChecker

    checker = FormatChecker(formats=())
    for name, function in FORMATS.items():

        def check(value: object, function: Any = function) -> bool:
            if isinstance(value, str):
                function(value)
            return True

        checker.checks(name, raises=ValueError)(check)
    return checker


@cache
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    # JSON Schema's own integer is 3.0 as well, and its number what no comparison with a bound refuses: nan.
    kinds = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": lambda _, value: is_whole(value), "number": lambda _, value: is_number(value)}
    )
    return extend(Draft202012Validator, type_checker=kinds)


@cache
def _validator(name: str) -> Any:
    return _validator_class()(definition().variables[name].schema, format_checker=_format_checker())
