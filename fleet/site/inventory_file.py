"""Changing an inventory of plain YAML by lines, so that comments and order stay; with a backup, and read again after.

No task's number moves: where a host leaves the middle of a group, the others get theirs written down.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import FleetError, first_line
from fleet.files import replace_file
from fleet.site.inventory import Inventory, load_inventory
from fleet.site.schema.formats import control_path
from fleet.site.schema.inventory_files import VARIABLE_SUFFIXES, directories
from fleet.site.topology import Task


class NotPlain(Exception):
    """The inventory can't be changed by lines; the message says why."""


def files_of(source: str) -> list[Path]:
    """Return the YAML files with hosts of an inventory; raises NotPlain where hosts come from elsewhere."""
    place = Path(source)
    found = [place] if place.is_file() else sorted(each for each in place.iterdir() if each.is_file())
    found = [each for each in found if not each.name.startswith(".") and not each.name.endswith((".orig", "~"))]
    found = [each for each in found if ".before-" not in each.name]
    for each in found:
        if each.suffix not in (".yml", ".yaml"):
            raise NotPlain(f"{each} is no YAML file")
        try:
            node = yaml.compose(each.read_text(encoding="utf-8"))
        except (yaml.YAMLError, OSError) as error:
            raise NotPlain(f"{each} can't be read: {error}") from error
        if isinstance(node, yaml.MappingNode) and any(key.value == "plugin" for key, _ in node.value):
            raise NotPlain(f"{each} asks a cloud for its hosts")
    return found


def entries(text: str, host: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node, bool]]:
    """Yield key and value of each place that lists a host, and whether that lies in a flow, as in `{a: , b: }`."""

    def walk(node: yaml.Node | None, in_hosts: bool) -> Iterator[tuple[yaml.ScalarNode, yaml.Node, bool]]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if in_hosts and key.value == host:
                yield key, value, bool(node.flow_style)
            elif not in_hosts:
                yield from walk(value, key.value == "hosts")

    yield from walk(yaml.compose(text), False)


def without_host(text: str, host: str) -> str:
    """Return a file's text without the lines of a host."""
    lines = text.splitlines(keepends=True)
    for key, value, in_flow in sorted(entries(text, host), key=lambda each: -each[0].start_mark.line):
        if in_flow:
            raise NotPlain(f"line {key.start_mark.line + 1} has several hosts in braces")
        end = value.end_mark
        # A block ends where the next thing begins; an empty or a short value ends in its own line.
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        last = end.line if is_block else end.line + 1
        last = _keep_comments(lines, key.start_mark.line + 1, last)
        del lines[key.start_mark.line : last]
    return "".join(lines)


def renamed(text: str, old: str, new: str, variables: Mapping[str, Any]) -> str:
    """Return a file's text with a host's name replaced, and these of its variables set where it has them."""
    lines = text.splitlines(keepends=True)
    for key, value, _ in sorted(entries(text, old), key=lambda each: -each[0].start_mark.index):
        if isinstance(value, yaml.MappingNode):
            for name, found in sorted(value.value, key=lambda each: -each[1].start_mark.index):
                if name.value in variables:
                    _replace(lines, found, str(variables[name.value]))
        _replace(lines, key, new)
    return "".join(lines)


def with_number(text: str, host: str, job: str, number: int) -> str:
    """Return a file's text in which the first place of a host in a job's group has its task's number."""
    name = f"{job}_index"
    found = list(_in_group(text, job, host))
    if not found:
        return text
    key, value = found[0]
    lines = text.splitlines(keepends=True)
    row = key.start_mark.line
    if isinstance(value, yaml.MappingNode) and not value.flow_style:
        first = value.value[0][0].start_mark
        lines.insert(first.line, f"{' ' * first.column}{name}: {number}\n")
    elif isinstance(value, yaml.MappingNode):
        mark = value.start_mark
        line = lines[mark.line]
        more = ", " if value.value else ""
        lines[mark.line] = f"{line[: mark.column + 1]}{name}: {number}{more}{line[mark.column + 1 :]}"
    else:
        line = lines[row]
        end = key.end_mark.column
        lines[row] = f"{line[:end]}: {{{name}: {number}}}{line[end:].partition(':')[2]}"
    return "".join(lines)


