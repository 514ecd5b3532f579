"""`fab export`: a run's newest checkpoint as a SavedModel."""

from __future__ import annotations

from fleet.actions.console import Console
from fleet.actions.look_around import observe_own
from fleet.hosts.cluster import Cluster
from fleet.planning import decision


def export_run(cluster: Cluster, console: Console, run: str | None = None, changes: bool = False) -> None:
    """Export a run's newest checkpoint, or what has changed in it since the newest export of one that trains."""
    decision.check_names(run, None)  # a wrong name is said before any host is asked
    observe_own(cluster, [cluster.inventory.chief.host])
    found = cluster.export_run(run, changes)
    place = f"{cluster.inventory.chief.host}:{found['export']}"
    what = "the changes up to " if changes else ""
    console.answer("export", found, f"exported {what}step {found['step']} of {found['run']} to {place}")
