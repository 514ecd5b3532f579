"""The command line of the verbs that keep runs, find what is wrong, and print the cluster for other managers."""

from __future__ import annotations

from fleet.command_line import MEANWHILE, PLAN, REASON, RUN, VerbCall, verb, whole_number

_YES = {"yes": "agree beforehand, instead of being asked"}


@verb({"run": "which run; `--run` before it is optional", **_YES, **REASON, **PLAN}, MEANWHILE, positional=["run"])
def delete_run(call: VerbCall, run: str, yes: bool = False, reason: str | None = None, plan: bool = False) -> None:
    """Remove a run that is neither being trained nor selected."""
    from fleet.verbs.delete_run import delete_run as delete

    with call.cluster() as cluster:
        delete(cluster, call.console, run, yes, plan, reason)


@verb(
    {
        "keep": "needed: how many of the newest runs and releases stay, beside those in use",
        "only": "runs, releases or wheels (default: all of them); may be repeated",
        **_YES,
        **REASON,
        **PLAN,
    },
    MEANWHILE,
    iterable=["only"],
)
def prune(
    call: VerbCall,
    keep: str,
    only: list[str] | None = None,
    yes: bool = False,
    reason: str | None = None,
    plan: bool = False,
) -> None:
    """Remove old runs, releases and wheels; with --plan, say how much that frees."""
    from fleet.verbs.prune import prune as remove_old

    number = whole_number("keep", keep)
    with call.cluster() as cluster:
        remove_old(cluster, call.console, number, only or (), yes, plan, reason)


@verb(
    {
        "run": "which run; `--run` before it is optional",
        "to": "a folder of the chief's host, as /srv/backup; the copy is RUN@STEP there",
        **REASON,
        **PLAN,
    },
    MEANWHILE,
    positional=["run"],
)
def backup(call: VerbCall, run: str, to: str, reason: str | None = None, plan: bool = False) -> None:
    """Copy a run, also one that trains, with a manifest of its files."""
    from fleet.verbs.backup import back_up

    with call.cluster() as cluster:
        back_up(cluster, call.console, run, to, plan, reason)


@verb(
    {
        "copy": "the copy's folder on the chief's host; `--copy` before it is optional",
        "run": "the run's name (default: the copy's)",
        **REASON,
        **PLAN,
    },
    MEANWHILE,
    positional=["copy"],
)
def restore_run(
    call: VerbCall, copy: str, run: str | None = None, reason: str | None = None, plan: bool = False
) -> None:
    """Make a run of a copy, proven by its manifest."""
    from fleet.verbs.restore_run import restore_run as restore

    with call.cluster() as cluster:
        restore(cluster, call.console, copy, run, plan, reason)


@verb(
    {
        "run": "which run; `--run` before it is optional",
        "new": "the new run's name; `--new` before it is optional",
        **REASON,
        **PLAN,
    },
    MEANWHILE,
    positional=["run", "new"],
)
def clone_run(call: VerbCall, run: str, new: str, reason: str | None = None, plan: bool = False) -> None:
    """Make a second run that goes on where a first one is now."""
    from fleet.verbs.clone_run import clone_run as clone

    with call.cluster() as cluster:
        clone(cluster, call.console, run, new, plan, reason)


@verb(json="print all findings as JSON")
def doctor(call: VerbCall) -> None:
    """Look at control machine, hosts, ways, tasks and run; say what is wrong and what fixes it."""
    from fleet.verbs.doctor import doctor as look

    with call.cluster() as cluster:
        look(cluster, call.console)


@verb(
    {
        "out": "the file to write (default: psfleet-bundle-TIME.tar.gz here)",
        "lines": "how many of the last lines of each host's journal (default: 2000)",
        "run": RUN,
    },
    "print where it is, and what is in it, as JSON",
)
def bundle(call: VerbCall, out: str | None = None, lines: str = "2000", run: str | None = None) -> None:
    """Write one archive for a bug report, with secrets removed."""
    from fleet.verbs.bundle import bundle as gather

    number = whole_number("lines", lines)
    with call.cluster() as cluster:
        gather(cluster, call.console, out, number, run)


@verb(
    {
        "manager": "kubernetes, slurm or spark; `--manager` before it is optional",
        "name": "name of the objects or of the job (default: psfleet)",
        "run": "name of the run, instead of the inventory's",
        "program": "what to train, instead of the inventory's: package.module:Name",
        "shared_dir": "slurm, spark: the path that all nodes share (default: the inventory's)",
        "image": "kubernetes: the container image, with Python, psfleet[trainer] and the program",
        "size": "kubernetes: the size of the shared volume (default: 100Gi)",
        "storage_class": "kubernetes: its storage class, which must have volumes for many nodes",
        "python": "slurm, spark: the Python that has psfleet[trainer] and the program (default: python)",
    },
    positional=["manager"],
)
def render(
    call: VerbCall,
    manager: str,
    name: str = "psfleet",
    run: str | None = None,
    program: str | None = None,
    shared_dir: str | None = None,
    image: str | None = None,
    size: str = "100Gi",
    storage_class: str | None = None,
    python: str = "python",
) -> None:
    """Print the same cluster for another manager: what kubectl apply or sbatch takes."""
    from fleet.verbs.render import render

    with call.cluster() as cluster:
        render(
            cluster.inventory, call.console, manager, name, run, program, shared_dir, image, size, storage_class, python
        )
