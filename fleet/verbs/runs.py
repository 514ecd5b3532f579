"""`fab runs` and `fab checkpoints`: what lies below the shared path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet import decision
from fleet.cluster import Cluster
from fleet.verbs import Desk
from trainer.telemetry.checkpoints import describe_checkpoints
from trainer.telemetry.status import describe_runs


def show_runs(cluster: Cluster, desk: Desk) -> None:
    """Show every run below the shared path."""
    _say_rows(desk, "runs", cluster.list_runs(), describe_runs, "no run yet: fab start-cluster")


def show_checkpoints(cluster: Cluster, desk: Desk, run: str | None = None) -> None:
    """Show a run's checkpoints and why each is kept."""
    decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    found = cluster.list_checkpoints(run)
    _say_rows(desk, "checkpoints", found, describe_checkpoints, "no checkpoint yet")


def _say_rows(
    desk: Desk,
    verb: str,
    rows: list[dict[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    none: str,
) -> None:
    """Print rows as JSON or as a table, and say it where there are none."""
    if desk.answers is not None:
        desk.answer(verb, {verb: rows})
    else:
        desk.say(render(rows) if rows else none)
