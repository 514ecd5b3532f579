"""Workers that are back, or new, join those that train, who go on meanwhile, and read for those that are drained."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

log = logging.getLogger(__name__)


class JoinableMembers(Protocol):
    """The part of a membership that says who may join."""

    def newcomers(self) -> dict[str, str]:
        """Return the workers that are present and take no part (task name to address)."""

    def join(self, task: str) -> None:
        """Count a worker to the generation: it is about to be taken in."""

    def joined(self, task: str) -> None:
        """Tell that a worker has joined."""

    def drained_workers(self) -> list[str]:
        """Return the workers of this generation that are drained, some of all."""

    def workers_serving(self) -> set[str]:
        """Return the workers that answer."""


class Runner(Protocol):
    """The part of a step runner that takes workers in, and has others read for those that are drained."""

    @property
    def takes_in(self) -> bool:
        """Whether it can, with these settings."""

    def take_in(self, task: str, address: str) -> bool:
        """Have a worker join; returns False where it can't, nor anybody later."""

    def joined(self) -> list[str]:
        """Return the workers that have joined since."""

    def leave_out(self, tasks: Collection[str]) -> bool:
        """Have the other workers read the data of these; returns False where that takes another generation."""


class CallCounter(Protocol):
    """What counts the calls of workers."""

    def join(self, task: str) -> None:
        """Count those of one more worker."""


class Joining:
    """Has workers join a generation, where its settings allow that."""

    def __init__(self, members: JoinableMembers | None, runner: Runner, calls: CallCounter) -> None:
        self._members = members
        self._runner = runner
        self._calls = calls
        self._coming: set[str] = set()
        self._drained: list[str] = []
        self._has_parts = False

    @property
    def is_possible(self) -> bool:
        """Whether workers can join: then no generation ends for one."""
        return self._runner.takes_in

    @property
    def leaving(self) -> list[str]:
        """The drained workers whose parts of the data go to others with the next generation; they have stopped."""
        if self._members is None or not self._has_parts:
            return []
        serving = self._members.workers_serving()
        return [task for task in self._drained if task not in serving]

    def _drained_now(self, members: JoinableMembers) -> list[str]:
        """Return whose parts others are to have: also of one that is not named any more, until it answers."""
        named = members.drained_workers()
        serving = members.workers_serving() if self._drained else set()
        return [*named, *(task for task in self._drained if task not in {*named, *serving})]

    def poll(self) -> None:
        """Have those join that can, and give calls to those that have; have others read for the drained."""
        if self._members is None:
            return
        if not self._coming and set(drained := self._drained_now(self._members)) != set(self._drained):
            self._drained, self._has_parts = drained, not self._runner.leave_out(drained)
            if drained and self._has_parts:
                log.info("others read the data of %s when the cluster is formed again", ", ".join(drained))
            else:
                log.info("the data are divided among all workers%s", f" but {', '.join(drained)}" if drained else "")
        if not self.is_possible:
            return
        for task, address in self._members.newcomers().items():
            if not self._runner.take_in(task, address):
                log.warning("%s (%s) joins at the next save, when the cluster is formed again", task, address)
                return
            log.info("%s (%s) joins those that train", task, address)
            self._members.join(task)
            self._coming.add(task)
        for task in self._runner.joined():
            self._calls.join(task)
            self._members.joined(task)
            self._coming.discard(task)
