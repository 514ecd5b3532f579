"""What is wrong with an inventory's files by their names and kinds, and with the ranges of hosts in them."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import yaml

from fleet.site.schema.checks import ANSIBLES_GROUPS, MAX_HOSTS
from fleet.site.schema.definition import definition, meant_group
from fleet.site.schema.problems import Problem, name_some, show

# As Ansible's own plugin for these directories: what ends otherwise is never read.
VARIABLE_SUFFIXES = ("", ".yml", ".yaml", ".json")
# What people and editors keep beside, and mean to be left alone.
ASIDE_SUFFIXES = (
    *(".bak", ".backup", ".dist", ".disabled", ".example", ".md", ".off", ".old", ".orig", ".rej", ".retry", ".rst"),
    *(".sample", ".save", ".swp"),
)
# As Ansible's setting inventory_ignore_extensions has them by itself.
_PASSED_OVER = (".pyc", ".pyo", ".swp", ".bak", "~", ".rpm", ".md", ".txt", ".rst", ".orig", ".cfg", ".retry")
# Of which Ansible reads no INI.
_OTHERS = (".yml", ".yaml", ".json", ".toml")
_RANGE = re.compile(r"\[([0-9]{1,40}):([0-9]{1,40})(?::(-?[0-9]{1,40}))?\]")
_MAX_BYTES = 5_000_000


def directories(sources: Sequence[str]) -> list[Path]:
    """The directories of an inventory's sources, in which group_vars and host_vars lie."""
    paths = [Path(source) for source in sources if "," not in source]
    return list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths if path.exists()))


def list_directory(directory: Path) -> list[Path]:
    """List what a directory has, nothing where there is none; what may not be read is for Ansible to refuse."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def file_problems(sources: Sequence[str], groups: Collection[str], hosts: Collection[str]) -> Iterator[Problem]:
    """Refuse variables' files of a group or of a host that there is not."""
    known = definition().groups
    for directory in directories(sources):
        yield from _directory_problems(directory)
        yield from _second_problems(directory / "group_vars")
        yield from _second_problems(directory / "host_vars")
        yield from _suffix_problems(directory / "group_vars", [*groups, *known, *ANSIBLES_GROUPS])
        yield from _suffix_problems(directory / "host_vars", hosts)
        for path in variable_files(directory / "group_vars"):
            if path.stem in groups or path.stem in known or path.stem in ANSIBLES_GROUPS:
                continue
            meant = meant_group(path.stem)
            fix = f"Did you mean {meant}?" if meant else f"The groups are {', '.join(sorted(groups))[:300]}"
            yield Problem(f"there is no group {show(path.stem)}, so no host gets its variables. {fix}", file=str(path))
        for path in variable_files(directory / "host_vars"):
            if path.stem in hosts or path.name in hosts:
                continue
            close = difflib.get_close_matches(path.stem, hosts, n=1)
            fix = f"Did you mean {close[0]}?" if close else "Name the file as the host, or take it away"
            yield Problem(f"there is no host {show(path.stem)}, so no host gets its variables. {fix}", file=str(path))


def _directory_problems(directory: Path) -> Iterator[Problem]:
    """Refuse directories that were meant for variables, and that Ansible never looks into."""
    for path in [path for path in list_directory(directory) if "var" in path.name.lower()]:
        aside = re.match(r"(group|host)_vars([-._~]|$)", path.name)  # such as group_vars.old
        if path.is_dir() and not aside:
            close = difflib.get_close_matches(path.name.lower(), ("group_vars", "host_vars"), n=1, cutoff=0.8)
            if close:
                text = f"no host gets the variables in {show(path.name)}; expected group_vars or host_vars"
                yield Problem(f"{text}. Rename it to {close[0]}", file=str(path))


def _second_problems(directory: Path) -> Iterator[Problem]:
    """Refuse a second file of one name: Ansible reads the first that it finds, a directory before any file."""
    first: dict[str, Path] = {}
    for path in sorted(variable_files(directory), key=lambda path: VARIABLE_SUFFIXES.index(_suffix(path))):
        name = path.name.removesuffix(_suffix(path))
        if name in first:
            text = f"Ansible reads {first[name].name} and not {path.name}; expected one of them"
            yield Problem(f"{text}. Put all into the one, or into files in a directory {name}/", file=str(path))
        first.setdefault(name, path)


def _suffix(path: Path) -> str:
    return path.suffix if path.suffix in VARIABLE_SUFFIXES and path.is_file() else ""


def _suffix_problems(directory: Path, names: Collection[str]) -> Iterator[Problem]:
    """Refuse a file that is named for a group or a host, and that Ansible does not read."""
    for path in list_directory(directory):
        suffix = path.suffix.lower()
        named = path.stem in names and path.name not in names and not path.name.endswith("~")
        if named and path.is_file() and suffix not in VARIABLE_SUFFIXES and suffix not in ASIDE_SUFFIXES:
            text = (
                f"Ansible reads no file that ends in {show(path.suffix)}, so {path.stem} gets none of these variables"
            )
            yield Problem(
                f"{text}. Name it {path.stem}.yml, or {path.name}.bak where it is to be left out", file=str(path)
            )


