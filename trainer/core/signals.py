"""Ask to stop: SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainer.core.failures import Stopped

log = logging.getLogger(__name__)


# A call in flight, a model that is built, a checkpoint that is read: so long a stop waits for its end.
STOP_PATIENCE_SECONDS = 20.0


class StopRequest:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False
        self._prepares: Callable[[], bool] = lambda: False

    def __call__(self) -> bool:
        return self.received

    def listen(self, prepares: Callable[[], bool] = lambda: False) -> None:
        """Handle SIGTERM from now on; only after the strategy is made, which would take the handler away.

        `prepares` says whether the main thread still builds or restores: where it does not get on, Stopped is raised
        there.
        """
        self._prepares = prepares
        on_sigterm(self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._prepares():
            log.info("asked to stop: saving once the model is built and restored, if that is soon")
            signal.signal(signal.SIGALRM, self._leave_unprepared)
            signal.setitimer(signal.ITIMER_REAL, STOP_PATIENCE_SECONDS)
        else:
            log.info("asked to stop: saving after the calls in flight")

    def _leave_unprepared(self, number: int, frame: FrameType | None) -> None:
        if self._prepares():
            log.warning(
                "the model is not built and restored %.0f s after the request to stop: leaving without a save",
                STOP_PATIENCE_SECONDS,
            )
            raise Stopped


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Leave at once: nothing is trained yet."""
    raise Stopped


def on_sigterm(handler: Any) -> None:
    """Set the handler of SIGTERM; a thread of a user's test or notebook may not."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
