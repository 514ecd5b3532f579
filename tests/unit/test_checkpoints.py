"""Which files in a run directory count, and which are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoints import RunDirectory, run_directories
from trainer.config import Config
from trainer.failures import UserError


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "mine")
    directory.checkpoints.mkdir(parents=True)
    return directory


def write(directory: RunDirectory, step: int, shards: int = 2, without: str = "") -> None:
    endings = [".index", *(f".data-{shard:05d}-of-{shards:05d}" for shard in range(shards))]
    for ending in endings:
        if ending != without:
            (directory.checkpoints / f"ckpt-{step}{ending}").touch()


def test_newest_by_number_and_not_by_name(directory: RunDirectory) -> None:
    for step in (900, 1000, 50):
        write(directory, step)
    assert directory.steps() == [50, 900, 1000]
    assert directory.newest() == 1000


@pytest.mark.parametrize("without", [".index", ".data-00000-of-00002", ".data-00001-of-00002"])
def test_a_checkpoint_without_one_of_its_files_does_not_count(directory: RunDirectory, without: str) -> None:
    write(directory, 100)
    write(directory, 200, without=without)
    assert directory.steps() == [100]


def test_an_index_alone_does_not_count(directory: RunDirectory) -> None:
    write(directory, 100, shards=0)
    assert directory.newest() is None


def test_other_files_and_other_numbers_do_not_count(directory: RunDirectory) -> None:
    write(directory, 10)
    write(directory, 100, without=".data-00000-of-00002")
    (directory.checkpoints / "ckpt-10_temp").mkdir()
    (directory.checkpoints / "ckpt-x.index").touch()
    assert directory.steps() == [10]


def test_checkpoint_state_file_is_not_relied_on(directory: RunDirectory) -> None:
    write(directory, 5)
    (directory.checkpoints / "checkpoint").write_text('model_checkpoint_path: "ckpt-99"')
    assert directory.newest() == 5
    directory.list_for_tensorflow()
    assert 'model_checkpoint_path: "ckpt-5"' in (directory.checkpoints / "checkpoint").read_text()


def test_a_run_that_never_started_has_none(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path, "none").steps() == []
    assert run_directories(tmp_path) == []


def test_prune_keeps_the_newest_and_every_file_of_them(directory: RunDirectory) -> None:
    for step in (1, 2, 3, 10, 11):
        write(directory, step)
    directory.prune(3)
    assert directory.steps() == [3, 10, 11]
    assert {path.name.split(".")[0] for path in directory.checkpoints.iterdir()} == {"ckpt-3", "ckpt-10", "ckpt-11"}


def test_what_is_set_aside_counts_no_more_and_is_still_there(directory: RunDirectory) -> None:
    for step in (100, 200):
        write(directory, step)
    assert directory.set_aside(200) == directory.checkpoints / "ckpt-200.index.bad"
    assert directory.steps() == [100]
    assert directory.set_aside_files() == [directory.checkpoints / "ckpt-200.index.bad"]
    assert (directory.checkpoints / "ckpt-200.data-00000-of-00002").exists()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_step_that_was_set_aside_can_be_saved_again(directory: RunDirectory, shards: int) -> None:
    write(directory, 100)
    directory.set_aside(100)
    write(directory, 100, shards, without=".index")
    assert directory.steps() == []
    write(directory, 100, shards)
    assert directory.steps() == [100]
    assert len(directory.set_aside_files()) == 1


def test_prune_does_not_keep_what_is_set_aside_instead_of_good_ones(directory: RunDirectory) -> None:
    for step in (1, 2, 3, 100, 200, 300):
        write(directory, step)
    for step in (100, 200, 300):
        directory.set_aside(step)
    write(directory, 4)
    directory.prune(3)
    assert directory.steps() == [2, 3, 4]


def test_prune_takes_along_what_was_set_aside_at_the_same_step(directory: RunDirectory) -> None:
    write(directory, 1)
    directory.set_aside(1)
    for step in (1, 2, 3):
        write(directory, step)
    directory.prune(2)
    assert directory.set_aside_files() == []


def test_a_run_remembers_its_program(tmp_path: Path) -> None:
    config = Config(program="mine:One", run="r", shared_dir=str(tmp_path))
    RunDirectory(tmp_path, "r").claim(config)
    RunDirectory(tmp_path, "r").claim(config.replace(steps=5))
    with pytest.raises(UserError, match=r"run r belongs to the program mine:One, not to mine:Two.*--run NAME"):
        RunDirectory(tmp_path, "r").claim(config.replace(program="mine:Two"))


def test_finished_until_more_steps_are_wanted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    assert directory.finished(100) is None
    directory.set_state("training", 0)
    assert directory.finished(100) is None
    directory.set_state("finished", 100)
    assert directory.finished(100) == 100
    assert directory.finished(50) == 100
    assert directory.finished(200) is None
