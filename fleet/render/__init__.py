"""What other managers start instead of systemd: the same trainer with the same settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import OperatorMistake
from fleet.site.inventory import Inventory
from trainer.core.runtime import NO_GPU

SHARED_DIR = "/srv/trainer"


@dataclass(frozen=True)
class RenderedCluster:
    """What is rendered: how many tasks each job has, with how many GPUs each, run settings, and names of secrets."""

    name: str
    tasks: Mapping[str, int]  # by job, the chief first; the evaluator among them
    gpus: Mapping[str, int]  # by job, of each of its tasks
    settings: Mapping[str, Any]
    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by job; nothing knows their values here

    @property
    def names(self) -> list[str]:
        """The tasks, the chief's first."""
        return [f"{job}-{index}" for job, count in self.tasks.items() for index in range(count)]

    @property
    def counts(self) -> str:
        return ", ".join(f"{count} {job}" for job, count in self.tasks.items())


def reject_gpus(wanted: RenderedCluster, manager: str, option: str) -> None:
    """Raise OperatorMistake for a cluster with GPUs, where `manager` gives all of its tasks the same."""
    if any(wanted.gpus.values()):
        shown = ", ".join(f"{job} {count}" for job, count in wanted.gpus.items() if count)
        raise OperatorMistake(
            f"the inventory gives GPUs to tasks ({shown}), and {manager} gives all its tasks the same. "
            f"Expected none. Render without the group gpu, and let {option} say how many: a ps gets them too, "
            "and uses none"
        )


def wanted(inventory: Inventory, name: str, run: str | None, program: str | None, shared_dir: str) -> RenderedCluster:
    """Read off an inventory what another manager should start; its addresses are of no account there.

    Raises OperatorMistake where tasks of one job have different numbers of GPUs: a manager has one template for a job.
    """
    tasks: dict[str, int] = {}
    for task in inventory.tasks:
        tasks[task.job] = max(tasks.get(task.job, 0), task.index + 1)
    given = {"run": run, "program": program}
    settings = {**inventory.run_settings, **{key: value for key, value in given.items() if value}}
    gpus = {job: _gpus_of(inventory, job) for job in tasks}
    # As on hosts: those that run the program.
    names = sorted(inventory.variables[inventory.chief.host].get("trainer_secrets") or {})
    secrets = {task["job"]: names for task in inventory.spec["tasks"] if names and not task["server"]}
    return RenderedCluster(name, tasks, gpus, {**settings, "shared_dir": shared_dir}, secrets)


def _gpus_of(inventory: Inventory, job: str) -> int:
    found: dict[int, str] = {}
    for task in inventory.spec["tasks"]:
        if task["job"] == job:
            devices = task.get("cuda_visible_devices", NO_GPU)
            found[0 if devices == NO_GPU else len(devices.split(","))] = task["name"]
    if len(found) > 1:
        shown = ", ".join(f"{name} has {count}" for count, name in sorted(found.items()))
        raise OperatorMistake(
            f"tasks of {job} have different numbers of GPUs: {shown}. Expected the same for all, since a job has one "
            "template there. Change gpu_count or gpu_devices in a copy of the inventory"
        )
    return next(iter(found), 0)
