"""A copy of a run: a folder with its files, a manifest of them (SHA256SUMS), and copy.json. Needs no TensorFlow.

The run may train meanwhile. Its checkpoints are copied by their manifests, and a log up to its last whole line. So a
copy is what a coordinator would find that was killed then. A copy lies under another name until all of it is proven.
An interrupted one goes on with what it has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trainer.core.failures import UserError
from trainer.run.catalogue import SET_ASIDE, Catalogue, Manifest
from trainer.run.directory import LEASE, RunDirectory
from trainer.run.records import make_directory, read_record, sync, sync_tree, write_record, write_text

SUMS, RECORD, LOCK, COMING = "SHA256SUMS", "copy.json", ".lock", ".coming"
# Of processes and no part of the run: what restarts were counted, and who evaluates now.
PASSING = {"attempts.json", "evaluating.json", RECORD, SUMS}
BLOCK = 2**22
KEPT_OPEN = (".nfs", ".fuse_hidden")
# A run may remove its checkpoints faster than they are copied.
MAX_PASSES = 5
OnBytes = Callable[[int], None]


def copied_names(directory: RunDirectory) -> list[str]:
    """Return the files of a copy, by their paths below the run's directory.

    What callbacks remember comes before the checkpoints, which need it, and what the run tells of itself after them.
    """
    first: list[str] = []
    last: list[str] = []
    for place, below, names in os.walk(directory.path, onerror=_reject_unless_gone):
        inside = Path(place).relative_to(directory.path)
        below[:] = sorted(name for name in below if not name.startswith(".") and name != directory.checkpoints.name)
        for name in sorted(names):
            known = str(inside / name)
            if not (name.startswith(".") or name.endswith(SET_ASIDE) or known in PASSING or LEASE.fullmatch(known)):
                (first if known.startswith(f"{directory.callbacks.name}/") else last).append(known)
    return [*first, *checkpoint_names(directory), *last]


def _reject_unless_gone(error: OSError) -> None:
    """Raise the error of a folder that can't be read, which the walk would pass over: the copy would lack it."""
    if not isinstance(error, FileNotFoundError):
        raise error


def reject_names(directory: RunDirectory) -> None:
    """Raise UserError for a name that a manifest can't have in a line, and for a link to a folder elsewhere."""
    for place, below, _ in os.walk(directory.path):
        for path in (Path(place, name) for name in below):
            if path.is_symlink() and not path.resolve().is_relative_to(directory.path.resolve()):
                raise UserError(
                    f"{path} is a link to a folder outside of the run, which a copy would not have: "
                    "put the folder itself there"
                )
    for name in copied_names(directory):
        try:
            wrong = "\n" in name or not name.encode()
        except UnicodeEncodeError:
            wrong = True
        if wrong:
            raise UserError(f"run {directory.run} has a file {name!r}: expected a name of UTF-8 in one line. Rename it")


def checkpoint_names(directory: RunDirectory) -> list[str]:
    """Return the files of the checkpoints that count, a manifest after what it names."""
    found = []
    for step in directory.catalogue.steps():
        manifest = Manifest.read(directory.catalogue.manifest(step))
        written = [*manifest.files, f"ckpt-{step}.evaluation.json", f"ckpt-{step}.manifest.json"] if manifest else []
        found += [f"{directory.checkpoints.name}/{name}" for name in written if (directory.checkpoints / name).exists()]
    return found


def measure(directory: RunDirectory) -> dict[str, Any]:
    """Return what a copy would have now: its newest step, how many files, and their bytes."""
    sizes = [size for name in copied_names(directory) if (size := _size(directory.path / name)) is not None]
    return {"step": directory.catalogue.newest() or 0, "files": len(sizes), "bytes": sum(sizes)}


