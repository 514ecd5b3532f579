"""Keep one task alive: a small parent that has imported TensorFlow forks it, and the next one when that dies.

A task that may wait for long does so first, without TensorFlow's memory, in a child of its own.

That of a host's unit can be parked (SIGHUP): it ends its child as a stop would, and waits. SIGUSR1 has it go on, with
a child that works in the release that is current then. One that starts where a file says so begins parked.

To systemd it is the unit's main process: it passes on what its child says, and answers for the child's life. A child
that ends with 0, 78 or 143 takes the parent with it; after any other end the next one is forked at once. One that ends
with 0 says so before: a program's os._exit(0) is an end like any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, USER_ERROR
from trainer.process.children import Child, describe_code, describe_lack, end_orphans, read_process, shell_code
from trainer.process.fork_server import ForkSocket
from trainer.process.parking import PARKED_SECONDS, Parking
from trainer.process.signal_selector import SignalSelector
from trainer.process.unit_state import UnitState
from trainer.process.warm_start import adopt_orphans, fork, warm_up, warm_up_server, why_unsafe
from trainer.process.workplace import Workplace
from trainer.telemetry.outlets.prometheus import inherit_listener
from trainer.telemetry.outlets.systemd import ALIVE, ENDS, READY, RESTART_UNIT, Notifier

log = logging.getLogger(__name__)
PASSED_ON = (FINISHED, USER_ERROR, STOPPED)
NEEDED = 70  # what a waiting child ends with, once there is something to do that needs TensorFlow
PAUSE_SECONDS = 1.0  # before the next child, where one ended before it was ready
POLL_SECONDS = 0.5
PARKED = "parked"  # its line for systemd begins so; `fab` waits for that
LOOKS_STOPPED = 8  # a child that SIGSTOP holds is killed after so many looks in a row
MAX_START_SECONDS = 600.0
# So much of processor time in a start asks systemd for so much more time; a start that hangs takes none.
WORK_SECONDS, START_PATIENCE_SECONDS = 0.25, 45.0


@dataclass(frozen=True)
class SupervisedTask:
    """What a supervisor keeps alive."""

    name: str
    run: Callable[[Notifier], int]
    """What a child is."""
    fresh: list[str]
    """The command of a new process instead, where a fork would be unsafe."""
    wait: Callable[[Notifier], int] | None = None
    """What children are before TensorFlow is imported, until one of them ends with NEEDED."""
    listener: socket.socket | None = None
    """Where the task is scraped: its children answer there."""
    serves: bool = False
    """It only serves the cluster, and imports no more of TensorFlow than that takes."""


class Supervisor:
    """The parent of one task's processes, one at a time."""

    def __init__(
        self,
        task: SupervisedTask,
        notifier: Notifier,
        release: Path | None = None,
        park_file: Path | None = None,
        fork_socket: Path | None = None,
    ) -> None:
        """Keep this task alive.

        `release` is the link to the current release; this process works in a release too. Once the link leads to one
        with another kit or environment, the next child is systemd's to start. Where there is a `park_file`, it
        imports TensorFlow and begins parked. At `fork_socket` others on this host ask for processes with its import
        (trainer/process/fork_server.py).
        """
        self._task = task
        self._unit = UnitState(notifier)
        self._workplace = Workplace(release)
        self._parking = Parking(park_file)
        self._forks = ForkSocket(fork_socket)
        self._selector = SignalSelector()
        self._child: Child | None = None
        self._stopping = False

    def run(self) -> int:
        """Keep the task alive until it is done or asked to stop; returns its exit code."""
        adopt_orphans()
        if self._workplace.is_release:  # elsewhere SIGHUP says that the terminal is gone
            signal.signal(signal.SIGHUP, self._heed_park)
            signal.signal(signal.SIGUSR1, self._heed_go_on)
            self._parking.begin()
        warm = self._parking.begins
        if warm:
            self._warm_up()
        if self._task.wait is not None and (code := self._keep(self._task.wait, *PASSED_ON, NEEDED)) != NEEDED:
            return code
        if not warm:
            self._warm_up()
        return self._keep(self._task.run, *PASSED_ON)

    def _warm_up(self) -> None:
        with more_time(self._unit.notifier):
            (warm_up_server if self._task.serves else warm_up)()  # meanwhile a signal ends this process as it would any
        self._forks.open(self._selector)

    def _keep(self, run: Callable[[Notifier], int], *passed_on: int) -> int:
        """Fork children that run this until one ends with a code that is passed on, or a stop is asked for."""
        with self._selector.signals({signal.SIGTERM: self._heed_stop, signal.SIGINT: self._heed_stop}):
            afresh = False
            while not self._stopping:
                if self._parking.asked:
                    if not self._park():
                        return STOPPED if self._stopping else FINISHED
                    if afresh:
                        return TRY_AGAIN
                    continue
                if not self._workplace.follow(self._task.name):
                    return TRY_AGAIN
                child = self._start(run)
                if child is None:
                    self._wait(PAUSE_SECONDS)
                    continue
                code = self._follow(child)
                if self._parking.asked and not self._stopping:
                    afresh = child.restart_unit
                    continue
                is_unsaid = code == FINISHED and not child.ends
                if self._stopping or (code in passed_on and not is_unsaid) or child.restart_unit:
                    return self._pass_on(code)
                lack = describe_lack(code, child.kills)
                self._unit.restart(code, lack)
                why = " before its task was over (does the program call os._exit?)" if is_unsaid else ""
                why += f", {lack}" if lack.short else ""
                log.info("%s ended with %s%s: starting the next", self._task.name, describe_code(code), why)
                if not child.ready:
                    self._wait(PAUSE_SECONDS)
            return STOPPED

    def _start(self, run: Callable[[Notifier], int]) -> Child | None:
        """Fork the next child, or start it afresh where a fork would be unsafe; None when there is no room for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unsafe = why_unsafe()
        try:
            if unsafe:
                log.warning("%s is started as a fresh process, since this one can't fork: %s", self._task.name, unsafe)
                pid = self._spawn(theirs)
            else:
                pid = fork(lambda: self._become(run, ours, theirs))
        except OSError as error:
            log.error("cannot start %s: %s", self._task.name, error.strerror)
            ours.close()
            return None
        finally:
            theirs.close()
        ours.setblocking(False)
        self._selector.add(ours)
        self._child = child = Child(pid, ours)
        if self._stopping or self._parking.asked:  # it was asked for while there was no child to pass it on to
            self._send(child, signal.SIGTERM)
        return child

    def _become(self, run: Callable[[Notifier], int], ours: socket.socket, theirs: socket.socket) -> int:
        """Be the child."""
        self._workplace.enter()
        self._leave_to_child()
        ours.close()
        theirs.settimeout(1.0)
        notifier = self._unit.for_child(theirs)
        return notifier.ends(run(notifier))

    def _leave_to_child(self) -> None:
        """In a process that was forked, give up what is this one's."""
        if self._workplace.is_release:
            for number in (signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._forks.close()
        if self._child is not None:
            self._child.channel.close()

    def _spawn(self, channel: socket.socket) -> int:
        channel.set_inheritable(True)
        environment = {**os.environ, **self._unit.environment(channel), **inherit_listener(self._task.listener)}
        command = [*self._task.fresh, "--parent", str(os.getpid())]
        with self._workplace.entered():
            return os.posix_spawn(command[0], command, environment, setpgroup=0, setsigmask=())

    def _park(self) -> bool:
        """Have no child until it is asked to go on or to stop; returns whether it goes on.

        After a while the caller must have died: then it goes on by itself, but for one that has begun so.
        """
        log.info("%s is parked", self._task.name)
        self._unit.park(f"{PARKED}: {self._parking.describe()}")
        while not (self._parking.goes_on or self._parking.is_over() or self._stopping):
            self._wait(POLL_SECONDS, once=True)
            self._unit.ping()
        if not (self._parking.goes_on or self._stopping):
            log.warning("%s was asked for nothing in %.0f s", self._task.name, PARKED_SECONDS)
        goes_on = self._parking.end() and not self._stopping
        if goes_on:
            self._unit.notifier.status("goes on")
        return goes_on

    def _follow(self, child: Child) -> int:
        """Pass on what the child says until it has ended; kill it when it gives no sign of life."""
        while child.code is None:
            began = time.monotonic()
            self._wait(POLL_SECONDS if self._unit.watchdog_seconds else None, once=True)
            if child.code is None and self._unit.watchdog_seconds:
                # A machine that was frozen has kept this process from hearing it.
                child.sign += max(0.0, time.monotonic() - began - POLL_SECONDS)
                self._check_child(child, self._unit.watchdog_seconds)
        self._hear(child)
        self._selector.remove(child.channel)
        child.channel.close()
        self._child = None
        end_orphans(self._forks.lent)
        return child.code

    def _wait(self, seconds: float | None, once: bool = False) -> None:
        """Handle what comes in for so long, until the first of it with `once`, or until a stop is asked for."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for ready in self._selector.wait(left):
                if self._forks.is_ready(ready):
                    self._forks.lend(self._leave_to_child, can_fork=not why_unsafe())
                elif self._child is not None:
                    self._hear(self._child)
            self._reap()
            if not once:
                self._unit.ping()
            if once or self._stopping or (deadline is not None and time.monotonic() >= deadline):
                return

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._forks.lent.discard(pid)
                if self._child is not None and pid == self._child.pid:
                    self._child.code = os.waitstatus_to_exitcode(status)

    def _hear(self, child: Child) -> None:
        """Read what the child said, and pass it on to systemd."""
        while True:
            try:
                message = child.channel.recv(65536).decode(errors="replace")
            except OSError:
                return
            if not message:  # it has closed its end: this one would be readable for ever
                self._selector.remove(child.channel)
                return
            child.sign = time.monotonic()
            if message == ALIVE:
                self._unit.ping()
            elif message == RESTART_UNIT:
                child.restart_unit = True
            elif message == ENDS:
                child.ends = True
            else:
                child.ready |= message.startswith(READY)
                self._unit.hear(message.partition("STATUS=")[2], ready=child.ready)

    def _check_child(self, child: Child, patience: float) -> None:
        """Kill the child when it is stopped, or gives no sign of life; else tell systemd that all is well.

        Until it is ready, its sign of life is that it takes processor time.
        """
        now = time.monotonic()
        try:
            state, worked = read_process(child.pid)
        except FileNotFoundError:
            return
        child.stopped = child.stopped + 1 if state == "T" else 0
        if not child.ready and worked > child.worked and now - child.began < MAX_START_SECONDS:
            child.sign, child.worked = now, worked
            if not self._unit.is_ready:
                self._unit.notifier.extend(START_PATIENCE_SECONDS)
        silent = now - child.sign
        if child.stopped >= LOOKS_STOPPED:
            why = "is stopped by a signal"
        elif silent > patience and not (self._stopping or (self._parking.asked and not self._parking.is_over())):
            why = f"has given no sign of life for {silent:.0f} s{'' if child.ready else ', and is not ready'}"
        else:
            self._unit.ping()
            return
        log.error("%s %s: killing it", self._task.name, why)
        self._send(child, signal.SIGKILL)
        child.stopped = 0

    def _heed_stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None:
            self._send(self._child, signal.SIGTERM)

    def _heed_park(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None and not self._parking.asked:
            self._send(self._child, signal.SIGTERM)
        self._parking.ask()

    def _heed_go_on(self, number: int, frame: FrameType | None) -> None:
        self._parking.go_on()

    def _send(self, child: Child, number: int) -> None:
        # Its pid is its own until it is reaped.
        if child.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _pass_on(self, code: int) -> int:
        """Return the child's exit code; what SIGTERM ended, ends this process likewise."""
        if code == -signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        return shell_code(code)


@contextlib.contextmanager
def more_time(notifier: Notifier) -> Iterator[None]:
    """Ask systemd for more time as long as this process takes processor time: what hangs takes none."""
    if notifier.watchdog_seconds is None:
        yield
        return
    until = time.monotonic() + MAX_START_SECONDS

    def extend(number: int, frame: FrameType | None) -> None:
        if time.monotonic() < until:
            notifier.extend(START_PATIENCE_SECONDS)
            notifier.alive()  # a unit that is up already has its watchdog

    before = signal.signal(signal.SIGPROF, extend)
    signal.setitimer(signal.ITIMER_PROF, WORK_SECONDS, WORK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
