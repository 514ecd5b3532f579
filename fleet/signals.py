"""What must go on to its end, though the operator wants to leave."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Heed neither Ctrl-C nor `kill` nor a terminal that is shut. For the main thread, and for what ends by itself."""
    heeded = {each: signal.signal(each, signal.SIG_IGN) for each in LEAVING}
    try:
        yield
    finally:
        for each, handler in heeded.items():
            signal.signal(each, handler)
