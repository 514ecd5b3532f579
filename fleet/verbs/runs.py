"""`fab runs` and `fab checkpoints`: what lies below the shared path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.planning import decision
from fleet.site.schema.problems import show
from trainer.core.settings.config import best_by_name
from trainer.telemetry.checkpoints import describe_checkpoints
from trainer.telemetry.history import number_of
from trainer.telemetry.status import describe_runs


def show_runs(cluster: Cluster, console: Console, by: str | None = None) -> None:
    """Show every run below the shared path, the best first where a metric of the evaluation is given to go `by`.

    Raises OperatorMistake for a metric that no run has.
    """
    found = cluster.list_runs()
    lines = [] if found else ["no run yet: fab start-cluster"]
    if by is not None:
        best = best_by_name(by)
        found = sorted_by(found, by, best == "max")
        unsaid = "" if best else ": its name does not say whether that is the best"
        lines.append(f"by {by}, the {'greatest' if best == 'max' else 'least'} first{unsaid}")
    lines += [describe_runs(found)] if found else []
    if any(run.get("export") for run in found):
        inventory = cluster.inventory
        lines.append(f"a model lies in {inventory.chief.host}:{inventory.shared_dir}/runs/RUN/export")
    console.answer("runs", {"runs": found}, "\n".join(lines))


def sorted_by(runs: Sequence[dict[str, Any]], metric: str, is_greatest: bool) -> list[dict[str, Any]]:
    """Return the runs, the best first; those without a number of this metric come last. Raises OperatorMistake."""
    metrics = {run["run"]: (run.get("evaluation") or {}).get("metrics") or {} for run in runs}
    values = {run: number_of(known.get(metric)) for run, known in metrics.items()}
    if not any(metric in known for known in metrics.values()):
        there = ", ".join(sorted({name for known in metrics.values() for name in known})) or "none"
        raise OperatorMistake(f"--by is {show(metric)}: expected a metric of an evaluation; the runs have {there}")

    def place(run: Mapping[str, Any]) -> tuple[bool, float]:
        value = values[run["run"]]
        is_missing = value is None or math.isnan(value)
        return is_missing, 0.0 if value is None or is_missing else -value if is_greatest else value

    return sorted(runs, key=place)


def show_checkpoints(cluster: Cluster, console: Console, run: str | None = None) -> None:
    """Show a run's checkpoints and why each is kept."""
    decision.check_names(run, None)  # a wrong name is said before any host is asked
    found = cluster.list_checkpoints(run)
    console.answer("checkpoints", {"checkpoints": found}, describe_checkpoints(found) if found else "no checkpoint yet")
