"""One thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.output.tables import render_table
from fleet.output.terminal import one_line

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


def render_findings(found: Sequence[Finding]) -> str:
    """A table of what is wrong, and below it what fixes each, by number."""
    rows = [[number, each.level, each.where, each.part, one_line(each.what)] for number, each in enumerate(found, 1)]
    fixes = [f"{number:>3}  {one_line(each.fix)}" for number, each in enumerate(found, 1)]
    return "\n".join([render_table(["", "LEVEL", "WHERE", "PART", "WHAT"], rows), "", "what fixes them:", *fixes])
