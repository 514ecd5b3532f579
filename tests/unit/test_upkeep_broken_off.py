"""Whole runs are kept whichever change of a file a process is killed before, and whichever finds the disk full."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_upkeep import make, tell
from trainer.core.settings.config import Config
from trainer.run import upkeep
from trainer.run.copies import find_damage
from trainer.run.directory import run_directories
from trainer.run.records import write_record

CHANGES = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.utime"}
WHOLE, RAISED, KILLED = 0, 1, 9
Work = Callable[[Config, Path], dict[str, Any]]
WORKS: dict[str, Work] = {
    "backup": lambda config, place: upkeep.back_up(config, "digits", place, tell, plan=False),
    "restore-run": lambda config, place: upkeep.restore(config, place / "digits@10", "again", tell, plan=False),
    "clone-run": lambda config, _: upkeep.clone(config, "digits", "twin", tell, plan=False),
    "delete-run": lambda config, _: upkeep.delete_run(config, "old", plan=False),
    "prune": lambda config, _: upkeep.prune_runs(config, 1, plan=False),
}


def site(place: Path, verb: str) -> Config:
    """Two runs, and a copy of one where a verb needs it."""
    shared, backups = place / "shared", place / "backups"
    for folder in (shared, backups):
        folder.mkdir(parents=True)
    write_record(shared / "selection.json", {"run": "chosen"})
    config = Config(program="p:P", run="digits", shared_dir=str(shared), lease_seconds=10.0)
    for number, name in enumerate(("old", "digits")):
        directory = make(config, name, steps=(10,))
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))
    if verb == "restore-run":
        WORKS["backup"](config, backups)
    return config


def disturbed(work: Callable[[], Any], place: Path, at: int, is_full: bool) -> int:
    """Do something in a process that is killed before its change number `at`, or finds no room from then on."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = at

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if reads or (path.startswith("/") and not path.startswith(str(place))):
            return
        left -= 1
        if left <= 0 and not is_full:
            os._exit(KILLED)
        if left <= 0 and event in ("open", "os.mkdir", "os.link"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(count)
    try:
        work()
    except BaseException:
        os._exit(RAISED)
    os._exit(WHOLE if left > 0 else RAISED)


def names_of(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def reject_halves(config: Config, place: Path, whole: set[str]) -> None:
    """Fail where a run or a copy appears that lacks something."""
    for copy in (place / "backups").glob("[!.]*"):
        assert find_damage(copy) == ""
    for directory in run_directories(Path(config.shared_dir)):
        assert directory.catalogue.steps() == [10]
        assert directory.catalogue.check(10) == ""
        files = {name for name in whole if name.startswith(f"shared/runs/{directory.run}/")}
        assert files <= names_of(place), directory.run


@pytest.mark.parametrize("is_full", [False, True], ids=["killed", "full"])
@pytest.mark.parametrize("verb", WORKS)
def test_what_is_broken_off_anywhere_leaves_no_half_and_is_done_by_the_next_call(
    verb: str, is_full: bool, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    config = site(whole, verb)
    before = names_of(whole)
    WORKS[verb](config, whole / "backups")
    after = names_of(whole)
    for at in range(1, 1000):
        place = tmp_path / str(at)
        config = site(place, verb)
        ended = disturbed(lambda: WORKS[verb](config, place / "backups"), place, at, is_full)  # noqa: B023
        reject_halves(config, place, before | after)
        WORKS[verb](config, place / "backups")
        assert names_of(place) == after, at
        if ended == WHOLE:
            break
    assert at > 3
