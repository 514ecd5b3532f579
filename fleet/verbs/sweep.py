"""`fab sweep`: what a sweep's start needs beyond a run's, and how far a sweep is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.actions.console import Console
from fleet.actions.watch import EVALUATION_SECONDS, SILENCE_SECONDS, UNITS_SECONDS
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.units import Health
from fleet.planning import decision
from fleet.site.inventory import Inventory
from fleet.site.sweep_file import is_same
from fleet.status import status_text
from trainer.core.settings.config import Config
from trainer.telemetry.sweep import ENDS, describe_sweep


def show_sweep(cluster: Cluster, console: Console, name: str | None = None) -> None:
    """Show how far a sweep is: the one of this name, the selected one, or the last."""
    sweep = cluster.read_sweep(name)
    if sweep is None:
        raise OperatorMistake(f"there is no sweep{f' {name}' if name else ''} yet: fab sweep FILE")
    console.answer("sweep", {"outcome": None, "sweep": sweep}, describe_sweep(sweep))


def choose_sweep(cluster: Cluster, before: Observation, asked: Mapping[str, Any]) -> decision.RunChoice:
    """Choose a sweep by what is selected, what runs, and how far the one of its name is.

    Raises OperatorMistake for a search whose points no task would evaluate.
    """
    if "search" in asked["sweep"]:
        reject_unevaluated(cluster.inventory)
    chief = before.units.get(cluster.inventory.chief.name)
    known = cluster.read_sweep(asked["sweep"]["name"]) if before.run else None
    done = known and known["over"] and all(point["state"] in ("finished", "pruned") for point in known["points"])
    same = known and (
        "search" in asked["sweep"]
        or [point["program_args"] for point in known["points"]]
        == [{**asked.get("program_args", {}), **point} for point in asked["sweep"]["points"]]
    )
    if done and same and is_same(asked, before.selection):
        return decision.RunChoice(before.selection, write=False, new=False)
    runs = chief is not None and chief.up
    return decision.choose_sweep(asked, before.selection, runs, known, cluster.inventory.run_settings)


def reject_unevaluated(inventory: Inventory) -> None:
    """Raise OperatorMistake where no task would evaluate the points of a search."""
    if inventory.run_settings.get("evaluation", Config.evaluation) == "sidecar" and inventory.evaluator is None:
        raise OperatorMistake(
            "a search goes by the evaluation, and evaluation is sidecar without an evaluator: expected a host in the "
            "group evaluator, or evaluation: inline or distributed in trainer_run"
        )


def follow_sweep(cluster: Cluster, console: Console, name: str, detach: bool) -> dict[str, Any] | None:
    """Say what becomes of each point, then show the table, and return it; None of a sweep that is left to itself.

    Raises where the coordinator is down before the end.
    """
    if detach:
        console.print(f"sweep {name} goes on by itself. Look: fab sweep --status. Stop it: fab stop-cluster")
        return None
    evaluator = cluster.inventory.evaluator
    seen_ends: set[str] | None = None
    begun = heard = console.clock()
    deadline = None
    with console.progress() as progress:
        while True:
            console.sleep(UNITS_SECONDS)
            seen, sweep = _observe(cluster, name)
            if sweep is None:
                if console.clock() - heard > SILENCE_SECONDS:
                    raise HostsUnreachable(seen.unreachable, "the sweep may go on unseen: fab sweep --status")
                continue
            heard = console.clock()
            ended = {point["run"]: point for point in sweep["points"] if point["state"] in ENDS}
            for run in [] if seen_ends is None else [run for run in ended if run not in seen_ends]:
                progress.keep(f"{run}: {ended[run]['state']}")
            seen_ends = set(ended)
            if sweep["over"]:
                deadline = deadline or console.clock() + EVALUATION_SECONDS
                if evaluator is None or sweep["evaluated"] or console.clock() > deadline:
                    break
            else:
                _reject_stopped(cluster, seen, name, console.clock() - begun)
            trained = status_text.render_progress(seen.run) if seen.run else "waiting"
            progress.show(f"{len(ended)} of {sweep['size']} points have ended; {sweep['present']}: {trained}")
    console.print(describe_sweep(sweep))
    if evaluator is not None and not sweep["evaluated"]:
        console.print("Not every point is evaluated yet; the evaluator goes on. Look: fab sweep --status")
    return sweep


def _observe(cluster: Cluster, name: str) -> tuple[Observation, dict[str, Any] | None]:
    """Ask the chief's host for its unit and the sweep; None of one that can't be asked just now."""
    try:
        seen = cluster.observe([cluster.inventory.chief.host], new_is_enough=True)
        return seen, None if seen.unreachable else cluster.read_sweep(name)
    except HostsUnreachable as error:
        return Observation(unreachable=dict(error.reasons)), None


def _reject_stopped(cluster: Cluster, seen: Observation, name: str, seconds: float) -> None:
    """Raise when the coordinator is down, `seconds` after the sweep was started."""
    chief = cluster.inventory.chief
    health = seen.units[chief.name].health
    # systemd needs a moment from the request to the first sign of life.
    if health is Health.FAILED or (health is Health.STOPPED and seconds > 2 * UNITS_SECONDS):
        raise ClusterTrouble("", cluster.trouble({chief: f"is down, and sweep {name} is not over"}))
