"""Calls that workers were given: each ends once, whichever of its workers tells of it, and however often."""

from __future__ import annotations

from trainer.training.steps.calls_in_flight import CallsInFlight
from trainer.training.steps.reports import Report
from trainer.training.steps.runner import Call


def given(count: int) -> tuple[CallsInFlight, list[Call]]:
    calls = CallsInFlight()
    made = [Call(steps=10, began=0.0) for _ in range(count)]
    for call in made:
        calls.add(calls.next_number(), call)
    return calls, made


def report(number: int, worker: int = 0) -> Report:
    return Report(number, worker, 10, None)


def test_calls_end_in_the_order_of_their_reports() -> None:
    calls, (first, second, _) = given(3)
    calls.report(report(1))
    calls.report(report(0, worker=1))
    assert [(call, each.worker) for call, each in calls.ended(is_quiet=False)] == [(second, 0), (first, 1)]
    assert len(calls) == 1


def test_a_call_that_ran_twice_ends_once() -> None:
    calls, (first, *_) = given(3)
    calls.report(report(0))
    calls.report(report(0, worker=1))
    assert [call is first for call, _ in calls.ended(is_quiet=False)] == [True]
    assert not calls.ended(is_quiet=True)


def test_the_last_call_ends_when_tensorflow_is_done_with_it_too() -> None:
    calls, (only,) = given(1)
    calls.report(report(0))
    assert not calls.ended(is_quiet=False)
    assert [call is only for call, _ in calls.ended(is_quiet=True)] == [True]


def test_calls_that_were_forgotten_do_not_end() -> None:
    calls, _ = given(2)
    calls.clear()
    calls.report(report(0))
    assert not calls.ended(is_quiet=True)
