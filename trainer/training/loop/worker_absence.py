"""For how long no worker has been present; time is an argument."""

from __future__ import annotations


class WorkerAbsence:
    """One absence of all workers at a time, which is neither training nor slows it down."""

    def __init__(self, limit: float) -> None:
        """Take the user's limit in seconds; 0 for none."""
        self._limit = limit
        self._since: float | None = None
        self._used = 0.0

    @property
    def lasts(self) -> bool:
        """Whether no worker is present."""
        return self._since is not None

    def begin(self, now: float, used: float) -> None:
        """No worker is present from now on; `used` is how much of its deadline the phase has used by now."""
        self._since, self._used = now, used

    def seconds(self, now: float) -> float:
        """Return for how long it has lasted, without what was excused."""
        return 0.0 if self._since is None else now - self._since

    def is_too_long(self, now: float) -> bool:
        """Return whether it has lasted for longer than the user's limit."""
        return 0 < self._limit < self.seconds(now)

    def excuse(self, now: float) -> float:
        """Count from now, since no limit is for this absence; returns how long it has lasted until now."""
        seconds, self._since = self.seconds(now), now
        return seconds

    def end(self, now: float) -> tuple[float, float]:
        """A worker is back; returns how long the absence has lasted, and the phase's used deadline before it.

        A worker that comes and goes must not have the deadline begin again each time.
        """
        seconds, self._since = self.seconds(now), None
        return seconds, self._used
