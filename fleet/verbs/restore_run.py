"""`fab restore-run COPY`: make a run of a copy that `fab backup` made."""

from __future__ import annotations

import shlex

from fleet.actions.console import Console, with_reason
from fleet.actions.run_work import have_copied, reject_path
from fleet.hosts.cluster import Cluster
from fleet.planning import decision


def restore_run(
    cluster: Cluster,
    console: Console,
    copy: str,
    name: str | None = None,
    plan: bool = False,
    reason: str | None = None,
) -> None:
    """Prove a copy and make a run of it, under its own name or another one."""
    reject_path("the copy", copy)
    if name is not None:
        decision.check_names(name, None)
    words = [copy, *(["--as", name] if name else [])]
    answer, size = have_copied(cluster, console, "restore-run", words, plan, reason)
    if answer["outcome"] == "planned":
        command = with_reason(shlex.join(["fab", "restore-run", copy, *(["--run", name] if name else [])]), reason)
        console.print(f"would make run {answer['run']} of {answer['host']}:{copy}: {size}\ndo it: {command}")
        return
    there = "exists already" if answer["outcome"] == "there already" else "is restored"
    console.print(f"run {answer['run']} {there}: {size}\ngo on with it: fab start-cluster --run {answer['run']}")
