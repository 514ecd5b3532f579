"""Workers that are back, or new, join those that train, who go on meanwhile."""

from __future__ import annotations

import logging
from typing import Protocol

log = logging.getLogger(__name__)


class Members(Protocol):
    """The part of a membership that says who may join."""

    def newcomers(self) -> dict[str, str]:
        """Return the workers that are present and take no part (task name to address)."""

    def join(self, task: str) -> None:
        """Count a worker to the generation: it is about to be taken in."""

    def joined(self, task: str) -> None:
        """Tell that a worker has joined."""


class Runner(Protocol):
    """The part of a step runner that takes workers in."""

    @property
    def takes_in(self) -> bool:
        """Whether it can, with these settings."""

    def take_in(self, task: str, address: str) -> bool:
        """Have a worker join; returns False where it can't, nor anybody later."""

    def joined(self) -> list[str]:
        """Return the workers that have joined since."""


class Calls(Protocol):
    """What counts the calls of workers."""

    def join(self, task: str) -> None:
        """Count those of one more worker."""


class Joining:
    """Has workers join a generation, where its settings allow that."""

    def __init__(self, members: Members | None, runner: Runner, calls: Calls) -> None:
        self._members = members
        self._runner = runner
        self._calls = calls

    @property
    def is_possible(self) -> bool:
        """Whether workers can join: then no generation ends for one."""
        return self._runner.takes_in

    def look(self) -> None:
        """Have those join that can, and give calls to those that have."""
        if self._members is None or not self.is_possible:
            return
        for task, address in self._members.newcomers().items():
            if not self._runner.take_in(task, address):
                log.warning("%s (%s) joins at the next save, when the cluster is formed again", task, address)
                return
            log.info("%s (%s) joins those that train", task, address)
            self._members.join(task)
        for task in self._runner.joined():
            self._calls.join(task)
            self._members.joined(task)
