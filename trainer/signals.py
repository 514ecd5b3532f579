"""Ask to stop: SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

from trainer.failures import Stopped

log = logging.getLogger(__name__)


class StopRequest:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self) -> bool:
        return self.received

    def listen(self) -> None:
        """Handle SIGTERM from now on; only after the strategy is made, which would take the handler away."""
        on_sigterm(self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        log.info("asked to stop: saving after the calls in flight")


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Leave at once: nothing is trained yet."""
    raise Stopped


def on_sigterm(handler: Any) -> None:
    """Set the handler of SIGTERM; a thread of somebody's test or notebook may not."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
