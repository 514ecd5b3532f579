"""Files that a pipeline writes where it runs: `cache(FILE)`, `snapshot` and `save`.

TensorFlow keeps a lock beside a cache that is being written. A worker that is killed meanwhile leaves it behind, and no
later worker could read. So each process that reads has files of its own here: to the program's name is added whose they
are. A cache that is whole is used again by the same process alone; what earlier processes of a worker have left is
emptied (docs/decisions/0193-a-pipelines-files-belong-to-a-process.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Dataset, Program
from trainer.core.failures import UserError, first_line
from trainer.training.tf_internals.datasets import for_each_worker

log = logging.getLogger(__name__)
OWN = ".psfleet-"
LARGEST = 2**62
LOCKED = "cache lockfile already exists"
METHODS = ("cache", "snapshot", "save")
SAVES = (
    "calls Dataset.save, which would write in each reading of each worker: save the data once, in a script before the "
    "run, and read them with tf.data.Dataset.load"
)
IN_SERVICE = (
    "names files for {method}, and input is service: all hosts of the group data would have one name for them. Leave "
    "the name out, as in cache(), which keeps the data in memory; or set input: local"
)
TWICE = (
    "two caches of one pipeline have one file: give each cache(FILE) another name, as by the file's name within "
    "interleave. To workers and runs psfleet gives files of their own"
)
NO_PLACE = (
    "a file of its pipeline can't be written where it runs: {}. The directory of cache(FILE) must be present on each "
    "host that reads, and the task must be allowed to write there (trainer_writable_paths)"
)
NO_ROOM = (
    "the disk of {} is full{}, where its pipeline writes cache(FILE) or snapshot: each try would write once more. Make "
    "room there, name another directory, or leave the name out, as in cache(), which keeps the data in memory"
)
FULL = tuple(f"; {os.strerror(number)}" for number in (errno.ENOSPC, errno.EDQUOT))
WORKER = re.compile(r"/job:worker/replica:0/task:(\d+)")
# What TensorFlow may say of such a file, as of others.
UNWRITABLE = (
    tf.errors.AlreadyExistsError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
)
LEFT_OUT = "%s: the file of %s is left out, and the data are read without it: %s"


# This process, among those that may read here.
THIS = f"{os.getpid()}-{secrets.token_hex(8)}"


def number_of(process: str, readers: Sequence[int]) -> int:
    """Return a number for a process while the data are divided among these workers, which TensorFlow can take."""
    return zlib.crc32(f"{process} {tuple(readers)}".encode())


def tag_of(shared_dir: str, run: str) -> str:
    """Return what tells a run's files from those of others."""
    return f"{zlib.crc32(f'{shared_dir} {run}'.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class Files:
    """Whose the files are: a run's, of the reader with a number, in one process with one division of the data.

    Each reading draws a number, too.
    """

    run: str
    reader: Any
    process: Any
    reading: Any

    def own(self, name: Any) -> tf.Tensor:
        """Return the reader's own name for a cache, that of a whole one if this process has made one before.

        Empties what the reader's earlier processes have left, and this one with another division of the data: of that,
        too, there may be a whole cache that was emptied before. A name with wildcards finds nothing again.
        """
        of_reader = tf.strings.join([name, OWN, self.run, "-", text(self.reader), "-"])
        of_process = tf.strings.join([of_reader, text(self.process), "-"])
        files = tf.io.matching_files(tf.strings.join([of_reader, "*"]))
        is_own = tf.strings.substr(files, 0, tf.strings.length(of_process)) == of_process
        whole = filled(tf.io.matching_files(tf.strings.join([of_process, "*.index"])))
        new = tf.strings.join([of_process, text(self.reading)])
        found = tf.concat([tf.strings.regex_replace(whole, r"\.index$", ""), [new]], axis=0)[0]
        with tf.control_dependencies([emptied(tf.boolean_mask(files, ~is_own))]):
            return tf.identity(found)

    def own_directory(self, name: Any) -> tf.Tensor:
        """Return the process's own name for a snapshot."""
        return tf.strings.join([name, OWN, self.run, "-", text(self.reader), "-", text(self.process)])


def text(number: Any) -> tf.Tensor:
    return tf.strings.as_string(tf.cast(number, tf.int64))


def filled(files: tf.Tensor) -> tf.Tensor:
    """Return the files that are not empty."""
    sizes = tf.map_fn(lambda file: tf.strings.length(tf.io.read_file(file)), files, fn_output_signature=tf.int32)
    return tf.boolean_mask(files, sizes > 0)


def emptied(files: tf.Tensor) -> tf.Tensor:
    """Truncate files, in what is traced or at once; returns their number. TensorFlow has no operation that removes."""

    def empty(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.raw_ops.WriteFile(filename=files[number], contents="")]):
            return number + 1

    def empty_eagerly(number: tf.Tensor) -> list[tf.Tensor]:
        tf.io.write_file(files[number], "")
        return [number + 1]

    body = empty_eagerly if tf.executing_eagerly() else empty
    done: tf.Tensor = tf.while_loop(lambda number: number < tf.size(files), body, [tf.constant(0)])[0]
    return done


