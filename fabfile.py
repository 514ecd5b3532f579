"""The operator's verbs. `fab --list` shows them, `fab VERB --help` their flags; docs/operations.md tells the rest."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fabric import task
from invoke import Context, Exit

# What one verb alone needs, it imports itself: half of the time of a `fab status` goes into imports.
if not sys.flags.dont_write_bytecode:
    sys.dont_write_bytecode = False  # Invoke forbids it, and each call would compile Ansible and the kit anew

from fleet import decision, verbs
from fleet.cluster import Cluster
from fleet.errors import FleetError
from fleet.inventory import load_inventory
from fleet.journal import Chosen, read_time
from fleet.known import recall_inventory
from fleet.schema.problems import show
from fleet.ssh import SshHosts
from fleet.terminal import printable
from trainer.core.parameters import parse_assignments

_WHERE = {
    "inventory": "path of the inventory (else PSFLEET_INVENTORY, else ansible.cfg's)",
    "ask_vault_pass": "type the password of the inventory's vaults, as with ansible-playbook",
}
_START = {
    "run": "name of the run to train: a new one starts a new training, an old one goes on",
    "program": "what to train, package.module:Name",
    "from_": "begin the new run from a checkpoint of another: RUN@STEP",
    "set": "a parameter of the program, as --set learning_rate=0.01 or --set layers='[64, 64]'; may be repeated",
    "detach": "leave as soon as a step is trained, instead of following until the run is finished",
    "plan": "say what would be done, and do nothing",
    "allow_missing": "start without hosts that don't answer, where each job has its minimum (cluster_minimum)",
    "timeout": "seconds to wait for the first trained step (default: 300)",
    "json": "print the outcome as JSON, and what is done meanwhile on standard error",
    **_WHERE,
}


@contextmanager
def _cluster(context: Context, inventory: str | None, ask_vault_pass: bool, check: bool = False) -> Iterator[Cluster]:
    """Give the inventory's cluster; what stops a verb becomes its message and exit code here.

    Starting asks for an inventory without fault (`check`); to look and to stop, knowing the tasks is enough.
    """
    try:
        if check or ask_vault_pass:
            known = load_inventory(inventory, check=check, ask_vault_pass=ask_vault_pass)
        else:
            known = recall_inventory(inventory)
        hosts = SshHosts(known.hosts, context.config)
        try:
            yield Cluster(known, hosts)
        finally:
            hosts.close()
    except FleetError as error:
        raise Exit(printable(str(error)), error.code) from error


@contextmanager
def _leaving(message: str = "") -> Iterator[None]:
    """Let Ctrl-C end a verb with its own message, or with this one; 130 is the shell's own code for it.

    A terminal that is shut and `kill` are the same: what was begun must not stay half done. Only the first one counts:
    shell and kernel both tell of a terminal that is shut.
    """

    def leave(*_: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    heeded = [each for each in (signal.SIGHUP, signal.SIGTERM) if signal.getsignal(each) is signal.SIG_DFL]
    for each in heeded:
        signal.signal(each, leave)
    try:
        yield
    except KeyboardInterrupt as left:
        said = str(left) or message
        raise Exit(f"\n{said}" if said else None, 130) from None
    finally:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)


_MOST_LINES = 1_000_000  # of each task, which journalctl counts with 32 bits


def _desk(json: bool) -> verbs.Desk:
    """With `--json` standard output has that alone, so that another program can read it.

    How far a verb is goes to standard error either way.
    """
    return verbs.Desk(sys.stderr, answers=sys.stdout) if json else verbs.Desk(meanwhile=sys.stderr)


# Invoke turns a number's text into one itself, and ends with a traceback where it can't: so flags are texts.
def _whole(flag: str, text: str) -> int:
    """Return a flag's whole number, 1 or more."""
    if not text.isascii() or not text.isdecimal() or len(text) > 4000 or not int(text):
        raise Exit(f"--{flag} is {show(text)}: expected a whole number of 1 or more, as in --{flag} 20", 2)
    return int(text)


def _above_zero(flag: str, text: str) -> float:
    """Return a flag's number, which is greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise Exit(f"--{flag} is {show(text)}: expected a number greater than 0, as in --{flag} 1.5", 2)
    return number


def _read_parameters(texts: list[str] | None) -> dict[str, Any]:
    """Return the program's parameters that `--set` gave."""
    try:
        return parse_assignments(texts or [])
    except ValueError as error:
        raise Exit(str(error), 2) from error


