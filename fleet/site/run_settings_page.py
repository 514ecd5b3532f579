"""The tables of docs/run-settings.md, as trainer/core declares them: `python -m fleet.site.run_settings_page`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from fleet.places import CODE
from trainer.core.settings.config import DECLARED, TYPES, Config
from trainer.core.settings.relations import RELATIONS

PAGE = CODE / "docs" / "run-settings.md"
SETTINGS = "| Key | Type | Default | Meaning |"
FIT = "| Settings | Refused |"
TYPE_NAMES: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    int | str: 'whole number or `"auto"`',
    int | None: "whole number or `null`",
}


def page(text: str) -> str:
    """Return the page with its tables as the code has them; the prose around them stays."""
    return with_table(with_table(text, SETTINGS, map(row, dataclasses.fields(Config))), FIT, relations())


def with_table(text: str, head: str, rows: Iterable[str]) -> str:
    """Put these rows below a table's head, in place of its own."""
    table = re.compile(re.escape(head) + r"\n(\|.*\n)*")
    rule = "|" + "---|" * (head.count("|") - 1)
    found, count = table.subn(lambda _: "\n".join([head, rule, *rows]) + "\n", text)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} tables with the head {head}; expected one")
    return found


def row(field: dataclasses.Field[Any]) -> str:
    """Return a setting's row."""
    kind = TYPE_NAMES.get(TYPES[field.name], "mapping")
    return f"| `{field.name}` | {kind} | {default(field)} | {DECLARED[field.name].meaning} |"


def default(field: dataclasses.Field[Any]) -> str:
    """Return a setting's default as JSON has it."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"


def relations() -> list[str]:
    """Return the rows of the settings that must fit together."""
    return [f"| {each.settings} | {each.refused} |" for each in RELATIONS]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
