"""The last words of a process, which must not keep it from ending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
LEAVE_SECONDS = 3.0


def make_final_write(words: Callable[[], None]) -> None:
    """Leave the last words of a process on the shared path, in a few seconds even if that hangs."""
    thread = threading.Thread(target=words, name="last words", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
    if thread.is_alive():
        log.warning("the shared path does not take the last words of this process: they are lost")
