"""Each host's variables as plain Python values, with the places where they are written.

Ansible renders a variable when it is asked for it: here that is once for each, and what can't be rendered is a problem
among the others.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.site.schema.definition import definition
from fleet.site.schema.problems import Problem, name_hosts, show

# Anchors let a short file stand for more values than any memory holds.
MAX_VALUES = 20_000
MAX_DEPTH = 30
TOO_LARGE = "it has more than"
VAULT_FIX = "Say where the vault's password is: ANSIBLE_VAULT_PASSWORD_FILE, or --ask-vault-pass"

Place = tuple[str | None, int | None]
NOWHERE: Place = (None, None)


@dataclass
class InventoryReading:
    """What the inventory says: groups, and of each host the variables that psfleet knows or would know."""

    groups: dict[str, list[str]]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, dict[str, Place]] = field(default_factory=dict)  # of each host's variables, those unread too
    parts: dict[str, Place] = field(default_factory=dict)  # of a part of trainer_run
    group_places: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, host: str, name: str) -> Place:
        return self.places.get(host, {}).get(name, NOWHERE)

    def problem(self, text: str, hosts: Sequence[str], name: str, value: str | None = None) -> Problem:
        """Say what is wrong with a variable, where the first host has it, or with `trainer_run.` a run setting."""
        is_part = name.startswith("trainer_run.")
        place = self.parts.get(name.partition(".")[2], NOWHERE) if is_part else self.place(hosts[0], name)
        return Problem(text, tuple(hosts), name, value, *place)


def read(groups: Mapping[str, Iterable[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> InventoryReading:
    """Take the groups and the variables over, without what Ansible wraps them in."""
    reading = InventoryReading({str(name): [str(host) for host in hosts] for name, hosts in groups.items()})
    reading.group_places = {str(name): place_of(name) for name in groups}
    known = definition()
    unread: dict[tuple[str, str], list[str]] = {}
    for host in reading.groups.get("all", ()):
        variables = hostvars[host]
        values, places = reading.values.setdefault(host, {}), reading.places.setdefault(host, {})
        for key in variables:
            if not isinstance(key, str) or not known.is_ours(str(key)):
                continue
            name = str(key)
            places[name] = place_of(key)
            try:
                value = variables[key]
                place = place_of(value)
                if place != NOWHERE and not isinstance(value, Mapping):
                    places[name] = place
                values[name] = plain(value)
                if name == "trainer_run" and isinstance(value, Mapping):
                    for part in value:
                        reading.parts.setdefault(str(part), place_of(part))
            except Exception as error:  # whatever Ansible raises for a template or a vault is the operator's to fix
                unread.setdefault((name, _say(error)), []).append(host)
    for (name, reason), hosts in unread.items():
        shut = "vault" in reason.lower() or "decrypt" in reason.lower()
        fix = VAULT_FIX if shut else "Give it a value that needs nothing of the host"
        if reason.startswith(TOO_LARGE):
            fix = "Look for anchors (&, *) that multiply it"
        text = f"{name_hosts(hosts)}: {name} can't be read: {reason}. {fix}"
        reading.problems.append(reading.problem(text, hosts, name))
    return reading


def place_of(value: object) -> Place:
    """Where Ansible read a value: its file and line, as far as it remembers."""
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:  # not part of Ansible's interface: without it a message names the host alone
        return NOWHERE
    origin = Origin.get_tag(value)
    if origin is None or origin.path is None:
        return NOWHERE
    return str(origin.path), int(origin.line_num) if origin.line_num else None


def plain(value: Any) -> Any:
    """Return a value without Ansible's tags; raises ValueError for one that is larger than any setting."""
    return _plain(value, [MAX_VALUES], 0)


def _plain(value: Any, room: list[int], depth: int) -> Any:
    room[0] -= 1
    if room[0] < 0 or depth > MAX_DEPTH:
        raise ValueError(f"{TOO_LARGE} {MAX_VALUES} values, or more than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, room, depth + 1): _plain(item, room, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, room, depth + 1) for item in value]
    from jinja2 import Undefined  # a fifth of `fab`'s own imports, for what is rare

    if isinstance(value, Undefined):  # what Ansible hands on instead of raising
        raise ValueError(value._undefined_message or "it is undefined")
    # No setting is a date, bytes (!!binary) or a set (!!set): as what they are they are refused.
    return value if isinstance(value, (datetime.date, bytes)) else frozenset({show(value)})


def _say(error: Exception) -> str:
    """The first line of an error, which may quote a whole file."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
