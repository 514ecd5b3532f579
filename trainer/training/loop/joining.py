"""Workers that are back, or new, join those that train, who go on meanwhile, and read for those that are drained."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.cluster.members.membership import Membership
    from trainer.training.loop.calls import Calls
    from trainer.training.steps.runner import StepRunner

log = logging.getLogger(__name__)
RETRY_SECONDS = 60.0  # until the data are divided again that could not be: each try traces the program


class Joining:
    """Has workers join a generation, where its settings allow that."""

    def __init__(self, members: Membership | None, runner: StepRunner, calls: Calls) -> None:
        self._members = members
        self._runner = runner
        self._calls = calls
        self._coming: set[str] = set()
        self._drained: list[str] = []
        """The workers whose data the others read."""
        self._refused: list[str] | None = None
        """The workers whose data the others were to read at the last try, which failed."""
        self._retry_at = math.inf

    @property
    def is_possible(self) -> bool:
        """Whether workers can join: then no generation ends for one."""
        return self._runner.takes_in

    @property
    def leaving(self) -> list[str]:
        """The drained workers whose parts of the data go to others with the next generation; they have stopped."""
        if self._members is None or not self._refused:
            return []
        away = {*self._members.workers_serving(), *self._drained}
        return [task for task in self._refused if task not in away]

    def _drained_now(self, members: Membership) -> list[str]:
        """Return whose parts others are to have: also of one that is not named any more, until it answers."""
        named = members.drained_workers()
        serving = members.workers_serving() if self._drained else set()
        return [*named, *(task for task in self._drained if task not in {*named, *serving})]

    def _divide(self, drained: list[str]) -> None:
        """Have others read for these workers, and for no others; tries again where one is back and that fails."""
        if set(drained) == set(self._drained):
            self._refused = None
            return
        if drained == self._refused and time.monotonic() < self._retry_at:
            return
        is_divided = self._runner.leave_out(drained)
        if is_divided is False:
            new = [task for task in drained if task not in self._drained]
            self._retry_at = math.inf if new else time.monotonic() + RETRY_SECONDS
            if drained == self._refused:
                return
            self._refused = drained
            if new:
                log.info("the others can't read the data of %s before the cluster is formed again", ", ".join(new))
            else:
                log.info("the data stay divided among all workers but %s", ", ".join(self._drained))
            return
        self._drained, self._refused = drained, None
        if is_divided:
            log.info("the data are divided among all workers%s", f" but {', '.join(drained)}" if drained else "")

    def poll(self, is_recovering: bool) -> None:
        """Have those join that can, and give calls to those that have; have others read for the drained.

        `is_recovering` says that TensorFlow is taking in a worker, whose place in the cluster changes.
        """
        if self._members is None:
            return
        # A newcomer has been promised a part; one that is lost may never join.
        if not is_recovering and not (self._coming and self._coming & self._members.workers_serving()):
            self._divide(self._drained_now(self._members))
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
