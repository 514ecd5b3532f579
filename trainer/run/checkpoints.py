"""Saves and restores what is trained; trainer/run/catalogue.py says which checkpoints count.

A save is written by a thread of its own where the training goes on beside it. The thread shares nothing with it but
the save's future: who asks for a save takes up how the one before has ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer.core.config import Config
from trainer.core.contracts import Model, Variable
from trainer.core.failures import Infrastructure, Misfit, StalePath, UserError, first_line, is_infrastructure, is_stale
from trainer.core.variables import bytes_of, variables_of
from trainer.run.catalogue import Manifest
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease, LostLease, check_lease
from trainer.run.position import Position
from trainer.run.records import make_directory
from trainer.run.retention import Retention, is_sound

log = logging.getLogger(__name__)
MOMENTUM = re.compile(r"[^/]+/m/")  # by the optimizer's name
# A save that was asked for while another is written waits for it this long, and is then left out: training goes on.
PATIENCE_SECONDS = 5.0
# Only a save that takes longer than this may be one that hangs.
SLOW_SECONDS = 60.0
# A save that fails by what the program has made of TensorFlow or of its model would fail so for ever.
MOST_REFUSALS = 3
# A ps that is just being replaced may refuse several in a row.
REFUSED_SECONDS = 30.0
# TensorFlow's file system says "<path>; <what the system says>", often as an error of no particular kind.
STORAGE = tuple(f"; {os.strerror(number)}" for number in errno.errorcode)
# Writes and reads whole checkpoints where the servers share no path. Named in full: "/job:chief" breaks the restore.
COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


class SaveFailed(Infrastructure):
    """A checkpoint that was asked for is not on disk: the storage has failed it, or a server."""

    def __init__(
        self, prefix: str, why: str, *, of_storage: bool = True, stale: bool = False, of_program: bool = False
    ) -> None:
        super().__init__(f"cannot save {prefix}: {why}")
        self.why = why
        self.of_storage = of_storage
        self.of_program = of_program
        self.stale = stale
        self.at = time.monotonic()


class RestoredTables(Protocol):
    """What takes rows from files beside a checkpoint's."""

    def restore(self, prefix: str) -> None: ...


