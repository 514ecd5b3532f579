"""What a role would write on a host: its own tasks, templates and variables, rendered here as Ansible renders them.

The roles say it once. A task with a module that fleet/rollout/readers.py does not know is refused, so that no check is
left out without a word. Two ask: `fab` before a start (fleet/rollout/short_way.py), and site.yml before a role's tasks
(ansible/action_plugins/look_ahead.py). The latter reads the tasks twice: what is the host to be asked for, and is what
it has answered what they would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fleet.places import KIT, ROLES, site
from fleet.rollout.desired_state import (
    SKIPPED,
    UNCHANGED,
    DesiredState,
    Pass,
    TaskCall,
    UnknownTask,
    expression,
    files_differ,
    load,
)
from fleet.rollout.readers import AHEAD, NAMING, OF_A_START
from fleet.site.inventory import Inventory
from fleet.site.reader import plain_value

# fleet/rollout/short_way.py asks the host for what they would find.
_NOT_OF_A_START = (
    *("ansible.builtin.debug", "ansible.builtin.find", "ansible.builtin.meta", "ansible.builtin.systemd_service"),
    *("firewall_facts", "look_ahead", "stale_tasks"),
)
# The wheels are compared where they are copied to.
_NOT_AHEAD = ("ansible.builtin.meta", "wheelhouse")
_INCLUDES = ("ansible.builtin.include_tasks", "ansible.builtin.import_tasks")


class Tasks:
    """Reads a role's tasks; `template(value, variables, **options)` renders with the role's own variables too."""

    def __init__(self, place: Path, template: Callable[..., Any]) -> None:
        self.place, self._template = place, template

    def desired_state(self, tasks: str, facts: Mapping[str, Any] | None = None) -> DesiredState:
        """Return what a file of tasks would make of the host; without `facts`, which hosts say, the files are names.

        Raises UnknownTask for a module that it does not know.
        """
        now = Pass(dict(facts or {}), whole=facts is not None)
        for task in self.load(tasks):
            self._read(task, now)
        return now.wanted

    def load(self, tasks: str) -> Any:
        return load(self.place / "tasks" / f"{tasks}.yml")

    def arguments(self, tasks: str, module: str) -> dict[str, Any]:
        """Return the arguments of the first task with a module."""
        found = next(task for task in _flat(self.load(tasks)) if module in task)
        return dict(plain_value(self._template(found[module], {})))

    def _read(self, task: Mapping[str, Any], now: Pass) -> None:
        if "block" in task:
            if self._holds(task, now.known):
                for each in task["block"]:
                    self._read(each, now)
            return
        module = next((name for name in task if name in OF_A_START or name in _NOT_OF_A_START), None)
        if module is None:
            raise UnknownTask(self.place, task)
        if module in _NOT_OF_A_START or not (now.whole or module in NAMING):
            return
        for more in self._items(task, now.known):
            if self._holds(task, more):
                OF_A_START[module](TaskCall(self.place, task, task[module], more, now, self._template))

    def _items(self, task: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Return the variables of each of a task's turns."""
        more = {**known, **task.get("vars", {})}
        if "loop" not in task:
            yield more
            return
        name = task.get("loop_control", {}).get("loop_var", "item")
        for item in plain_value(self._template(task["loop"], more)):
            yield {**more, name: item}

    def _holds(self, task: Mapping[str, Any], more: Mapping[str, Any]) -> bool:
        conditions = task.get("when", [])
        conditions = conditions if isinstance(conditions, list) else [conditions]
        return all(bool(self._template(expression(each), more)) for each in conditions)


