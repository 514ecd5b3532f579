"""The run directory: the only module that knows a path below it.

    <shared>/runs/<run>/run.json state.json status.json evaluation.json checkpoints/ckpt-<step>* events/{train,eval}
                        export/

A checkpoint holds the model with its optimizer, and the step. Its number is its step. The newest one that is complete
counts, whatever the `checkpoint` state file says. A damaged one counts no more: its index is renamed to
ckpt-<step>.index.bad.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.failures import Infrastructure, UserError, first_line, is_infrastructure
from trainer.records import read_record, write_record, write_text

log = logging.getLogger(__name__)
INDEX = re.compile(r"ckpt-(\d+)\.index")
DATA = re.compile(r"\.data-\d{5}-of-(\d{5})")
SET_ASIDE = ".bad"
# TensorFlow's file system says "<path>; <what the system says>", often as an error of no particular kind.
STORAGE = tuple(f"; {os.strerror(number)}" for number in errno.errorcode)


class RunDirectory:
    """The paths of one run, and the records that outlive its processes."""

    def __init__(self, shared_dir: str | Path, run: str) -> None:
        self.run = run
        self.path = Path(shared_dir) / "runs" / run
        self.settings = self.path / "run.json"
        self.state = self.path / "state.json"
        self.status = self.path / "status.json"
        self.evaluation = self.path / "evaluation.json"
        self.attempts = self.path / "attempts.json"
        self.event_log = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.train_events = self.path / "events" / "train"
        self.eval_events = self.path / "events" / "eval"
        self.export = self.path / "export"

    def claim(self, config: Config) -> None:
        """Remember the run's program, or raise UserError when the run belongs to another one."""
        record = read_record(self.settings)
        if record is not None and record.get("program") != config.program:
            raise UserError(
                f"run {self.run} belongs to the program {record.get('program')}, not to {config.program}: "
                "start the new program with another --run NAME"
            )
        created = record["created"] if record is not None else time.time()
        write_record(self.settings, {"program": config.program, "created": created, "settings": config.as_dict()})

    def finished(self, steps: int) -> int | None:
        """Return the step at which the run finished, or None when there is something left to train."""
        record = read_record(self.state)
        if record is None or record.get("state") != "finished":
            return None
        # A callback may have ended the training before the last step that was asked for.
        return int(record["step"]) if max(record["step"], record.get("asked", 0)) >= steps else None

    def set_state(self, state: str, step: int, asked: int = 0) -> None:
        """Record the run's state for its other tasks; the epoch counts the starts of its coordinator.

        `asked`, of a finished run, is the number of steps that it was to train.
        """
        record = read_record(self.state) or {}
        epoch = int(record.get("epoch", 0)) + (state == "training")
        write_record(self.state, {"state": state, "step": step, "asked": asked, "epoch": epoch})

    def prefix(self, step: int) -> str:
        """Return the checkpoint's name as TensorFlow wants it, without an ending."""
        return str(self.checkpoints / f"ckpt-{step}")

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        try:
            names = {path.name for path in self.checkpoints.iterdir()}
        except FileNotFoundError:
            return []
        found = [int(match[1]) for name in names if (match := INDEX.fullmatch(name))]
        return sorted(step for step in found if complete(f"ckpt-{step}", names))

    def newest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def saved(self, step: int) -> int | None:
        """Return when a checkpoint was saved (nanoseconds), or None when it has gone."""
        try:
            return (self.checkpoints / f"ckpt-{step}.index").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def prune(self, kept: int) -> None:
        """Remove the oldest checkpoints; the index first, so that what is half removed is no longer complete."""
        for step in self.steps()[:-kept]:
            for path in sorted(self.checkpoints.glob(f"ckpt-{step}.*"), key=lambda path: path.suffix != ".index"):
                path.unlink(missing_ok=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint's index, so that it counts no more; returns the new name."""
        index = self.checkpoints / f"ckpt-{step}.index"
        return index.replace(index.with_name(index.name + SET_ASIDE))

    def set_aside_files(self) -> list[Path]:
        """Return what was set aside and not removed since."""
        return sorted(self.checkpoints.glob(f"ckpt-*.index{SET_ASIDE}"))

    def list_for_tensorflow(self) -> None:
        """Write the `checkpoint` file that tf.train.latest_checkpoint reads; nothing here reads it."""
        names = [f"ckpt-{step}" for step in self.steps()]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        write_text(self.checkpoints / "checkpoint", "\n".join(lines) + "\n")


def run_directories(shared_dir: Path) -> list[RunDirectory]:
    """Return every run on the shared path."""
    runs = shared_dir / "runs"
    with contextlib.suppress(FileNotFoundError):
        return [RunDirectory(shared_dir, path.name) for path in sorted(runs.iterdir()) if path.is_dir()]
    return []


def complete(name: str, names: set[str]) -> bool:
    """Return whether a checkpoint's index has all its data files; TensorFlow writes the index last."""
    rests = [entry[len(name) :] for entry in names if entry.startswith(name + ".")]
    of = [int(match[1]) for rest in rests if (match := DATA.fullmatch(rest))]
    # A save that was interrupted, or set aside, may have left files of another number of ps.
    return any(of.count(shards) == shards for shards in of)


class Checkpoints:
    """Saves and restores what is trained."""

    def __init__(self, directory: RunDirectory, model: Any, step: Any, kept: int, leads: bool = True) -> None:
        import tensorflow as tf

        self._tf = tf
        self._directory = directory
        self._leads = leads
        self._checkpoint = tf.train.Checkpoint(model=model, step=step)
        self._step = step
        self._kept = kept
        self._remote = "/job:ps/" in step.device
        self._traced: Any = None
        self._traced_objects: list[int] = []

    def save(self) -> None:
        """Write ckpt-<step>; raises Infrastructure when the storage fails.

        Under multi_worker_mirrored each member takes part in a save, and only the coordinator's files are kept.
        """
        if not self._leads:
            with tempfile.TemporaryDirectory() as directory:
                self._checkpoint.write(str(Path(directory) / "ckpt"))
            return
        prefix = self._directory.prefix(int(self._step.numpy()))
        started = time.monotonic()
        self._directory.checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            self._write(prefix)
            self._directory.prune(self._kept)
            self._directory.list_for_tensorflow()
        except (self._tf.errors.OpError, OSError) as error:
            raise Infrastructure(f"cannot save {prefix}: {first_line(error)}") from error
        log.info("saved %s in %.2f s", prefix, time.monotonic() - started)

    def _write(self, prefix: str) -> None:
        if not self._remote:
            self._checkpoint.write(prefix)
            return
        # Left alone, TensorFlow traces the save anew every time, and every ps keeps every trace: some 200 KiB a save.
        objects = [id(found) for found in self._tf.train.TrackableView(self._checkpoint).descendants()]
        if objects != self._traced_objects:
            self._traced = self._tf.function(self._checkpoint.write, autograph=False)
            self._traced_objects = objects
        self._traced(self._tf.constant(prefix)).numpy()

    def read(self, step: int) -> None:
        """Restore the checkpoint that another member has restored; raises Infrastructure when it can't be read."""
        try:
            self._checkpoint.read(self._directory.prefix(step)).assert_consumed()
        except (self._tf.errors.OpError, OSError, IndexError) as error:
            raise Infrastructure(f"cannot read {self._directory.prefix(step)}: {error}") from error

    def restore(self) -> int | None:
        """Restore the newest checkpoint that can be read; returns its step, or None when there is none.

        Every variable, optimizer slots included, must exist already: nothing may be left for later, and nothing may
        be left over. A damaged checkpoint is set aside: it may neither stand in the way of a new one of the same step
        nor be kept instead of a good one. Raises UserError when the model does not fit the checkpoint, or all are
        damaged; Infrastructure when the storage fails.
        """
        for step in reversed(self._directory.steps()):
            prefix = self._directory.prefix(step)
            try:
                self._checkpoint.read(prefix).assert_consumed()
            except (AssertionError, ValueError) as error:
                raise misfit(prefix, error) from error
            except (self._tf.errors.OpError, IndexError) as error:
                if is_infrastructure(error):
                    raise
                if isinstance(error, self._tf.errors.InvalidArgumentError):
                    raise misfit(prefix, error) from error
                if not self._is_damage(error):
                    raise Infrastructure(f"cannot read {prefix}: {error}") from error
                aside = self._directory.set_aside(step)
                log.warning("the checkpoint %s is damaged, its index is set aside as %s: %s", prefix, aside.name, error)
                continue
            log.info("restored %s", prefix)
            return step
        # Also at the next start: a run that has lost its training must not begin again as if it were new.
        if damaged := self._directory.set_aside_files():
            raise UserError(
                f"none of the checkpoints in {self._directory.checkpoints} can be read "
                f"(set aside: {', '.join(path.name for path in damaged)}): put a good one there, "
                "or start anew with another --run NAME"
            )
        return None

    def _is_damage(self, error: Exception) -> bool:
        """Return whether a checkpoint's files were read and are wrong, rather than could not be read."""
        errors = self._tf.errors
        if isinstance(error, (IndexError, errors.DataLossError, errors.OutOfRangeError)):
            return True
        # What TensorFlow's reader of the index raises is of no particular kind.
        return type(error) is errors.OpError and not str(error).rstrip().endswith(STORAGE)


def read_model(directory: RunDirectory, model: Any, step: int) -> None:
    """Restore the weights of a model that has no strategy, without its optimizer.

    Raises tf.errors.OpError or IndexError when the checkpoint can't be read, perhaps because it was just removed.
    """
    import tensorflow as tf

    prefix = directory.prefix(step)
    try:
        tf.train.Checkpoint(model=model).read(prefix).assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError) as error:
        raise misfit(prefix, error) from error


def misfit(prefix: str, error: Exception) -> UserError:
    return UserError(
        f"the checkpoint {prefix} does not fit the model: {str(error).strip().splitlines()[0]}. "
        "A changed model needs a new run: start it with another --run NAME"
    )