def special_file_problems(sources: Sequence[str]) -> Iterator[Problem]:
    """Refuse what is neither a file nor a directory: a link that leads nowhere, or a pipe without an end."""
    whole = [Path(source) for source in sources]
    for directory in directories(sources):
        for parent in [directory] if directory in whole else [directory / "group_vars", directory / "host_vars"]:
            for path in sorted(parent.rglob("*")):
                if not path.name.startswith(".") and not path.is_file() and not path.is_dir():
                    what = "a link that leads nowhere" if path.is_symlink() else "no regular file"
                    yield Problem(f"this is {what}; expected a file or a directory. Take it away", file=str(path))
    from ansible.inventory.manager import IGNORED  # what else than hosts a directory may have, by ansible.cfg too

    for source in whole:
        found = [each for each in list_directory(source) if not IGNORED.search(each.name.encode())]
        for path in found if source.is_dir() else [source]:
            if path.is_file() and path.suffix not in _OTHERS:
                yield from _misread_problems(path)


def _misread_problems(path: Path) -> Iterator[Problem]:
    """Refuse a file of hosts that Ansible's reader of INI files would take for another thing, without a reason."""
    try:
        if path.stat().st_size > _MAX_BYTES or os.access(path, os.X_OK):
            return
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # Ansible can't read it either, and says so
        return
    if content.startswith("#!/"):
        text = "this is a script that may not be run, so its lines would be taken for hosts; expected an executable"
        yield Problem(f"{text}. Make it one, or take it away: chmod +x {shlex.quote(str(path))}", file=str(path))
        return
    if not path.suffix and _is_yaml(content):
        return
    if content.startswith("\ufeff"):
        text = "it begins with a byte order mark, which would be a part of its first name; expected UTF-8 without one"
        yield Problem(f"{text}. Take it away: sed -i '1s/^\\xef\\xbb\\xbf//' {shlex.quote(str(path))}", file=str(path))
    for number, line in enumerate(content.splitlines(), start=1):
        if line.startswith("[") and "]" not in line:
            yield Problem(f"{show(line)} has no ]; expected a group, as [worker]", file=str(path), line=number)


def _is_yaml(content: str) -> bool:
    """Whether Ansible, which tries YAML first in a file whose name has no end, finds groups there."""
    try:
        return isinstance(yaml.compose(content), yaml.MappingNode)
    except (yaml.YAMLError, RecursionError):
        return False


def variable_files(directory: Path) -> list[Path]:
    """The files, and directories of files, of which Ansible reads variables."""
    return [
        path
        for path in list_directory(directory)
        if not path.name.startswith(".")
        and not path.name.endswith("~")
        and (path.is_dir() or path.suffix in VARIABLE_SUFFIXES)
    ]


def beside_problems(sources: Sequence[str], root: Path) -> Iterator[Problem]:
    """Refuse variables beside the playbooks: each playbook reads those of its own directory, and fab others."""
    beside = [path.resolve() for path in directories(sources)]
    for directory in (root, root / "ansible"):
        for path in (directory / "group_vars", directory / "host_vars"):
            if variable_files(path) and directory.resolve() not in beside:
                text = (
                    "variables beside the playbooks count for some playbooks and not for others; expected them beside"
                )
                where = f"{beside[0]}/{path.name}" if beside else "a file of hosts"
                yield Problem(f"{text} the inventory. Move them to {where}", file=str(path))


def empty_problems(source: str) -> Iterator[Problem]:
    """Refuse a directory in which Ansible looks for hosts and finds no file."""
    path = Path(source)
    found = [each for each in list_directory(path) if is_for_hosts(each)] if path.is_dir() else []
    passed_over = [each.name for each in found if each.name.endswith(_PASSED_OVER)]
    if path.is_dir() and len(found) == len(passed_over):
        text = "this directory has no file of hosts; expected one, such as hosts.yml"
        seen = f". Ansible passes over {name_some(passed_over)} for the name's end" if passed_over else ""
        yield Problem(f"{text}{seen}. Write it, or name another directory", file=source)


def is_for_hosts(path: Path) -> bool:
    """Whether an entry of an inventory's directory is meant for hosts, and not for variables."""
    return not path.name.startswith(".") and not ("var" in path.name.lower() and path.is_dir())


def range_problems(source: str) -> Iterator[Problem]:
    """Refuse a range of hosts that Ansible would make without end: it does so before anybody can look. One that runs
    backwards is none at all to it, and it says nothing."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file())
    for file in files:
        try:
            content = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size <= _MAX_BYTES else ""
        except OSError:  # Ansible can't read it either, and says so
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            hosts = 1
            for first, last, step in _RANGE.findall(line.partition("#")[0]):
                if int(last) < int(first) or int(step or 1) < 1:
                    text = f"{show(line.strip())} stands for no host; expected the lower number first"
                    yield Problem(f"{text}, as in [{last}:{first}]", file=str(file), line=number)
                hosts *= max(1, (int(last) - int(first)) // max(1, int(step or 1)) + 1)
            if hosts > MAX_HOSTS:
                text = f"{show(line.strip())} stands for {show(hosts)} hosts; expected {MAX_HOSTS:,} at most"
                yield Problem(text, file=str(file), line=number)
