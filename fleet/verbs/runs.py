"""`fab runs` and `fab checkpoints`: what lies below the shared path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet.actions.console import Console
from fleet.hosts.cluster import Cluster
from fleet.planning import decision
from trainer.telemetry.checkpoints import describe_checkpoints
from trainer.telemetry.status import describe_runs


def show_runs(cluster: Cluster, console: Console) -> None:
    """Show every run below the shared path."""
    _say_rows(console, "runs", cluster.list_runs(), describe_runs, "no run yet: fab start-cluster")


def show_checkpoints(cluster: Cluster, console: Console, run: str | None = None) -> None:
    """Show a run's checkpoints and why each is kept."""
    decision.choose(run, None, {}, None)  # a wrong name is said before any host is asked
    found = cluster.list_checkpoints(run)
    _say_rows(console, "checkpoints", found, describe_checkpoints, "no checkpoint yet")


def _say_rows(
    console: Console,
    verb: str,
    rows: list[dict[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    none: str,
) -> None:
    """Print rows as JSON or as a table, and say it where there are none."""
    if console.json_out is not None:
        console.print_json(verb, {verb: rows})
    else:
        console.print(render(rows) if rows else none)
