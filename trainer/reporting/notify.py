"""Tell systemd how this process is doing (sd_notify), when it listens."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping


class Notifier:
    """Sends states to systemd's notification socket; does nothing when there is none."""

    def __init__(self, address: str | None = None, watchdog_seconds: float | None = None) -> None:
        self._address = address
        self._watchdog_seconds = watchdog_seconds

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        usec = environment.get("WATCHDOG_USEC", "")
        return cls(environment.get("NOTIFY_SOCKET"), int(usec) / 1e6 if usec.isdigit() else None)

    def ready(self, status: str) -> None:
        """Say that the process has started: systemd goes on with what waits for it."""
        self._send("READY=1\n" + status_line(status))

    def status(self, status: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(status_line(status))

    def watch(self, alive: Callable[[], bool]) -> None:
        """Ping the watchdog from a thread, three times in its interval, as long as `alive` says so."""
        if self._address is None or self._watchdog_seconds is None:
            return
        pause = threading.Event()

        def ping() -> None:
            while not pause.wait(self._watchdog_seconds / 3 if self._watchdog_seconds else None):
                if alive():
                    self._send("WATCHDOG=1")

        threading.Thread(target=ping, name="watchdog", daemon=True).start()

    def _send(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # A lost message must never end a training; systemd's own timeouts notice.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)
            channel.sendto(state.encode(), address)


def status_line(status: str) -> str:
    # A second line would be another assignment to systemd.
    return "STATUS=" + " ".join(status.split())
