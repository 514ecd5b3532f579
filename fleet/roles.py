"""What a role would write on a host: its own tasks, templates and variables, rendered here as Ansible renders them.

The roles say it once. This module knows the modules that the tasks name. A task with another one is refused, so that no
check is left out without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fleet.inventory import Inventory, plain_value
from fleet.places import KIT, ROLES, site

# They write nothing, or fleet/short.py asks the host for what they would find.
_SKIPPED = (
    *("ansible.builtin.debug", "ansible.builtin.find", "ansible.builtin.systemd_service"),
    *("stale_tasks", "firewall_facts"),
)


class UnknownTask(LookupError):
    """A role has a task that only Ansible can do."""


@dataclass
class Wanted:
    """What tasks would make of a host."""

    files: dict[str, list[str]] = field(default_factory=dict)
    """By path: the mode, and the hash of the content; of a directory `directory`, as fleet/agent.py says it."""
    texts: dict[str, str] = field(default_factory=dict)  # by path: the content of a file
    checks: list[dict[str, Any]] = field(default_factory=list)  # modules that are to find nothing to change
    refusals: list[str] = field(default_factory=list)  # what an assertion says

    def file(self, path: str, mode: str, text: str) -> None:
        self.texts[path] = text
        self.files[path] = [mode, hashlib.sha256(text.encode()).hexdigest()]


class Role:
    """A role as a play has it for one host."""

    def __init__(
        self, inventory: Inventory, host: str, name: str, playbook: str, part: str = "main", **more: Any
    ) -> None:
        from ansible.parsing.dataloader import DataLoader

        self.name = name
        self._loader = DataLoader()
        self._loader.set_basedir(str(site()))
        known = inventory.variables[host]
        self._variables: dict[str, Any] = {
            "ansible_managed": "Ansible managed",
            "ansible_check_mode": False,
            **_load(ROLES / name / "defaults/main.yml"),
            **getattr(known, "raw", known),
            **_load(ROLES / name / "vars/main.yml"),
            "groups": {group: list(hosts) for group, hosts in inventory.groups.items()},
            "hostvars": inventory.variables,
            "inventory_hostname": host,
            "playbook_dir": str(KIT / "ansible"),
            "psfleet_spec": inventory.spec,
            **more,
        }
        given = _inputs(playbook, name, part)
        self._variables |= {key: value for key, value in given.items() if key not in more}
        # Once, and not at each use: with a thousand hosts they are long.
        self._variables |= {key: self.value(key) for key in given}

    def value(self, name: str, **more: Any) -> Any:
        """Return a variable of the role, rendered."""
        return plain_value(self._template(self._variables[name], more))

    def look(self, tasks: str, facts: Mapping[str, Any] | None = None) -> Wanted:
        """Return what a file of tasks would make of the host; without `facts`, which hosts say, the files are names.

        Raises UnknownTask for a module that it does not know.
        """
        wanted = Wanted()
        for task in _load(ROLES / self.name / f"tasks/{tasks}.yml"):
            self._read(task, wanted, {} if facts is None else facts, facts is not None)
        return wanted

    def arguments(self, tasks: str, module: str) -> dict[str, Any]:
        """Return the arguments of the first task with a module."""
        found = next(task for task in _flat(_load(ROLES / self.name / f"tasks/{tasks}.yml")) if module in task)
        return dict(plain_value(self._template(found[module], {})))

    def _read(self, task: Mapping[str, Any], wanted: Wanted, facts: Mapping[str, Any], whole: bool) -> None:
        if "block" in task:
            if self._holds(task, facts):
                for each in task["block"]:
                    self._read(each, wanted, facts, whole)
            return
        module = next((name for name in task if name in _READERS or name in _SKIPPED), None)
        if module is None:
            raise UnknownTask(f"roles/{self.name}: only Ansible can do {str(task.get('name'))!r}")
        if module in _SKIPPED or not (whole or module in _NAMING):
            return
        items = plain_value(self._template(task["loop"], facts)) if "loop" in task else [None]
        for item in items:
            more = {**facts, "item": item}
            if self._holds(task, more):
                _READERS[module](self, task[module], wanted, more, whole)

    def _holds(self, task: Mapping[str, Any], more: Mapping[str, Any]) -> bool:
        condition = task.get("when")
        return condition is None or bool(self._template(_expression(condition), more))

    def _template(self, value: Any, more: Mapping[str, Any], **options: Any) -> Any:
        from ansible.template import Templar

        return Templar(loader=self._loader, variables={**self._variables, **more}).template(value, **options)

    def _template_file(self, arguments: Any, wanted: Wanted, more: Mapping[str, Any], whole: bool) -> None:
        from ansible.template import trust_as_template

        path, mode = (str(self._template(arguments[name], more)) for name in ("dest", "mode"))
        text = (ROLES / self.name / "templates" / str(arguments["src"])).read_text(encoding="utf-8")
        overrides = {"trim_blocks": True, "lstrip_blocks": False}
        content = self._template(trust_as_template(text), more, overrides=overrides) if whole else ""
        wanted.file(path, mode, str(content))

    def _copy(self, arguments: Any, wanted: Wanted, more: Mapping[str, Any], whole: bool) -> None:
        path, mode = (str(self._template(arguments[name], more)) for name in ("dest", "mode"))
        if "src" in arguments:
            content = (ROLES / self.name / "files" / str(arguments["src"])).read_text(encoding="utf-8")
        else:
            content = str(self._template(arguments["content"], more)) if whole else ""
        wanted.file(path, mode, content)

    def _file(self, arguments: Any, wanted: Wanted, more: Mapping[str, Any], _whole: bool) -> None:
        given = self._template(arguments, more)
        if given["state"] != "directory":
            raise UnknownTask(f"roles/{self.name}: only Ansible can make {given['path']} a {given['state']}")
        wanted.files[str(given["path"])] = [str(given["mode"]), "directory"]

    def _assert(self, arguments: Any, wanted: Wanted, more: Mapping[str, Any], _whole: bool) -> None:
        if not self._template(_expression(arguments["that"]), more):
            wanted.refusals.append(str(self._template(arguments["fail_msg"], more)))


def _check(module: str, **state: str) -> Callable[..., None]:
    """Have a module look whether it would change anything."""

    def read(role: Role, arguments: Any, wanted: Wanted, more: Mapping[str, Any], _whole: bool) -> None:
        given = plain_value(role._template(arguments, more))
        wanted.checks.append({"module": module, "arguments": {**given, **state}, "check": True})

    return read


_READERS: dict[str, Callable[..., None]] = {
    "ansible.builtin.template": Role._template_file,
    "ansible.builtin.copy": Role._copy,
    "ansible.builtin.file": Role._file,
    "ansible.builtin.assert": Role._assert,
    "reserved_ports": _check("reserved_ports"),
    "task_secrets": _check("task_secrets"),
    "try_firewall": _check("firewall_table", state="tried"),
}
_CALLS = ("ansible.builtin.import_role", "ansible.builtin.include_role")
# The names of their files are known before a host has answered.
_NAMING = ("ansible.builtin.template", "ansible.builtin.copy", "ansible.builtin.file")


def _flat(tasks: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for task in tasks:
        yield task
        yield from _flat(task.get("block", ()))


@cache
def _load(path: Path) -> Any:
    from ansible.parsing.dataloader import DataLoader

    return DataLoader().load_from_file(str(path), trusted_as_template=True) or {}


@cache
def _inputs(playbook: str, role: str, part: str) -> Mapping[str, Any]:
    """Return what a playbook gives to a role, listed or imported by a task."""
    for play in _load(KIT / "ansible" / playbook):
        for each in play.get("roles", ()):
            if (each["role"], "main") == (role, part):
                return dict(each.get("vars", {}))
        for task in play.get("tasks", ()):
            named: Mapping[str, Any] = next((task[name] for name in _CALLS if name in task), {})
            if (named.get("name"), named.get("tasks_from", "main")) == (role, part):
                return dict(task.get("vars", {}))
    return {}


@cache
def _expression(condition: str) -> Any:
    from ansible.template import trust_as_template

    return trust_as_template("{{ " + str(condition) + " }}")
