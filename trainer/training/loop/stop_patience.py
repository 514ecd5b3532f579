"""For how long a request to stop waits for the calls in flight; time is an argument."""

from __future__ import annotations

from trainer.core.signals import STOP_PATIENCE_SECONDS


class StopPatience:
    """Counts from the first request to stop."""

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def why_leave(self, now: float, *, has_workers: bool, is_failing: bool) -> str:
        """Say why a process that is asked to stop must leave its calls in flight behind; nothing while it may wait.

        `has_workers` says whether a worker is present, `is_failing` whether calls have only ever failed.
        """
        self._asked_at = now if self._asked_at is None else self._asked_at
        if now - self._asked_at > STOP_PATIENCE_SECONDS:
            return f"a call has not ended {STOP_PATIENCE_SECONDS:.0f} s after the request to stop"
        if not has_workers:
            return "no worker is present to end the calls in flight"
        return "the calls in flight fail again and again" if is_failing else ""
