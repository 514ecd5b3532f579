"""The command line of the verbs of docs/queue.md."""

from __future__ import annotations

import sys
from pathlib import Path

from invoke import Exit

from fleet.command_line import (
    MEANWHILE,
    REASON,
    VerbCall,
    above_zero,
    leaving,
    number,
    read_parameters,
    verb,
    whole_number,
)
from fleet.command_line.training import START

_ENTRY = {"run": "which run or sweep; `--run` before it is optional"}


@verb()
def queue(call: VerbCall) -> None:
    """Show what the cluster trains, what waits, whose it is, and what has ended."""
    from fleet.verbs.queue import show_queue

    with call.cluster() as cluster:
        show_queue(cluster, call.console)


@verb(
    {
        "run": "name of the run; `--run` before it is optional",
        "sweep": "a sweep's file instead of a run: all its points are one entry",
        "program": START["program"],
        "set": START["set"],
        "setting": "a run setting for it alone, as --setting checkpoint_seconds=60; may be repeated",
        "steps": "how many steps, instead of the inventory's",
        "minutes": "how long the cluster may work on it: then it is saved, and the next begins",
        "priority": "a whole number, below 0 too: what has more goes first (default: 0)",
        "as_shipped": "train it with the release that the hosts have, where this checkout is another",
        **REASON,
        "plan": START["plan"],
    },
    MEANWHILE,
    positional=[] if any(word.partition("=")[0] == "--sweep" for word in sys.argv) else ["run"],
    iterable=["set", "setting"],
)
def queue_add(
    call: VerbCall,
    run: str | None = None,
    sweep: str | None = None,
    program: str | None = None,
    set: list[str] | None = None,
    setting: list[str] | None = None,
    steps: str | None = None,
    minutes: str | None = None,
    priority: str = "0",
    as_shipped: bool = False,
    reason: str | None = None,
    plan: bool = False,
) -> None:
    """Have the cluster train a run or a sweep in its turn; where it has nothing else to train, now."""
    from fleet.verbs.queue import QueueRequest, queue_add

    settings = read_parameters(setting, "--setting") | ({"steps": whole_number("steps", steps)} if steps else {})
    limit = above_zero("minutes", minutes) if minutes else 0.0
    if bool(run) == bool(sweep):
        raise Exit("name a run or a sweep's file, as in fab queue-add digits-2, or fab queue-add --sweep rates.yml", 2)
    with leaving("left. Look: fab queue"), call.cluster(check=True) as cluster:
        name, given, points, search = run or "", read_parameters(set), None, None
        if sweep:
            from fleet.site.sweep_file import read_sweep_file

            if program or given:
                raise Exit("a sweep's file has its program and parameters: leave --program and --set out", 2)
            selection = read_sweep_file(Path(sweep))
            name, points, search = (selection["sweep"].get(key) for key in ("name", "points", "search"))
            program, given = selection.get("program"), selection.get("program_args", {})
        asked = QueueRequest(
            name, program, given, points, settings, number("priority", priority), limit, reason, sweep, search
        )
        queue_add(cluster, call.console, asked, plan, as_shipped)


@verb(
    {
        **_ENTRY,
        "first": "before all others that wait",
        "last": "after all others",
        "before": "before this one",
        "priority": "give it another priority",
        **REASON,
        "plan": START["plan"],
    },
    MEANWHILE,
    positional=["run"],
)
def queue_move(
    call: VerbCall,
    run: str,
    first: bool = False,
    last: bool = False,
    before: str | None = None,
    priority: str | None = None,
    reason: str | None = None,
    plan: bool = False,
) -> None:
    """Move a run or a sweep that waits in the queue."""
    from fleet.verbs.queue import queue_move

    chosen = ["first"] * first + ["last"] * last
    chosen += [f"before:{before}"] if before is not None else []
    chosen += [f"priority:{number('priority', priority)}"] if priority is not None else []
    if len(chosen) != 1:
        raise Exit("say where to, with one of --first, --last, --before RUN and --priority NUMBER", 2)
    with call.cluster() as cluster:
        queue_move(cluster, call.console, run, chosen[0], reason, plan)


@verb(
    {
        **_ENTRY,
        "stop": "also where it trains: it is saved and stopped, and the next begins",
        **REASON,
        "plan": START["plan"],
    },
    MEANWHILE,
    positional=["run"],
)
def queue_remove(call: VerbCall, run: str, stop: bool = False, reason: str | None = None, plan: bool = False) -> None:
    """Take a run or a sweep out of the queue; what it has trained stays."""
    from fleet.verbs.queue import queue_remove

    with call.cluster() as cluster:
        queue_remove(cluster, call.console, run, stop, reason, plan)
