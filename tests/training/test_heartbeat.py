"""What the heartbeat says of a real server that is frozen, thawed, killed and started again."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import grpc
import pytest
from processes import Runs, until

from trainer.cluster import heartbeat as module
from trainer.cluster.heartbeat import Heartbeat
from trainer.cluster.spec import free_addresses

pytestmark = pytest.mark.timeout(180)
SILENT_SECONDS = 5.0


def test_heartbeat_tells_frozen_from_gone_and_knows_a_process_again(runs: Runs) -> None:
    chief, worker = free_addresses(2)
    config = json.dumps(
        {"cluster": {"chief": [chief], "worker": [worker], "ps": [chief]}, "task": {"type": "worker", "index": 0}}
    )
    heartbeat = Heartbeat({"worker-0": worker}, SILENT_SECONDS)
    heartbeat.start()
    try:
        until(lambda: heartbeat.closed() == ["worker-0"], "a port that is closed")
        assert heartbeat.identities() == {}
        process = runs.task(TF_CONFIG=config)
        first = until(lambda: heartbeat.identities().get("worker-0"), "an answer")
        until(lambda: heartbeat.steady(2.0) == {"worker-0"}, "two seconds of answers")
        assert heartbeat.identities() == {"worker-0": first}

        process.send(signal.SIGSTOP)
        until(lambda: "worker-0" in heartbeat.silent(), "silence")
        assert heartbeat.closed() == []
        assert heartbeat.identities() == {}
        process.send(signal.SIGCONT)
        until(lambda: heartbeat.identities() == {"worker-0": first}, "the same process")
        assert heartbeat.silent() == {}
        assert heartbeat.ended() == {}

        process.end()
        until(lambda: heartbeat.closed() == ["worker-0"], "a closed port")
        assert heartbeat.ended()["worker-0"][0] == first
        assert heartbeat.ended()["worker-0"][1] < SILENT_SECONDS
        process = runs.task(TF_CONFIG=config)
        second = until(lambda: heartbeat.identities().get("worker-0"), "another answer")
        assert second != first
        assert heartbeat.silent() == {}
        until(lambda: heartbeat.steady(2.0) == {"worker-0"}, "two seconds of answers")
        assert heartbeat.ended()["worker-0"][0] == first

        # As when its host is reset: nothing at first, then its new kernel, which knows of no connection.
        process.send(signal.SIGSTOP)
        until(lambda: "worker-0" in heartbeat.silent(), "silence")
        process.end()
        until(lambda: heartbeat.closed() == ["worker-0"], "a closed port")
        assert heartbeat.silent() == {}
        assert heartbeat.ended()["worker-0"][0] == second
        assert heartbeat.ended()["worker-0"][1] >= SILENT_SECONDS
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
    heartbeat = Heartbeat({"worker-0": worker}, SILENT_SECONDS)
    heartbeat.start()
    try:
        until(lambda: "worker-0" in heartbeat.silent(), "silence")
        until(lambda: heartbeat.identities().get("worker-0"), "an answer")
    finally:
        heartbeat.stop()
    assert heartbeat.silent() == {}


def test_a_question_that_cannot_be_asked_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, beaten, asked = Heartbeat({"worker-0": "127.0.0.1:9"}, SILENT_SECONDS), threading.Event(), []

    def ask(task: str) -> None:
        asked.append(task)
        if len(asked) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(heartbeat, "_ask", ask)
    heartbeat.on_beat = beaten.set
    heartbeat.start()
    try:
        assert beaten.wait(30)
    finally:
        heartbeat.stop()
