"""`fab clone-run RUN NEW`: a second run that goes on where a first one is now."""

from __future__ import annotations

from fleet.actions.console import Console, with_reason
from fleet.actions.run_work import have_copied
from fleet.hosts.cluster import Cluster
from fleet.planning import decision


def clone_run(
    cluster: Cluster, console: Console, run: str, new: str, plan: bool = False, reason: str | None = None
) -> None:
    """Make a run with the checkpoints, logs and parameters of another, which goes on undisturbed."""
    decision.check_names(run, None)
    decision.check_names(new, None, "--new")
    answer, size = have_copied(cluster, console, "clone-run", [run, new], plan, reason)
    if answer["outcome"] == "planned":
        command = with_reason(f"fab clone-run {run} {new}", reason)
        console.print(f"would make run {new} of run {run}: {size}\ndo it: {command}")
        return
    there = "exists already" if answer["outcome"] == "there already" else f"is a clone of {run}"
    console.print(f"run {new} {there}: {size}\ngo on with it: fab start-cluster --run {new}")
