"""One thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.output.tables import render_table
from fleet.output.terminal import one_line
from fleet.site.schema.problems import name_some

ERROR, WARNING = "error", "warning"
CONTROL = "control machine"


@dataclass(frozen=True)
class Finding:
    """What is wrong: where (a host, a task, a run, or the control machine), with which part, how bad, and the fix."""

    level: str
    where: str
    part: str
    what: str
    fix: str


def sorted_findings(found: Sequence[Finding]) -> list[Finding]:
    """Errors first; each once."""
    return sorted(dict.fromkeys(found), key=lambda each: each.level != ERROR)


def joined_findings(found: Sequence[Finding]) -> list[Finding]:
    """Make one of findings that say the same of several hosts, and have the same fix."""
    places: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        places.setdefault((each.level, each.part, each.what, each.fix), []).append(each.where)
    joined = {key: where[0] if len(where) == 1 else name_some(where) for key, where in places.items()}
    return [Finding(key[0], where, *key[1:]) for key, where in joined.items()]


def render_findings(found: Sequence[Finding]) -> str:
    """A table of what is wrong, and below it what fixes each, by number."""
    rows = [[number, each.level, each.where, each.part, one_line(each.what)] for number, each in enumerate(found, 1)]
    fixes = [f"{number:>3}  {one_line(each.fix)}" for number, each in enumerate(found, 1)]
    return "\n".join([render_table(["", "LEVEL", "WHERE", "PART", "WHAT"], rows), "", "what fixes them:", *fixes])
