"""`fab delete-run RUN`: remove a run that is neither being trained nor selected."""

from __future__ import annotations

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively
from fleet.actions.look_around import observe_own
from fleet.actions.run_work import have_done, reject_unless_agreed, render_bytes
from fleet.hosts.cluster import Cluster
from fleet.planning import decision


def delete_run(
    cluster: Cluster, console: Console, run: str, yes: bool = False, plan: bool = False, reason: str | None = None
) -> None:
    """Say what would go, ask, and remove it; a run that is gone already is no mistake."""
    decision.check_names(run, None)
    begin_exclusively(cluster, console, "delete-run", plan)  # nobody may select it between the look and the removal
    observe_own(cluster, [cluster.inventory.chief.host])
    planned = have_done(cluster, console, "delete-run", [run], plan=True)
    size = f"{planned['files']} files, {render_bytes(planned['bytes'])}"
    if not planned["files"]:
        known = ", ".join(planned["runs"]) or "none"
        console.print(f"there is no run {run}; the runs are {known}")
    elif plan:
        command = with_reason(f"fab delete-run {run}", reason)
        console.print(f"would remove run {run}: {size}\ndo it: {command}")
    else:
        reject_unless_agreed(console, yes, f"Remove run {run} for ever ({size})?")
    answer = planned if plan else have_done(cluster, console, "delete-run", [run], plan=False, reason=reason)
    console.print_json("delete-run", answer)
    if answer["outcome"] == "done":
        console.print(f"run {run} is removed: {size}\nthe others: fab runs")
