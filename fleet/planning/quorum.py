"""Which hosts a start can do without: pure functions of the inventory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from fleet.site.inventory import Inventory
from trainer.cluster.spec import JOBS
from trainer.core.settings.config import Config
from trainer.core.settings.strategies import STRATEGIES

# Jobs with members that are counted; the dispatcher is on the chief's host.
COUNTED_JOBS = tuple(job for job in JOBS if job != "dispatcher")


def find_shortages(inventory: Inventory, away: Collection[str]) -> list[str]:
    """Say which jobs would have fewer members than their minimum without the hosts that are away."""
    shortages = []
    for job in COUNTED_JOBS:
        members = [task for task in inventory.tasks if task.job == job]
        here = [task for task in members if task.host not in away]
        least = minimum(inventory, job, len(members))
        if len(here) < least:
            shortages.append(f"{len(here)} of {len(members)} {job} can be started, and at least {least} must be")
    return shortages


def minimum(inventory: Inventory, job: str, members: int) -> int:
    """How many of a job's members must be present: as cluster_minimum says, else what the strategy needs at least."""
    if job == "chief":
        return members  # it has one, who leads
    given = chosen_minimum(inventory)
    if job in given:
        return _count(given[job], members)
    settings = inventory.run_settings
    if job == "data":
        return min(1, members)  # the others read what a missing one would have
    strategy = STRATEGIES.get(settings.get("strategy", Config.strategy), STRATEGIES[Config.strategy])
    if job == "evaluator":
        return 0  # the training does not notice
    if strategy.in_step or not settings.get("elastic", Config.elastic):
        return members  # they wait for one another
    return min(1, members)


def chosen_minimum(inventory: Inventory) -> Mapping[str, Any]:
    """Return the inventory's cluster_minimum, which preflight has checked; empty where it has none."""
    return inventory.variables[inventory.chief.host].get("cluster_minimum") or {}


def _count(value: int | float | str, members: int) -> int:
    if value == "all":
        return members
    return math.ceil(value * members - 1e-9) if isinstance(value, float) else min(int(value), members)
