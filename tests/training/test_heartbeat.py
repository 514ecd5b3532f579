"""What the heartbeat says of a real server that is frozen, thawed, killed and started again."""

from __future__ import annotations

import json
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from processes import Runs, until

from trainer.cluster.member import Member, MemberState
from trainer.cluster.members import heartbeat as module
from trainer.cluster.members.heartbeat import PERIOD_SECONDS, Heartbeat, Line
from trainer.cluster.spec import free_addresses

pytestmark = pytest.mark.timeout(180)
SILENT_SECONDS = 5.0


def beat(address: str) -> Heartbeat:
    return Heartbeat({"worker-0": Member("worker-0", address, since=time.monotonic())}, SILENT_SECONDS)


def member(heartbeat: Heartbeat) -> Member:
    return heartbeat.members()["worker-0"]


def reaches(heartbeat: Heartbeat, state: MemberState) -> Member:
    until(lambda: member(heartbeat).state is state, state.value, say=lambda: str(member(heartbeat)))
    return member(heartbeat)


def test_heartbeat_tells_frozen_from_gone_and_knows_a_process_again(runs: Runs) -> None:
    chief, worker = free_addresses(2)
    config = json.dumps(
        {"cluster": {"chief": [chief], "worker": [worker], "ps": [chief]}, "task": {"type": "worker", "index": 0}}
    )
    heartbeat = beat(worker)
    heartbeat.start()
    try:
        reaches(heartbeat, MemberState.CLOSED)
        process = runs.task(TF_CONFIG=config)
        first = reaches(heartbeat, MemberState.SERVING).incarnation
        until(lambda: member(heartbeat).is_steady(time.monotonic()), "some seconds of answers")
        heartbeat.change(lambda member: member.taken(time.monotonic()), "worker-0")

        began = time.monotonic()
        process.send(signal.SIGSTOP)
        silent = reaches(heartbeat, MemberState.SILENT)
        assert time.monotonic() - began > SILENT_SECONDS - PERIOD_SECONDS - 0.5
        assert (silent.incarnation, silent.must_restart, silent.steady_since) == (first, first, None)
        process.send(signal.SIGCONT)
        thawed = reaches(heartbeat, MemberState.STARTING)
        assert (thawed.incarnation, thawed.ended) == (first, None)

        process.end()
        closed = reaches(heartbeat, MemberState.CLOSED)
        assert closed.ended is not None
        assert closed.ended[0] == first
        assert closed.ended[1] < SILENT_SECONDS
        assert closed.is_lost
        process = runs.task(TF_CONFIG=config)
        second = reaches(heartbeat, MemberState.SERVING).incarnation
        assert second != first

        # As when its host is reset: nothing at first, then its new kernel, which knows of no connection.
        process.send(signal.SIGSTOP)
        reaches(heartbeat, MemberState.SILENT)
        process.end()
        closed = reaches(heartbeat, MemberState.CLOSED)
        assert closed.ended is not None
        assert closed.ended[0] == second
        assert closed.ended[1] >= SILENT_SECONDS
    finally:
        heartbeat.stop()


class Deaf:
    """A channel whose questions never end."""

    def unary_unary(self, method: str) -> Deaf:
        return self

    def future(self, request: bytes, timeout: float) -> Deaf:
        return self

    def add_done_callback(self, callback: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_channel_that_says_nothing_more_is_replaced(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    chief, worker = free_addresses(2)
    config = {"cluster": {"chief": [chief], "worker": [worker], "ps": [chief]}, "task": {"type": "worker", "index": 0}}
    real, opened = grpc.insecure_channel, list[object]()

    def open_channel(*arguments: Any, **options: Any) -> Any:
        opened.append(Deaf() if not opened else real(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(grpc, "insecure_channel", open_channel)
    monkeypatch.setattr(module, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(module, "RENEW_SECONDS", 6.0)
    runs.task(TF_CONFIG=json.dumps(config))
    heartbeat = beat(worker)
    heartbeat.start()
    try:
        reaches(heartbeat, MemberState.AWAY)
        reaches(heartbeat, MemberState.SERVING)
    finally:
        heartbeat.stop()


def test_a_question_that_cannot_be_asked_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, beaten, asked = beat("127.0.0.1:9"), threading.Event(), []

    def ask(task: str, now: float) -> None:
        asked.append(task)
        if len(asked) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Line, "ask", ask)
    heartbeat.on_beat = beaten.set
    heartbeat.start()
    try:
        assert beaten.wait(30)
    finally:
        heartbeat.stop()


def test_what_this_process_missed_itself_is_no_members_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it was frozen, or did not get the processor: its next round comes late."""
    heartbeat, now = beat("127.0.0.1:9"), [time.monotonic()]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    # Each question is over at once, without an answer.
    line: Any = SimpleNamespace(asked_at=None, opened_at=now[0], open=lambda: None, close=lambda: None)
    line.ask = lambda heard: setattr(line, "asked_at", None)

    def rounds(*pauses: float) -> Any:
        def wait(seconds: float) -> bool:
            now[0] += next(passing, 0.0)
            return next(left, True)

        passing, left = iter(pauses), iter([False] * len(pauses))
        return wait

    heartbeat._lines = {"worker-0": line}
    heartbeat.change(lambda member: member.answered(now[0], now[0], "one"), "worker-0")
    monkeypatch.setattr(heartbeat, "_pause", rounds(1.5, 60.0, 0.2, 0.2))
    heartbeat._beat()
    assert member(heartbeat).state is not MemberState.SILENT
    monkeypatch.setattr(heartbeat, "_pause", rounds(*[0.2] * 30))
    heartbeat._beat()
    assert member(heartbeat).state is MemberState.SILENT


def test_who_waits_for_an_answer_has_everybody_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also whose last question is open: that answer would be an earlier one."""
    monkeypatch.setattr(module, "TICK_SECONDS", 3600.0)  # no round comes by itself
    heartbeat, asked, rounds = beat("127.0.0.1:9"), threading.Semaphore(0), threading.Semaphore(0)
    questions: list[float] = []

    def ask(line: Line, heard: object) -> None:
        assert line.asked_at is not None
        questions.append(line.asked_at)
        asked.release()

    def answer() -> None:
        future: Any = SimpleNamespace(exception=lambda: None, cancelled=lambda: False, result=lambda: b"one")
        heartbeat._heard("worker-0", questions[-1], future)

    monkeypatch.setattr(Line, "ask", ask)
    heartbeat.on_beat = rounds.release
    heartbeat.start()
    try:
        assert asked.acquire(timeout=60)
        assert rounds.acquire(timeout=60)
        began = time.monotonic()
        heartbeat.hurry(since=began)
        assert rounds.acquire(timeout=60)
        answer()
        assert not member(heartbeat).is_here(since=began)
        assert asked.acquire(timeout=60)
        answer()
        assert member(heartbeat).is_here(since=began)
        heartbeat.hurry(since=began)  # which has been heard by now
        assert not asked.acquire(timeout=0.2)
    finally:
        heartbeat.stop()
