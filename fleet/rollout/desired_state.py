"""What tasks of a role would make of a host, and whether a host is so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

UNCHANGED = {"changed": False}
SKIPPED = {**UNCHANGED, "skipped": True}
# By path: mode, hash of the content (`directory` for one), owner and group, as far as they are given. None: no file.
FileState = Sequence[str | None] | None


class UnknownTask(LookupError):
    """A role has a task that only Ansible can do."""

    def __init__(self, place: Path, task: Mapping[str, Any]) -> None:
        super().__init__(f"roles/{place.name}: only Ansible can do {str(task.get('name'))!r}")


@dataclass
class DesiredState:
    """What tasks would make of a host, and what it is to be asked for."""

    files: dict[str, FileState] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # by path: the content of a file
    checks: list[dict[str, Any]] = field(default_factory=list)  # modules that are to find nothing to change
    refusals: list[str] = field(default_factory=list)  # what an assertion says, and what else differs
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)  # of fleet/hosts/agent.py, by their names
    looks: set[str] = field(default_factory=set)  # paths that are only looked at
    reads: set[str] = field(default_factory=set)  # files whose text decides
    blobs: dict[str, bytes] = field(default_factory=dict)  # what the steps' modules need of the control machine

    def file(self, path: str, mode: str, text: str, owner: str | None = None, group: str | None = None) -> None:
        self.texts[path] = text
        owners = [owner, group] if owner or group else []
        self.files[path] = [mode, hashlib.sha256(text.encode()).hexdigest(), *owners]

    def question(self) -> dict[str, Any]:
        """Return what fleet/hosts/agent.py is to do, but for the modules' sources and the blobs."""
        steps = [{"name": name, **step} for name, step in self.steps.items()]
        return {"look": sorted({*self.files, *self.looks}), "read": sorted(self.reads), "steps": steps}


@dataclass
class Pass:
    """One reading of a role's tasks."""

    known: dict[str, Any]  # facts, and what tasks have registered
    whole: bool  # contents too; else what can't be known before the host has answered is passed over
    answer: Mapping[str, Any] | None = None  # the host's, to a look ahead
    sure: bool = True  # whether the tasks that are read would certainly run
    wanted: DesiredState = field(default_factory=DesiredState)


@dataclass
class TaskCall:
    """A task, about to be done for one item of its loop."""

    place: Path  # of the role
    task: Mapping[str, Any]
    arguments: Any
    more: Mapping[str, Any]
    now: Pass
    template: Callable[..., Any]

    @property
    def wanted(self) -> DesiredState:
        return self.now.wanted

    @property
    def name(self) -> str:
        return str(self.task.get("name"))

    def value(self, name: str) -> Any:
        """Return an argument, rendered; None where it is not given."""
        given = self.arguments.get(name)
        return None if given is None else self.template(given, self.more)

    def text(self, name: str) -> str | None:
        value = self.value(name)
        return None if value is None else str(value)


def files_differ(found: Mapping[str, Any], wanted: Mapping[str, FileState]) -> str | None:
    """Say which file or directory is not as it should be."""
    for path, state in wanted.items():
        if path not in found:
            return f"{path} was not looked at"
        there = found[path]
        if there is None or state is None:
            if there is not state:
                return f"{path} is missing" if there is None else f"{path} exists"
        elif not all(part is None or part in has.split() for part, has in zip(state, there, strict=False)):
            return f"{path} differs"
    return None


@cache
def load(path: Path) -> Any:
    """Read a file of a role or a playbook, its texts being templates."""
    from ansible.parsing.dataloader import DataLoader

    return DataLoader().load_from_file(str(path), trusted_as_template=True) or {}


@cache
def expression(condition: str) -> Any:
    """Return a condition as a template."""
    from ansible.template import trust_as_template

    return trust_as_template("{{ " + str(condition) + " }}")
