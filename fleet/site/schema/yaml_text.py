"""What an inventory's YAML says and Ansible passes over: keys that it skips, values that set nothing, and numbers that
it reads as others."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from fleet.site.schema.definition import definition
from fleet.site.schema.inventory_files import (
    VARIABLE_SUFFIXES,
    directories,
    is_for_hosts,
    list_directory,
    variable_files,
)
from fleet.site.schema.problems import Problem, show
from trainer.core.settings.parameters import plain_number

GROUP_KEYS = ("hosts", "children", "vars")
_MAX_BYTES = 5_000_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OTHER_NUMBER = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*(:[0-9.]+)+")
# YAML 1.1 wants a dot and a sign in it: 1.0e-3.
_TEXT_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


Value = tuple[str, str, int, list[str]]  # a host's variable: host, name, line, and what stands there


def text_problems(sources: Sequence[str]) -> Iterator[Problem]:
    """Look at the files of hosts, and at those of variables beside them. What is no YAML is for Ansible to refuse."""
    first: dict[tuple[str, str], tuple[Path, int, list[str]]] = {}
    for file in hosts_files(sources):
        root = _compose(file)
        if root and not any(key == "plugin" for key, _, _ in entries(root)):
            yield from _group_problems(root, file)
            yield from _contradictions(_yaml_values(root), file, first)
            yield from _number_and_key_problems(root, file)
        elif root is None:
            yield from _contradictions(_ini_values(file), file, first)
    for directory in directories(sources):
        for entry in [*variable_files(directory / "group_vars"), *variable_files(directory / "host_vars")]:
            for file in [entry] if entry.is_file() else sorted(entry.rglob("*")):
                if root := _compose(file):
                    yield from _nesting_problems(root, file)
                    yield from _number_and_key_problems(root, file)


def unread_problems(sources: Sequence[str]) -> Iterator[Problem]:
    """Refuse files of hosts that are no YAML: a playbook warns of one, and goes on with the hosts of the others."""
    for file in hosts_files(sources):
        if file.suffix in VARIABLE_SUFFIXES[1:] and file.is_file():
            try:
                yaml.compose(file.read_bytes(), Loader=_LOADER)
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
                place = getattr(error, "problem_mark", None)
                reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
                text = f"can't be read, so that its hosts would be missing: {reason}. Fix it, or take the file away"
                yield Problem(text, file=str(file), line=place.line + 1 if place else None)


def hosts_files(sources: Sequence[str]) -> list[Path]:
    """List the files in which an inventory's sources may have hosts."""
    paths = [Path(source) for source in sources if "," not in source]
    return [file for path in paths for file in (_files_below(path) if path.is_dir() else [path])]


def _files_below(directory: Path) -> Iterator[Path]:
    """The files in the order in which Ansible reads them, directories' files too."""
    for path in list_directory(directory):
        if is_for_hosts(path) and path.is_dir() and not path.is_symlink():
            yield from _files_below(path)
        elif is_for_hosts(path):
            yield path


def _compose(file: Path) -> yaml.MappingNode | None:
    root = compose_any(file)
    return root if isinstance(root, yaml.MappingNode) else None


def compose_any(file: Path) -> yaml.Node | None:
    """Return what a file holds, as YAML; None for what is no YAML, a script, a vault, or too large."""
    try:
        if not file.is_file() or file.suffix not in VARIABLE_SUFFIXES or file.stat().st_size > _MAX_BYTES:
            return None
        content = file.read_bytes()
        if content.startswith((b"#!", b"$ANSIBLE_VAULT")):
            return None
        root: yaml.Node | None = yaml.compose(content, Loader=_LOADER)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return root


def entries(node: yaml.Node) -> list[tuple[str, int, yaml.Node]]:
    """A mapping's keys, their lines and their values."""
    if not isinstance(node, yaml.MappingNode):
        return []
    return [
        (key.value, key.start_mark.line + 1, value)
        for key, value in node.value
        if isinstance(key, yaml.ScalarNode) and key.value != "<<"
    ]


def _all_nodes(root: yaml.Node) -> list[yaml.Node]:
    """A node and those below it, each once however many aliases it has, in the order of the file."""
    found: dict[int, yaml.Node] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in found:
            continue
        found[id(node)] = node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
    return list(found.values())


def group_bodies(groups: yaml.Node, seen: set[int] | None = None) -> Iterator[tuple[str, yaml.Node]]:
    """The groups of a file of hosts, children too, each once however many aliases lead to it."""
    seen = set() if seen is None else seen
    if id(groups) in seen:
        return
    seen.add(id(groups))
    for group, _, body in entries(groups):
        yield group, body
        for section, _, content in entries(body):
            if section == "children":
                yield from group_bodies(content, seen)


def _group_problems(root: yaml.Node, file: Path) -> Iterator[Problem]:
    """Refuse what stands beside a group's hosts, children and vars: Ansible warns and leaves it out."""
    for group, body in group_bodies(root):
        for key, line, _ in entries(body):
            if key not in GROUP_KEYS:
                close = difflib.get_close_matches(key, GROUP_KEYS, n=1)
                fix = f"Did you mean {close[0]}?" if close else "Its variables stand below vars, its hosts below hosts"
                text = f"group {show(group)} has the key {show(key)}, which Ansible leaves out; expected hosts, "
                yield Problem(f"{text}children or vars. {fix}", file=str(file), line=line)


