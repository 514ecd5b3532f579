"""docs/run-settings.md says of every key what Config says."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from trainer.core.config import TYPES, Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-settings.md"
ROW = re.compile(r"^\| `(?P<key>\w+)` \| (?P<type>[^|]+) \| (?P<default>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
TYPE_NAMES = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "int | str": 'whole number or `"auto"`',
}
TYPE_NAMES["collections.abc.Mapping[str, typing.Any]"] = "mapping"
TYPE_NAMES["int | None"] = "whole number or `null`"


def rows() -> dict[str, re.Match[str]]:
    return {row["key"]: row for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}


def test_page_has_exactly_the_keys_in_their_order() -> None:
    assert list(rows()) == [field.name for field in dataclasses.fields(Config)]


def test_page_states_the_types() -> None:
    expected = {key: TYPE_NAMES[kind.__name__ if isinstance(kind, type) else str(kind)] for key, kind in TYPES.items()}
    assert {key: row["type"].strip() for key, row in rows().items()} == expected


def test_page_states_the_defaults() -> None:
    defaults = Config(program="mine:One").as_dict()
    required = {field.name for field in dataclasses.fields(Config) if is_required(field)}
    expected = {key: "required" if key in required else f"`{json.dumps(value)}`" for key, value in defaults.items()}
    assert {key: row["default"].strip() for key, row in rows().items()} == expected


def is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
