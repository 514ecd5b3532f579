"""When a process can't go on for a member, and what it fixes itself."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster.member import Member, MemberState
from trainer.cluster.members import member_troubles
from trainer.cluster.members.member_troubles import DROP_SECONDS, QUIET_SECONDS, REPORT_SECONDS, MemberTroubles

NOW = 1000.0
HANDLER: Any = SimpleNamespace(busy={}, updating_since=None)


def member(task: str, **more: Any) -> Member:
    return dataclasses.replace(Member(task, f"{task}:1").answered(NOW, NOW, "one").taken(NOW), **more)


def silent(task: str) -> Member:
    return member(task, state=MemberState.SILENT, quiet=6.0, since=NOW)


def test_a_silent_ps_or_a_silent_worker_before_there_is_a_handler_is_trouble() -> None:
    troubles = MemberTroubles()
    for found in (
        troubles.find_for(silent("ps-0"), HANDLER, NOW, NOW),
        troubles.find_for(silent("worker-0"), None, NOW, NOW),
    ):
        assert found is not None
        assert found[0] == "member-silent"
    assert troubles.find_for(member("ps-0"), HANDLER, NOW, NOW) is None


def test_a_silent_worker_is_trouble_when_tensorflow_does_not_let_go_of_its_call() -> None:
    troubles, busy = MemberTroubles(), SimpleNamespace(busy={"worker-0": NOW - 50.0}, updating_since=None)
    assert troubles.find_for(silent("worker-0"), HANDLER, NOW, NOW + 60.0) is None
    assert troubles.find_for(silent("worker-0"), busy, NOW, NOW + DROP_SECONDS) is None
    found = troubles.find_for(silent("worker-0"), busy, NOW, NOW + DROP_SECONDS + 1.0)
    assert found is not None
    assert "TensorFlow does not let go of it" in found[1]


def test_a_ps_that_has_ended_is_trouble_when_tensorflow_has_long_said_nothing() -> None:
    troubles, ended = MemberTroubles(), member("ps-0").refused(NOW, NOW)
    ended = dataclasses.replace(ended, ended=("one", 0.1))
    assert ended.is_lost
    assert troubles.find_for(ended, HANDLER, NOW - REPORT_SECONDS, NOW) is None
    assert troubles.find_for(ended, HANDLER, NOW - REPORT_SECONDS - 1.0, NOW) is not None


def test_connections_of_a_worker_that_was_quiet_before_its_end_are_shut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shut: list[str] = []
    monkeypatch.setattr(member_troubles, "shut", shut.append)
    troubles, ended = MemberTroubles(), member("worker-0", ended=("one", QUIET_SECONDS + 1.0))
    for _ in range(2):
        assert troubles.find_for(ended, HANDLER, NOW, NOW) is None
    assert shut == ["worker-0:1"]
    assert MemberTroubles().find_for(member("worker-0", ended=("one", 0.1)), HANDLER, NOW, NOW) is None
    assert shut == ["worker-0:1"]
