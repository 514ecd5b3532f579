"""Saves and restores what is trained; trainer/run/catalogue.py says which checkpoints count.

A save is written by a thread of its own where the training goes on beside it. The thread shares nothing with it but
the save's future: the caller of a save takes up how the one before has ended.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from trainer.core.settings.config import Config
from trainer.run.catalogue import Manifest
from trainer.run.data_position import Position
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.run.retention import Retention
from trainer.run.saves.checkpoint_reader import CheckpointReader
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoint_writer import CheckpointWriter, Order
from trainer.run.saves.save_failures import SaveFailed, SaveFailures

log = logging.getLogger(__name__)
# A save that was asked for while another is written waits for it this long, and is then left out: training goes on.
PATIENCE_SECONDS = 5.0
# Only a save that takes longer than this may be one that hangs.
SLOW_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class SavedProgress:
    """What a checkpoint is of."""

    step: int
    position: Position | None = None
    """How far the data were read, where a later save of this step may know it better."""
    is_outdated: bool = False
    """Whether the model has changed since, without a step."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """A save in flight: of what, when it began (of time.monotonic), and the future of its end."""

    saved: SavedProgress
    began: float
    end: Future[int]


class Checkpoints:
    """Saves and restores what is trained. Its methods are called from one thread."""

    def __init__(
        self,
        directory: RunDirectory,
        state: CheckpointState,
        config: Config,
        *,
        leads: bool = True,
        lease: Lease | None = None,
        saved: Callable[[int, float, str | None], None] = lambda step, seconds, error: None,
        set_aside: Callable[[str], None] = lambda message: None,
        numbers: Callable[[], Mapping[str, float]] = dict,
        position: Callable[[], Position | None] = lambda: None,
    ) -> None:
        """`saved` is called for each save that ends: its step, how long it took, and what went wrong.

        The thread that writes calls it. `set_aside` is called for each bad checkpoint that a restore finds. `numbers`
        returns the training's last numbers by name, and `position` how far the data are read.
        """
        catalogue = directory.catalogue
        self._catalogue = catalogue
        self._leads = leads
        self._numbers = numbers
        self._position = position
        self._state = state
        self._writer = CheckpointWriter(catalogue, lease, Retention.from_config(config), saved)
        self._reader = CheckpointReader(catalogue, self._state, set_aside)
        self._failures = SaveFailures(directory, config.storage_timeout_seconds)
        self._saving: Saving | None = None
        self._newest: SavedProgress | None = None

    def has(self, step: int) -> bool:
        """Return whether the step is that of the newest checkpoint, as far as this process knows."""
        self._take_up_the_end()
        return self._newest is not None and step == self._newest.step

    def has_all(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step, and counts what has been read of the data until now.

        One that was saved with calls in flight may have the weights of a call whose examples it does not count.
        """
        newest = self._newest if self.has(step) else None
        return newest is not None and not newest.is_outdated and newest.position in (None, self._position())

    def outdate(self, step: int) -> bool:
        """Have the next save of this step replace the checkpoint that it has; returns whether it has one.

        One that was begun with calls in flight may be of an epoch's end, and callbacks have changed the model since.
        """
        outdated, saving = SavedProgress(step, is_outdated=True), self._saving
        if self.has(step):
            self._newest = outdated
        elif saving is not None and saving.saved.step == step:
            self._saving = dataclasses.replace(saving, saved=outdated)
        else:
            return False
        return True

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
        step = self._state.step
        if not self._leads:
            with tempfile.TemporaryDirectory() as directory:
                self._state.write_apart(str(Path(directory) / "ckpt"))
            return ended(lambda: step)
        if again:
            self.settle()
        elif not self._settle_in_time(PATIENCE_SECONDS if patience is None else patience):
            return self._leave_out(step)
        if not again and self.has_all(step):
            return ended(lambda: step)
        self._failures.check()
        return self._begin(step, final=again)

    def save_and_wait(self, *, again: bool = False) -> None:
        """Save as `save` does, and return when it is on disk; raises SaveFailed when it can't be."""
        self.settle()
        end = self.save(again=again)
        self.settle()
        if end.exception() is not None:
            self._failures.check()
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
        return self._failures.trouble()

    def _settle_in_time(self, patience: float) -> bool:
        """Return whether no save is in flight, having waited for it until it has lasted so many seconds."""
        began = self._saving.began if self._saving else 0.0
        return self.settle(max(0.0, began + patience - time.monotonic()))

    def _leave_out(self, step: int) -> Future[int]:
        assert self._saving is not None
        if step == self._saving.saved.step:
            return self._saving.end
        seconds = time.monotonic() - self._saving.began
        written = self._catalogue.prefix(self._saving.saved.step)
        failure = SaveFailed(self._catalogue.prefix(step), f"{written} is not written after {seconds:.0f} s")
        self._failures.add(self._saving.began, failure)
        log.warning("leaving out the checkpoint of step %d: %s", step, failure.why)
        self._writer.on_saved(step, 0.0, failure.why)
        if seconds > SLOW_SECONDS:
            self._failures.check()
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
            self._newest = saving.saved
            self._failures.written()
        elif isinstance(error, SaveFailed):
            self._failures.add(saving.began, error)
        else:
            raise error

    def _begin(self, step: int, *, final: bool) -> Future[int]:
        """Have the state written by a thread, or write it where that makes no difference."""
        began, state = time.monotonic(), self._state
        write: Callable[[str], object] = state.write
        position = self._position()  # before the copy: what it counts is in the copy
        if state.remote:
            step, write = state.copy_variables()
        order = Order(
            step,
            write,
            began,
            replaces=self.has(step),
            final=final,
            first_bytes=self._first_bytes(),
            numbers=self._numbers(),
            position=position.as_record() if position else None,
        )
        save = partial(self._writer.save, order)
        end = in_thread("save", save) if state.remote else ended(save)
        self._saving = Saving(SavedProgress(step, None if final else position), began, end)
        return self._saving.end

    def prepare(self) -> None:
        """Trace what saves, before any call is given."""
        self._state.prepare()

    def _first_bytes(self) -> int:
        """Return what the first save takes; 0 when there was one, or where no call is in flight with it."""
        # Under other strategies to look at a variable may take all members.
        return self._state.model_bytes if self._state.remote and self._newest is None else 0

    def read(self, step: int) -> None:
        """Restore the checkpoint that another member has restored; raises Infrastructure when it can't be read."""
        self._reader.read(step)

    def position(self, step: int) -> Position | None:
        """Return how far the data were read when the checkpoint of this step was saved; None where not known."""
        manifest = Manifest.read(self._catalogue.manifest(step))
        return Position.from_record(manifest.input) if manifest and manifest.input else None

    def skip_restore(self, newest: int | None) -> None:
        """Go on with variables that are as new as the newest checkpoint, or newer: none is read."""
        self._newest = None if newest is None else SavedProgress(newest)

    def restore(self, steps: Sequence[int] | None = None) -> int | None:
        """Restore the newest good checkpoint as CheckpointReader does; returns its step, None without any."""
        step = self._reader.restore(steps)
        if step is not None:
            self._newest = SavedProgress(step)
        return step


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
