"""The operator's verbs. `fab --list` shows them, `fab VERB --help` their flags; docs/operations.md tells the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from invoke import Exit

if not sys.flags.dont_write_bytecode:
    sys.dont_write_bytecode = False  # Invoke forbids it, and each call would compile Ansible and the kit again

# What one verb alone needs, it imports itself: half of the time of a `fab status` goes into imports.
from fleet.command_line import (
    MEANWHILE,
    PLAN,
    REASON,
    RUN,
    VerbCall,
    above_zero,
    ending,
    leaving,
    number,
    read_parameters,
    verb,
    whole_number,
)
from fleet.planning import decision

_MAX_LINES = 1_000_000  # of each task, which journalctl counts with 32 bits
_A_LINE = "print JSON instead of a line"
_START = {
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


@verb(_START, MEANWHILE, flags_of=_start, iterable=["set"])
def start_cluster(call: VerbCall, **flags: Any) -> None:
    """Ship and prove changed code and settings, start every task, and follow the training to its end."""
    _start(call, **flags, restart=False)


@verb(
    {
        "file": "YAML: a grid, list or search of parameters (docs/sweeps.md); `--file` before it is optional",
        "status": "show how far it is, and start nothing",
        "name": "with --status: which sweep, instead of the selected one",
        **{flag: _START[flag] for flag in ("detach", "plan", "allow_missing", "reason")},
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


@verb()
def queue(call: VerbCall) -> None:
    """Show what the cluster trains, what waits, whose it is, and what has ended."""
    from fleet.verbs.queue import show_queue

    with call.cluster() as cluster, leaving():
        show_queue(cluster, call.console)


@verb(
    {
        "run": "name of the run; `--run` before it is optional",
        "sweep": "a sweep's file instead of a run: all its points are one entry",
        "program": _START["program"],
        "set": _START["set"],
        "setting": "a run setting for it alone, as --setting checkpoint_seconds=60; may be repeated",
        "steps": "how many steps, instead of the inventory's",
        "minutes": "how long the cluster may work on it: then it is saved, and the next begins",
        "priority": "a whole number, below 0 too: what has more goes first (default: 0)",
        "as_shipped": "train it with the release that the hosts have, where this checkout is another",
        **REASON,
        "plan": _START["plan"],
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
        name, given, points = run or "", read_parameters(set), None
        if sweep:
            from fleet.site.sweep_file import read_sweep_to_wait

            if program or given:
                raise Exit("a sweep's file has its program and parameters: leave --program and --set out", 2)
            selection = read_sweep_to_wait(Path(sweep))
            name, points = selection["sweep"]["name"], selection["sweep"]["points"]
            program, given = selection.get("program"), selection.get("program_args", {})
        asked = QueueRequest(name, program, given, points, settings, number("priority", priority), limit, reason, sweep)
        queue_add(cluster, call.console, asked, plan, as_shipped)


_ENTRY = {"run": "which run or sweep; `--run` before it is optional"}


@verb(
    {
        **_ENTRY,
        "first": "before all others that wait",
        "last": "after all others",
        "before": "before this one",
        "priority": "give it another priority",
        **REASON,
        "plan": _START["plan"],
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
    with call.cluster() as cluster, leaving():
        queue_move(cluster, call.console, run, chosen[0], reason, plan)


@verb(
    {
        **_ENTRY,
        "stop": "also where it trains: it is saved and stopped, and the next begins",
        **REASON,
        "plan": _START["plan"],
    },
    MEANWHILE,
    positional=["run"],
)
def queue_remove(call: VerbCall, run: str, stop: bool = False, reason: str | None = None, plan: bool = False) -> None:
    """Take a run or a sweep out of the queue; what it has trained stays."""
    from fleet.verbs.queue import queue_remove

    with call.cluster() as cluster, leaving():
        queue_remove(cluster, call.console, run, stop, reason, plan)


@verb({**PLAN, **REASON}, MEANWHILE)
def stop_cluster(call: VerbCall, plan: bool = False, reason: str | None = None) -> None:
    """Save a checkpoint, stop every task and keep it down at the next boot."""
    from fleet.verbs.stop import stop_cluster

    with call.cluster() as cluster, leaving("left; fab status shows what still runs"):
        stop_cluster(cluster, call.console, reason, plan)


@verb(_START, MEANWHILE, flags_of=_start, iterable=["set"])
def restart_cluster(call: VerbCall, **flags: Any) -> None:
    """Do as start-cluster does, with every task stopped once what is shipped has proven itself."""
    _start(call, **flags, restart=True)


@verb(json="print all problems as JSON")
def validate(call: VerbCall) -> None:
    """Say what is wrong with the inventory, without asking a host."""
    from fleet.verbs.validate import validate

    with ending():
        validate(call.console, call.inventory, call.ask_vault_pass)


@verb(
    {
        "deep": "compare code and environment on the hosts, byte by byte, with what was installed",
        "watch": "go on looking until Ctrl-C; with --json, an object on a line at each look",
    }
)
def status(call: VerbCall, deep: bool = False, watch: bool = False) -> None:
    """Show each task, the hosts' code and the run."""
    if watch and deep:
        raise Exit("--deep reads every byte on the hosts, which --watch would do again and again: choose one", 2)
    with call.cluster() as cluster, leaving():
        if watch:
            from fleet.actions.watch_status import watch_status

            watch_status(cluster, call.console)
        else:
            from fleet.verbs.status import show_status

            show_status(cluster, call.console, deep)


