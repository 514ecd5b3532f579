"""The processes that a supervisor forks: what is known of one, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainer.core.memory_limit import GIB, memory_limit

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
# What native code raises by its own fault. SIGBUS isn't one: a file that is read through memory may be cut off.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def memory_kills() -> int:
    """Return how many processes this machine's kernel has ended so far for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@dataclass
class Child:
    """A process that was forked, and what is known of it."""

    pid: int
    channel: socket.socket
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    restart_unit: bool = False
    ends: bool = False  # it has said that its exit code is its task's
    sign: float = field(default_factory=time.monotonic)  # when it last gave a sign of life
    worked: int = 0  # processor time that it has taken, in ticks
    stopped: int = 0  # looks in a row at which it was stopped by a signal
    code: int | None = None  # as subprocess gives it: below 0, the signal that ended it
    kills: int = field(default_factory=memory_kills)  # when it began


def read_process(pid: int) -> tuple[str, int]:
    """Return a process's state as proc(5) names it, and the processor time that it has taken, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def end_orphans(spared: Container[int]) -> None:
    """Kill what the child has left behind, such as processes of the user's program; children of ours are spared."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [pid for pid in map(int, children.read_text(encoding="ascii").split()) if pid not in spared]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def crash_of(code: int) -> str:
    """Return the name of the signal by which native code ended a process; nothing where it ended otherwise."""
    return signal.Signals(-code).name if -code in CRASHES else ""


def shell_code(code: int) -> int:
    """Return an exit code of subprocess as a shell gives it."""
    return code if code >= 0 else 128 - code


def describe_code(code: int) -> str:
    """Return an exit code as a shell gives it, and which signal that was."""
    if code >= 0:
        return str(code)
    try:
        return f"{shell_code(code)} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name here
        return f"{shell_code(code)} (signal {-code})"


class Lack(NamedTuple):
    """What a process lacked that was killed; nothing where it was not for a lack."""

    short: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.short}: {self.fix}" if self.short else ""


def describe_lack(code: int, kills: int) -> Lack:
    """Say that memory is what a process lacked that was killed; `kills` are those at its beginning."""
    if code not in KILLED or memory_kills() <= kills:
        return Lack()
    return Lack(
        f"out of memory, limit {memory_limit() / GIB:.1f} GiB",
        "the kernel ended a process for it (journalctl -k). Take fewer elements in shuffle(), smaller batches, more ps "
        "or a larger host, or raise memory_max in trainer_limits",
    )
