"""An error that every worker reports in the same words, again and again, is the program's."""

from __future__ import annotations

import pytest

from trainer.core.repeated_failures import FAILURES, RepeatedFailures

CLASSES = ("InvalidArgumentError", "OpError", "Exception")
BOTH = [("worker-0", "a"), ("worker-1", "b")]


def message(number: int) -> str:
    return (
        f"/job:localhost/replica:0/task:0/device:CPU:0 unknown device, from /job:worker/task:{number} "
        f"[Op:__inference_train_call_{1900 + number}]"
    )


def failed(
    processes: list[tuple[str, str]], times: int = FAILURES, classes: tuple[str, ...] = CLASSES
) -> RepeatedFailures:
    failures = RepeatedFailures()
    for number, process in enumerate(processes * times):
        failures.add(*process, classes, message(number))
    return failures


def test_the_same_error_of_every_worker_is_the_programs() -> None:
    assert failed(BOTH).are_the_programs(message(7), BOTH)
    assert failed(BOTH[:1]).are_the_programs(message(7), BOTH[:1])


def test_two_failures_are_not_enough() -> None:
    assert not failed(BOTH[:1], FAILURES - 1).are_the_programs(message(7), BOTH[:1])
    assert not failed(BOTH, 1).are_the_programs(message(7), BOTH)


def test_several_root_errors_are_compared_by_the_first() -> None:
    failures, text = RepeatedFailures(), "INVALID_ARGUMENT: no such thing"
    for process, roots in (("a", 1), ("b", 2), ("a", 3)):
        lines = [f"{roots} root error(s) found.", *(f"  ({number}) {text}" for number in range(roots)), f"{roots} more"]
        failures.add(f"worker-{process}", process, CLASSES, "\n".join(lines))
    found = "9 root error(s) found.\n  (0) " + text
    assert failures.are_the_programs(found, [("worker-a", "a"), ("worker-b", "b")])


def test_one_workers_error_is_its_own() -> None:
    assert not failed(BOTH[:1], 9).are_the_programs(message(7), BOTH)


def test_a_new_process_counts_from_its_beginning() -> None:
    assert not failed(BOTH).are_the_programs(message(7), [("worker-0", "a"), ("worker-1", "another")])


def test_nobody_there_proves_nothing() -> None:
    assert not failed(BOTH).are_the_programs(message(7), [])


def test_another_message_counts_by_itself() -> None:
    assert not failed(BOTH).are_the_programs("another error", BOTH)


def test_a_call_that_ends_well_begins_the_count_again() -> None:
    failures = failed(BOTH)
    assert failures.any
    failures.clear()
    assert not failures.any
    assert not failures.are_the_programs(message(7), BOTH)


@pytest.mark.parametrize("name", ["UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError"])
def test_what_breaks_calls_from_outside_is_never_the_programs(name: str) -> None:
    failures = failed(BOTH, 9, (name, "OpError"))
    assert not failures.any
    assert not failures.are_the_programs(message(7), BOTH)