@verb(
    {
        "task": "show one task only, such as worker-1",
        "lines": "how many of the last lines of each task (default: 20, and 1000 with --run, --since or --grep)",
        "run": "what was said while this run trained",
        "since": "lines since then: '10 min', '2 h', '14:30', '2026-03-02 14:30'",
        "grep": "lines with this regular expression; capitals count where it has any",
        "follow": "go on with new lines until Ctrl-C",
    },
    "print each entry as an object on a line",
)
def logs(
    call: VerbCall,
    task: str | None = None,
    lines: str | None = None,
    run: str | None = None,
    since: str | None = None,
    grep: str | None = None,
    follow: bool = False,
) -> None:
    """Show the tasks' journals, each line with its task."""
    from fleet.hosts.journal import JournalQuery, read_time
    from fleet.verbs.logs import show_logs

    number = None if lines is None else whole_number("lines", lines)
    if number is not None and number > _MAX_LINES:
        raise Exit(f"--lines is {lines}: expected {_MAX_LINES:,} at most, as in --lines 20", 2)
    with call.cluster() as cluster, leaving():
        decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
        chosen = JournalQuery(run, None if since is None else read_time(since), grep)
        show_logs(cluster, call.console, task, number, follow, chosen)


@verb({"port": "of this machine (default: 6006)"}, "print the address as JSON")
def tensorboard(call: VerbCall, port: str = "6006") -> None:
    """Open TensorBoard through an SSH tunnel, until Ctrl-C."""
    from fleet.verbs.tensorboard import open_tensorboard

    number = whole_number("port", port)
    if number > 65535:
        raise Exit(f"--port is {port}: expected a port from 1 to 65535, as in --port 6006", 2)
    with call.cluster() as cluster, leaving():
        open_tensorboard(cluster, call.console, number)


@verb()
def runs(call: VerbCall) -> None:
    """Show every run on the shared path."""
    from fleet.verbs.runs import show_runs

    with call.cluster() as cluster:
        show_runs(cluster, call.console)


@verb({"run": RUN})
def checkpoints(call: VerbCall, run: str | None = None) -> None:
    """Show a run's checkpoints: what is known of each, and why it is kept."""
    from fleet.verbs.runs import show_checkpoints

    with call.cluster() as cluster:
        show_checkpoints(cluster, call.console, run)


