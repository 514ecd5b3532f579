"""Which release each server runs, asked once a process."""

from __future__ import annotations

import pytest

from tests.waiting import until
from trainer.cluster import server_releases as module
from trainer.cluster.server_releases import TRIES, ServerReleases


def test_each_process_is_asked_once_beside_who_wants_to_know() -> None:
    asked: list[str] = []

    def read(task: str, address: str) -> str:
        asked.append(task)
        return "new" if task == "worker-0" else "old"

    releases = ServerReleases("new", read)
    assert releases.other("worker-0", "a:1", "w0") is None
    assert releases.other("worker-1", "b:1", "w1") is None
    until(lambda: releases.other("worker-0", "a:1", "w0") == "")
    until(lambda: releases.other("worker-1", "b:1", "w1") == "runs release old, and the coordinator new")
    assert sorted(asked) == ["worker-0", "worker-1"]
    until(lambda: releases.other("worker-0", "a:1", "its next process") == "")
    assert len(asked) == 3


def test_one_that_does_not_say_holds_up_nobody_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    failures = 0

    def read(task: str, address: str) -> str:
        nonlocal failures
        if task == "worker-1" and failures < TRIES:
            failures += 1
            raise OSError("no answer")
        return "new"

    releases = ServerReleases("new", read)
    assert releases.other("worker-1", "b:1", "w1") is None
    until(lambda: "w1" in releases._found)
    reason = "does not say which release it runs, and the coordinator runs new"
    assert releases.other("worker-1", "b:1", "w1") == reason
    until(lambda: releases.other("worker-1", "b:1", "w1") == "")