def _in_group(text: str, group: str, host: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    def walk(node: yaml.Node | None, name: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if key.value == "hosts" and name == group and isinstance(value, yaml.MappingNode):
                yield from ((each, found) for each, found in value.value if each.value == host)
            elif key.value != "hosts":
                yield from walk(value, key.value)

    yield from walk(yaml.compose(text), "all")


def _keep_comments(lines: Sequence[str], first: int, last: int) -> int:
    """Leave to the next entry the comments and empty lines that stand before it."""
    while last > first and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return last


def _replace(lines: list[str], node: yaml.Node, text: str) -> None:
    start, end = node.start_mark, node.end_mark
    if start.line != end.line:
        raise NotPlain(f"line {start.line + 1} goes on in the next one")
    line = lines[start.line]
    written = text if yaml.safe_load(text) == text else json.dumps(text)  # as a name of digits alone
    lines[start.line] = f"{line[: start.column]}{written}{line[end.column :]}"


def edited(inventory: Inventory, edit: Callable[[str], str]) -> dict[Path, str]:
    """Return the new texts of the inventory's files; raises NotPlain where it can't be changed by lines."""
    texts: dict[Path, str] = {}
    try:
        control_path(inventory.source)
        for path in files_of(inventory.source):
            before = path.read_bytes().decode()  # the ends of its lines stay as they are
            if (after := edit(before)) != before:
                texts[path] = after
    except (OSError, ValueError) as error:
        raise NotPlain(str(error)) from error
    except yaml.YAMLError as error:
        raise NotPlain(f"a host's lines are used by others: {first_line(error)}") from error
    if not texts:
        raise NotPlain(f"{inventory.source} names the host nowhere in YAML, or in a range of hosts")
    for path in texts:
        if not all(os.access(place, os.W_OK) for place in (path, path.resolve().parent)):  # it is written beside
            raise NotPlain(f"{path} can't be written")
    return texts


def own_files(inventory: Inventory, host: str) -> list[Path]:
    """Return the files, and the directory, that Ansible reads for this host alone."""
    places = [each / "host_vars" / host for each in directories([inventory.source])]
    found = [place.with_name(f"{host}{suffix}") for place in places for suffix in VARIABLE_SUFFIXES]
    return [path for path in found if path.exists()]


def change(
    inventory: Inventory,
    edit: Callable[[str], str],
    expected: Sequence[Task],
    old: str,
    new: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Edit the inventory's files, each with a backup beside it, and read the whole again; returns the backups.

    `expected` are the tasks that it must describe then: their names, hosts, addresses and ports. The variables of the
    host `old` go to `new`, which has these `variables` instead, or to the backups. Raises NotPlain where it can't be
    changed so; then the files are as they were.
    """
    try:
        return _change(inventory, edit, expected, old, new, variables or {})
    except OSError as error:  # one that may only be read, or a full disk
        raise NotPlain(f"it can't be written: {error}") from error


def _change(
    inventory: Inventory,
    edit: Callable[[str], str],
    expected: Sequence[Task],
    old: str,
    new: str | None,
    variables: Mapping[str, Any],
) -> list[Path]:
    texts = edited(inventory, edit)
    aside = _backup_place(Path(inventory.source))
    moved = {
        path: path.with_name(f"{new}{path.name[len(old) :]}") if new else aside(path)
        for path in own_files(inventory, old)
    }
    for path in moved if new else ():
        if path.is_file() and (after := _with_values(before := path.read_bytes().decode(), variables)) != before:
            texts[path] = after
    backups = {path: Path(shutil.copy2(path, aside(path))) for path in texts}
    try:
        for path, text in texts.items():
            replace_file(path, text.encode())
        for path, there in moved.items():
            path.rename(there)
        read = load_inventory(inventory.source, ask_vault_pass=inventory.vault_password or False)
        _reject_others(read, expected, old)
    except BaseException as error:
        _restore_files(moved, backups)
        if isinstance(error, FleetError):
            raise NotPlain(f"the inventory would be wrong: {error}") from error
        raise
    return [*backups.values(), *(() if new else moved.values())]


def _backup_place(place: Path) -> Callable[[Path], Path]:
    """Return where the backup of each file of an inventory belongs; its folder is made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    # Beside an inventory's folder, not in it: Ansible would read the backup too.
    folder = place.parent if place.is_dir() else place.parent / f".{place.name}.backups"
    folder.mkdir(exist_ok=True)

    def aside(path: Path) -> Path:
        name = f"{place.name}.{path.name}.before-{stamp}" if place.is_dir() else f"{path.name}.{stamp}"
        return folder / (stamp if path == place else name)

    return aside


def _reject_others(read: Inventory, expected: Sequence[Task], old: str) -> None:
    found, wanted = ({(one.name, one.host, one.address, one.port) for one in tasks} for tasks in (read.tasks, expected))
    if found != wanted or old in read.variables:
        raise NotPlain("its tasks would not be the expected ones then")


def _restore_files(moved: Mapping[Path, Path], backups: Mapping[Path, Path]) -> None:
    for path, there in moved.items():
        if there.exists() and not path.exists():
            there.rename(path)
    for path, backup in backups.items():
        if path.read_bytes() != (before := backup.read_bytes()):
            replace_file(path, before)  # in one step: the disk may be full
        backup.unlink()


def _with_values(text: str, variables: Mapping[str, Any]) -> str:
    """Return a file of variables with these values, where it has them."""
    lines = text.splitlines(keepends=True)
    node = yaml.compose(text)
    for name, found in reversed(node.value) if isinstance(node, yaml.MappingNode) else ():
        if name.value in variables:
            _replace(lines, found, str(variables[name.value]))
    return "".join(lines)
