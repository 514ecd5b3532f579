"""What a verb has of its operator: where it writes, how it tells time, how it asks."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from fleet.hosts.cluster import Cluster
from fleet.output.tables import ProgressLine, put
from fleet.output.terminal import printable
from fleet.rollout.release import Shipment, ShipmentResult, build_release, check_deeply, find_program, ship
from fleet.site.inventory import Inventory
from trainer.run.records import to_json

# Of what verbs answer with `--json` (fleet/site/schema/answers.json). Within a version keys are only added. What else
# changes raises it.
VERSION = 1


def _ask(question: str) -> bool:
    """Put a question to the operator; no where nobody sits at a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(printable(question)).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


def _prove(cluster: Cluster, release: str, selection: Mapping[str, Any], display: ProgressLine) -> None:
    """Prove a choice on the coordinator's host, beside what runs there."""
    from fleet.rollout.short_way import prove_beside  # which few verbs need

    prove_beside(cluster, release, selection, display)


def with_reason(command: str, reason: str | None) -> str:
    """Return a command with the reason that was typed with it."""
    return f"{command} --reason {shlex.quote(reason)}" if reason else command


@dataclass
class Console:
    """Where a verb writes and how it tells time; a test brings its own."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    ship: Callable[[Shipment, ProgressLine], ShipmentResult] = ship
    check_program: Callable[[Inventory, str, Sequence[str]], None] = find_program
    build: Callable[[Inventory], str] = build_release
    verify_hosts: Callable[[Inventory, Sequence[str], ProgressLine], Mapping[str, str]] = check_deeply
    ask: Callable[[str], bool] = _ask
    prove: Callable[[Cluster, str, Mapping[str, Any], ProgressLine], None] = _prove
    json_out: TextIO | None = None
    """Where `--json` goes, while `out` is for the operator; None without it."""
    progress_out: TextIO | None = None
    """Where it is shown how far a verb is, so that `out` has what comes of it; None for `out`."""

    complete: Callable[[str], str] = str
    """Adds to the commands that a text names what they need to be for this cluster."""

    def print(self, text: str) -> None:
        put(self.out, self.complete(text))

    @contextmanager
    def progress(self) -> Iterator[ProgressLine]:
        """Give the line that says how far a verb is, and leave it at the end."""
        line = ProgressLine(self.progress_out or self.out, clock=self.clock)
        try:
            yield line
        finally:
            line.end()

    def print_json(self, verb: str, record: Mapping[str, Any], on_a_line: bool = False) -> None:
        """Print what `--json` asked for, if it did."""
        if self.json_out is None:
            return
        if isinstance(record.get("next"), str):
            record = {**record, "next": self.complete(record["next"])}
        answer = {"version": VERSION, "verb": verb, **record}
        put(self.json_out, to_json(answer, indent=None if on_a_line else 1))

    def answer(self, verb: str, record: Mapping[str, Any], text: str) -> None:
        """Print what `--json` asked for, else the text."""
        if self.json_out is None:
            self.print(text)
        else:
            self.print_json(verb, record)
