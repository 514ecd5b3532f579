"""Say where a program's own code is that takes long: an import, a constructor or a build_model may wait for ever."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from trainer.core.own_frames import is_user_file

log = logging.getLogger(__name__)
FIRST_SECONDS = 30.0


@contextlib.contextmanager
def naming_slow_code(what: str, program_file: Path | None = None, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Log where this thread is in the user's code when `what` takes that long, and each time that this doubles."""
    ended, caller = threading.Event(), threading.get_ident()

    def watch() -> None:
        seconds = first
        waited = seconds
        while not ended.wait(seconds):
            place = where(caller, program_file)
            log.warning("%s has not ended after %.0f s%s", what, waited, f": it is at {place}" if place else "")
            seconds, waited = waited, 2 * waited

    threading.Thread(target=watch, name="slow code", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def where(thread: int, program_file: Path | None = None) -> str:
    """Return "file:line" of the user's code deepest in what a thread does now, or nothing."""
    frame = sys._current_frames().get(thread)
    for line in reversed(traceback.extract_stack(frame)) if frame else ():
        if is_user_file(Path(line.filename), program_file):
            return f"{line.filename}:{line.lineno}"
    return ""
