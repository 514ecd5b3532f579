"""Which members leave in order, because their hosts are about to be taken away for a while.

roles/trainer/tasks/leave.yml names them on the coordinator's host before it stops them: a file for
each task, in a directory that a boot empties. The coordinator lets go of a ps after a save, and takes the end of a
worker for no fault. It is a local directory, so that looking at it never waits.
"""

from __future__ import annotations

from pathlib import Path

from trainer.core.task_id import TaskId
from trainer.run.records import names_in

LEAVING = Path("/run/psfleet-leaving")


def is_leaving(task: str) -> bool:
    """Return whether a task is named as one that leaves."""
    return task in names()


def leaving_ps() -> set[str]:
    """Return the parameter servers that are named as leaving."""
    return {name for name in names() if is_ps(name)}


def names() -> list[str]:
    """Return who is named; nobody where the directory can't be read, since that must end no training."""
    try:
        return names_in(LEAVING)
    except OSError:
        return []


def is_ps(name: str) -> bool:
    try:
        return TaskId.parse(name).job == "ps"
    except ValueError:
        return False
