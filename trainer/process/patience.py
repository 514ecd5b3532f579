"""Ask systemd for more time in a start that works: what hangs takes no processor time."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from trainer.telemetry.outlets.systemd import Notifier

MAX_START_SECONDS = 600.0
# So much of processor time in a start asks systemd for so much more time; a start that hangs takes none.
WORK_SECONDS, START_PATIENCE_SECONDS = 0.25, 45.0


@contextlib.contextmanager
def more_time(notifier: Notifier) -> Iterator[None]:
    """Ask systemd for more time as long as this process takes processor time: what hangs takes none."""
    if notifier.watchdog_seconds is None:
        yield
        return
    until = time.monotonic() + MAX_START_SECONDS

    def extend(number: int, frame: FrameType | None) -> None:
        if time.monotonic() < until:
            notifier.extend(START_PATIENCE_SECONDS)
            notifier.alive()  # a unit that is up already has its watchdog

    before = signal.signal(signal.SIGPROF, extend)
    signal.setitimer(signal.ITIMER_PROF, WORK_SECONDS, WORK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
