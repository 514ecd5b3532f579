"""The budget of restarts: only crashes without a new checkpoint in between are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.core.failures import UserError
from trainer.run.directory import RunDirectory
from trainer.run.restart_budget import back_off, begin_attempt, end_attempt, end_import


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "a")


def crash(directory: RunDirectory, step: int | None, times: int = 1, limit: int = 10) -> list[float]:
    """Begin so many processes that end without a word; returns the pause of each."""
    return [begin_attempt(directory, step, limit) for _ in range(times)]


def test_pauses_grow_from_the_third_crash_on(directory: RunDirectory) -> None:
    assert crash(directory, None, 10) == [0, 0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert back_off(10**6) == 30


def test_more_crashes_than_the_limit_end_the_run_once(directory: RunDirectory) -> None:
    crash(directory, 7, 4, limit=3)
    with pytest.raises(UserError, match="crashed 4 times without a new checkpoint, and max_restarts_without_step is 3"):
        begin_attempt(directory, 7, 3)
    assert crash(directory, 7, 2, limit=3) == [0, 0]


def test_memory_that_ran_out_is_the_message_of_the_attempts_after(directory: RunDirectory) -> None:
    begin_attempt(directory, 7, 1)
    begin_attempt(directory, 7, 1, lack="out of memory, limit 2.0 GiB: take smaller batches")
    with pytest.raises(UserError, match=r"the last one said: out of memory, limit 2\.0 GiB: take smaller batches"):
        begin_attempt(directory, 7, 1)


def test_native_crashes_of_the_import_end_the_run_at_the_third(directory: RunDirectory) -> None:
    assert [begin_attempt(directory, 7, 10, crash) for crash in ("", "SIGSEGV", "SIGSEGV")] == [0, 0, 0]
    with pytest.raises(UserError, match=r"native code crashed each time while .* imported, at last with SIGABRT"):
        begin_attempt(directory, 7, 10, "SIGABRT")
    assert crash(directory, 7, 2) == [0, 0]  # the next start is the operator's


@pytest.mark.parametrize("other", ["after the import", "by itself", "killed"])
def test_native_crashes_that_are_not_all_the_imports_are_counted_as_others(directory: RunDirectory, other: str) -> None:
    for number in range(6):
        begin_attempt(directory, 7, 10, "" if other == "killed" and number % 2 else "SIGSEGV")
        if other == "after the import":
            end_import(directory)
        if other == "by itself" and number % 2:
            end_attempt(directory)


def test_new_checkpoint_begins_the_budget_again(directory: RunDirectory) -> None:
    crash(directory, 7, 4, limit=4)
    assert crash(directory, 8, 4, limit=4) == [0, 0, 1, 2]  # the crash after the checkpoint is the first


def test_checkpoint_that_was_set_aside_is_no_progress(directory: RunDirectory) -> None:
    crash(directory, 8, 2, limit=3)
    crash(directory, 7, 2, limit=3)
    with pytest.raises(UserError):
        begin_attempt(directory, 8, 3)


def test_waiting_for_machines_is_not_counted(directory: RunDirectory) -> None:
    for _ in range(50):
        assert begin_attempt(directory, None, 3) == 0
        end_attempt(directory)


def test_trouble_holds_back_without_being_counted(directory: RunDirectory) -> None:
    pauses = []
    for _ in range(6):
        pauses.append(begin_attempt(directory, 7, 1))
        end_attempt(directory, trouble=True)
    assert pauses == [0, 0, 0, 1, 2, 4]
    assert begin_attempt(directory, 8, 1) == 0


def test_trouble_that_is_counted_is_told_at_the_end(directory: RunDirectory) -> None:
    for _ in range(2):
        begin_attempt(directory, None, 1)
        end_attempt(directory, counted=True, message="compiling has lasted 1801 s")
    with pytest.raises(UserError, match="the last one said: compiling has lasted 1801 s"):
        begin_attempt(directory, None, 1)


def test_message_outlives_a_crash_without_one(directory: RunDirectory) -> None:
    begin_attempt(directory, None, 1)
    end_attempt(directory, counted=True, message="no memory")
    crash(directory, None)
    with pytest.raises(UserError, match="no memory"):
        begin_attempt(directory, None, 1)


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_damaged_or_unwritable_record_counts_nothing(directory: RunDirectory, damage: str) -> None:
    crash(directory, None, 3)
    directory.attempts.write_text(damage)
    assert begin_attempt(directory, None, 1) == 0
    directory.attempts = Path("/proc/none/attempts.json")
    assert crash(directory, None, 5, limit=1) == [0] * 5
    end_attempt(directory)
