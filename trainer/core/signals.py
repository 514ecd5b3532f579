"""Ask to stop: SIGTERM. And to make room for the next run: SIGUSR2."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainer.core.failures import Stopped

log = logging.getLogger(__name__)


# The queue's limit is used up, or a search prunes: the run is saved and ends as by a stop, and the next one begins.
MAKE_ROOM = signal.SIGUSR2
# A call in flight, a model that is built, a checkpoint that is read: so long a stop waits for its end.
STOP_PATIENCE_SECONDS = 20.0


class StopRequest:
    """Whether SIGTERM was received, or MAKE_ROOM; called, it says whether this run must end."""

    def __init__(self) -> None:
        self.received = False
        """Whether the process is to end too."""
        self._must_make_room = False
        self._prepares: Callable[[], bool] = lambda: False

    def __call__(self) -> bool:
        return self.received or self._must_make_room

    def listen(self, prepares: Callable[[], bool] = lambda: False) -> None:
        """Handle both signals from now on; only after the strategy is made, which would take the handler away.

        `prepares` says whether the main thread still builds or restores: where it does not get on, Stopped is raised
        there.
        """
        self._prepares = prepares
        on_signals(self._receive, signal.SIGTERM, MAKE_ROOM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == MAKE_ROOM:
            self._must_make_room = True
        else:
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


def leave_when_asked() -> None:
    """Leave at once when asked to stop or to make room from now on: nothing is trained yet."""
    on_signals(_raise_stopped, signal.SIGTERM, MAKE_ROOM)


def end_when_asked() -> None:
    """Have SIGTERM end the process from now on, while a constructor waits and no Python handler could run.

    MAKE_ROOM must not end it: what is to be done then is done after the constructor.
    """
    on_signals(signal.SIG_DFL, signal.SIGTERM)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped


def on_signals(handler: Any, *numbers: signal.Signals) -> None:
    """Set the handler of signals; a thread of a user's test or notebook may not."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, handler)
