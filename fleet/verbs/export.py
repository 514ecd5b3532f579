"""`fab export`: a run's newest checkpoint as a SavedModel."""

from __future__ import annotations

from fleet import decision
from fleet.cluster import Cluster
from fleet.verbs import Desk


def export_run(cluster: Cluster, desk: Desk, run: str | None = None, as_json: bool = False) -> None:
    """Export the newest checkpoint of a run that has ended."""
    decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    found = cluster.export_run(run)
    if as_json:
        desk.answer("export", found)
        return
    place = f"{cluster.inventory.chief.host}:{found['export']}"
    desk.say(f"exported step {found['step']} of {found['run']} to {place}")
