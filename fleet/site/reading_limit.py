"""A limit of time for what an inventory runs on the control machine: its scripts, plugins of clouds, and lookups."""

from __future__ import annotations

import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fleet.site.schema.inventory_reading import LATE

# Enough for a script that is asked for some hundred hosts one by one, and for a cloud of many regions.
READ_SECONDS = 120.0


class Late(BaseException):
    """It has not ended in time. No Exception: Ansible would take that for one plugin's answer, and try the next."""


@contextmanager
def limited(what: str) -> Iterator[None]:
    """End what is done within after READ_SECONDS, and the command that it waits for; raises Late, which names it.

    A thread other than the main one has no limit.
    """

    def end(_number: int, frame: FrameType | None) -> None:
        late = what
        while frame is not None:
            process = frame.f_locals.get("self")
            if isinstance(process, subprocess.Popen) and getattr(process, "pid", None):
                process.kill()
                late = f"`{_words(process.args)}`"
            frame = frame.f_back
        raise Late(f"{late} {LATE} {READ_SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, READ_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _words(command: Any) -> str:
    return command if isinstance(command, str) else shlex.join(map(str, command))
