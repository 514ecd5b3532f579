"""The name of a task: its job and its index in it, written "worker-0"."""

from __future__ import annotations

import dataclasses
import re

WRITTEN = re.compile(r"([a-z]+)-(\d+)")


@dataclasses.dataclass(frozen=True, order=True)
class TaskId:
    """A task of the cluster. Sorts by job, then by number; `str` gives what records and units are named by."""

    job: str
    index: int

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """Read what `str` gives; raises ValueError."""
        match = WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} names no task: expected a job and a number, such as worker-0")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.job}-{self.index}"


def is_worker(task: str) -> bool:
    """Return whether a task's name is a worker's."""
    return TaskId.parse(task).job == "worker"
