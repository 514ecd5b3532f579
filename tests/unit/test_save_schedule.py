"""When a checkpoint is due."""

from __future__ import annotations

from trainer.training.loop.save_schedule import PATIENCE_SECONDS, SaveSchedule


def free() -> bool:
    return False


def writing() -> bool:
    return True


def test_a_save_is_due_where_its_steps_are_passed() -> None:
    schedule = SaveSchedule(20, 0)
    schedule.saved(0)
    due = [
        step
        for before, step in ((0, 19), (19, 21), (21, 39), (39, 40), (40, 81))
        if schedule.is_due(before, step, 9, free)
    ]
    assert due == [21, 40, 81]


def test_a_save_is_due_when_its_seconds_have_passed_since_the_last() -> None:
    schedule = SaveSchedule(0, 60)
    schedule.saved(100)
    assert not schedule.is_due(0, 1, 159.9, free)
    assert schedule.is_due(0, 1, 160, free)
    schedule.saved(160)
    assert not schedule.is_due(1, 2, 219, free)


def test_no_save_is_due_without_steps_and_seconds() -> None:
    assert not SaveSchedule(0, 0).is_due(0, 1000, 1e9, free)


def test_a_due_save_waits_for_the_one_that_is_being_written() -> None:
    schedule = SaveSchedule(10, 0)
    schedule.saved(0)
    assert not schedule.is_due(9, 10, 1, writing)
    assert schedule.is_due(10, 11, 2, free)
    assert not schedule.is_due(11, 12, 3, free)


def test_a_slow_save_is_not_waited_for() -> None:
    schedule = SaveSchedule(10, 0)
    schedule.saved(0)
    assert not schedule.is_due(9, 10, PATIENCE_SECONDS - 0.1, writing)
    assert schedule.is_due(10, 11, PATIENCE_SECONDS, writing)


def test_nobody_asks_for_the_save_in_flight_where_none_is_due() -> None:
    def fail() -> bool:
        raise AssertionError

    assert not SaveSchedule(10, 0).is_due(0, 9, 1, fail)


def test_a_save_that_is_put_off_is_due_at_the_next_look() -> None:
    schedule = SaveSchedule(10, 0)
    schedule.put_off()
    assert schedule.is_due(0, 1, 1, free)
    assert not schedule.is_due(1, 2, 2, free)


def test_a_save_waits_for_callbacks_once() -> None:
    schedule = SaveSchedule(10, 0)
    assert not schedule.callbacks_heard()
    schedule.wait_for_callbacks()
    assert schedule.callbacks_heard()
    assert not schedule.callbacks_heard()
