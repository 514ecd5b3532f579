"""What is done to whole runs while no task works on them: copy, take back, clone, delete, prune. Needs no TensorFlow.

Each may be interrupted and done again: a run appears and vanishes by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.settings.formats import RUN_NAME
from trainer.core.states import RunState
from trainer.run.copies import (
    COMING,
    OnBytes,
    alone,
    clear,
    coming_of,
    copy_run,
    find_damage,
    measure,
    read_copy,
    read_sums,
    reject_copy_without_room,
    reject_names,
    reject_without_room,
    take_copy,
)
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.lease import holder, is_free, read_lease
from trainer.run.records import read_record, readable, sync, write_record
from trainer.run.selections.queue_changes import read_or_none
from trainer.run.selections.selection import read_selection, sweep_of

# A lease that was not renewed for so many times its length is over, by the storage's own clock.
LEASES = 2
DONE, THERE, PLANNED, GONE = "done", "there already", "planned", "not there"


def find(shared_dir: Path, run: str) -> RunDirectory:
    """Return a run's directory; raises UserError where there is none."""
    directory = RunDirectory(shared_dir, run)
    if not RUN_NAME.fullmatch(run) or not directory.path.is_dir():
        names = ", ".join(each.run for each in run_directories(shared_dir)) or "none"
        raise UserError(f"there is no run {run} in {shared_dir}; the runs are {names}")
    return directory


def who_trains(directory: RunDirectory, lease_seconds: float) -> str | None:
    """Name the process that coordinates a run, None where none does."""
    epoch = directory.lease_epoch()
    record = read_lease(directory, epoch)
    if is_free(epoch, record):
        return None
    os.utime(directory.path)  # by the clock that wrote the lease; no file, for which a full path may have no room
    age = directory.path.stat().st_mtime - directory.lease(epoch).stat().st_mtime
    return holder(record) if age < LEASES * lease_seconds else None


def chosen_runs(config: Config) -> set[str]:
    """Return the runs that the selection names, and those that wait in the queue.

    Of a sweep it is each run: a search goes by those that have ended. Where none was ever selected, the settings'.
    """
    selection = read_selection(config)
    if queue := read_or_none(config.shared_dir):
        waiting = {point.run for entry in queue.left() for point in entry.points}
        if "queue" in selection:
            return waiting
    else:
        waiting = set()
    if "sweep" in selection and (sweep := sweep_of(selection, config.shared_dir)):
        return waiting | {point.run for point in sweep.points}
    return waiting | {selection.get("run", config.run)}


def why_kept(directory: RunDirectory, config: Config, chosen: Iterable[str]) -> str | None:
    """Say why a run must not be removed, None where it may."""
    if who := who_trains(directory, config.lease_seconds):
        return f"it is trained by {who}"
    return "it is selected" if directory.run in chosen else None


def reject_awaited(config: Config, run: str) -> None:
    """Raise UserError for the name of a run that waits in the queue: it would go on from a copy, and never begin."""
    queue = read_or_none(config.shared_dir)
    if queue and (entry := queue.entry_awaiting(run)):
        raise UserError(
            f"run {run} waits in the queue, and would go on from this copy: choose another name, or take it out "
            f"(fab queue-remove {entry.name}) and add it when the copy is made"
        )


def delete_run(config: Config, run: str, plan: bool) -> dict[str, Any]:
    """Remove a run with all that it has; one that was removed before is none to do. Raises UserError."""
    shared_dir = Path(config.shared_dir)
    if not RUN_NAME.fullmatch(run):
        raise UserError(f"--run {run!r} can't name a run: `fab runs` lists all")
    directory = RunDirectory(shared_dir, run)
    there = directory.path.is_dir()
    outcome = GONE if not there else PLANNED if plan else DONE
    answer: dict[str, Any] = {"run": run, "outcome": outcome, "bytes": 0, "files": 0}
    if there:
        if why := why_kept(directory, config, chosen_runs(config)):
            fix = "stop it first: fab stop-cluster" if "trained" in why else _free_fix(config, run)
            raise UserError(f"run {run} is not removed: {why}; {fix}")
        answer |= freed([directory.path])
    if not plan:
        remove([directory.path] if there else [], shared_dir)
    answer["runs"] = [each.run for each in run_directories(shared_dir)]
    return answer


