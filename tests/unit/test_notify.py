"""What systemd is told, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.telemetry.outlets.systemd import Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(5)
        yield channel


def test_ready_and_status(systemd: socket.socket) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": systemd.getsockname()})
    notifier.ready("waiting for members")
    notifier.status("training")
    assert systemd.recv(1000) == b"READY=1\nSTATUS=waiting for members"
    assert systemd.recv(1000) == b"STATUS=training"


def test_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("\0psfleet-test-notify")
        channel.settimeout(5)
        Notifier("@psfleet-test-notify").status("hello")
        assert channel.recv(1000) == b"STATUS=hello"


def test_a_status_is_one_line(systemd: socket.socket) -> None:
    Notifier(systemd.getsockname()).status("two\nlines")
    assert systemd.recv(1000) == b"STATUS=two lines"


def test_nothing_is_sent_without_systemd_or_when_it_is_gone(tmp_path: Path) -> None:
    Notifier.from_environment({}).ready("nobody listens")
    Notifier(str(tmp_path / "gone")).ready("nobody listens")


def test_watchdog_is_pinged_only_while_alive(systemd: socket.socket) -> None:
    asked = threading.Semaphore(0)
    alive = threading.Event()
    alive.set()

    def is_alive() -> bool:
        asked.release()
        return alive.is_set()

    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "60000"}
    Notifier.from_environment(environment).watch(is_alive)
    assert systemd.recv(1000) == b"WATCHDOG=1"
    alive.clear()
    # Whatever was sent before is in the socket after two more questions: take it out, and nothing may follow.
    wait_for_questions(asked)
    drain(systemd)
    wait_for_questions(asked)
    assert drain(systemd) == []


def wait_for_questions(asked: threading.Semaphore) -> None:
    while asked.acquire(blocking=False):
        pass
    for _ in range(2):
        assert asked.acquire(timeout=60)


def drain(channel: socket.socket) -> list[bytes]:
    channel.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(channel.recv(1000))
    return found
