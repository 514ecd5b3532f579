"""Waiting for what another thread, process or host does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], Any], what: str = "it did not happen", seconds: float = 60.0, pause: float = 0.01) -> Any:
    """Poll until the condition holds, and return what it returned; fails with `what` after the deadline."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
    return found