def _free_fix(config: Config, run: str) -> str:
    """Return what frees a run that is selected, or waits in the queue."""
    queue = read_or_none(config.shared_dir)
    entry = queue.entry_of(run) if queue else None
    if queue and entry in queue.left():
        return f"take it out of the queue: fab queue-remove {entry.name}"
    return "select another: fab start-cluster --run NAME"


def prune_runs(config: Config, keep: int, plan: bool, agreed: Collection[str] | None = None) -> dict[str, Any]:
    """Remove all runs but the newest `keep`, those that train or are selected, and what interrupted work has left.

    With `agreed` none but these: while a person is asked, the queue may begin a run, and others are the newest then.
    """
    shared_dir = Path(config.shared_dir)
    chosen = chosen_runs(config)
    newest = sorted(run_directories(shared_dir), key=_written, reverse=True)
    kept = {each.run: "one of the newest" for each in newest[:keep]}
    for directory in newest[keep:]:
        if why := why_kept(directory, config, chosen):
            kept[directory.run] = why
    going = [each for each in newest if each.run not in kept and (agreed is None or each.run in agreed)]
    left = list(shared_dir.glob(f"runs/.*{COMING}")) + list(shared_dir.glob("removing/[!.]*"))
    answer: dict[str, Any] = {
        "removed": sorted(each.run for each in going),
        "kept": kept,
        "left": [each.name for each in left],
    }
    answer |= {"outcome": PLANNED if plan else DONE, **freed([each.path for each in going] + left)}
    if not plan:
        remove([each.path for each in going], shared_dir)
        for unfinished in shared_dir.glob(f"runs/.*{COMING}"):
            remove_unfinished(unfinished)
    return answer


def remove_unfinished(coming: Path) -> None:
    """Remove a copy that was broken off; one that is still at work stays."""
    try:
        with alone(coming) as ours:
            clear(ours)
    except UserError:
        return


def remove(paths: Iterable[Path], shared_dir: Path) -> None:
    """Remove directories, each by one rename, and then what they hold; also what an interrupted call has left.

    Raises UserError where another process does so: each would find that the other's files are gone.
    """
    going, is_full = shared_dir / "removing", False
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(alone(going))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            is_full = True  # there may be no room for a directory
        for path in paths:
            name = f"{path.name}-{time.time_ns()}"
            target = path.with_name(f".{name}{COMING}") if is_full else going / name
            path.rename(target)
            sync(path.parent)
            if is_full:
                shutil.rmtree(target)
        if not is_full:
            clear(going)
        elif going.is_dir():
            shutil.rmtree(going)


def freed(paths: Iterable[Path]) -> dict[str, int]:
    """Return how many files and bytes go with directories; bytes that another run shares stay."""
    links: dict[tuple[int, int], list[int]] = {}
    files = 0
    for path in paths:
        for each in path.rglob("*"):
            try:
                found = each.lstat()
            except FileNotFoundError:  # a copy that goes on meanwhile
                continue
            if not stat.S_ISDIR(found.st_mode):
                files += 1
                links.setdefault((found.st_dev, found.st_ino), [found.st_nlink, 0, found.st_size])[1] += 1
    return {"files": files, "bytes": sum(size for all_of, seen, size in links.values() if seen >= all_of)}


def back_up(config: Config, run: str, place: Path, on_bytes: OnBytes, plan: bool) -> dict[str, Any]:
    """Copy a run to <place>/<run>@<step>, also one that trains; a whole copy of that step stays. Raises UserError."""
    directory = find(Path(config.shared_dir), run)
    if not place.is_dir():
        raise UserError(
            f"--to {place}: there is no such folder on this host; make it, for the user trainer to write to"
        )
    reject_names(directory)
    planned = measure(directory)
    destination = place / f"{run}@{planned['step']}"
    answer = {"run": run, "copy": str(destination), **planned, "outcome": PLANNED}
    if destination.is_dir():
        if damage := find_damage(destination):
            raise UserError(f"{destination} exists and is damaged: {damage}. Move it away, and type this again")
        known = read_copy(destination)
        return {**answer, "outcome": THERE, **{key: known[key] for key in ("step", "files", "bytes")}}
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--to {place}: the user trainer can't write there; give it the folder: chown trainer {place}")
    if plan:
        reject_copy_without_room(directory, coming_of(place, run), makes_run=False)
        return answer
    made = copy_run(directory, place, on_bytes, lambda step: f"{run}@{step}")
    return {**answer, "copy": made["path"], "outcome": DONE, **{key: made[key] for key in ("step", "files", "bytes")}}


