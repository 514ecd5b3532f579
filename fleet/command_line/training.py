"""The command line of the verbs that start and stop a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from invoke import Exit

from fleet.command_line import MEANWHILE, PLAN, REASON, VerbCall, above_zero, leaving, read_parameters, verb

START = {
    "run": "name of the run to train: a new one starts a new training, an old one goes on",
    "program": "what to train, package.module:Name",
    "from_": "begin the new run from a checkpoint of another: RUN@STEP",
    "set": "a parameter of the program, as --set learning_rate=0.01 or --set layers='[64, 64]'; may be repeated",
    "detach": "leave as soon as a step is trained, instead of following until the run is finished",
    **PLAN,
    "allow_missing": "start without hosts that don't answer, where each job has its minimum (cluster_minimum)",
    "timeout": "seconds to wait for the first trained step (default: 300)",
    "queue": "go on with the queue, instead of the run that is selected (docs/queue.md)",
    **REASON,
}


def _start(
    call: VerbCall,
    run: str | None = None,
    program: str | None = None,
    from_: str | None = None,
    set: list[str] | None = None,
    detach: bool = False,
    plan: bool = False,
    allow_missing: bool = False,
    timeout: str = "300",
    queue: bool = False,
    reason: str | None = None,
    *,
    restart: bool,
) -> None:
    from fleet.verbs.start import StartRequest, start_cluster

    seconds = above_zero("timeout", timeout)
    with leaving("left"), call.cluster(check=True) as cluster:
        given = read_parameters(set)
        request = StartRequest(
            run, program, detach, seconds, restart, plan, allow_missing, from_, given, queue=queue, reason=reason
        )
        start_cluster(cluster, call.console, request)


@verb(START, MEANWHILE, flags_of=_start, iterable=["set"])
def start_cluster(call: VerbCall, **flags: Any) -> None:
    """Ship and prove changed code and settings, start every task, and follow the training to its end."""
    _start(call, **flags, restart=False)


@verb(
    {
        "file": "YAML: a grid, list or search of parameters (docs/sweeps.md); `--file` before it is optional",
        "status": "show how far it is, and start nothing",
        "name": "with --status: which sweep, instead of the selected one",
        "detach": "leave as soon as the tasks are started, instead of following until the sweep is over",
        **{flag: START[flag] for flag in ("plan", "allow_missing", "reason")},
    },
    MEANWHILE,
    positional=[] if "--status" in sys.argv else ["file"],
)
def sweep(
    call: VerbCall,
    file: str | None = None,
    status: bool = False,
    name: str | None = None,
    detach: bool = False,
    plan: bool = False,
    allow_missing: bool = False,
    reason: str | None = None,
) -> None:
    """Train the points of a grid or a list one after the other, unattended; or show how far that is."""
    if status:
        from fleet.verbs.sweep import show_sweep

        with call.cluster() as cluster:
            show_sweep(cluster, call.console, name)
        return
    from fleet.site.sweep_file import read_sweep_file
    from fleet.verbs.start import StartRequest, start_cluster

    if not file:
        raise Exit("name the sweep's file, as in fab sweep learning-rates.yml, or ask for the last one: --status", 2)
    with leaving("left"), call.cluster(check=True) as cluster:
        points = read_sweep_file(Path(file))
        request = StartRequest(detach=detach, plan_only=plan, allow_missing=allow_missing, sweep=points, reason=reason)
        start_cluster(cluster, call.console, request)


@verb({**PLAN, **REASON}, MEANWHILE)
def stop_cluster(call: VerbCall, plan: bool = False, reason: str | None = None) -> None:
    """Save a checkpoint, stop every task and keep it down at the next boot."""
    from fleet.verbs.stop import stop_cluster

    with call.cluster() as cluster, leaving("left; fab status shows what still runs"):
        stop_cluster(cluster, call.console, reason, plan)


@verb(START, MEANWHILE, flags_of=_start, iterable=["set"])
def restart_cluster(call: VerbCall, **flags: Any) -> None:
    """Do as start-cluster does, with every task stopped once what is shipped has proven itself."""
    _start(call, **flags, restart=True)
