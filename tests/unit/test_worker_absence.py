"""For how long no worker has been present."""

from __future__ import annotations

from trainer.training.loop.worker_absence import WorkerAbsence


def test_an_absence_lasts_from_its_beginning_to_its_end() -> None:
    absence = WorkerAbsence(limit=100)
    assert not absence.lasts
    absence.begin(10, used=7)
    assert absence.lasts
    assert absence.seconds(40) == 30
    assert absence.end(50) == (40, 7)
    assert not absence.lasts
    assert absence.seconds(60) == 0


def test_an_absence_is_too_long_beyond_the_limit() -> None:
    absence = WorkerAbsence(limit=100)
    absence.begin(10, used=0)
    assert not absence.is_too_long(110)
    assert absence.is_too_long(110.1)


def test_no_absence_is_too_long_without_a_limit() -> None:
    absence = WorkerAbsence(limit=0)
    absence.begin(0, used=0)
    assert not absence.is_too_long(1e9)


def test_an_excused_time_does_not_count() -> None:
    absence = WorkerAbsence(limit=100)
    absence.begin(0, used=3)
    assert absence.excuse(90) == 90
    assert not absence.is_too_long(180)
    assert absence.is_too_long(191)
    assert absence.end(200) == (110, 3)