def restore(config: Config, copy: Path, run: str | None, on_bytes: OnBytes, plan: bool) -> dict[str, Any]:
    """Make a run of a copy, under its own name or another; it appears once all of it is proven. Raises UserError."""
    record = read_copy(copy)
    name = run or str(record["run"])
    if not RUN_NAME.fullmatch(name):
        raise UserError(f"--run {name!r} can't name a run: use letters, digits, dot, dash and underscore")
    directory = RunDirectory(config.shared_dir, name)
    origin = {"run": record["run"], "step": record["step"], "copied": record["copied"]}
    answer = {"run": name, "copy": str(copy), **{key: record[key] for key in ("step", "files", "bytes")}}
    if directory.path.exists():
        if _origin(directory) == origin:
            return {**answer, "outcome": THERE}
        raise UserError(f"run {name} exists already, and is not this copy: choose another name with --run")
    reject_awaited(config, name)
    if plan:
        reject_without_room(coming_of(directory.path.parent, name), copy, read_sums(copy))
    else:
        take_copy(copy, directory.path, on_bytes, lambda coming: settle(coming, config, name, origin))
    return {**answer, "outcome": PLANNED if plan else DONE}


def clone(config: Config, run: str, new: str, on_bytes: OnBytes, plan: bool) -> dict[str, Any]:
    """Make a second run that goes on where the first is now; checkpoints share their bytes. Raises UserError."""
    directory, other = find(Path(config.shared_dir), run), RunDirectory(config.shared_dir, new)
    if not RUN_NAME.fullmatch(new) or new == run:
        raise UserError(f"{new!r} can't name the new run: use letters, digits, dot, dash and underscore, not {run}")
    answer = {"run": new, "source": run, **measure(directory)}
    if other.path.exists():
        if (_origin(other) or {}).get("run") == run:
            return {**answer, "outcome": THERE}
        raise UserError(f"run {new} exists already, and is no clone of {run}: choose another name")
    reject_awaited(config, new)
    if plan:
        reject_copy_without_room(directory, coming_of(other.path.parent, new), makes_run=True)
        return {**answer, "outcome": PLANNED}
    made = copy_run(
        directory, other.path.parent, on_bytes, lambda _: new, lambda coming: settle(coming, config, new, {"run": run})
    )
    return {**answer, "outcome": DONE, **{key: made[key] for key in ("step", "files", "bytes")}}


def settle(coming: Path, config: Config, run: str, restored: dict[str, Any]) -> None:
    """Make of copied files a run of this name, which no task trains; raises UserError where it waits by now."""
    reject_awaited(config, run)
    directory = RunDirectory(coming.parent, run)
    there = RunDirectory(config.shared_dir, run)
    place = {name: coming / getattr(directory, name).name for name in ("settings", "state", "status", "export_record")}
    if record := read_record(place["settings"]):
        write_record(
            place["settings"], {**record, "settings": {**record.get("settings", {}), "run": run}, "restored": restored}
        )
    for name in ("state", "status"):
        if record := read_record(place[name]):
            ended = record.get("state") in (RunState.FINISHED, RunState.FAILED)
            record["state"] = record["state"] if ended else RunState.STOPPED
            # Members, and whose turn it was, are of the coordinator that wrote this.
            for key in ("members", "without", "restart", "epoch", "phase", "workers", "ways", "pid"):
                record.pop(key, None)
            if name == "status":
                record |= {"run": run, "run_dir": str(there.path)}
                record |= {"checkpoint": None, "export": str(there.export) if record.get("export") else None}
            write_record(place[name], record)


def _origin(directory: RunDirectory) -> dict[str, Any] | None:
    """Return of which copy or run this one was made."""
    return readable(directory.settings).get("restored")


def _written(directory: RunDirectory) -> float:
    """Return when a run was written last, in seconds since 1970."""
    times = [path.stat().st_mtime for path in (directory.status, directory.state, directory.settings) if path.exists()]
    return max(times, default=0.0)
