"""Waits for sockets that can be read, and for signals, in a process without threads."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType


class SignalSelector:
    """A selector of sockets whose `wait` also ends at a signal."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.add(self._woken)

    def add(self, file: socket.socket) -> None:
        self._selector.register(file, selectors.EVENT_READ)

    def remove(self, file: socket.socket) -> None:
        """Wait for it no more; it may have been removed before, but not closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(file)

    def is_empty(self) -> bool:
        """Return whether there is nothing to wait for but signals."""
        return len(self._selector.get_map()) == 1

    def wait(self, seconds: float | None = None) -> list[socket.socket]:
        """Return the sockets that can be read, after so many seconds at most; perhaps none after a signal."""
        ready: list[socket.socket] = [key.fileobj for key, _ in self._selector.select(seconds)]  # type: ignore[misc]
        if self._woken in ready:
            ready.remove(self._woken)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        return ready

    @contextlib.contextmanager
    def signals(self, handlers: dict[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
        """Have these handlers for a while, one for the end of a child as well, and have each signal end `wait`."""
        handlers = {**handlers, signal.SIGCHLD: lambda number, frame: None}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Give up what is its own, in a process that was forked; not the sockets."""
        for each in (self._selector, self._woken, self._waker):
            each.close()
