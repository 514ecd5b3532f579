"""The run directory: the only module that knows a path below it.

    <shared>/runs/<run>/run.json state.json status.json evaluation.json attempts.json events.jsonl lease-<epoch>.json
                        checkpoints/ckpt-<step>{.index,.data-*,.manifest.json} events/{train,eval} export/

A checkpoint holds the model with its optimizer, and the step. Its number is its step. It counts when it has a manifest,
which is written last. One that turns out to be bad counts no more: its files are renamed to <name>.bad. One that
replaces another of its step is written beside it, as ckpt-<step>_new, and takes its place when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import __version__
from trainer.config import Config
from trainer.failures import Infrastructure, StalePath, UserError, first_line, is_infrastructure, is_stale
from trainer.reporting.events import EventLog
from trainer.run.records import read_record, write_record, write_text
from trainer.training.placement import bytes_of, variables_of

if TYPE_CHECKING:
    from trainer.run.lease import Lease

log = logging.getLogger(__name__)
LEASE = re.compile(r"lease-(\d+)\.json")
MANIFEST = re.compile(r"ckpt-(\d+)\.manifest\.json")
# Also what a save leaves when it is interrupted: TensorFlow's ckpt-<step>_temp, a manifest's temporary file.
OF_CHECKPOINT = re.compile(r"\.?ckpt-(\d+)[._].*")
BESIDE = re.compile(r"\.?ckpt-(\d+)_new.*")
SET_ASIDE = ".bad"
# A save that was asked for while another is written waits for it this long, and is then left out: training goes on.
PATIENCE_SECONDS = 5.0
# Only a save that takes longer than this may be one that hangs.
SLOW_SECONDS = 60.0
# TensorFlow's file system says "<path>; <what the system says>", often as an error of no particular kind.
STORAGE = tuple(f"; {os.strerror(number)}" for number in errno.errorcode)
# Writes and reads whole checkpoints where the servers share no path. Named in full: "/job:chief" breaks the restore.
COORDINATOR = "/job:chief/replica:0/task:0/device:CPU:0"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of, and who wrote it."""

    step: int
    epoch: int
    files: Mapping[str, int]
    """Names and sizes (bytes)."""
    index_sha256: str
    psfleet: str
    tensorflow: str
    created: float
    final: bool = False
    """Whether the weights are what `fit` has made of them at the end of the training."""

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Return the manifest, or None when it has gone; raises ValueError when it is not one."""
        record = read_record(path)
        if record is None:
            return None
        try:
            return cls(**record)
        except TypeError as error:
            raise ValueError(f"{path} is no manifest: {error}") from error


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
        self._changing = threading.Lock()
        self.failing_since: float | None = None
        """Since when (of time.monotonic) no checkpoint could be saved, over all the turns of this process."""

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

    def mend(self) -> None:
        """Set damaged records aside that a run can do without: only the lease's holder may."""
        for path in (self.state, self.status, self.evaluation, self.attempts):
            try:
                read_record(path)
            except ValueError as error:
                aside = path.with_name(path.name + SET_ASIDE)
                path.replace(aside)
                log.warning("%s: going on without it, it is kept as %s", error, aside.name)

    def finished(self, steps: int) -> int | None:
        """Return the step at which the run finished, or None when there is something left to train."""
        try:
            record = read_record(self.state)
        except ValueError:  # a coordinator mends it
            return None
        if record is None or record.get("state") != "finished":
            return None
        # A callback may have ended the training before the last step that was asked for.
        return int(record["step"]) if max(record["step"], record.get("asked", 0)) >= steps else None

    def set_state(
        self,
        state: str,
        step: int,
        asked: int = 0,
        epoch: int | None = None,
        members: Mapping[str, str] | None = None,
        without: Sequence[str] | None = None,
        restart: Mapping[str, str] | None = None,
    ) -> None:
        """Record the run's state for its other tasks. What is None stays as it was.

        `asked`, of a finished run, is the number of steps that it was to train. `epoch` is the lease's, `members` the
        tasks that the coordinator uses with the identities of their processes, `without` those that it goes on
        without, `restart` the ps, with their identities, that shall start anew.
        """
        more = {"epoch": epoch, "members": members, "without": without, "restart": restart}
        self._change_state({"state": state, "step": step, "asked": asked, **more})

    def set_members(
        self,
        members: Mapping[str, str] | None = None,
        without: Sequence[str] | None = None,
        restart: Mapping[str, str] | None = None,
    ) -> None:
        """Record whom the coordinator uses, as `set_state` does; the state stays as it was."""
        self._change_state({"members": members, "without": without, "restart": restart})

    def read_state(self) -> dict[str, Any]:
        """Return the state record; what there is of none, or of a damaged one, is that of a new run."""
        new = {"state": "waiting", "step": 0, "epoch": 0, "members": {}, "without": [], "restart": {}}
        try:
            return {**new, **(read_record(self.state) or {})}
        except ValueError as error:
            log.warning("%s: going on without it", error)
            return new

    def _change_state(self, changes: Mapping[str, Any]) -> None:
        # The guard's thread writes its last words while the main one goes on.
        with self._changing:
            told = {key: value for key, value in changes.items() if value is not None}
            write_record(self.state, {**self.read_state(), **told})

    def lease(self, epoch: int) -> Path:
        return self.path / f"lease-{epoch}.json"

    def lease_epoch(self) -> int:
        """Return the newest lease's epoch, 0 when the run has never been coordinated."""
        return max((int(match[1]) for name in names(self.path) if (match := LEASE.fullmatch(name))), default=0)

    def prefix(self, step: int, beside: bool = False) -> str:
        """Return the checkpoint's name as TensorFlow wants it, without an ending, perhaps of one beside another."""
        return str(self.checkpoints / f"ckpt-{step}{'_new' if beside else ''}")

    def manifest(self, step: int, beside: bool = False) -> Path:
        return Path(f"{self.prefix(step, beside)}.manifest.json")

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that count, oldest first; whether their files are good is not looked at.

        What a coordinator saved that had lost its lease, and did not know, never counts: steps that a later epoch
        went back behind.
        """
        counting: list[int] = []
        for _, step in sorted(self._epochs(), reverse=True):
            if not counting or step < counting[-1]:
                counting.append(step)
        return counting[::-1]

    def saved_epoch(self) -> int:
        """Return the newest epoch in which a checkpoint was saved, 0 without any."""
        return max((epoch for epoch, _ in self._epochs()), default=0)

    def unreadable(self) -> list[int]:
        """Return the steps of checkpoints whose manifest is no manifest."""
        found = []
        for step in self._with_manifest():
            try:
                Manifest.read(self.manifest(step))
            except ValueError:
                found.append(step)
        return found

    def newest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def saved(self, step: int) -> int | None:
        """Return when a checkpoint was saved (nanoseconds), or None when it has gone."""
        try:
            return self.manifest(step).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def check(self, step: int) -> str:
        """Say what is wrong with a checkpoint's files, or nothing; raises OSError when the storage fails.

        The data are not read: TensorFlow finds a flipped bit when it restores them.
        """
        try:
            manifest = Manifest.read(self.manifest(step))
        except ValueError as error:
            return str(error)
        if manifest is None:
            return f"{self.manifest(step).name} is gone"
        for name, size in manifest.files.items():
            try:
                found = (self.checkpoints / name).stat().st_size
            except FileNotFoundError:
                return f"{name} is gone"
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
        index = self.checkpoints / f"ckpt-{step}.index"
        return "" if sha256(index) == manifest.index_sha256 else f"{index.name} is not the one that was saved"

    def check_room(self, first: int) -> None:
        """Raise OSError when there is less room than the newest checkpoint takes, or `first` bytes when there is none.

        A write that TensorFlow breaks off takes the calls in flight with it.
        """
        step = self.newest()
        manifest = Manifest.read(self.manifest(step)) if step is not None else None
        needed = sum(manifest.files.values()) if manifest else first
        space = os.statvfs(self.checkpoints)
        free = space.f_bavail * space.f_frsize
        if free < needed:
            text = f"{os.strerror(errno.ENOSPC)}: {free} bytes are free, and a checkpoint takes {needed}"
            raise OSError(errno.ENOSPC, text)

    def write_manifest(self, step: int, epoch: int, tensorflow: str, beside: bool = False, final: bool = False) -> None:
        """Make the files that TensorFlow has written a checkpoint that counts, or one that is ready for `replace`."""
        self._refresh()
        prefix = self.prefix(step, beside)
        endings = [name.partition(".")[2] for name in self._files(step, beside)]
        files = {f"ckpt-{step}.{ending}": Path(f"{prefix}.{ending}").stat().st_size for ending in endings}
        manifest = Manifest(
            step=step,
            epoch=epoch,
            files=files,
            index_sha256=sha256(Path(f"{prefix}.index")),
            psfleet=__version__,
            tensorflow=tensorflow,
            created=time.time(),
            final=final,
        )
        write_record(self.manifest(step, beside), dataclasses.asdict(manifest))

    def replace(self) -> None:
        """Put complete checkpoints in the place of those that they were written beside; begun, it must be ended.

        What is not complete is removed, and what is older than a later coordinator's checkpoints.
        """
        for step in steps_of(BESIDE, names(self.checkpoints)):
            try:
                manifest = Manifest.read(self.manifest(step, beside=True))
            except ValueError as error:
                log.warning("%s: removing it", error)
                manifest = None
            if manifest is None or manifest.epoch < self.saved_epoch():
                self.manifest(step, beside=True).unlink(missing_ok=True)
                self._remove([name for name in self._named(step) if BESIDE.fullmatch(name)])
                continue
            for name in manifest.files:
                with contextlib.suppress(FileNotFoundError):  # it is there already
                    Path(f"{self.prefix(step, beside=True)}.{name.partition('.')[2]}").replace(self.checkpoints / name)
            self._remove([name for name in self._files(step) if name not in manifest.files])
            self.manifest(step, beside=True).replace(self.manifest(step))

    def remove(self, step: int, bad: bool = False) -> None:
        """Remove what there is of a checkpoint, the manifest first, and perhaps what was set aside at its step."""
        self.manifest(step).unlink(missing_ok=True)
        self._remove([name for name in self._named(step) if bad or not name.endswith(SET_ASIDE)])

    def _remove(self, found: Sequence[str]) -> None:
        for name in found:
            path = self.checkpoints / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def prune(self, kept: int) -> None:
        """Remove the oldest checkpoints, with what was set aside at their steps, and all that never was one."""
        for step in self.steps()[:-kept]:
            self.remove(step, bad=True)
        self.remove_orphans()

    def remove_orphans(self, epoch: int = 0) -> None:
        """Remove what interrupted saves left, and leases before this epoch: only the lease's holder may."""
        with contextlib.suppress(FileNotFoundError):  # nothing was ever saved
            self._refresh()
        self.replace()
        # In this order: a manifest that comes to light in between spares its checkpoint.
        found = [name for name in names(self.checkpoints) if not name.endswith(SET_ASIDE)]
        spared = {*self.steps(), *self.unreadable()}
        for step in steps_of(OF_CHECKPOINT, found) - spared:
            log.info("removing what there is of %s, which is no checkpoint that counts", self.prefix(step))
            self.remove(step)
        for name in names(self.path):
            if (match := LEASE.fullmatch(name)) and int(match[1]) < epoch:
                (self.path / name).unlink(missing_ok=True)

    def set_aside(self, step: int) -> Path:
        """Rename a bad checkpoint's files, so that it counts no more; returns the manifest's new name."""
        manifest = self.manifest(step)
        for name in (manifest.name, *self._files(step)):
            with contextlib.suppress(FileNotFoundError):
                (self.checkpoints / name).replace(self.checkpoints / (name + SET_ASIDE))
        return manifest.with_name(manifest.name + SET_ASIDE)

    def set_aside_files(self) -> list[Path]:
        """Return the manifests that were set aside and not removed since."""
        return sorted(self.checkpoints.glob(f"ckpt-*.manifest.json{SET_ASIDE}"))

    def _refresh(self) -> None:
        """Make a file, whereupon an NFS client knows of those that others have made."""
        with tempfile.TemporaryFile(dir=self.checkpoints):
            pass

    def _epochs(self) -> list[tuple[int, int]]:
        """Return epoch and step of every checkpoint with a manifest that can be read."""
        found = []
        for step in self._with_manifest():
            with contextlib.suppress(ValueError):  # `unreadable` finds it
                if manifest := Manifest.read(self.manifest(step)):
                    found.append((manifest.epoch, step))
        return found

    def _with_manifest(self) -> list[int]:
        return sorted(int(match[1]) for name in names(self.checkpoints) if (match := MANIFEST.fullmatch(name)))

    def _named(self, step: int) -> list[str]:
        found = names(self.checkpoints)
        return sorted(name for name in found if (match := OF_CHECKPOINT.fullmatch(name)) and int(match[1]) == step)

    def _files(self, step: int, beside: bool = False) -> list[str]:
        """Return the names of the files that TensorFlow wrote."""
        written = re.compile(rf"ckpt-{step}{'_new' if beside else ''}\.(index|data-[\d-]+of-\d+)")
        return [name for name in self._named(step) if written.fullmatch(name)]

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