def copy_run(
    directory: RunDirectory,
    place: Path,
    on_bytes: OnBytes,
    name: Callable[[int], str],
    change: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Copy a run into the folder `place`; what `name` makes of its newest step appears once it is proven.

    `on_bytes` gets the bytes so far. With `change` a run is made of the copy, by what it is given before it appears.
    Its checkpoints share their bytes with the other's, where the file system can do that: the files of one that
    counts are not written to. Returns copy.json, with the `path` of the copy.

    Raises UserError where another process makes the same copy or there is no room, and OSError.
    """
    with alone(coming_of(place, name(0) if change else directory.run)) as coming:
        for _ in range(MAX_PASSES):
            newest = directory.catalogue.newest()
            reject_copy_without_room(directory, coming, makes_run=change is not None)
            sums = _copy_pass(directory, coming, on_bytes, change is not None)
            kept = _settle(coming, sums)
            if newest is None or newest in kept:
                break
        else:
            raise UserError(f"run {directory.run} removed its newest checkpoint {MAX_PASSES} times while it was copied")
        record = {"run": directory.run, "step": max(kept, default=0), "files": len(sums), "copied": time.time()}
        record["bytes"] = sum((coming / name).stat().st_size for name in sums)
        _prove(coming, sums)
        if change:
            change(coming)
        else:
            write_text(coming / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
            write_record(coming / RECORD, record)
        destination = place / name(max(kept, default=0))
        _appear(coming, destination)
    return {**record, "path": str(destination)}


def coming_of(place: Path, name: str) -> Path:
    """Return where a copy is made that appears in the folder `place`."""
    return place / f".{name}{COMING}"


def reject_copy_without_room(directory: RunDirectory, coming: Path, makes_run: bool) -> None:
    """Raise UserError where a copy of the run finds no room; of one that `makes_run` the checkpoints take none."""
    shared = checkpoint_names(directory) if makes_run else []
    reject_without_room(coming, directory.path, {*copied_names(directory)} - {*shared})


def take_copy(copy: Path, destination: Path, on_bytes: OnBytes, change: Callable[[Path], None]) -> None:
    """Copy a copy back to a new folder, proven by its manifest; `change` is given it before it appears.

    Raises UserError as `copy_run`, where the copy is damaged too, and OSError.
    """
    wanted = read_sums(copy)
    with alone(coming_of(destination.parent, destination.name)) as coming:
        reject_without_room(coming, copy, wanted)
        done = 0
        for name, digest in wanted.items():
            if _digest(coming / name) != digest and _copy_file(copy / name, coming / name) != digest:
                raise UserError(f"{copy / name} is damaged: {SUMS} has another digest. Take another copy of this run")
            done += (coming / name).stat().st_size
            on_bytes(done)
        _settle(coming, wanted)
        change(coming)
        _appear(coming, destination)


def read_sums(copy: Path) -> dict[str, str]:
    """Return the digests of a copy's files by their paths; raises UserError for what is no copy."""
    try:
        lines = filter(None, (copy / SUMS).read_bytes().decode().split("\n"))  # a name may have other ends of lines
        found = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{copy} is no copy of a run: {SUMS} can't be read ({error}). Name a folder that fab backup made"
        ) from error
    if wrong := [name for name in found if Path(name).is_absolute() or ".." in Path(name).parts or not name]:
        raise UserError(f"{copy / SUMS} names {wrong[0]!r}: expected paths below the folder")
    return found


def find_damage(copy: Path) -> str:
    """Say which file of a copy is missing or differs from its manifest, or nothing."""
    for name, digest in read_sums(copy).items():
        found = _digest(copy / name)
        if found != digest:
            return f"{name} is missing" if found is None else f"{name} differs from {SUMS}"
    return ""


@contextmanager
def alone(coming: Path) -> Iterator[Path]:
    """Make a folder that one process at a time may fill; raises UserError where another one does."""
    while True:
        make_directory(coming)
        try:
            lock = (coming / LOCK).open("a")
        except FileNotFoundError:  # another process has just removed the folder
            continue
        with _removed_where_empty(coming), lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise UserError(f"another process is at work on {coming}: wait until it has ended") from error
            # Another process may have finished, or removed, what this one has just opened.
            if _is_same(lock.fileno(), coming / LOCK):
                yield coming
                return


