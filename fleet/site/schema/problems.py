"""What is wrong, with the place where it is written."""

from __future__ import annotations

import datetime
import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.core.settings.setting import MAX_LISTED

MAX_LINES = 10
MAX_NAMED = 3
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One mistake. The message names the value, what was expected and the fix."""

    message: str
    hosts: tuple[str, ...] = ()
    variable: str | None = None
    value: str | None = None
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return self.message
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}"

    def as_json(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "hosts": list(self.hosts),
            "variable": self.variable,
            "value": self.value,
            "file": self.file,
            "line": self.line,
        }


def describe_problems(problems: Sequence[object]) -> str:
    """Write the first problems a line each, and how many more there are."""
    lines = [str(problem) for problem in problems[:MAX_LINES]]
    if len(problems) > MAX_LINES:
        lines.append(f"and {len(problems) - MAX_LINES} more; `fab validate --json` lists them all")
    return "\n".join(lines)


def show(value: object) -> str:
    """Write a value in one short line, whatever it is."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value that can't be written"


def name_some(names: Iterable[str]) -> str:
    """Name the first, and say how many more there are; a name that could be mistaken for a sentence gets quotes."""
    shown = [name if _PLAIN.fullmatch(name) else show(name) for name in names]
    rest = len(shown) - MAX_NAMED
    return ", ".join(shown[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def name_known(name: str, known: Sequence[str]) -> str:
    """Say which of the known names an unknown one may stand for, and which there are: all of them, unless many."""
    close = [each for each in known if each.casefold() == name.casefold()] or difflib.get_close_matches(
        name, known, n=1
    )
    listed = ", ".join(known) if len(known) <= MAX_LISTED else name_some(known)
    return f"{f'Did you mean {close[0]}? ' if close else ''}It has: {listed}"


def name_hosts(hosts: Sequence[str]) -> str:
    """Say which hosts: "host 'a'", or "hosts a, b, c and 4 more"."""
    return f"host {show(hosts[0])}" if len(hosts) == 1 else f"hosts {name_some(hosts)}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlong = 40
_SHORT.maxlevel = 3
