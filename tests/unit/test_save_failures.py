"""Saves that fail: when the training goes on, and when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.core.failures import StalePath, UserError
from trainer.run.directory import RunDirectory
from trainer.run.saves import save_failures
from trainer.run.saves.save_failures import SaveFailed, SaveFailures

LIMIT = 60.0


def failed(at: float, **more: bool) -> SaveFailed:
    failure = SaveFailed("ckpt-8", "No space left on device", **more)
    failure.at = at
    return failure


@pytest.fixture
def failures(tmp_path: Path) -> SaveFailures:
    return SaveFailures(RunDirectory(tmp_path, "mine"), LIMIT)


def test_training_goes_on_until_saves_have_failed_for_the_users_limit(failures: SaveFailures) -> None:
    failures.check()
    assert failures.trouble() is None
    failures.add(100.0, failed(101.0))
    failures.add(140.0, failed(160.0))
    failures.check()
    assert "No space left on device" in (failures.trouble() or "")
    failures.add(160.0, failed(161.0))
    with pytest.raises(UserError, match="longer than storage_timeout_seconds, 60"):
        failures.check()


def test_a_save_that_is_written_ends_the_trouble(failures: SaveFailures) -> None:
    failures.add(100.0, failed(101.0))
    failures.written()
    assert (failures.trouble(), failures.last) == (None, None)
    failures.add(300.0, failed(301.0))
    failures.check()  # counted from this one


def test_failures_of_a_server_are_no_trouble_of_the_storage(failures: SaveFailures) -> None:
    for at in (100.0, 200.0, 300.0):
        failures.add(at, failed(at, of_storage=False))
    failures.check()
    assert failures.trouble() is None


def test_a_program_that_can_never_be_saved_ends_the_training(failures: SaveFailures) -> None:
    for number in range(save_failures.MAX_REFUSALS):
        failures.check()
        at = 100.0 + number * save_failures.REFUSED_SECONDS
        failures.add(at, failed(at, of_storage=False, of_program=True))
    with pytest.raises(UserError, match="3 saves failed so, and not by the storage"):
        failures.check()


def test_a_path_that_must_be_mounted_again_is_said_at_once(failures: SaveFailures) -> None:
    failures.add(100.0, failed(101.0, stale=True))
    with pytest.raises(StalePath, match="must be mounted again"):
        failures.check()