class Ahead(Tasks):
    """Reads a role's tasks before they are done, to see whether there is anything to do."""

    def __init__(self, place: Path, template: Callable[..., Any], leads: bool) -> None:
        super().__init__(place, template)
        self._leads = leads  # whether what is done once is done for this host

    def question(self, tasks: str) -> DesiredState:
        """Return what a host is to be asked for. Raises UnknownTask where the tasks certainly have something to do."""
        now = Pass({}, whole=False)
        self._read_all(self._coming(tasks), now)
        return now.wanted

    def difference(self, tasks: str, answer: Mapping[str, Any]) -> str | None:
        """Say in what a host differs from what the tasks would make of it, after what it has answered.

        Raises UnknownTask, and whatever a template raises.
        """
        now = Pass({}, whole=True, answer=answer)
        self._read_all(self._coming(tasks), now)
        return next(iter(now.wanted.refusals), None) or files_differ(answer["files"], now.wanted.files)

    def _coming(self, tasks: str) -> Sequence[Mapping[str, Any]]:
        """Return the tasks after the look itself, where it is among them."""
        found = self.load(tasks)
        return found[next((place for place, task in enumerate(found, 1) if "look_ahead" in task), 0) :]

    def _read_all(self, tasks: Sequence[Mapping[str, Any]], now: Pass) -> None:
        for task in tasks:
            try:
                self._read(task, now)
            except UnknownTask:
                raise
            except Exception:
                if now.whole:
                    raise

    def _read(self, task: Mapping[str, Any], now: Pass) -> None:
        if task.get("run_once") is True and not self._leads:
            return
        if "block" in task:
            known = {**now.known, **task.get("vars", {})}
            self._within(task["block"], self._may(task, known, now), task.get("vars", {}), now)
            return
        if included := next((task[name] for name in _INCLUDES if name in task), None):
            self._include(task, included, now)
            return
        if any(name in _NOT_AHEAD for name in task):
            now.known |= {task["register"]: SKIPPED} if "register" in task else {}
            return
        module = next((name for name in task if name in AHEAD), None)
        found = []
        for more in self._items(task, now.known):
            holds = self._may(task, more, now)
            if holds is False:
                found.append(SKIPPED)
            elif module is not None:
                found.append(AHEAD[module](TaskCall(self.place, task, task[module], more, now, self._template)))
            elif "ansible.builtin.set_fact" in task:
                now.known |= self._template(task["ansible.builtin.set_fact"], more)
            elif holds and now.sure:
                raise UnknownTask(self.place, task)
        self._register(task, found, now)

    def _within(
        self, tasks: Sequence[Mapping[str, Any]], holds: bool | None, more: Mapping[str, Any], now: Pass
    ) -> None:
        if holds is False:
            # Their registers are set all the same.
            now.known |= {each["register"]: SKIPPED for each in _flat(tasks) if "register" in each}
            return
        before, now.sure = now.sure, now.sure and holds is True
        now.known |= more
        self._read_all(tasks, now)
        now.sure = before

    def _include(self, task: Mapping[str, Any], named: Any, now: Pass) -> None:
        if self._template(task.get("run_once", False), now.known) and not self._leads:
            return
        for more in self._items(task, now.known):
            name = str(self._template(named if isinstance(named, str) else named["file"], more))
            self._within(self.load(name.removesuffix(".yml")), self._may(task, more, now), more, now)

    def _may(self, task: Mapping[str, Any], more: Mapping[str, Any], now: Pass) -> bool | None:
        """Whether a task would run; None where that can't be known before the host has answered."""
        try:
            return self._holds(task, more)
        except Exception:
            if now.whole:
                raise
            return None

    def _register(self, task: Mapping[str, Any], found: Sequence[Any], now: Pass) -> None:
        if any(each is None for each in found):
            return
        if "register" in task:
            alone = found[0] if found else UNCHANGED
            now.known[task["register"]] = {**UNCHANGED, "results": list(found)} if "loop" in task else alone
        if not now.whole or (found and all(each is SKIPPED for each in found)):
            return
        for word, does in (("changed_when", "would change something"), ("failed_when", "fails")):
            condition = task.get(word)
            if condition not in (None, False) and self._template(expression(condition), now.known):
                now.wanted.refusals.append(f"{str(task.get('name'))!r} {does}")


class Role(Tasks):
    """A role as a play has it for one host."""

    def __init__(
        self, inventory: Inventory, host: str, name: str, playbook: str, part: str = "main", **more: Any
    ) -> None:
        from ansible.parsing.dataloader import DataLoader

        _compile_once()
        place = ROLES / name
        super().__init__(place, self._render)
        self._loader = DataLoader()
        self._loader.set_basedir(str(site()))
        known = inventory.variables[host]
        self._variables: dict[str, Any] = {
            "ansible_managed": "Ansible managed",
            "ansible_check_mode": False,
            **load(place / "defaults/main.yml"),
            **getattr(known, "raw", known),
            **load(place / "vars/main.yml"),
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

    def _render(self, value: Any, more: Mapping[str, Any], **options: Any) -> Any:
        from ansible.template import Templar

        return Templar(loader=self._loader, variables={**self._variables, **more}).template(value, **options)


# What else a template's code depends on.
_SYNTAX = (
    *("block_start_string", "block_end_string", "variable_start_string", "variable_end_string"),
    *("comment_start_string", "comment_end_string", "line_statement_prefix", "line_comment_prefix"),
    *("trim_blocks", "lstrip_blocks", "newline_sequence", "keep_trailing_newline"),
)


@cache
def _compile_once() -> None:
    """Have Jinja keep the code of each text in this process: Ansible compiles it for each host, and at each use."""
    from jinja2 import Environment

    compile_text: Any = Environment.compile
    known: dict[Any, Any] = {}

    def compile_new(environment: Environment, source: Any, *more: Any, **options: Any) -> Any:
        if not isinstance(source, str) or more or options:
            return compile_text(environment, source, *more, **options)
        key = (type(environment), str(source), *(getattr(environment, name) for name in _SYNTAX))
        if key not in known:
            known[key] = compile_text(environment, source)
        return known[key]

    Environment.compile = compile_new  # type: ignore[assignment, method-assign]


_CALLS = ("ansible.builtin.import_role", "ansible.builtin.include_role")


def _flat(tasks: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for task in tasks:
        yield task
        yield from _flat(task.get("block", ()))


@cache
def _inputs(playbook: str, role: str, part: str) -> Mapping[str, Any]:
    """Return what a playbook gives to a role, listed or imported by a task."""
    for play in load(KIT / "ansible" / playbook):
        for each in play.get("roles", ()):
            if (each["role"], "main") == (role, part):
                return dict(each.get("vars", {}))
        for task in play.get("tasks", ()):
            named: Mapping[str, Any] = next((task[name] for name in _CALLS if name in task), {})
            if (named.get("name"), named.get("tasks_from", "main")) == (role, part):
                return dict(task.get("vars", {}))
    return {}
