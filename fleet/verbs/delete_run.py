"""`fab delete-run RUN`: remove a run that nobody trains and that is not selected."""

from __future__ import annotations

from fleet.cluster import Cluster
from fleet.run_work import have_done, reject_name, reject_unless_agreed, render_bytes
from fleet.verbs import Desk
from fleet.verbs.alone import begin_alone


def delete_run(
    cluster: Cluster, desk: Desk, run: str, yes: bool = False, plan: bool = False, reason: str | None = None
) -> None:
    """Say what would go, ask, and remove it; a run that is gone already is no mistake."""
    reject_name(run)
    begin_alone(cluster, desk, "delete-run", plan)  # nobody may select it between the look and the removal
    planned = have_done(cluster, desk, "delete-run", [run], plan=True)
    size = f"{planned['files']} files, {render_bytes(planned['bytes'])}"
    if not planned["files"]:
        known = ", ".join(planned["runs"]) or "none"
        desk.say(f"there is no run {run}; the runs are {known}")
    elif plan:
        desk.say(f"would remove run {run}: {size}\ndo it: fab delete-run {run}")
    else:
        reject_unless_agreed(desk, yes, f"Remove run {run} for ever ({size})?")
    answer = planned if plan else have_done(cluster, desk, "delete-run", [run], plan=False, reason=reason)
    desk.answer("delete-run", answer)
    if answer["outcome"] == "done":
        desk.say(f"run {run} is removed: {size}\nthe others: fab runs")
