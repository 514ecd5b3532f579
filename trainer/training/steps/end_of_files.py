"""When files that come while a run trains have come to their end; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Collection


class EndOfFiles:
    """Whether no more files come: that is told, or none was found or trained for too long."""

    def __init__(self, patience: float, now: float) -> None:
        """Take for how many seconds none may be found or trained; 0 for any time."""
        self._patience = patience or math.inf
        self._moved_at = now
        self._is_told = False

    def moved(self, now: float) -> None:
        """The reading has begun, or a file was trained."""
        self._moved_at = now

    def found(self, names: Collection[str], is_end: bool, now: float) -> None:
        """These files were found last; `is_end` says that no more will come after them."""
        if names:
            self._moved_at = now
        self._is_told = is_end and not names

    def is_reached(self, now: float) -> bool:
        """Return whether no more files come."""
        return self._is_told or now - self._moved_at > self._patience
