"""What systemd hears of a task with several processes, one after the other."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.process.children import Lack
from trainer.process.unit_state import UnitState
from trainer.telemetry.outlets.systemd import CHANNEL, CRASH, LACK, RESTARTS, Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        yield systemd


@pytest.fixture
def unit(systemd: socket.socket) -> UnitState:
    return UnitState(Notifier(systemd.getsockname(), 40.0))


def heard(systemd: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(systemd.recv(1000).decode())
        except BlockingIOError:
            return found


def test_a_unit_is_ready_once_whichever_child_is(unit: UnitState, systemd: socket.socket) -> None:
    unit.hear("begins", ready=False)
    assert not unit.is_ready
    unit.hear("trains", ready=True)
    assert unit.is_ready
    unit.hear("trains on", ready=True)
    assert heard(systemd) == ["STATUS=begins", "READY=1\nSTATUS=trains", "STATUS=trains on"]


def test_a_restart_is_shown_and_its_crash_is_known_to_the_next_child(unit: UnitState, systemd: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        unit.restart(-signal.SIGABRT)
        unit.hear("trains", ready=True)
        assert heard(systemd) == ["READY=1\nSTATUS=trains (restart 1)"]
        child = unit.for_child(theirs)
        assert (child.restarts, child.crash) == (1, "SIGABRT")
        unit.restart(75)
        assert unit.environment(theirs) == {CHANNEL: str(theirs.fileno()), RESTARTS: "2", CRASH: "", LACK: ""}


def test_memory_that_ran_out_is_shown_in_short_and_known_in_full(unit: UnitState, systemd: socket.socket) -> None:
    lack = Lack("out of memory, limit 2.0 GiB", "take smaller batches")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        unit.restart(-signal.SIGKILL, lack)
        unit.hear("serves", ready=True)
        assert heard(systemd) == ["READY=1\nSTATUS=serves (out of memory, limit 2.0 GiB; restart 1)"]
        assert unit.for_child(theirs).lack == str(lack)
        environment = {key: value for key, value in unit.environment(theirs).items() if key != CHANNEL}
        assert Notifier.from_environment(environment).lack == str(lack)
        unit.restart(75)
        unit.hear("serves", ready=True)
        assert heard(systemd) == ["STATUS=serves (restart 2)"]
        assert unit.for_child(theirs).lack == ""


def test_a_parked_unit_has_started_and_its_next_child_is_the_first(unit: UnitState, systemd: socket.socket) -> None:
    unit.restart(-signal.SIGKILL, Lack("out of memory, limit 2.0 GiB", "take smaller batches"))
    unit.park("parked")
    unit.park("parked again")
    unit.hear("trains", ready=True)
    assert heard(systemd) == ["READY=1\nSTATUS=parked", "STATUS=parked again", "STATUS=trains"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unit.for_child(theirs).lack == ""


def test_it_lives_no_more_often_than_systemd_asks_for(
    unit: UnitState, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (100.0, 109.9, 110.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        unit.ping()
    assert heard(systemd) == ["WATCHDOG=1"] * 2
    without = UnitState(Notifier(systemd.getsockname()))
    without.ping()
    assert heard(systemd) == []
