"""Which deadline counts, at whatever moment the guard's thread looks."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.cluster.deadlines import Phases
from trainer.core.states import Phase


class Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.cluster.deadlines.time", clock)
    return clock


class Watched(Phases):
    """Is looked at after each change of anything that it consists of."""

    overdue_texts: tuple[str, ...] = ()
    looked_at = False

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.looked_at and name != "overdue_texts":
            self.overdue_texts += (self.overdue(),)


def test_a_phase_after_a_long_one_is_not_overdue_at_any_moment(clock: Clock) -> None:
    phases = Watched({"compiling": 1800.0})
    phases.looked_at = True
    clock.now += 7200
    phases.enter(Phase.COMPILING)
    assert set(phases.overdue_texts) == {""}
    clock.now += 1801
    assert phases.overdue().startswith("compiling has lasted 1801 s")
    phases.progressed()
    assert phases.overdue() == ""
