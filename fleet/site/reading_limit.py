"""A limit of time for what an inventory runs on the control machine: its scripts, plugins of clouds, and lookups."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from fleet.errors import OperatorMistake
from fleet.site.schema.inventory_reading import LATE, SECONDS
from fleet.site.schema.problems import show

# Enough for a script that is asked for some hundred hosts one by one, and for a cloud of many regions.
READ_SECONDS = 120.0
MAX_SECONDS = 1e6


class Late(BaseException):
    """It has not ended in time. No Exception: Ansible would take that for one plugin's answer, and try the next."""


def limit(environment: Mapping[str, str]) -> float:
    """Return for how many seconds each thing is waited for; raises OperatorMistake where the setting is no number."""
    given = environment.get(SECONDS) or str(READ_SECONDS)
    with suppress(ValueError):
        if 0 < (seconds := float(given)) < MAX_SECONDS:
            return seconds
    raise OperatorMistake(f"{SECONDS} is {show(given)}: expected a number of seconds, such as {3 * READ_SECONDS:g}")


@contextmanager
def limited(what: str) -> Iterator[None]:
    """End what is done within after some seconds, and the command that it waits for; raises Late, which names it.

    A thread other than the main one has no limit. Raises OperatorMistake where the limit is no number of seconds.
    """

    def end(_number: int, frame: FrameType | None) -> None:
        late = what
        while frame is not None:
            process = frame.f_locals.get("self")
            if isinstance(process, subprocess.Popen) and getattr(process, "pid", None):
                process.kill()
                late = f"`{_words(process.args)}`"
            frame = frame.f_back
        raise Late(f"{late} {LATE} {seconds:g} s")

    seconds = limit(os.environ)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _words(command: Any) -> str:
    return command if isinstance(command, str) else shlex.join(map(str, command))
