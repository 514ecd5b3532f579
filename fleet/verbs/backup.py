"""`fab backup RUN --to FOLDER`: copy a run, also one that trains, to a folder of the chief's host."""

from __future__ import annotations

import shlex

from fleet.actions.console import Console, with_reason
from fleet.actions.run_work import have_copied, reject_path
from fleet.hosts.cluster import Cluster
from fleet.planning import decision


def back_up(
    cluster: Cluster, console: Console, run: str, to: str, plan: bool = False, reason: str | None = None
) -> None:
    """Copy a run to <to>/<run>@<step>; says where it is. Typed twice at one step it proves the copy."""
    decision.check_names(run, None)
    reject_path("--to", to)
    answer, size = have_copied(cluster, console, "backup", [run, "--to", to], plan, reason)
    if answer["outcome"] == "planned":
        command = with_reason(shlex.join(["fab", "backup", run, "--to", to]), reason)
        console.print(f"would copy run {run} to {answer['host']}:{answer['copy']}: {size}\ndo it: {command}")
        return
    there = "exists already, and is whole" if answer["outcome"] == "there already" else "copied"
    back = shlex.join(["fab", "restore-run", answer["copy"]])
    if answer["host"] != (chief := cluster.inventory.chief.host):
        back = f"bring it to {chief}, then {back}"
    console.print(f"{answer['host']}:{answer['copy']}: {there}: {size}\nget it back: {back}")