@contextmanager
def _removed_where_empty(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is in use, or has got its name
            folder.rmdir()


def clear(coming: Path) -> None:
    """Remove all that a folder holds which this process has alone; it goes itself when `alone` ends.

    NFS keeps a file that is open, under another name: until the lock is closed, its folder is not empty. What others
    of this host have open, as TensorBoard, stays until the next time.
    """
    for each in coming.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
            if any(not name.startswith(KEPT_OPEN) for _, _, names in os.walk(each) for name in names):
                shutil.rmtree(each)  # which says why it can't
        elif each.name != LOCK:
            each.unlink()
    (coming / LOCK).unlink()


def reject_without_room(coming: Path, source: Path, names: Iterable[str]) -> None:
    """Raise UserError where the files that are still to be copied find no room."""
    needed = sum((_size(source / name) or 0) for name in names if _size(coming / name) is None)
    space = os.statvfs(coming.parent)
    free = space.f_bavail * space.f_frsize
    if needed > free:
        raise UserError(
            f"{coming.parent} has {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB are to be copied: "
            "make room, or choose another place"
        )


def _copy_pass(directory: RunDirectory, coming: Path, on_bytes: OnBytes, link: bool) -> dict[str, str]:
    """Copy what the run has now; returns the digests of what was still there, by path."""
    sums: dict[str, str] = {}
    done = 0
    for name in copied_names(directory):
        source, target = directory.path / name, coming / name
        of_checkpoint = name.startswith(f"{directory.checkpoints.name}/")
        try:
            digest = (link and of_checkpoint and _link_file(source, target)) or _copy_file(source, target)
        except FileNotFoundError:  # removed meanwhile
            target.unlink(missing_ok=True)
            continue
        sums[name] = digest
        done += target.stat().st_size
        on_bytes(done)
    return sums


def _settle(coming: Path, sums: dict[str, str]) -> list[int]:
    """Remove what an earlier try has left, and checkpoints that lost a file; returns the steps that are whole."""
    catalogue = Catalogue(coming / "checkpoints")
    for step in catalogue.steps():
        if catalogue.check(step):
            catalogue.remove(step)
    for place, _, names in os.walk(coming):
        for name in names:
            known = str((Path(place) / name).relative_to(coming))
            if known != LOCK and known not in sums:
                (coming / known).unlink(missing_ok=True)
    for name in [name for name in sums if not (coming / name).exists()]:
        del sums[name]
    return catalogue.steps()


def _prove(coming: Path, sums: dict[str, str]) -> None:
    """Raise OSError where the storage gives back other bytes than were written."""
    if wrong := next((name for name, digest in sums.items() if _digest(coming / name) != digest), None):
        raise OSError(errno.EIO, "what was written reads otherwise", str(coming / wrong))


def _appear(coming: Path, destination: Path) -> None:
    """Have a folder appear under its name once all of it is on disk."""
    if destination.exists():
        clear(coming)
        raise UserError(f"{destination} exists already")
    sync_tree(coming)
    (coming / LOCK).unlink()
    coming.rename(destination)
    sync(destination.parent)


def _link_file(source: Path, target: Path) -> str | None:
    """Give a file a second name, and return its digest; None where the file system can't."""
    make_directory(target.parent)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return _digest(target)


def _copy_file(source: Path, target: Path) -> str:
    """Copy a file as it is now, a log up to its last whole line; returns the digest of what was copied."""
    with source.open("rb") as file:  # which stays what it is, when another file gets its name
        found = os.fstat(file.fileno())
        same = _size(target) == found.st_size and target.stat().st_mtime_ns == found.st_mtime_ns
        if same and (digest := _digest_of(file)) == _digest(target):
            return digest
        make_directory(target.parent)
        partial = target.with_name(f".{target.name}.part")
        left = _whole_lines(file, found.st_size) if source.suffix == ".jsonl" else found.st_size
        file.seek(0)
        digest_of = hashlib.sha256()
        with partial.open("wb") as copy:
            while left and (block := file.read(min(BLOCK, left))):
                copy.write(block)
                digest_of.update(block)
                left -= len(block)
    os.utime(partial, ns=(found.st_atime_ns, found.st_mtime_ns))
    partial.replace(target)
    return digest_of.hexdigest()


def _whole_lines(file: BinaryIO, size: int) -> int:
    """Return how many of a log's first bytes end with a line."""
    while size:
        begin = max(0, size - BLOCK)
        file.seek(begin)
        end = file.read(size - begin).rfind(b"\n")
        if end >= 0:
            return begin + end + 1
        size = begin
    return 0


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return _digest_of(file)
    except FileNotFoundError:
        return None


def _digest_of(file: BinaryIO) -> str:
    """Return what hashlib.file_digest does, which Python 3.10 has not."""
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        there, opened = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def read_copy(copy: Path) -> dict[str, Any]:
    """Return copy.json; raises UserError for what is no copy."""
    try:
        record = read_record(copy / RECORD)
    except (OSError, ValueError) as error:
        raise UserError(f"{copy} is no copy of a run: {error}") from error
    if record is None or not {"run", "step", "files", "bytes"} <= record.keys():
        raise UserError(f"{copy} is no copy of a run: it has no {RECORD}. Name a folder that fab backup made")
    return record