def names(directory: Path) -> list[str]:
    """Return the names in a directory; none when it is not there."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except FileNotFoundError:
        return []


def steps_of(pattern: re.Pattern[str], found: Sequence[str]) -> set[int]:
    return {int(match[1]) for name in found if (match := pattern.fullmatch(name))}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class LostLease(Infrastructure):
    """The run directory is another coordinator's by now."""


def check_lease(lease: Lease | None) -> None:
    """Raise LostLease when the run has become another coordinator's, as while this process was frozen."""
    if lease is not None and not lease.held():
        raise LostLease("lost the lease: another coordinator has this run")


class Checkpoints:
    """Saves and restores what is trained."""

    def __init__(
        self,
        directory: RunDirectory,
        model: Any,
        step: Any,
        config: Config,
        leads: bool = True,
        lease: Lease | None = None,
        saved: Callable[[int, float, str | None], None] = lambda step, seconds, error: None,
    ) -> None:
        """`saved` is told of each save that ends: its step, how long it took, and what went wrong."""
        import tensorflow as tf

        self._tf = tf
        self._directory = directory
        self._leads = leads
        self._lease = lease
        self._told = saved
        self._checkpoint = tf.train.Checkpoint(model=model, step=step)
        self._step = step
        self._kept = config.checkpoints_kept
        self._limit = config.storage_timeout_seconds
        self._remote = "/job:ps/" in step.device
        io_device = COORDINATOR if config.local_run_dir and self._remote else None
        self._options = tf.train.CheckpointOptions(experimental_io_device=io_device)
        self._write = partial(self._checkpoint.write, options=self._options)
        self._snapshot: Any = None
        self._snapshot_objects: list[int] = []
        self._writer: threading.Thread | None = None
        self._writing: tuple[int, float] = (0, 0.0)
        self._newest: int | None = None
        self._beyond_limit = self._is_stale = False
        self._error = ""

    def has(self, step: int) -> bool:
        """Return whether the step is that of the newest checkpoint, as far as this process knows."""
        return step == self._newest

    def is_final(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step, and what the end of the training has made of it."""
        manifest = Manifest.read(self._directory.manifest(step)) if self.has(step) else None
        return manifest is not None and manifest.final

    def save(self, wait: bool = False, again: bool = False) -> None:
        """Save the state as it is now, unless this step is saved; `again` replaces it, since the end has changed it.

        Under parameter_server this returns as soon as training may go on, and a thread writes; with `wait` it returns
        when the checkpoint is on disk, and raises Infrastructure when it can't be. Otherwise a save that fails is
        complained about, and training goes on, until saves have failed for the user's limit: then this raises
        UserError. Under multi_worker_mirrored each member takes part, and only the coordinator's files are kept.
        """
        if not self._leads:
            with tempfile.TemporaryDirectory() as directory:
                self._checkpoint.write(str(Path(directory) / "ckpt"))
            return
        step = int(self._step.numpy())
        if wait or again:
            self.settle()
        elif self._is_busy():
            self._leave_out(step)
            return
        if again or not self.has(step):
            self._check_limit()
            self._begin(step, again)
            if wait:
                self.settle()
                if self._error:
                    self._check_limit()
                self.demand()

    def demand(self) -> None:
        """Raise Infrastructure unless the last save is on disk, whoever has failed it: the storage, or a server."""
        if self._error:
            raise Infrastructure(f"cannot save {self._directory.prefix(self._writing[0])}: {self._error}")

    def settle(self, seconds: float | None = None) -> bool:
        """Wait for the save that is in flight, however it ends, perhaps not longer; returns whether none is any more.

        Before TensorFlow's cluster is formed anew none may be: its thread would call into what is gone.
        """
        if self._writer is None:
            return True
        self._writer.join(seconds)
        return not self._writer.is_alive()

    def _is_busy(self) -> bool:
        """Return whether a save is still in flight, having waited for it while it is no slow one."""
        return not self.settle(max(0.0, self._writing[1] + PATIENCE_SECONDS - time.monotonic()))

    def _leave_out(self, step: int) -> None:
        written, began = self._writing
        if step == written:
            return
        seconds = time.monotonic() - began
        self._failed(began, f"{self._directory.prefix(written)} is not written after {seconds:.0f} s")
        log.warning("leaving out the checkpoint of step %d: %s", step, self._error)
        self._told(step, 0.0, self._error)
        if seconds > SLOW_SECONDS:
            self._check_limit()

    def _failed(self, began: float, error: str) -> None:
        self._error = error
        self._directory.failing_since = self._directory.failing_since or began
        self._beyond_limit = time.monotonic() - self._directory.failing_since > self._limit

    def _check_limit(self) -> None:
        if self._is_stale:
            raise StalePath(f"{self.trouble()}; the path must be mounted anew")
        if self._directory.failing_since is not None and self._beyond_limit:
            raise UserError(f"{self.trouble()}; that is longer than storage_timeout_seconds, {self._limit:g}")

    def _begin(self, step: int, final: bool) -> None:
        """Have the state written by a thread, or write it where that makes no difference."""
        self._writing = step, time.monotonic()
        if not self._remote:
            self._save(step, self._write, final)
            return
        objects = [id(found) for found in self._tf.train.TrackableView(self._checkpoint).descendants()]
        if objects != self._snapshot_objects:
            from trainer.run.snapshot import Snapshot

            self._snapshot, self._snapshot_objects = Snapshot(self._write), objects
        self._snapshot.take()
        arguments = (step, self._snapshot.write, final)
        self._writer = threading.Thread(target=self._save, args=arguments, name="save", daemon=True)
        self._writer.start()

    def trouble(self) -> str | None:
        """Say why and since when checkpoints can't be saved, or nothing."""
        if self._directory.failing_since is None:
            return None
        seconds = time.monotonic() - self._directory.failing_since
        return f"no checkpoint could be saved in {self._directory.checkpoints} for {seconds:.0f} s: {self._error}"

    def _save(self, step: int, write: Callable[[str], object], final: bool) -> None:
        """Write ckpt-<step> with its manifest, and tell how that ended."""
        directory = self._directory
        beside = self.has(step)  # the good one of this step stays until the new one is complete
        prefix = directory.prefix(step)
        began = self._writing[1]
        try:
            check_lease(self._lease)
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
            directory.replace()
            directory.check_room(self._first_bytes())
            if not beside:
                directory.remove(step)
            write(directory.prefix(step, beside))
            check_lease(self._lease)
            epoch = self._lease.epoch if self._lease else 0
            directory.write_manifest(step, epoch, self._tf.__version__, beside, final)
            directory.replace()
        except Exception as error:
            if self._is_of_a_server(error):
                self._error = first_line(error)
            else:
                self._failed(began, first_line(error))
                self._is_stale = is_stale(error)
            log.error("cannot save %s: %s", prefix, self._error)
            if not isinstance(error, LostLease):
                with contextlib.suppress(OSError):  # what there is of it would only make a full disk fuller
                    directory.replace() if beside else directory.remove(step)
            self._told(step, time.monotonic() - began, self._error)
            return
        self._newest, self._directory.failing_since, self._error = step, None, ""
        self._is_stale = False
        log.info("saved %s in %.2f s", prefix, time.monotonic() - began)
        self._told(step, time.monotonic() - began, None)
        try:
            directory.prune(self._kept)
            directory.list_for_tensorflow()
        except OSError as error:
            log.error("cannot remove old checkpoints: %s", error)

    def _first_bytes(self) -> int:
        """Return what the first save takes; 0 when there was one, or where no call is in flight with it."""
        # Under other strategies to look at a variable may take all members.
        first = self._remote and self._newest is None
        return sum(map(bytes_of, variables_of(self._checkpoint.model))) if first else 0

    def _is_of_a_server(self, error: Exception) -> bool:
        """Return whether a save failed with a ps, which the next turn does without, rather than with the storage."""
        if not isinstance(error, self._tf.errors.OpError) or not is_infrastructure(error):
            return False
        return not any(text in str(error) for text in STORAGE)

    def read(self, step: int) -> None:
        """Restore the checkpoint that another member has restored; raises Infrastructure when it can't be read."""
        try:
            self._checkpoint.read(self._directory.prefix(step), options=self._options).assert_consumed()
        except (self._tf.errors.OpError, OSError, IndexError) as error:
            raise Infrastructure(f"cannot read {self._directory.prefix(step)}: {error}") from error

    def restore(self, steps: Sequence[int] | None = None) -> int | None:
        """Restore the newest checkpoint that is good, of these steps or of all; returns its step, None without any.

        Every variable, optimizer slots included, must exist already: nothing may be left for later, and nothing may
        be left over. A bad checkpoint is set aside: it may neither stand in the way of a new one of the same step
        nor be kept instead of a good one. Raises UserError when the model does not fit the checkpoint, or all are
        bad; Infrastructure when the storage fails.
        """
        directory = self._directory
        directory.replace()
        for step in directory.unreadable():
            self._set_aside(step, directory.check(step))
        for step in reversed(directory.steps() if steps is None else steps):
            prefix = directory.prefix(step)
            if wrong := directory.check(step):
                self._set_aside(step, wrong)
                continue
            try:
                self._checkpoint.read(prefix, options=self._options).assert_consumed()
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
        if damaged := directory.set_aside_files():
            raise UserError(
                f"none of the checkpoints in {directory.checkpoints} can be read "
                f"(set aside: {', '.join(path.name for path in damaged)}): put a good one there, with its manifest, "
                "or start anew with another --run NAME"
            )
        return None

    def _set_aside(self, step: int, wrong: str) -> None:
        aside = self._directory.set_aside(step)
        prefix = self._directory.prefix(step)
        log.warning("the checkpoint %s is bad and set aside as %s: %s", prefix, aside.name, wrong)
        EventLog(self._directory.event_log).write("checkpoint-set-aside", message=f"{aside.name}: {wrong}")

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