@task(auto_shortflags=False, iterable=["set"], help=_START)
def start_cluster(
    context: Context,
    run: str | None = None,
    program: str | None = None,
    from_: str | None = None,
    set: list[str] | None = None,
    detach: bool = False,
    plan: bool = False,
    allow_missing: bool = False,
    timeout: str = "300",
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Ship and prove changed code and settings, start every task, and follow the training to its end."""
    seconds = _above_zero("timeout", timeout)
    with _leaving("left"), _cluster(context, inventory, ask_vault_pass, check=True) as cluster:
        verbs.start_cluster(
            cluster,
            _desk(json),
            run,
            program,
            detach,
            seconds,
            plan_only=plan,
            allow_missing=allow_missing,
            source=from_,
            program_args=_read_parameters(set),
        )


@task(
    auto_shortflags=False,
    positional=[] if "--status" in sys.argv else ["file"],
    help={
        "file": "YAML: a grid or a list of the program's parameters (docs/sweeps.md); --file may be left out",
        "status": "show how far it is, and start nothing",
        "name": "with --status: which sweep, instead of the selected one",
        "json": "print the outcome as JSON, and what is done meanwhile on standard error",
        **{flag: _START[flag] for flag in ("detach", "plan", "allow_missing")},
        **_WHERE,
    },
)
def sweep(
    context: Context,
    file: str | None = None,
    status: bool = False,
    name: str | None = None,
    json: bool = False,
    detach: bool = False,
    plan: bool = False,
    allow_missing: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Train the points of a grid or a list one after the other, unattended; or show how far that is."""
    if status:
        with _cluster(context, inventory, ask_vault_pass) as cluster:
            verbs.show_sweep(cluster, _desk(json), name, json)
        return
    from fleet.sweep import read_sweep_file

    if not file:
        raise Exit("name the sweep's file, as in fab sweep learning-rates.yml, or ask for the last one: --status", 2)
    with _leaving("left"), _cluster(context, inventory, ask_vault_pass, check=True) as cluster:
        asked = read_sweep_file(Path(file))
        verbs.start_cluster(
            cluster, _desk(json), detach=detach, plan_only=plan, allow_missing=allow_missing, sweep=asked
        )


@task(auto_shortflags=False, help={"json": _START["json"], **_WHERE})
def stop_cluster(
    context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False
) -> None:
    """Save a checkpoint, stop every task and keep it down at the next boot."""
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving("left; fab status shows what still runs"):
        verbs.stop_cluster(cluster, _desk(json))


@task(auto_shortflags=False, iterable=["set"], help=_START)
def restart_cluster(
    context: Context,
    run: str | None = None,
    program: str | None = None,
    from_: str | None = None,
    set: list[str] | None = None,
    detach: bool = False,
    plan: bool = False,
    allow_missing: bool = False,
    timeout: str = "300",
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Do as start-cluster does, with every task stopped once what is shipped has proven itself."""
    seconds = _above_zero("timeout", timeout)
    with _leaving("left"), _cluster(context, inventory, ask_vault_pass, check=True) as cluster:
        verbs.start_cluster(
            cluster,
            _desk(json),
            run,
            program,
            detach,
            seconds,
            True,
            plan_only=plan,
            allow_missing=allow_missing,
            source=from_,
            program_args=_read_parameters(set),
        )


@task(auto_shortflags=False, help={"json": "print all problems as JSON", **_WHERE})
def validate(context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False) -> None:
    """Say what is wrong with the inventory, without asking a host."""
    from fleet.validate import validate as check_inventory

    try:
        check_inventory(_desk(json), inventory, json, ask_vault_pass)
    except FleetError as error:
        raise Exit(printable(str(error)) or None, error.code) from error


@task(
    auto_shortflags=False,
    help={
        "json": "print JSON instead of a table",
        "deep": "compare code and environment on the hosts, byte by byte, with what was installed",
        "watch": "go on looking until Ctrl-C; with --json, an object on a line at each look",
        **_WHERE,
    },
)
def status(
    context: Context,
    json: bool = False,
    deep: bool = False,
    watch: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Show each task, the hosts' code and the run."""
    if watch and deep:
        raise Exit("--deep reads every byte on the hosts, which --watch would do again and again: choose one", 2)
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        if watch:
            from fleet.live import watch_status

            watch_status(cluster, _desk(json), json)
        else:
            verbs.show_status(cluster, _desk(json), json, deep)


@task(
    auto_shortflags=False,
    help={
        "task": "show one task only, such as worker-1",
        "lines": "how many of the last lines of each task (default: 20, and 1000 with --run, --since or --grep)",
        "run": "what was said while this run trained",
        "since": "lines since then: '10 min', '2 h', '14:30', '2026-03-02 14:30'",
        "grep": "lines with this regular expression; capitals count where it has any",
        "follow": "go on with new lines until Ctrl-C",
        "json": "print each entry as an object on a line",
        **_WHERE,
    },
)
def logs(
    context: Context,
    task: str | None = None,
    lines: str | None = None,
    run: str | None = None,
    since: str | None = None,
    grep: str | None = None,
    follow: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Show the tasks' journals, each line with its task."""
    number = None if lines is None else _whole("lines", lines)
    if number is not None and number > _MOST_LINES:
        raise Exit(f"--lines is {lines}: expected {_MOST_LINES:,} at most, as in --lines 20", 2)
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
        chosen = Chosen(run, None if since is None else read_time(since), grep)
        verbs.show_logs(cluster, _desk(json), task, number, follow, chosen)


@task(
    auto_shortflags=False,
    help={"port": "of this machine (default: 6006)", "json": "print the address as JSON", **_WHERE},
)
def tensorboard(
    context: Context,
    port: str = "6006",
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Open TensorBoard through an SSH tunnel, until Ctrl-C."""
    number = _whole("port", port)
    if number > 65535:
        raise Exit(f"--port is {port}: expected a port from 1 to 65535, as in --port 6006", 2)
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verbs.open_tensorboard(cluster, _desk(json), number)


@task(auto_shortflags=False, help={"json": "print JSON instead of a table", **_WHERE})
def runs(context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False) -> None:
    """Show every run on the shared path."""
    with _cluster(context, inventory, ask_vault_pass) as cluster:
        verbs.show_runs(cluster, _desk(json), json)


@task(
    auto_shortflags=False,
    help={"run": "whose (default: the chosen run's)", "json": "print JSON instead of a table", **_WHERE},
)
def checkpoints(
    context: Context,
    run: str | None = None,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Show a run's checkpoints: what is known of each, and why it is kept."""
    with _cluster(context, inventory, ask_vault_pass) as cluster:
        verbs.show_checkpoints(cluster, _desk(json), run, json)


@task(
    auto_shortflags=False,
    iterable=["run"],
    help={
        "run": "whose (default: the chosen run's); given more than once, these side by side",
        "out": "the file to write (default: report-<run>.html here)",
        "open": "show it in this machine's browser",
        "json": "print JSON instead of a line",
        **_WHERE,
    },
)
def report(
    context: Context,
    run: list[str] | None = None,
    out: str | None = None,
    open: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Write a run's page, one HTML file: curves, faults, members, checkpoints, and what to do next."""
    import webbrowser

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        show = webbrowser.open if open else None
        verbs.make_report(cluster, _desk(json), run or [], Path(out) if out else None, show, json)


@task(
    auto_shortflags=False,
    help={"run": "whose (default: the chosen run's)", "json": "print JSON instead of a line", **_WHERE},
)
def export(
    context: Context,
    run: str | None = None,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Export a run's newest checkpoint as a SavedModel, where its end did not."""
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verbs.export_run(cluster, _desk(json), run, json)


@task(auto_shortflags=False, help={"json": "print JSON instead of a table", **_WHERE})
def ways(context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False) -> None:
    """Have each host try its ways to the other members, with a large packet."""
    from fleet.ways import show_ways

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        show_ways(cluster, _desk(json))


@task(auto_shortflags=False, help={"json": "print JSON instead of a table", **_WHERE})
def gpu_check(context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False) -> None:
    """Prove the GPUs: driver, number, and a product of matrices on each."""
    from fleet.gpu import check_gpus

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        check_gpus(cluster, _desk(json), json)


@task(
    auto_shortflags=False,
    # Fabric knows no argument without a flag that may be left out.
    positional=[] if {"--all", "--list", "--random"} & set(sys.argv) else ["names"],
    help={
        "names": "which drill, or several with commas between them; --names may be left out",
        "all": "every drill that the inventory permits",
        "list": "say what each drill does, and its bounds",
        "random": "faults by chance, one or two at a time, and a verdict on the whole",
        "seed": "with --random: the number that decides on the faults (default: one that is drawn, and printed)",
        "minutes": "with --random: for how long (default: 10)",
        "slack": "multiply the bounds by this, on machines that have other work besides (default: 1)",
        "json": _START["json"],
        **_WHERE,
    },
)
def drill(
    context: Context,
    names: str | None = None,
    all: bool = False,
    list: bool = False,
    random: bool = False,
    seed: str | None = None,
    minutes: str | None = None,
    slack: str = "1",
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Do a fault to the live cluster, in a run of its own, and judge the recovery."""
    from fleet.drills import rehearsal

    if list:
        rehearsal.list_drills(_desk(json))
        return
    if random and (names or all):
        raise Exit("--random chooses the drills itself: leave out --all and the names", 2)
    for flag, given in (("seed", seed), ("minutes", minutes)):
        if given is not None and not random:
            raise Exit(f"--{flag} is for faults by chance, and no drill takes it: leave it out, or add --random", 2)
    chosen = None if seed is None else _whole("seed", seed)
    length = 10.0 if minutes is None else _above_zero("minutes", minutes)
    factor = _above_zero("slack", slack)
    with (
        _cluster(context, inventory, ask_vault_pass, check=True) as cluster,
        _leaving("left; the cluster was given back"),
    ):
        if random:
            rehearsal.soak(cluster, _desk(json), chosen, length, factor)
            return
        rehearsal.drill(cluster, _desk(json), [name for name in (names or "").split(",") if name], all, factor)


_RUN = {"plan": "say what would be done, and do nothing", "json": _START["json"], **_WHERE}
_YES = {"yes": "agree beforehand, instead of being asked"}


@task(auto_shortflags=False, positional=["run"], help={"run": "which run", **_YES, **_RUN})
def delete_run(
    context: Context,
    run: str,
    yes: bool = False,
    plan: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Remove a run that nobody trains and that is not selected."""
    from fleet.verbs_runs import delete_run as verb

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.delete_run(cluster, _desk(json), run, yes, plan)


@task(
    auto_shortflags=False,
    iterable=["only"],
    help={
        "keep": "how many of the newest runs and releases stay, whatever else is in use",
        "only": "runs, releases or wheels (default: all of them); may be repeated",
        **_YES,
        **_RUN,
    },
)
def prune(
    context: Context,
    keep: str,
    only: list[str] | None = None,
    yes: bool = False,
    plan: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Remove old runs, releases and wheels; with --plan, say how much that frees."""
    from fleet.verbs_runs import prune as verb

    number = _whole("keep", keep)
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.prune(cluster, _desk(json), number, only or (), yes, plan)


@task(
    auto_shortflags=False,
    positional=["run"],
    help={"run": "which run", "to": "a folder of the chief's host, as /srv/backup; the copy is RUN@STEP there", **_RUN},
)
def backup(
    context: Context,
    run: str,
    to: str,
    plan: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Copy a run, also one that trains, with a manifest of its files."""
    from fleet.verbs_runs import backup as verb

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.back_up(cluster, _desk(json), run, to, plan)


@task(
    auto_shortflags=False,
    positional=["copy"],
    help={"copy": "the copy's folder on the chief's host", "run": "the run's name (default: the copy's)", **_RUN},
)
def restore_run(
    context: Context,
    copy: str,
    run: str | None = None,
    plan: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Make a run of a copy, proven by its manifest."""
    from fleet.verbs_runs import restore_run as verb

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.restore_run(cluster, _desk(json), copy, run, plan)


@task(auto_shortflags=False, positional=["run", "new"], help={"run": "which run", "new": "the new run's name", **_RUN})
def clone_run(
    context: Context,
    run: str,
    new: str,
    plan: bool = False,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Make a second run that goes on where a first one is now."""
    from fleet.verbs_runs import clone_run as verb

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.clone_run(cluster, _desk(json), run, new, plan)


@task(auto_shortflags=False, help={"json": "print all findings as JSON", **_WHERE})
def doctor(context: Context, json: bool = False, inventory: str | None = None, ask_vault_pass: bool = False) -> None:
    """Look at control machine, hosts, ways, tasks and run; say what is wrong and what mends it."""
    from fleet.verbs_runs import doctor as verb

    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.doctor(cluster, _desk(json))


@task(
    auto_shortflags=False,
    help={
        "out": "the file to write (default: psfleet-bundle-TIME.tar.gz here)",
        "lines": "how many of the last lines of each host's journal (default: 2000)",
        "run": "whose records (default: the chosen run's)",
        "json": "print where it is, and what is in it, as JSON",
        **_WHERE,
    },
)
def bundle(
    context: Context,
    out: str | None = None,
    lines: str = "2000",
    run: str | None = None,
    json: bool = False,
    inventory: str | None = None,
    ask_vault_pass: bool = False,
) -> None:
    """Write one archive for a bug report, with secrets removed."""
    from fleet.verbs_runs import bundle as verb

    number = _whole("lines", lines)
    with _cluster(context, inventory, ask_vault_pass) as cluster, _leaving():
        verb.bundle(cluster, _desk(json), out, number, run)
