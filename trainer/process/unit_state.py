"""What systemd hears of a task, whose processes come and go below one supervisor."""

from __future__ import annotations

import socket
import time

from trainer.process.children import Lack, crash_of
from trainer.telemetry.outlets.systemd import CHANNEL, CRASH, LACK, RESTARTS, Notifier


class UnitState:
    """Says once that the task's unit is ready, then what its processes do, and how often one was started again."""

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self.is_ready = False
        """Whether systemd has heard that the unit has started."""
        self._restarts = 0
        self._crash, self._lack = "", Lack()
        self._pinged = 0.0

    @property
    def watchdog_seconds(self) -> float | None:
        return self.notifier.watchdog_seconds

    def for_child(self, channel: socket.socket) -> Notifier:
        """Return the notifier of a child that was forked."""
        return self.notifier.through(channel, self._restarts, self._crash, str(self._lack))

    def environment(self, channel: socket.socket) -> dict[str, str]:
        """Return what a child that is started afresh makes its notifier of."""
        return {
            CHANNEL: str(channel.fileno()),
            RESTARTS: str(self._restarts),
            CRASH: self._crash,
            LACK: str(self._lack),
        }

    def restart(self, code: int, lack: Lack | None = None) -> None:
        """Count a child that ended with this code, and is followed by another; `lack` says that memory ran out."""
        self._restarts += 1
        self._lack = lack or Lack()
        self._crash = crash_of(code)

    def park(self, status: str) -> None:
        """Say that the unit has started, and has no child; the next one is the first again."""
        self._say(status, ready=True)
        self._restarts, self._lack = 0, Lack()

    def hear(self, status: str, *, ready: bool) -> None:
        """Say what a child says, which may be `ready`."""
        restart = "; ".join(filter(None, (self._lack.short, f"restart {self._restarts}")))
        self._say(f"{status} ({restart})" if self._restarts else status, ready=ready)

    def _say(self, status: str, *, ready: bool) -> None:
        say = self.notifier.ready if ready and not self.is_ready else self.notifier.status
        self.is_ready |= ready
        say(status)

    def ping(self) -> None:
        """Say that the task lives, no more often than systemd asks for."""
        if self.watchdog_seconds and time.monotonic() - self._pinged >= self.watchdog_seconds / 4:
            self._pinged = time.monotonic()
            self.notifier.alive()
