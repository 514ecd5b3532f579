"""When a checkpoint is due, by the steps and by the time since the last one; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable

PATIENCE_SECONDS = 5.0


class SaveSchedule:
    """Whether a save is due. One that is due waits a little for the save in flight, and for callbacks."""

    def __init__(self, steps: int, seconds: float) -> None:
        """Take after how many steps, and after how many seconds, a save is due: 0 for neither."""
        self._steps = steps
        self._seconds = seconds
        self._saved_at = -math.inf
        self._waits = False
        self._waits_for_callbacks = False

    def saved(self, now: float) -> None:
        """Count from now: a save has begun, or the training has."""
        self._saved_at = now

    def is_due(self, before: int, step: int, now: float, is_writing: Callable[[], bool]) -> bool:
        """Return whether to save at `step`, where the look before read the step `before`.

        While a save is being written, this one waits: as long as the last one began within PATIENCE_SECONDS.
        """
        passed = bool(self._steps and step // self._steps > before // self._steps)
        wanted = self._waits or passed or bool(self._seconds and now - self._saved_at >= self._seconds)
        self._waits = wanted and is_writing() and now - self._saved_at < PATIENCE_SECONDS
        return wanted and not self._waits

    def put_off(self) -> None:
        """Have the next look find a save due, which this one could not begin."""
        self._waits = True

    def wait_for_callbacks(self) -> None:
        """Put a save off until the callbacks have heard of the epoch's end: they may change the model."""
        self._waits_for_callbacks = True

    def callbacks_heard(self) -> bool:
        """Return whether a save has waited for the callbacks; it does so no more."""
        waited, self._waits_for_callbacks = self._waits_for_callbacks, False
        return waited
