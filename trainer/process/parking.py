"""Whether a supervisor is to have no child, and until when."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

PARKED_SECONDS = 900.0  # then it goes on by itself: a `fab` that died leaves no cluster parked for ever


@dataclass
class Parking:
    """What the operator's machine has asked of a supervisor."""

    file: Path | None = None
    """It begins parked where this file is there, which `fab` removes before it sends SIGUSR1."""
    asked: bool = False
    goes_on: bool = False  # asked to while the child was still about to end
    begins: bool = False  # there was no child before: who is asked for nothing ends, and trains nothing
    until: float = 0.0

    def begin(self) -> None:
        """Be parked from the start where its file is there; one that is old is of a `fab` that has died."""
        with contextlib.suppress(FileNotFoundError):
            if self.file is not None:
                age = max(0.0, time.time() - self.file.stat().st_mtime)
                self.until = time.monotonic() + PARKED_SECONDS - age
                self.asked = self.begins = True

    def ask(self) -> None:
        self.asked, self.goes_on = True, False
        self.until = time.monotonic() + PARKED_SECONDS

    def go_on(self) -> None:
        self.goes_on = self.asked

    def is_over(self) -> bool:
        """Return whether nothing was asked for in time: the caller must have died."""
        return time.monotonic() > self.until

    def describe(self) -> str:
        return f"goes on when it is asked to, {'within' if self.begins else 'or after'} {PARKED_SECONDS:.0f} s"

    def end(self) -> bool:
        """Be parked no more; returns whether the supervisor is to go on."""
        goes_on = self.asked and (self.goes_on or not self.begins)
        self.asked = self.goes_on = self.begins = False
        return goes_on