@dataclasses.dataclass(frozen=True)
class WorkerFiles:
    """The files of the workers of a run, of which `readers` have a part of the data each.

    `process` tells which process a worker is now, where that is known.
    """

    run: str = ""
    process: Callable[[int], str | None] = lambda worker: None
    readers: Sequence[int] = ()

    def for_worker(self, worker: tf.Tensor) -> Files:
        """Return the files of the worker that runs what is traced."""

        def numbers(number: int) -> list[int]:
            return [number_of(self.process(number) or THIS, self.readers), secrets.randbelow(LARGEST)]

        process, reading = tf.unstack(for_each_worker(numbers, 2))
        return Files(self.run, worker, process, reading)


def processes_of(members: Any) -> Callable[[int], str | None]:
    """Return what tells which process a worker is, from the object that knows the workers."""
    if members is None:
        return lambda worker: None
    return lambda worker: members.process(members.workers[worker])


def own_files(run: str, reader: Any, readers: Sequence[int]) -> Files:
    """Return the files of a pipeline that this process runs itself."""
    return Files(run, reader, number_of(THIS, readers), secrets.randbelow(LARGEST))


@contextlib.contextmanager
def methods_of_datasets(**ways: Callable[..., Any]) -> Iterator[None]:
    """Have each of these methods of tf.data.Dataset be another, which is given TensorFlow's first."""
    plain = {name: vars(tf.data.Dataset)[name] for name in METHODS}
    for name, way in ways.items():
        setattr(tf.data.Dataset, name, bound(way, plain[name]))
    try:
        yield
    finally:
        for name, one in plain.items():
            setattr(tf.data.Dataset, name, one)


def bound(way: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    def method(dataset: Dataset, *given: object, **named: object) -> Any:
        return way(plain, dataset, *given, **named)

    return method


def is_named(filename: Any) -> bool:
    """Return whether a cache has a file: a name that is no tensor may be empty."""
    return not (isinstance(filename, str | bytes) and not filename)


def kept_apart(files: Files, what: str) -> contextlib.AbstractContextManager[None]:
    """Have pipelines that `what` makes meanwhile write files of the reader's own; raises UserError for `save`."""

    def cache(plain: Any, dataset: Dataset, filename: Any = "", name: str | None = None) -> Any:
        return plain(dataset, files.own(filename) if is_named(filename) else filename, name)

    def snapshot(plain: Any, dataset: Dataset, path: Any, *given: object, **named: object) -> Any:
        return plain(dataset, files.own_directory(path), *given, **named)

    return methods_of_datasets(cache=cache, snapshot=snapshot, save=rejecting(f"{what} {SAVES}"))


def left_out(what: str, why: str) -> contextlib.AbstractContextManager[None]:
    """Have pipelines that are made meanwhile read without their files, which would be of no use; says so once each."""

    def cache(plain: Any, dataset: Dataset, filename: Any = "", name: str | None = None) -> Any:
        if not is_named(filename):
            return plain(dataset, filename, name)
        log.warning(LEFT_OUT, what, "cache", why)
        return dataset

    def snapshot(plain: Any, dataset: Dataset, *given: object, **named: object) -> Any:
        log.warning(LEFT_OUT, what, "snapshot", why)
        return dataset

    return methods_of_datasets(cache=cache, snapshot=snapshot, save=rejecting(f"{what} {SAVES}"))


def rejecting_files_in_service(what: str) -> contextlib.AbstractContextManager[None]:
    """Raise UserError for files in pipelines that are made meanwhile, which a data service will run."""

    def cache(plain: Any, dataset: Dataset, filename: Any = "", name: str | None = None) -> Any:
        if is_named(filename):
            raise UserError(f"{what} {IN_SERVICE.format(method='cache')}")
        return plain(dataset, filename, name)

    snapshot = rejecting(f"{what} {IN_SERVICE.format(method='snapshot')}")
    return methods_of_datasets(cache=cache, snapshot=snapshot, save=rejecting(f"{what} {SAVES}"))


def rejecting(message: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise UserError(message)

    return refuse


def reject_unwritable(program: Program, error: Exception) -> None:
    """Raise UserError where a file of a reader's own has no place or room, or is locked, by two caches of one name."""
    name = type(program).__name__
    if LOCKED in str(error):
        raise UserError(f"{name}: {TWICE}") from error
    if OWN in str(error) and isinstance(error, tf.errors.NotFoundError | tf.errors.PermissionDeniedError):
        raise UserError(f"{name}: {NO_PLACE.format(first_line(error).rstrip('.'))}") from error
    path, own, why = first_line(error).partition(OWN)
    if own and why.endswith(FULL):
        worker = WORKER.search(str(error))
        where = f" on the host of worker-{worker[1]}" if worker else ""
        raise UserError(f"{name}: {NO_ROOM.format(Path(path).parent, where)}") from error
