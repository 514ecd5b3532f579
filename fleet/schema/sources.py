"""What is wrong with an inventory's files by their names, and with the ranges of hosts in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fleet.schema.check import ANSIBLES_GROUPS, MAX_HOSTS
from fleet.schema.definition import definition, meant_group
from fleet.schema.problems import Problem, show

# As Ansible's own plugin for these directories: what ends otherwise is never read.
VARIABLE_SUFFIXES = ("", ".yml", ".yaml", ".json")
_RANGE = re.compile(r"\[([0-9]{1,40}):([0-9]{1,40})(?::([0-9]{1,40}))?\]")
_MOST_BYTES = 5_000_000


def directories(sources: Sequence[str]) -> list[Path]:
    """The directories of an inventory's sources, in which group_vars and host_vars lie."""
    paths = [Path(source) for source in sources if "," not in source]
    return list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths if path.exists()))


def file_problems(sources: Sequence[str], groups: Collection[str], hosts: Collection[str]) -> Iterator[Problem]:
    """Refuse variables' files of a group or of a host that there is not."""
    known = definition().groups
    for directory in directories(sources):
        for path in variable_files(directory / "group_vars"):
            if path.stem in groups or path.stem in known or path.stem in ANSIBLES_GROUPS:
                continue
            meant = meant_group(path.stem)
            mend = f"Did you mean {meant}?" if meant else f"The groups are {', '.join(sorted(groups))[:300]}"
            yield Problem(
                f"there is no group {show(path.stem)}, so nobody gets these variables. {mend}", file=str(path)
            )
        for path in variable_files(directory / "host_vars"):
            if path.stem in hosts or path.name in hosts:
                continue
            close = difflib.get_close_matches(path.stem, hosts, n=1)
            mend = f"Did you mean {close[0]}?" if close else "Name the file as the host, or take it away"
            yield Problem(f"there is no host {show(path.stem)}, so nobody gets these variables. {mend}", file=str(path))


def variable_files(directory: Path) -> list[Path]:
    """The files, and directories of files, of which Ansible reads variables."""
    if not directory.is_dir():
        return []
    return [
        path
        for path in sorted(directory.iterdir())
        if not path.name.startswith(".")
        and not path.name.endswith("~")
        and (path.is_dir() or path.suffix in VARIABLE_SUFFIXES)
    ]


def range_problems(source: str) -> Iterator[Problem]:
    """Refuse a range of hosts that Ansible would make without end: it does so before anybody can look."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file())
    for file in files:
        if file.stat().st_size > _MOST_BYTES:
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            hosts = 1
            for first, last, step in _RANGE.findall(line.partition("#")[0]):
                hosts *= max(1, (int(last) - int(first)) // max(1, int(step or 1)) + 1)
            if hosts > MAX_HOSTS:
                text = f"{show(line.strip())} stands for {show(hosts)} hosts; expected {MAX_HOSTS:,} at most"
                yield Problem(text, file=str(file), line=number)
