"""How fast the training goes since its numbers were shown."""

from __future__ import annotations

from trainer.training.loop.progress_meter import ProgressMeter, Stretch


def meter() -> ProgressMeter:
    found = ProgressMeter(10, ["worker-0", "worker-1"])
    found.begin(100, 50)
    return found


def test_a_stretch_has_its_speed_and_each_tasks_steps() -> None:
    found = meter()
    found.add_steps("worker-0", 20)
    found.add_steps("worker-1", 10)
    found.add_steps("worker-0", 10)
    assert found.stretch(140, 60) == Stretch(10, 4.0, {"worker-0": 30, "worker-1": 10})


def test_a_new_stretch_counts_from_its_beginning() -> None:
    found = meter()
    found.add_steps("worker-0", 20)
    found.begin(120, 60)
    assert found.stretch(130, 62) == Stretch(2, 5.0, {"worker-0": 0, "worker-1": 0})


def test_nothing_is_shown_where_no_step_has_ended() -> None:
    assert meter().stretch(100, 60) is None


def test_numbers_are_due_after_the_interval() -> None:
    found = meter()
    assert not found.is_due(59.9)
    assert found.is_due(60)


def test_a_time_that_is_left_out_neither_counts_nor_makes_numbers_due() -> None:
    found = meter()
    found.leave_out(5)
    assert not found.is_due(64.9)
    assert found.stretch(110, 65) == Stretch(10, 1.0, {"worker-0": 0, "worker-1": 0})
