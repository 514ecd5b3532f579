"""Which members leave in order, because their hosts are about to be taken away for a while.

A planned reboot (roles/trainer/tasks/leave.yml) and `fab drain` name them on the coordinator's host before they stop
them: a file for each task, of a reboot in a directory that a boot empties. The coordinator lets go of a ps after a
save, and takes the end of a worker for no fault. The directories are local, so that looking at them never waits.
"""

from __future__ import annotations

from pathlib import Path

from trainer.core.task_id import TaskId
from trainer.run.records import names_in

LEAVING = Path("/run/psfleet-leaving")
DRAINED = Path("/opt/trainer/drains")  # until an operator has them back


def is_leaving(task: str) -> bool:
    """Return whether a task is named as one that leaves."""
    return task in leaving_tasks()


def leaving_ps() -> set[str]:
    """Return the parameter servers that are named as leaving."""
    return {name for name in leaving_tasks() if is_ps(name)}


def leaving_tasks() -> list[str]:
    """Return the tasks that are named; none where the directory can't be read, since that must end no training."""
    return sorted({*_named_in(LEAVING), *_named_in(DRAINED)})


def drained() -> list[str]:
    """Return who is away until an operator has them back."""
    return _named_in(DRAINED)


def away_for_a_reboot() -> list[str]:
    """Return who is back soon."""
    return _named_in(LEAVING)


def _named_in(directory: Path) -> list[str]:
    try:
        return names_in(directory)
    except OSError:
        return []


def is_ps(name: str) -> bool:
    try:
        return TaskId.parse(name).job == "ps"
    except ValueError:
        return False
