"""A request to stop ends a process that does not get on with its preparations."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from trainer.core import signals
from trainer.core.failures import Stopped
from trainer.core.signals import MAKE_ROOM, StopRequest, end_when_asked, leave_when_asked


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the patience, and put the handlers back."""
    monkeypatch.setattr(signals, "STOP_PATIENCE_SECONDS", 0.1)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM, MAKE_ROOM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def ask(stopping: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping()


def test_a_model_that_is_built_for_long_is_left() -> None:
    stopping = StopRequest()
    stopping.listen(lambda: True)
    ask(stopping)
    with pytest.raises(Stopped):
        time.sleep(30)


def test_a_model_that_is_built_soon_is_trained_and_saved() -> None:
    stopping = StopRequest()
    still = [True]
    stopping.listen(lambda: still[0])
    ask(stopping)
    still.clear()
    still.append(False)
    time.sleep(0.3)  # nothing is raised


def test_a_stop_is_told_apart_from_a_request_to_make_room() -> None:
    stopping = StopRequest()
    stopping.listen()
    os.kill(os.getpid(), MAKE_ROOM)
    assert stopping()
    assert not stopping.received
    ask(stopping)
    assert stopping.received


def test_a_request_to_make_room_ends_no_process_while_a_strategy_is_made() -> None:
    leave_when_asked()
    end_when_asked()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Stopped):
        os.kill(os.getpid(), MAKE_ROOM)


def test_calls_in_flight_are_waited_for_by_the_controller() -> None:
    stopping = StopRequest()
    stopping.listen()
    ask(stopping)
    time.sleep(0.3)  # nothing is raised
