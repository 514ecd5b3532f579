"""For how long a request to stop waits for the calls in flight."""

from __future__ import annotations

from trainer.core.signals import STOP_PATIENCE_SECONDS
from trainer.training.loop.stop_patience import StopPatience


def test_calls_in_flight_are_waited_for_since_the_first_request() -> None:
    patience = StopPatience()
    for now in (0.0, 5.0, STOP_PATIENCE_SECONDS):
        assert patience.why_leave(now, has_workers=True, is_failing=False) == ""
    why = patience.why_leave(STOP_PATIENCE_SECONDS + 0.1, has_workers=True, is_failing=False)
    assert why == f"a call has not ended {STOP_PATIENCE_SECONDS:.0f} s after the request to stop"


def test_calls_that_can_not_end_are_not_waited_for() -> None:
    assert StopPatience().why_leave(0, has_workers=False, is_failing=True).startswith("no worker")
    assert StopPatience().why_leave(0, has_workers=True, is_failing=True).startswith("the calls in flight fail")
