"""The command line of the verbs that look at a cluster and its runs."""

from __future__ import annotations

from pathlib import Path

from invoke import Exit

from fleet.command_line import RUN, VerbCall, above_zero, ending, verb, whole_number
from fleet.planning import decision

_MAX_LINES = 1_000_000  # of each task, which journalctl counts with 32 bits
_A_LINE = "print JSON instead of a line"


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
    with call.cluster() as cluster:
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
    with call.cluster() as cluster:
        decision.check_names(run, None)  # a wrong name is said before any host is asked
        chosen = JournalQuery(run, None if since is None else read_time(since), grep)
        show_logs(cluster, call.console, task, number, follow, chosen)


@verb({"port": "of this machine (default: 6006)"}, "print the address as JSON")
def tensorboard(call: VerbCall, port: str = "6006") -> None:
    """Open TensorBoard through an SSH tunnel, until Ctrl-C."""
    from fleet.verbs.tensorboard import open_tensorboard

    number = whole_number("port", port)
    if number > 65535:
        raise Exit(f"--port is {port}: expected a port from 1 to 65535, as in --port 6006", 2)
    with call.cluster() as cluster:
        open_tensorboard(cluster, call.console, number)


@verb({"by": "the best first, by this metric of the evaluation, such as loss"})
def runs(call: VerbCall, by: str | None = None) -> None:
    """Show every run on the shared path."""
    from fleet.verbs.runs import show_runs

    with call.cluster() as cluster:
        show_runs(cluster, call.console, by)


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

    with call.cluster() as cluster:
        show = webbrowser.open if open else None
        make_report(cluster, call.console, run or [], Path(out) if out else None, show)


@verb({"run": RUN, "changes": "write what has changed since the newest whole one in exports/"}, _A_LINE)
def export(call: VerbCall, run: str | None = None, changes: bool = False) -> None:
    """Export a run's newest checkpoint as a SavedModel: where its end did not, or while it trains."""
    from fleet.verbs.export import export_run

    with call.cluster() as cluster:
        export_run(cluster, call.console, run, changes)


@verb()
def ways(call: VerbCall) -> None:
    """Have each host try its ways to the other members, with a large packet."""
    from fleet.verbs.ways import show_ways

    with call.cluster() as cluster:
        show_ways(cluster, call.console)


@verb({"minutes": "for how long it looks (default: 2)"}, "print the findings as JSON")
def advise(call: VerbCall, minutes: str = "2") -> None:
    """Measure a live training, and say in figures what holds it up: workers, ps, input, network or coordinator."""
    from fleet.verbs.advise import advise

    seconds = 60 * above_zero("minutes", minutes)
    with call.cluster() as cluster:
        advise(cluster, call.console, seconds)


@verb()
def gpu_check(call: VerbCall) -> None:
    """Prove the GPUs: driver, number, and a product of matrices on each."""
    from fleet.verbs.gpu_check import check_gpus

    with call.cluster() as cluster:
        check_gpus(cluster, call.console)
