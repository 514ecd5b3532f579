"""What a run's checkpoints hold: the model, its optimizer, the step, and tables with files of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from trainer.core.contracts import Model, Variable
from trainer.core.variables import bytes_of, variables_of

# Writes and reads whole checkpoints where the servers share no path. Named in full: "/job:chief" breaks the restore.
COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


Reading = Callable[[str], AbstractContextManager[object]]


class RestoredTables(Protocol):
    """What takes rows from files beside a checkpoint's."""

    def restore(self, prefix: str) -> None: ...


class Tables(RestoredTables, Protocol):
    """What is saved and restored in files of its own beside a checkpoint's."""

    def prepare_saves(self, io_device: str | None) -> None: ...
    def save(self, prefix: str) -> None: ...


class CheckpointState:
    """The variables that are saved and restored, and how: at once, or from a copy on the ps."""

    def __init__(
        self,
        model: Model,
        step: Variable,
        *,
        copy: Callable[[Any], None] | None = None,
        tables: Tables | None = None,
        local_run_dir: bool = False,
        reading: Reading = nullcontext,
        make_snapshot: Callable[..., Any] | None = None,
    ) -> None:
        """`copy` copies variables that workers train, as Snapshot has it; with `local_run_dir` no path is shared.

        `reading` has TensorFlow read a checkpoint as it was written. `make_snapshot` makes another Snapshot.
        """
        import tensorflow as tf

        self._checkpoint = tf.train.Checkpoint(model=model, step=step)
        self._step = step
        self._tables = tables
        self._reading = reading
        self.remote = "/job:ps/" in step.device
        """Whether the variables lie on ps, and training goes on while they are written."""
        self._io_device = COORDINATOR if local_run_dir and self.remote else None
        self._options = tf.train.CheckpointOptions(experimental_io_device=self._io_device)

        def snapshot_of(write: Callable[[Any], Any]) -> Any:
            from trainer.run.saves.snapshot import Snapshot, copy_each

            return (make_snapshot or Snapshot)(write, step, copy or copy_each)

        self._make_snapshot = snapshot_of
        self._snapshot: Any = None
        self._snapshot_objects: list[int] = []

    @property
    def step(self) -> int:
        return int(self._step.numpy())

    @property
    def model_bytes(self) -> int:
        """What the model's variables take."""
        return sum(map(bytes_of, variables_of(self._checkpoint.model)))

    def write(self, prefix: Any) -> Any:
        """Write the variables as they are."""
        return self._checkpoint.write(prefix, options=self._options)

    def write_apart(self, prefix: str) -> None:
        """Take part in a save that another process writes, and write this process's own files elsewhere."""
        self._checkpoint.write(prefix)

    def copy_variables(self) -> tuple[int, Callable[[str], object]]:
        """Copy the variables; returns the step that is copied with them, and what writes the copies."""
        snapshot = self._current_snapshot()
        # Calls in flight go on counting: the copies are of the step that is copied with them.
        return snapshot.copy_variables(), partial(self._write_all, snapshot)

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
        if self.remote:
            self._current_snapshot()
        self._prepare_tables()

    def _prepare_tables(self) -> None:
        if self._tables is not None:
            self._tables.prepare_saves(self._io_device)

    def _current_snapshot(self) -> Any:
        """Return the snapshot of the checkpoint's variables, traced again where these have changed."""
        import tensorflow as tf

        objects = [id(found) for found in tf.train.TrackableView(self._checkpoint).descendants()]
        if objects != self._snapshot_objects:
            write = partial(self._checkpoint.write, options=self._options)
            self._snapshot, self._snapshot_objects = self._make_snapshot(write), objects
        return self._snapshot

    def read(self, prefix: str) -> Any:
        """Read the variables, as tf.train.Checkpoint does; returns its status."""
        if self._snapshot is not None:
            self._snapshot.start_again()
        with self._reading(prefix):
            return self._checkpoint.read(prefix, options=self._options)

    def restore_tables(self, prefix: str) -> None:
        """Take the tables' rows from the files beside a checkpoint's."""
        if self._tables is not None:
            self._prepare_tables()
            self._tables.restore(prefix)
