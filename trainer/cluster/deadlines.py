"""What the coordinator is doing, and by when it must be done with it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from trainer.core.settings.config import Config
from trainer.core.states import Phase

log = logging.getLogger(__name__)


class Phases:
    """One phase at a time, each with its deadline."""

    def __init__(self, deadlines: Mapping[Phase, float], entered: Callable[[Phase], None] = lambda phase: None) -> None:
        """Take each phase's deadline (seconds, 0 for none) and whom to tell that a phase begins."""
        self._deadlines = dict(deadlines)
        self._entered = entered
        # In one piece: the heartbeat's thread looks at any moment.
        self._now = (Phase.WAITING, time.monotonic())

    @classmethod
    def from_config(cls, config: Config, entered: Callable[[Phase], None]) -> Phases:
        """Return the phases with the deadlines of the run settings; waiting bounds itself, to name the members."""
        bounded = [phase for phase in Phase if phase is not Phase.WAITING]
        return cls({phase: getattr(config, f"{phase}_timeout_seconds") for phase in bounded}, entered)

    @property
    def phase(self) -> Phase:
        return self._now[0]

    @property
    def seconds(self) -> float:
        """How much of its deadline the phase has used."""
        return time.monotonic() - self._now[1]

    def enter(self, phase: Phase, used: float = 0.0) -> None:
        """Begin a phase: its deadline counts from now, or so many seconds of it are used already."""
        self._now = (phase, time.monotonic() - used)
        self._entered(phase)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase inside another one, which goes on afterwards with a new deadline."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def progressed(self) -> None:
        """Something of this phase is done: its deadline counts from now."""
        self._now = (self.phase, time.monotonic())

    def overdue(self) -> str:
        """Say which phase has passed its deadline, or nothing."""
        phase, since = self._now
        seconds = time.monotonic() - since
        deadline = self._deadlines.get(phase, 0.0)
        if not deadline or seconds <= deadline:
            return ""
        return f"{phase} has lasted {seconds:.0f} s without an end, and {phase}_timeout_seconds is {deadline:g}"

    def in_time(self) -> bool:
        """Return whether systemd's watchdog is to be told that all is well; the membership may be faster."""
        if late := self.overdue():
            log.error("%s; leaving it to systemd's watchdog to restart", late)
        return not late
