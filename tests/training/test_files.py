"""What a pipeline writes where it runs belongs to one process: the next one is not stopped by what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from processes import MINUTE, Runs, kill, run_check, until

from trainer.core.failures import UserError
from trainer.training.data.worker_files import reject_unwritable

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What files_check.py found on servers in its process."""
    checked: dict[str, Any] = run_check("files_check.py", deadline=500)
    return checked


@pytest.fixture(scope="module")
def workers(found: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = found["workers"]
    return own


FIRST, SECOND = [[0, 2], [4, 6]] * 2, [[1, 3], [5, 7]] * 2


def test_workers_with_one_name_read_each_its_own_part(workers: dict[str, Any]) -> None:
    assert workers["own"] == [FIRST, SECOND]
    assert len(workers["names"]) == 4  # data and index of each
    assert all(name.startswith("numbers.psfleet-run-") for name in workers["names"])


def test_a_whole_cache_is_read_again_by_the_same_process(workers: dict[str, Any]) -> None:
    assert workers["same_process"] == [FIRST, SECOND]


def test_another_process_reads_the_data_and_empties_what_earlier_ones_left(workers: dict[str, Any]) -> None:
    assert workers["other_process"] == [[[10, 12], [14, 16]] * 2, SECOND]
    assert len(workers["names_then"]) == 5
    assert "numbers.psfleet-other-0-1-1.index" in workers["names_then"]  # another run's


def test_one_cache_lies_there_however_often_the_data_are_divided_again(workers: dict[str, Any]) -> None:
    """What was emptied is not read, either."""
    assert workers["divided"] == [[[FIRST, SECOND], 5]] * 3


def test_a_cache_within_a_function_is_each_workers_own(workers: dict[str, Any]) -> None:
    assert workers["each"] == [[[0, 1, 2]] * 2, [[10, 11, 12]] * 2]


def test_a_snapshot_is_each_workers_own(workers: dict[str, Any]) -> None:
    assert workers["snapshot"] == [FIRST, SECOND]
    assert len(workers["snapshots"]) == 2


def test_one_file_of_two_caches_is_refused_in_our_words(workers: dict[str, Any]) -> None:
    assert workers["twice"].startswith("Twice: two caches of one pipeline have one file: give each cache(FILE) another")


def test_what_no_worker_should_write_is_refused(workers: dict[str, Any]) -> None:
    assert workers["saving"].startswith("Saving.train_dataset calls Dataset.save")
    assert workers["service"].startswith("Cached.train_dataset names files for cache, and input is service")


def test_passes_in_an_order_of_their_own_are_not_cached_in_files(workers: dict[str, Any]) -> None:
    assert workers["exact"] == 0


def test_runs_and_evaluations_of_one_process_have_caches_of_their_own(found: dict[str, Any]) -> None:
    """What an earlier process of the run left is empty then."""
    one_pass, size = [[0, 1], [2, 3]], 0
    assert found["alone"] == [one_pass * 2, one_pass * 2, one_pass, size]


def test_a_worker_that_is_killed_while_it_writes_its_cache_reads_again(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    more = ["--evaluation", "none", "--log-seconds", "0.5", "--steps-per-execution", "10"]
    process = runs.local("cached:Cached", "cached", 2000, *more, FILE=str(file))
    process.search(r"step \d+ of 2000")
    until(lambda: len(list(file.parent.glob("*.lockfile"))) == 2, "both workers write their caches")
    kill(process.pids("worker-0")[-1])
    process.search("TensorFlow has taken in worker-0")
    assert process.wait(4 * MINUTE) == 0, process.output[-3000:]
    emptied = [path for path in file.parent.glob("*.lockfile") if not path.stat().st_size]
    assert len(emptied) == 1


@pytest.mark.parametrize("kind", ["NotFoundError", "PermissionDeniedError"])
def test_a_directory_that_is_missing_is_named_with_what_to_do(kind: str) -> None:
    error = getattr(tf.errors, kind)(None, None, "/scratch/numbers.psfleet-1-0-2-3_0.lockfile; No such file")
    with pytest.raises(UserError, match=r"^object: a file of its pipeline can't be written .*/scratch/numbers"):
        reject_unwritable(object(), error)


def test_a_full_disk_is_named_with_the_worker_and_what_to_do() -> None:
    file = "/scratch/numbers.psfleet-1-0-2-3_0.data-00000-of-00001.tempstate1; No space left on device"
    text = f"Graph execution error:\n\nDetected at node Next defined at\n{file}\n\t [[{{{{node Next}}}}]]\nHint: more\n"
    text += "from remote target /job:worker/replica:0/task:1 while calling"
    with pytest.raises(UserError, match=r"^object: the disk of /scratch is full on the host of worker-1, .*Make room"):
        reject_unwritable(object(), tf.errors.ResourceExhaustedError(None, None, text))


@pytest.mark.parametrize("name", ["NotFoundError", "ResourceExhaustedError"])
@pytest.mark.parametrize("text", ["/data/train-1; No such file", "/data/train-1; No space left on device", "OOM"])
def test_another_files_error_stays_as_it_is(name: str, text: str) -> None:
    reject_unwritable(object(), getattr(tf.errors, name)(None, None, text))
