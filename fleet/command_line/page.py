"""docs/verbs.md, by the verbs of fabfile.py. `python -m fleet.command_line.page` writes it."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

from invoke import Argument, Task

MANY = 5
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verbs.md"
HEAD = """# Verbs

Every verb of `fab` with its flags, made from `fabfile.py`: `fab VERB --help` prints the same.
[operations.md](operations.md), [upkeep.md](upkeep.md) and [second-day.md](second-day.md) explain them,
[json.md](json.md) has their answers. A flag in brackets may be left out before its value.

Each verb takes these flags, after its name:

{common}
Many verbs have these, and only name them below:

{shared}"""


def page() -> str:
    """Write docs/verbs.md; raises TypeError for a flag without a help text."""
    # A task loses its help texts when its flags are asked for: each page takes tasks of its own.
    found = [each for each in runpy.run_path(str(ROOT / "fabfile.py")).values() if isinstance(each, Task)]
    flags = {verb.name: {_name(flag): _row(flag) for flag in verb.get_arguments()} for verb in found}
    # A flag that every verb has stands once, at the top, and so does one that many verbs explain in the same words.
    common = [name for name in flags[found[0].name] if all(name in each for each in flags.values())]
    own = {verb: [row for name, row in flags[verb.name].items() if name not in common] for verb in found}
    shared = [row for row, verbs in Counter(row for rows in own.values() for row in rows).items() if verbs >= MANY]
    head = HEAD.format(common="".join(flags[found[0].name][name] for name in common), shared="".join(shared))
    texts = {verb: _flags(rows, shared) for verb, rows in own.items()}
    same = {rows: verb for verb, rows in reversed(texts.items())}
    return head + "".join(_section(verb, rows, same[rows]) for verb, rows in texts.items())


def _flags(rows: list[str], shared: list[str]) -> str:
    """Write the flags of a verb, and last the names of those that the page's head explains."""
    named = ", ".join(row.removeprefix("- ").partition(": ")[0] for row in rows if row in shared)
    return "".join(row for row in rows if row not in shared) + (f"- {named}\n" if named else "")


def _section(verb: Task[Any], rows: str, first: Task[Any]) -> str:
    """Write a verb's section: what it does, and its own flags, or the earlier verb that has the same ones."""
    does = (verb.__doc__ or "").strip().partition("\n")[0]
    many = rows.count("\n") > 1
    flags = f"Its flags are those of [`{_name(first)}`](#{_name(first)}).\n" if many and verb is not first else rows
    return f"\n## `{_name(verb)}`\n{does}\n" + (f"\n{flags}" if flags else "")


def _name(named: Argument | Task[Any]) -> str:
    return (named.name or "").strip("_").replace("_", "-")


def _row(flag: Argument) -> str:
    """Write a flag's line; raises TypeError where it has no help text."""
    if not flag.help:
        raise TypeError(f"--{_name(flag)} has no help text: give it one in fleet/command_line")
    name = f"--{_name(flag)}"
    text = flag.help.removesuffix(f"; `{name}` before it is optional")
    name = name if text == flag.help else f"[{name}]"
    value = "" if flag.kind is bool else " …"
    return f"- `{name}{value}`: {text}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