class Tables(RestoredTables, Protocol):
    """What is saved and restored in files of its own beside a checkpoint's."""

    def prepare_saves(self, io_device: str | None) -> None: ...
    def save(self, prefix: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Saving:
    """A save in flight: its step, when it began (of time.monotonic), and the future of its end."""

    step: int
    began: float
    end: Future[int]


class Checkpoints:
    """Saves and restores what is trained. Its methods are called from one thread."""

    def __init__(
        self,
        directory: RunDirectory,
        model: Model,
        step: Variable,
        config: Config,
        *,
        leads: bool = True,
        lease: Lease | None = None,
        saved: Callable[[int, float, str | None], None] = lambda step, seconds, error: None,
        set_aside: Callable[[str], None] = lambda message: None,
        told: Callable[[], Mapping[str, float]] = dict,
        position: Callable[[], Position | None] = lambda: None,
        copy: Callable[[Any], None] | None = None,
        tables: Tables | None = None,
    ) -> None:
        """`saved` is told of each save that ends: its step, how long it took, and what went wrong.

        It is called by the thread that writes. `set_aside` is told of each bad checkpoint that a restore finds. `told`
        says what the training last told, by name, and `position` how far the data are read. `copy` copies variables
        that workers train, as Snapshot has it. `tables` save and restore themselves beside the variables.
        """
        import tensorflow as tf

        self._tf = tf
        self._directory = directory
        self._catalogue = directory.catalogue
        self._leads = leads
        self._lease = lease
        self._tell_saved = saved
        self._tell_set_aside = set_aside
        self._checkpoint = tf.train.Checkpoint(model=model, step=step)
        self._step = step
        self._kept = Retention.of(config)
        self._told = told
        self._position = position
        self._copy = copy
        self._tables = tables
        self._limit = config.storage_timeout_seconds
        self._remote = "/job:ps/" in step.device
        io_device = COORDINATOR if config.local_run_dir and self._remote else None
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._write = partial(self._checkpoint.write, options=self._options)
        self._snapshot: Any = None
        self._snapshot_objects: list[int] = []
        self._saving: Saving | None = None
        self._newest: int | None = None
        self._failure: SaveFailed | None = None
        self._refused = 0
        self._refused_since = 0.0
        self._beyond_limit = False

    def has(self, step: int) -> bool:
        """Return whether the step is that of the newest checkpoint, as far as this process knows."""
        self._take_up_the_end()
        return step == self._newest

    def is_final(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step, and what the end of the training has made of it."""
        manifest = Manifest.read(self._catalogue.manifest(step)) if self.has(step) else None
        return manifest is not None and manifest.final

    def save(self, *, again: bool = False, patience: float | None = None) -> Future[int]:
        """Begin to save the state as it is now, unless this step is saved; returns the future of the save's end.

        The future gives the step that was saved, or raises SaveFailed. `again` replaces the checkpoint of this step,
        since the training's end has changed the weights. A save in flight is waited for until it has lasted `patience`
        seconds (PATIENCE_SECONDS by default), and then this one is left out.
        Under parameter_server this returns as soon as training may go on, and a thread writes. A save that fails is
        logged and told, and training goes on, until saves have failed for the user's limit: then this raises
        UserError. Under multi_worker_mirrored each member takes part, and only the coordinator's files are kept.
        """
        step = int(self._step.numpy())
        if not self._leads:
            with tempfile.TemporaryDirectory() as directory:
                self._checkpoint.write(str(Path(directory) / "ckpt"))
            return ended(lambda: step)
        if again:
            self.settle()
        elif not self._settle_in_time(PATIENCE_SECONDS if patience is None else patience):
            return self._leave_out(step)
        if not again and self.has(step):
            return ended(lambda: step)
        self._check_limit()
        return self._begin(step, final=again)

    def save_and_wait(self, *, again: bool = False) -> None:
        """Save as `save` does, and return when it is on disk; raises SaveFailed when it can't be."""
        self.settle()
        end = self.save(again=again)
        self.settle()
        if end.exception() is not None:
            self._check_limit()
        end.result()

    def settle(self, seconds: float | None = None) -> bool:
        """Wait for the save in flight, however it ends, perhaps not longer; returns whether none is in flight any more.

        Before TensorFlow's cluster is formed again none may be: its thread would call into what is gone.
        """
        if self._saving is not None:
            concurrent.futures.wait([self._saving.end], seconds)
        self._take_up_the_end()
        return self._saving is None

    def trouble(self) -> str | None:
        """Say why and since when checkpoints can't be saved, or nothing."""
        self._take_up_the_end()
        if self._directory.failing_since is None:
            return None
        seconds = time.monotonic() - self._directory.failing_since
        why = self._failure.why if self._failure else "nor could it in the generation before"
        return f"no checkpoint could be saved in {self._catalogue.path} for {seconds:.0f} s: {why}"

    def _settle_in_time(self, patience: float) -> bool:
        """Return whether no save is in flight, having waited for it until it has lasted so many seconds."""
        began = self._saving.began if self._saving else 0.0
        return self.settle(max(0.0, began + patience - time.monotonic()))

    def _leave_out(self, step: int) -> Future[int]:
        assert self._saving is not None
        if step == self._saving.step:
            return self._saving.end
        seconds = time.monotonic() - self._saving.began
        written = self._catalogue.prefix(self._saving.step)
        failure = SaveFailed(self._catalogue.prefix(step), f"{written} is not written after {seconds:.0f} s")
        self._failed(self._saving.began, failure)
        log.warning("leaving out the checkpoint of step %d: %s", step, failure.why)
        self._tell_saved(step, 0.0, failure.why)
        if seconds > SLOW_SECONDS:
            self._check_limit()
        left_out: Future[int] = Future()
        left_out.set_exception(failure)
        return left_out

    def _take_up_the_end(self) -> None:
        """Learn how the save in flight has ended, if it has."""
        saving = self._saving
        if saving is None or not saving.end.done():
            return
        self._saving = None
        error = saving.end.exception()
        if error is None:
            self._newest, self._failure, self._directory.failing_since = saving.step, None, None
            self._refused = 0
        elif isinstance(error, SaveFailed):
            self._failed(saving.began, error)
        else:
            raise error

    def _failed(self, began: float, failure: SaveFailed) -> None:
        self._refused = self._refused + 1 if failure.of_program else 0
        self._refused_since = self._refused_since if self._refused > 1 else failure.at
        self._failure = failure
        if failure.of_storage:
            self._directory.failing_since = self._directory.failing_since or began
            self._beyond_limit = failure.at - self._directory.failing_since > self._limit

    def _check_limit(self) -> None:
        lasts = self._failure is not None and self._failure.at - self._refused_since >= REFUSED_SECONDS
        if self._refused >= MOST_REFUSALS and lasts:
            raise UserError(f"{self._failure}; {self._refused} saves failed so, and not by the storage")
        if self._failure is not None and self._failure.stale:
            raise StalePath(f"{self.trouble()}; the path must be mounted again")
        if self._directory.failing_since is not None and self._beyond_limit:
            raise UserError(f"{self.trouble()}; that is longer than storage_timeout_seconds, {self._limit:g}")

    def _begin(self, step: int, *, final: bool) -> Future[int]:
        """Have the state written by a thread, or write it where that makes no difference."""
        began = time.monotonic()
        write: Callable[[str], object] = self._write
        position = self._position()  # before the copy: what it counts is in the copy
        if self._remote:
            snapshot = self._current_snapshot()
            # Calls in flight go on counting: the copies are of the step that is copied with them.
            step, write = snapshot.take(), partial(self._write_all, snapshot)
        save = partial(
            self._save,
            step,
            write,
            began,
            replaces=self.has(step),
            final=final,
            first_bytes=self._first_bytes(),
            told=self._told(),
            position=position.as_record() if position else None,
        )
        self._saving = Saving(step, began, in_thread("save", save) if self._remote else ended(save))
        return self._saving.end

    def _write_all(self, snapshot: Any, prefix: str) -> None:
        """Write the copies, and the rows of tables as they are by then: at least what the step counts is in them."""
        snapshot.write(prefix)
        if self._tables is not None:
            self._tables.save(prefix)

    def prepare(self) -> None:
        """Trace what saves, before any call is given.

        A trace while a worker begins with its first call may wait for ever: each waits for the other's server,
        and the one that traces holds Python's lock.
        """
        if self._remote:
            self._current_snapshot()
        self._prepare_tables()

    def _prepare_tables(self) -> None:
        if self._tables is not None:
            self._tables.prepare_saves(self._options.experimental_io_device)

    def _current_snapshot(self) -> Any:
        """Return the snapshot of the checkpoint's variables, traced again where these have changed."""
        objects = [id(found) for found in self._tf.train.TrackableView(self._checkpoint).descendants()]
        if objects != self._snapshot_objects:
            from trainer.run.snapshot import Snapshot, copy_each

            snapshot = Snapshot(self._write, self._step, self._copy or copy_each)
            self._snapshot, self._snapshot_objects = snapshot, objects
        return self._snapshot

    def _first_bytes(self) -> int:
        """Return what the first save takes; 0 when there was one, or where no call is in flight with it."""
        # Under other strategies to look at a variable may take all members.
        first = self._remote and self._newest is None
        return sum(map(bytes_of, variables_of(self._checkpoint.model))) if first else 0

    def _save(
        self,
        step: int,
        write: Callable[[str], object],
        began: float,
        *,
        replaces: bool,
        final: bool,
        first_bytes: int,
        told: Mapping[str, float],
        position: dict[str, Any] | None,
    ) -> int:
        """Write ckpt-<step> with its manifest, and tell how that ended; returns the step, raises SaveFailed.

        With `replaces` the good checkpoint of this step stays until the new one is complete.
        """
        catalogue = self._catalogue
        prefix = catalogue.prefix(step)
        try:
            check_lease(self._lease)
            make_directory(catalogue.path)
            catalogue.finish_replacements()
            catalogue.check_room(first_bytes)
            if not replaces:
                catalogue.remove(step)
            write(catalogue.prefix(step, replacement=replaces))
            check_lease(self._lease)
            epoch = self._lease.epoch if self._lease else 0
            catalogue.write_manifest(
                step,
                epoch,
                self._tf.__version__,
                replacement=replaces,
                final=final,
                loss=told.get("loss"),
                sound=is_sound(told),
                position=position,
            )
            catalogue.finish_replacements()
        except Exception as error:
            why = first_line(error)
            log.error("cannot save %s: %s", prefix, why)
            if not isinstance(error, LostLease):
                with contextlib.suppress(OSError):  # what there is of it would only make a full disk fuller
                    catalogue.finish_replacements() if replaces else catalogue.remove(step)
            self._tell_saved(step, time.monotonic() - began, why)
            of_storage = not self._is_of_a_server(error)
            of_program = self._is_of_the_program(error)
            raise SaveFailed(
                prefix, why, of_storage=of_storage and not of_program, stale=is_stale(error), of_program=of_program
            ) from error
        log.info("saved %s in %.2f s", prefix, time.monotonic() - began)
        self._tell_saved(step, time.monotonic() - began, None)
        try:
            check_lease(self._lease)  # the files may have taken long to come to the disk
            catalogue.prune(self._kept)
            catalogue.list_for_tensorflow()
        except (LostLease, OSError, ValueError) as error:
            log.error("cannot remove old checkpoints: %s", error)
        return step

    def _is_of_a_server(self, error: Exception) -> bool:
        """Return whether a save failed with a ps, which training does without, rather than with the storage."""
        if not isinstance(error, self._tf.errors.OpError) or not is_infrastructure(error):
            return False
        return not any(text in str(error) for text in STORAGE)

    def _is_of_the_program(self, error: Exception) -> bool:
        """Return whether a save failed by what the program has made of TensorFlow or of its model."""
        kinds = (self._tf.errors.InvalidArgumentError, self._tf.errors.UnimplementedError, TypeError, ValueError)
        if not isinstance(error, (*kinds, NotImplementedError)) or is_infrastructure(error):
            return False
        return not any(text in str(error) for text in STORAGE)

    def read(self, step: int) -> None:
        """Restore the checkpoint that another member has restored; raises Infrastructure when it can't be read."""
        try:
            check_fit(self._checkpoint.read(self._catalogue.prefix(step), options=self._options))
        except (self._tf.errors.OpError, OSError, IndexError) as error:
            raise Infrastructure(f"cannot read {self._catalogue.prefix(step)}: {error}") from error

    def position(self, step: int) -> Position | None:
        """Return how far the data were read when the checkpoint of this step was saved; None where nobody knows."""
        manifest = Manifest.read(self._catalogue.manifest(step))
        return Position.of(manifest.input) if manifest and manifest.input else None

    def skip_restore(self, newest: int | None) -> None:
        """Go on with variables that are as new as the newest checkpoint, or newer: none is read."""
        self._newest = newest

    def restore(self, steps: Sequence[int] | None = None) -> int | None:
        """Restore the newest checkpoint that is good, of these steps or of all; returns its step, None without any.

        Every variable, optimizer slots included, must exist already: nothing may be left for later, and nothing may
        be left over. A bad checkpoint is set aside: it may neither stand in the way of a new one of the same step
        nor be kept instead of a good one. Raises UserError when the model does not fit the checkpoint, or all are
        bad; Infrastructure when the storage fails.
        """
        catalogue = self._catalogue
        catalogue.finish_replacements()
        for step in catalogue.unreadable():
            self._set_aside(step, catalogue.check(step))
        for step in reversed(catalogue.steps() if steps is None else steps):
            prefix = catalogue.prefix(step)
            if wrong := catalogue.check(step):
                self._set_aside(step, wrong)
                continue
            try:
                check_fit(self._checkpoint.read(prefix, options=self._options))
                self._restore_tables(prefix)
            except (AssertionError, ValueError) as error:
                raise misfit(prefix, error) from error
            except (self._tf.errors.OpError, IndexError) as error:
                if is_infrastructure(error):
                    raise
                if isinstance(error, self._tf.errors.InvalidArgumentError):
                    raise misfit(prefix, error) from error
                if not self._is_damage(error):
                    raise Infrastructure(f"cannot read {prefix}: {error}") from error
                self._set_aside(step, first_line(error))
                continue
            log.info("restored %s", prefix)
            self._newest = step
            return step
        # Also at the next start: a run that has lost its training must not begin again as if it were new.
        if damaged := catalogue.set_aside_files():
            raise UserError(
                f"none of the checkpoints in {catalogue.path} can be read "
                f"(set aside: {', '.join(path.name for path in damaged)}): put a good one there, with its manifest, "
                "or start again with another --run NAME"
            )
        return None

    def _restore_tables(self, prefix: str) -> None:
        if self._tables is not None:
            self._prepare_tables()
            self._tables.restore(prefix)

    def _set_aside(self, step: int, wrong: str) -> None:
        aside = self._catalogue.set_aside(step)
        log.warning("the checkpoint %s is bad and set aside as %s: %s", self._catalogue.prefix(step), aside.name, wrong)
        self._tell_set_aside(f"{aside.name}: {wrong}")

    def _is_damage(self, error: Exception) -> bool:
        """Return whether a checkpoint's files were read and are wrong, rather than could not be read."""
        errors = self._tf.errors
        if isinstance(error, (IndexError, errors.DataLossError, errors.OutOfRangeError)):
            return True
        # What TensorFlow's reader of the index raises is of no particular kind.
        return type(error) is errors.OpError and not str(error).rstrip().endswith(STORAGE)


def ended(function: Callable[[], int]) -> Future[int]:
    """Call the function now; returns its result or its exception as a future."""
    end: Future[int] = Future()
    conclude(end, function)
    return end


def in_thread(name: str, function: Callable[[], int]) -> Future[int]:
    """Call the function in a thread that the end of the process does not wait for."""
    end: Future[int] = Future()
    threading.Thread(target=conclude, args=(end, function), name=name, daemon=True).start()
    return end


def conclude(end: Future[int], function: Callable[[], int]) -> None:
    try:
        end.set_result(function())
    except Exception as error:
        end.set_exception(error)


def read_model(directory: RunDirectory, model: Model, step: int, tables: RestoredTables | None = None) -> None:
    """Restore the weights of a model that has no strategy, without its optimizer, and its tables.

    Raises tf.errors.OpError or IndexError when the checkpoint can't be read, perhaps because it was just removed.
    """
    import tensorflow as tf

    prefix = directory.catalogue.prefix(step)
    try:
        tf.train.Checkpoint(model=model).read(prefix).assert_existing_objects_matched().expect_partial()
        if tables is not None:
            tables.restore(prefix)
    except (AssertionError, ValueError) as error:
        raise misfit(prefix, error) from error


def check_fit(status: Any) -> None:
    """Raise AssertionError where a checkpoint that was read has too little, or something that nobody has.

    A momentum that nobody has was never written: an SGD without momentum makes none where it updates rows alone.
    """
    try:
        status.assert_consumed()
    except AssertionError:
        read = status._checkpoint
        nodes = enumerate(read.object_graph_proto.nodes)
        left = [each for number, node in nodes for each in node.attributes if number not in read.object_by_proto_id]
        if not all("/_variables/" in each.checkpoint_key and MOMENTUM.match(each.full_name) for each in left):
            raise
        status.assert_existing_objects_matched()


def misfit(prefix: str, error: Exception) -> Misfit:
    return Misfit(
        f"the checkpoint {prefix} does not fit the model: {str(error).strip().splitlines()[0]}. "
        "A changed model needs a new run: start it with another --run NAME"
    )
