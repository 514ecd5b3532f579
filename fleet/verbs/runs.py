"""`fab runs` and `fab checkpoints`: what lies below the shared path."""

from __future__ import annotations

from fleet.actions.console import Console
from fleet.hosts.cluster import Cluster
from fleet.planning import decision
from trainer.telemetry.checkpoints import describe_checkpoints
from trainer.telemetry.status import describe_runs


def show_runs(cluster: Cluster, console: Console) -> None:
    """Show every run below the shared path."""
    found = cluster.list_runs()
    console.answer("runs", {"runs": found}, describe_runs(found) if found else "no run yet: fab start-cluster")


def show_checkpoints(cluster: Cluster, console: Console, run: str | None = None) -> None:
    """Show a run's checkpoints and why each is kept."""
    decision.check_names(run, None)  # a wrong name is said before any host is asked
    found = cluster.list_checkpoints(run)
    console.answer("checkpoints", {"checkpoints": found}, describe_checkpoints(found) if found else "no checkpoint yet")
