"""Where others on a host ask for processes with the import of a task's supervisor (trainer/process/fork_server.py)."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from trainer.process.children import end_orphans
from trainer.process.fork_server import WarmParent, open_door
from trainer.process.warm_start import adopt_orphans, fork


class Door:
    """A socket at which clients come, each of which gets a server of its own; none where no path is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.lent: set[int] = set()
        """Servers of those who came."""

    def open(self, selector: selectors.BaseSelector) -> None:
        """Let clients come from now on."""
        if self._path is not None:
            self._socket = open_door(self._path)
            selector.register(self._socket, selectors.EVENT_READ)

    def close(self) -> None:
        """Give it up, in a process that was forked."""
        if self._socket is not None:
            self._socket.close()

    def is_knocked_at(self, file: object) -> bool:
        """Return whether a client has come, where this file is ready."""
        return self._socket is not None and file is self._socket

    def lend(self, leave: Callable[[], None], *, can_fork: bool) -> None:
        """Fork a server for the one who has come, where this process can fork; it ends with its client.

        `leave` gives up in it what is this process's.
        """
        assert self._socket is not None

        def serve() -> int:
            leave()
            adopt_orphans()
            code = WarmParent().run(client=client)
            end_orphans(())
            return code

        with contextlib.suppress(OSError):
            client, _ = self._socket.accept()
            with client:
                if can_fork:
                    self.lent.add(fork(serve))
