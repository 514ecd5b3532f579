"""Waiting for sockets and signals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from trainer.process.signal_selector import SignalSelector


@pytest.fixture
def selector() -> Iterator[SignalSelector]:
    selector = SignalSelector()
    yield selector
    selector.close()


def test_sockets_are_found_while_they_are_waited_for(selector: SignalSelector) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert selector.is_empty()
        selector.add(ours)
        assert not selector.is_empty()
        theirs.send(b"x")
        assert selector.wait() == [ours]
        selector.remove(ours)
        selector.remove(ours)
        assert selector.is_empty()
        assert selector.wait(0) == []


def test_a_signal_ends_the_wait_and_its_handler_is_for_a_while(selector: SignalSelector) -> None:
    heard = []
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGCHLD)
    with selector.signals({signal.SIGUSR1: lambda number, frame: heard.append(number)}):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert selector.wait() == []
        assert heard == [signal.SIGUSR1]
        if not (pid := os.fork()):
            os._exit(0)
        assert selector.wait() == []  # the child's end is a signal too
        os.waitpid(pid, 0)
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGCHLD)) == before
