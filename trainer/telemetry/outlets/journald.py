"""Log lines with fields of their own, in the journal's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).

So `journalctl RUN=digits-1` finds a run's lines on a host. Without a journal the lines go where they went.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
import time

SOCKET = "/run/systemd/journal/socket"
SEND_SECONDS = 1.0  # a journal that is stopped takes nothing
REST_SECONDS = 30.0  # for so long it is not tried again
FLUSH_SECONDS = 0.5
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_about: dict[str, str] = {}


def about(**fields: object) -> None:
    """Have each later line of this process say what it is about: `task`, `run`, `step`. None takes a field away."""
    for name, value in fields.items():
        if value is None:
            _about.pop(name.upper(), None)
        else:
            _about[name.upper()] = str(value)


class JournalHandler(logging.Handler):
    """Sends each record as one entry; where the journal doesn't take it, the record goes to `otherwise`."""

    def __init__(self, otherwise: logging.Handler, path: str = SOCKET) -> None:
        """Raise OSError where there is no journal."""
        super().__init__()
        self._otherwise = otherwise
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._rests_until = 0.0
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(SEND_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if time.monotonic() >= self._rests_until:
                self._socket.sendto(entry(self.format(record), record), self._path)  # a journal may begin another
                return
        except OSError:  # it is gone, it hangs, or the line is longer than a datagram
            self._rests_until = time.monotonic() + REST_SECONDS
        except Exception:
            self.handleError(record)
            return
        self._otherwise.handle(record)

    def flush(self) -> None:
        """Wait until the journal has read what was sent: of a process that is gone it can't tell the unit."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while unread(self._socket) and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self) -> None:
        self._socket.close()
        super().close()


def unread(channel: socket.socket) -> int:
    """Return how many bytes of what was sent the other side has not taken; 0 where that is not known."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(channel, termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0


def entry(message: str, record: logging.LogRecord) -> bytes:
    """Return the datagram of one entry."""
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(next((number for level, number in PRIORITIES if record.levelno >= level), 7)),
        "SYSLOG_IDENTIFIER": "psfleet",
        "SYSLOG_PID": str(os.getpid()),
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
        "CODE_FUNC": record.funcName or "",
        **_about,
    }
    return b"".join(field(name, value) for name, value in fields.items())


def field(name: str, value: str) -> bytes:
    """Return a field; a value of several lines goes with its length, so that no line of it passes for a field."""
    text = value.encode(errors="replace")
    if b"\n" not in text:
        return name.encode() + b"=" + text + b"\n"
    return name.encode() + b"\n" + struct.pack("<Q", len(text)) + text + b"\n"
