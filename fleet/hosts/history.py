"""The cluster's history: what was done to it, when, by whom, from where and why.

It is one file of JSON lines on the shared path, `history.jsonl`. A verb leaves a line before it acts, and one with the
outcome; the two have one `id`. Any host that answers can write it, and nothing removes a line.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol

from fleet.errors import FleetError, first_line
from fleet.hosts.cluster import Cluster
from fleet.hosts.run import SETTINGS, on_path
from fleet.places import ROLES
from fleet.site.inventory import Inventory
from fleet.site.origin import operator

NAME = "history.jsonl"
# Of a line: a command's words have an end, and so has what a reader can use.
MAX_TEXT = 500
# That are read: of people several years, of a script that acts each minute one week. They have some 10 MB.
MAX_LINES = 20_000
BEGUN, DONE, FAILED, LEFT = "begun", "done", "failed", "left"


# Has the chief's host run a script that leaves a line, beside what it does; returns whether that was done.
Act = Callable[[str], bool]


class Printer(Protocol):
    """Where a verb says what it could not write."""

    def print(self, text: str) -> None:
        """Print a line."""


class Trail:
    """One act of an operator: `begin` leaves a line, and so does the end, whatever that is.

    A history that can't be written is said, and holds up no verb: a full disk must not keep a cluster from being
    stopped.
    """

    def __init__(
        self, cluster: Cluster, console: Printer, verb: str, reason: str | None = None, settings: bool = False
    ) -> None:
        """With `settings` the last line has the members, and the run settings of the host that writes it: a rollback
        goes back to them."""
        self._cluster = cluster
        self._settings = settings
        self._console = console
        self._line: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "verb": verb, **origin(cluster.inventory)}
        if reason:
            self._line["reason"] = reason[:MAX_TEXT]
        self._open = False

    def begin(self, beside: Act | None = None, /, **what: Any) -> None:
        """Leave a line before anything is changed, with what will be; `beside` an act, where one is given."""
        self._line |= what
        self._open = True
        self._write(BEGUN, beside)

    def end(self, outcome: str = DONE, beside: Act | None = None, /, **what: Any) -> None:
        """Leave the line with the outcome; once, and only where something was begun. An act `beside` is done."""
        if self._open:
            self._open = False
            self._line |= what
            self._write(outcome, beside)

    def __enter__(self) -> Trail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif isinstance(error, Exception):
            self.end(FAILED, message=first_line(error)[:MAX_TEXT])
        else:
            self.end(LEFT)

    def _write(self, outcome: str, beside: Act | None = None) -> None:
        line = {**self._line, "outcome": outcome}
        settings = self._settings and outcome == DONE
        if settings:
            line["members"] = members_of(self._cluster.inventory)
        if beside and beside(_script_of(self._cluster.inventory, line, settings)):
            return
        try:
            append(self._cluster, line, settings)
        except FleetError as error:
            self._console.print(f"this is not in the cluster's history: {first_line(error)}")


def origin(inventory: Inventory) -> dict[str, Any]:
    """Return by whom, from where, and with which inventory something is done."""
    return {"who": operator(), "from": socket.gethostname(), "inventory": digest_of(inventory)}


def digest_of(inventory: Inventory) -> str:
    """Return a digest of groups, tasks and run settings: another one means that the inventory was changed."""
    tasks = [[task.name, task.host, task.address, task.port] for task in inventory.tasks]
    groups = {group: sorted(hosts) for group, hosts in inventory.groups.items()}
    settings = {key: inventory.run_settings[key] for key in inventory.run_settings}
    text = json.dumps([groups, tasks, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def members_of(inventory: Inventory) -> dict[str, list[str]]:
    """Return by host the names of its tasks."""
    found = {host: [task.name for task in inventory.tasks_on(host)] for host in inventory.hosts}
    return {host: names for host, names in found.items() if names}


def append(cluster: Cluster, line: Mapping[str, Any], settings: bool = False) -> None:
    """Append a line, with the run settings of a host; raises FleetError where no host can write it."""
    path = f"{cluster.inventory.shared_dir}/{NAME}"
    cluster.on_shared(_script_of(cluster.inventory, line, settings), f"{path} can't be written")


def _script_of(inventory: Inventory, line: Mapping[str, Any], settings: bool) -> str:
    script = (ROLES / "release/files/append_history.sh").read_text(encoding="utf-8")
    path = f"{inventory.shared_dir}/{NAME}"
    given = f"SETTINGS={SETTINGS if settings else ''} HISTORY={shlex.quote(path)} LINE={shlex.quote(json.dumps(line))}"
    return on_path(f"env {given} sh -c {shlex.quote(script)}")


def read(cluster: Cluster) -> tuple[list[dict[str, Any]], int]:
    """Return the acts of the last lines, the oldest first, each as its last line has it, and how many can't be read.

    An act whose end is missing has the outcome `begun`: its control machine was lost, or it goes on just now.
    """
    path = shlex.quote(f"{cluster.inventory.shared_dir}/{NAME}")
    look = on_path(f"sh -c {shlex.quote(f'[ ! -e {path} ] || tail -n {MAX_LINES} {path}')}")
    return merge(cluster.on_shared(look, f"{path} can't be read").stdout.splitlines())


def merge(lines: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Make acts of lines; the time is that of an act's first line, `seconds` how long it took.

    Ansible's lines have no `id`: it is their digest.
    """
    acts: dict[str, dict[str, Any]] = {}
    damaged = 0
    for text in lines:
        try:
            line = json.loads(text)
            line["time"] = time = float(line["time"])
            datetime.fromtimestamp(time)  # no clock shows what this can't
        except (ValueError, TypeError, KeyError, OverflowError, OSError):
            damaged += bool(text.strip())
            continue
        line["id"] = key = str(line.get("id") or hashlib.sha256(text.encode()).hexdigest()[:12])
        if key in acts:
            begun = acts[key]["time"]
            line |= {"time": begun, "seconds": round(time - begun, 1)}
        acts[key] = line
    return list(acts.values()), damaged