@verb(
    {
        "run": f"{RUN}; given more than once, these side by side",
        "out": "the file to write (default: report-<run>.html here)",
        "open": "show it in this machine's browser",
    },
    _A_LINE,
    iterable=["run"],
)
def report(call: VerbCall, run: list[str] | None = None, out: str | None = None, open: bool = False) -> None:
    """Write a run's page, one HTML file: curves, faults, members, checkpoints, and what to do next."""
    import webbrowser

    from fleet.verbs.report import make_report

    with call.cluster() as cluster, leaving():
        show = webbrowser.open if open else None
        make_report(cluster, call.console, run or [], Path(out) if out else None, show)


@verb({"run": RUN, "changes": "write what has changed since the newest whole one in exports/"}, _A_LINE)
def export(call: VerbCall, run: str | None = None, changes: bool = False) -> None:
    """Export a run's newest checkpoint as a SavedModel: where its end did not, or while it trains."""
    from fleet.verbs.export import export_run

    with call.cluster() as cluster, leaving():
        export_run(cluster, call.console, run, changes)


@verb()
def ways(call: VerbCall) -> None:
    """Have each host try its ways to the other members, with a large packet."""
    from fleet.verbs.ways import show_ways

    with call.cluster() as cluster, leaving():
        show_ways(cluster, call.console)


@verb({"minutes": "for how long it looks (default: 2)"}, "print the findings as JSON")
def advise(call: VerbCall, minutes: str = "2") -> None:
    """Measure a live training, and say in figures what holds it up: workers, ps, input, network or coordinator."""
    from fleet.verbs.advise import advise

    seconds = 60 * above_zero("minutes", minutes)
    with call.cluster() as cluster, leaving():
        advise(cluster, call.console, seconds)


@verb()
def gpu_check(call: VerbCall) -> None:
    """Prove the GPUs: driver, number, and a product of matrices on each."""
    from fleet.verbs.gpu_check import check_gpus

    with call.cluster() as cluster, leaving():
        check_gpus(cluster, call.console)


@verb(
    {
        "names": "which drill, or several with commas between them; `--names` before it is optional",
        "all": "every drill that the inventory permits",
        "list": "say what each drill does, and its bounds",
        "random": "faults by chance, one or two at a time, and a verdict on the whole",
        "seed": "with --random: the number that decides on the faults (default: one that is drawn, and printed)",
        "minutes": "with --random: for how long (default: 10)",
        "bounds_factor": "multiply the bounds by this, on machines that have other work besides (default: 1)",
    },
    MEANWHILE,
    # Fabric knows no argument without a flag that may be left out.
    positional=[] if {"--all", "--list", "--random"} & set(sys.argv) else ["names"],
)
def drill(
    call: VerbCall,
    names: str | None = None,
    all: bool = False,
    list: bool = False,
    random: bool = False,
    seed: str | None = None,
    minutes: str | None = None,
    bounds_factor: str = "1",
) -> None:
    """Do a fault to the live cluster, in a run of its own, and judge the recovery."""
    from fleet.drills import runner

    if list:
        runner.list_drills(call.console)
        return
    if random and (names or all):
        raise Exit("--random chooses the drills itself: leave out --all and the names", 2)
    for flag, given in (("seed", seed), ("minutes", minutes)):
        if given is not None and not random:
            raise Exit(f"--{flag} is for faults by chance, and no drill takes it: leave it out, or add --random", 2)
    chosen = None if seed is None else whole_number("seed", seed)
    length = 10.0 if minutes is None else above_zero("minutes", minutes)
    factor = above_zero("bounds-factor", bounds_factor)
    with call.cluster(check=True) as cluster, leaving("left; the cluster was given back"):
        if random:
            runner.soak(cluster, call.console, chosen, length, factor)
            return
        runner.drill(cluster, call.console, [name for name in (names or "").split(",") if name], all, factor)


# The verbs beside training have modules of their own. They come last, as `docs/verbs.md` has them.
from fleet.command_line.hosts import (  # noqa: E402, F401
    canary,
    drain,
    history,
    hosts,
    ok_to_stop,
    remove_host,
    replace_host,
    rollback,
    undrain,
    update_hosts,
)
from fleet.command_line.runs import (  # noqa: E402, F401
    backup,
    bundle,
    clone_run,
    delete_run,
    doctor,
    prune,
    render,
    restore_run,
)
