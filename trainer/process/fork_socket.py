"""Where others on a host ask for processes with the import of a task's supervisor (trainer/process/fork_server.py)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from trainer.process.children import end_orphans
from trainer.process.fork_server import WarmParent, listen_at
from trainer.process.signal_selector import SignalSelector
from trainer.process.warm_start import adopt_orphans, fork


class ForkSocket:
    """A socket at which clients come, each of which gets a server of its own; none where no path is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.lent: set[int] = set()
        """The servers that clients have."""

    def open(self, selector: SignalSelector) -> None:
        """Let clients come from now on."""
        if self._path is not None:
            self._socket = listen_at(self._path)
            selector.add(self._socket)

    def close(self) -> None:
        """Give it up, in a process that was forked."""
        if self._socket is not None:
            self._socket.close()

    def is_ready(self, file: socket.socket) -> bool:
        """Return whether it is this socket that can be read: a client has come."""
        return self._socket is not None and file is self._socket

    def lend(self, leave: Callable[[], None], *, can_fork: bool) -> None:
        """Fork a server for the client that has come, where this process can fork; it ends with its client.

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
