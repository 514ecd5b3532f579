"""Tell systemd how this process is doing (sd_notify): directly, or through the supervisor that forked it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping

READY, ALIVE = "READY=1", "WATCHDOG=1"
# For the supervisor alone: what a fork can't fix, the unit's own start can, which mounts the shared path again.
RESTART_UNIT = "X_RESTART_UNIT=1"
ENDS = "X_ENDS=1"  # likewise: the exit code that follows is the task's
CHANNEL = "TRAINER_SUPERVISOR"  # the environment's name for the descriptor of a socket to the supervisor
RESTARTS = "TRAINER_RESTARTS"  # the same for how many processes of this task came before
CRASH = "TRAINER_CRASH"  # and for the signal by which native code ended the last of them
LACK = "TRAINER_LACK"  # and for what is said of it where it was killed as memory ran out


class Notifier:
    """Sends states to systemd's notification socket or to the supervisor; does nothing when there is neither."""

    def __init__(
        self,
        address: str | None = None,
        watchdog_seconds: float | None = None,
        channel: socket.socket | None = None,
        restarts: int = 0,
        crash: str = "",
        lack: str = "",
    ) -> None:
        """Take systemd's socket, or a `channel` to the supervisor, and how often systemd wants a sign of life."""
        self.watchdog_seconds = watchdog_seconds
        self.restarts = restarts
        """How many processes of this task its supervisor has seen end before this one."""
        self.crash = crash
        """The signal by which native code ended the process before this one, if that was how it ended."""
        self.lack = lack
        """What is said of the process before this one, if it was killed as memory ran out."""
        self._address = address
        self._channel = channel

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        usec, descriptor = environment.get("WATCHDOG_USEC", ""), environment.get(CHANNEL)
        channel = socket.socket(fileno=int(descriptor)) if descriptor else None
        seconds = int(usec) / 1e6 if usec.isdigit() else None
        restarts, crash = int(environment.get(RESTARTS, "0")), environment.get(CRASH, "")
        return cls(environment.get("NOTIFY_SOCKET"), seconds, channel, restarts, crash, environment.get(LACK, ""))

    def through(self, channel: socket.socket, restarts: int = 0, crash: str = "", lack: str = "") -> Notifier:
        """Return the notifier of a child, whose states go to its supervisor."""
        return Notifier(None, self.watchdog_seconds, channel, restarts, crash, lack)

    def ready(self, status: str) -> None:
        """Say that the process has started: systemd goes on with what waits for it."""
        self._send(f"{READY}\n{status_line(status)}")

    def status(self, status: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(status_line(status))

    def alive(self) -> None:
        """Say once that this process lives."""
        self._send(ALIVE)

    def extend(self, seconds: float) -> None:
        """Ask for more time: systemd gives a start up after so many seconds without another word."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def restart_unit(self) -> None:
        """Ask the supervisor to end with this process, so that systemd starts the unit from its beginning."""
        if self._channel is not None:
            self._send(RESTART_UNIT)

    def ends(self, code: int) -> int:
        """Say that this process ends now, with the code of its task; returns the code."""
        if self._channel is not None:
            self._send(ENDS)
        return code

    def watch(self, alive: Callable[[], bool]) -> None:
        """Say that this process lives from a thread, three times in the watchdog's interval, as long as it does."""
        if (self._address is None and self._channel is None) or self.watchdog_seconds is None:
            return
        pause = threading.Event()

        def beat() -> None:
            while not pause.wait(self.watchdog_seconds / 3 if self.watchdog_seconds else None):
                if alive():
                    self.alive()

        threading.Thread(target=beat, name="watchdog", daemon=True).start()

    def _send(self, state: str) -> None:
        # A lost message must never end a training; systemd's own timeouts notice.
        with contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(state.encode())
            elif self._address:
                address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                    channel.settimeout(1.0)
                    channel.sendto(state.encode(), address)


def status_line(status: str) -> str:
    # A second line would be another assignment to systemd.
    return "STATUS=" + " ".join(status.split())