def _contradictions(
    values: Iterable[Value], file: Path, first: dict[tuple[str, str], tuple[Path, int, list[str]]]
) -> Iterator[Problem]:
    """Refuse two values of one host's variable: the host has one, whatever group or file it stands in."""
    for host, name, line, value in values:
        place, before, other = first.setdefault((host, name), (file, line, value))
        if other != value and _is_ours(name):
            where = f"in line {before}" if place == file else f"in {place}:{before}"
            text = f"host {show(host)} has {name} here and with another value {where}, and one of them is lost"
            text = f"{text}; expected one value for one host. Take one of the two away"
            yield Problem(text, (host,), name, None, str(file), line)


def _yaml_values(root: yaml.Node) -> Iterator[Value]:
    bodies = [content for _, body in group_bodies(root) for key, _, content in entries(body) if key == "hosts"]
    for host, _, variables in [each for hosts in bodies for each in entries(hosts)]:
        for name, (line, value) in {name: (line, value) for name, line, value in entries(variables)}.items():
            yield host, name, line, [str(each.value) for each in _all_nodes(value) if isinstance(each, yaml.ScalarNode)]


def _ini_values(file: Path) -> Iterator[Value]:
    """The variables on hosts' lines of an INI file. What Ansible can't read of it is for Ansible to refuse."""
    try:
        if file.suffix not in ("", ".ini") or not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return
        content = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    section = ""
    for number, line in enumerate([] if content.startswith("#!") else content.splitlines(), start=1):
        if line.startswith("["):
            section = line
        if line.startswith("[") or ":" in section:
            continue
        try:
            host, *words = shlex.split(line, comments=True) or [""]
        except ValueError:
            continue
        for name, equals, value in [word.partition("=") for word in words]:
            if equals:
                yield host, name, number, [value]


def _nesting_problems(root: yaml.Node, file: Path) -> Iterator[Problem]:
    """Refuse variables that stand below a key of an inventory's file, where they set nothing."""
    for key, line, value in entries(root):
        if key not in (*GROUP_KEYS, *definition().groups, "all") or not isinstance(value, yaml.MappingNode):
            continue
        inner = next((name for node in _all_nodes(value) for name, _, _ in entries(node) if _is_ours(name)), None)
        if inner is not None:
            text = f"{inner} stands below {show(key)} and sets nothing; expected each variable at the left margin of "
            yield Problem(f"{text}this file. Take {show(key)} away", (), inner, file=str(file), line=line)


def _number_and_key_problems(root: yaml.Node, file: Path) -> Iterator[Problem]:
    """Refuse keys that stand twice, and in psfleet's variables numbers that YAML takes for octal or for hours."""
    others: dict[int, tuple[str, yaml.Node]] = {}
    for node in _all_nodes(root):
        seen: dict[str, int] = {}
        for key, line, value in entries(node):
            if key in seen:
                text = f"{show(key)} stands twice, in line {seen[key]} too, and only the last counts; expected it once"
                yield Problem(text, file=str(file), line=line)
            seen[key] = line
            known = definition().variables.get(key)
            if known is not None and known.scope == "line":
                text = f"{key} counts on the command line alone: Ansible asks for it before it reads an inventory"
                yield Problem(f"{text}. Leave it out here, and say -e {key}=...", (), key, None, str(file), line)
            if key == "program_args":
                yield from _text_number_problems(value, file)
            for part in _all_nodes(value) if _is_ours(key) else ():
                if _is_other_number(part):
                    others[id(part)] = (key, part)
    for key, part in others.values():
        try:
            number = show(yaml.safe_load(part.value))
        except ValueError:  # more digits than Python reads: Ansible can't read the file either, which is said by itself
            continue
        text = f"{key}: YAML reads {part.value[:40]} as {number}; expected a number without zeros before it and without"
        text = f"{text} colons. Write {number}, or what you meant"
        yield Problem(text, (), key, part.value[:40], str(file), part.start_mark.line + 1)


def _text_number_problems(arguments: yaml.Node, file: Path) -> Iterator[Problem]:
    """Refuse numbers that the program would get as texts; what is meant as a text has quotes."""
    for node in _all_nodes(arguments):
        if isinstance(node, yaml.ScalarNode) and not node.style and node.tag.endswith(":str"):
            number = float(node.value) if _TEXT_NUMBER.fullmatch(node.value) else math.inf
            if math.isfinite(number):
                text = (
                    f"program_args: YAML reads {node.value[:40]} as a text; expected a number with a dot and a sign, "
                )
                text = f"{text}such as 1.0e-3. Write {plain_number(number)}, or quotes where you mean the text"
                yield Problem(
                    text, (), "trainer_run.program_args", node.value[:40], str(file), node.start_mark.line + 1
                )


def _is_other_number(node: yaml.Node) -> bool:
    return (
        isinstance(node, yaml.ScalarNode) and _OTHER_NUMBER.fullmatch(node.value) is not None and node.tag in _NUMBERS
    )


def _is_ours(name: str) -> bool:
    return len(name) <= 60 and definition().is_ours(name)
