"""Which checkpoints of a run count: their manifests, and what is replaced, set aside and removed.

    checkpoints/ckpt-<step>{.index,.data-*,.table-*,.manifest.json,.evaluation.json}

A checkpoint holds the model with its optimizer, and the step. Its number is its step. It counts when it has a manifest,
which is written last. One that turns out to be bad counts no more: its files are renamed to <name>.bad. One that
replaces another of its step is written beside it, as ckpt-<step>_new, and takes its place when it is complete.
Needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.run.records import make_directory, names_in, numbers_of, read_record, sync, write_record, write_text
from trainer.run.retention import CheckpointInfo, Retention

log = logging.getLogger(__name__)
MANIFEST = re.compile(r"ckpt-(\d+)\.manifest\.json")
# Also what a save leaves when it is interrupted: TensorFlow's ckpt-<step>_temp, a manifest's temporary file.
OF_CHECKPOINT = re.compile(r"\.?ckpt-(\d+)[._].*")
REPLACEMENT = re.compile(r"\.?ckpt-(\d+)_new.*")
SET_ASIDE = ".bad"


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
    loss: float | None = None
    """The training loss of the call that ended last by then, None where it is not known."""
    sound: bool | None = None
    """Whether what the training reported by then were numbers (`is_sound`), None where it reported nothing."""
    input: Mapping[str, Any] | None = None
    """How far the data were read (trainer/run/data_position.py), None where that is not counted."""

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Return the manifest, or None when it has gone; raises ValueError when it is not one."""
        record = read_record(path)
        if record is None:
            return None
        try:
            known = {field.name for field in dataclasses.fields(cls)}
            found = {key: value for key, value in record.items() if key in known}
            if found.get("loss") is not None:
                found["loss"] = float(found["loss"])
                found.setdefault("sound", math.isfinite(found["loss"]))  # before it was written
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no manifest: {error}") from error


class Catalogue:
    """The checkpoints in one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prefix(self, step: int, *, replacement: bool = False) -> str:
        """Return the checkpoint's name as TensorFlow wants it, without an ending, or of its replacement."""
        return str(self.path / f"ckpt-{step}{'_new' if replacement else ''}")

    def manifest(self, step: int, *, replacement: bool = False) -> Path:
        return Path(f"{self.prefix(step, replacement=replacement)}.manifest.json")

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

    def saved_at(self, step: int) -> int | None:
        """Return when a checkpoint was saved (nanoseconds), or None when it has gone."""
        try:
            return self.manifest(step).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def size(self, step: int) -> int | None:
        """Return the bytes of a checkpoint's files, or None when they can't be counted."""
        try:
            manifest = Manifest.read(self.manifest(step))
        except (OSError, ValueError):
            return None
        return sum(manifest.files.values()) if manifest else None

    def check(self, step: int) -> str:
        """Say what is wrong with a checkpoint's files, or nothing; raises OSError when the storage fails.

        The data are not read: TensorFlow finds a flipped bit when it restores them.
        """
        try:
            manifest = Manifest.read(self.manifest(step))
        except ValueError as error:
            return str(error)
        return f"{self.manifest(step).name} is gone" if manifest is None else self._compare(manifest)

    def _compare(self, manifest: Manifest) -> str:
        """Say what is wrong with the files, by this manifest, or nothing."""
        for name, size in manifest.files.items():
            try:
                found = (self.path / name).stat().st_size
            except FileNotFoundError:
                return f"{name} is gone"
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
        index = self.path / f"ckpt-{manifest.step}.index"
        return "" if sha256(index) == manifest.index_sha256 else f"{index.name} is not the one that was saved"

    def check_room(self, first: int) -> None:
        """Raise OSError when there is less room than the newest checkpoint takes, or `first` bytes without any.

        Nor may there be too few files that can still be made: each part of a checkpoint takes two while it is written.
        A write that TensorFlow breaks off takes the calls in flight with it.
        """
        step = self.newest()
        manifest = Manifest.read(self.manifest(step)) if step is not None else None
        needed = sum(manifest.files.values()) if manifest else first
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        if free < needed:
            text = f"{os.strerror(errno.ENOSPC)}: {free} bytes are free, and a checkpoint takes {needed}"
            raise OSError(errno.ENOSPC, text)
        files = 2 * len(manifest.files) if manifest else 1
        if space.f_files and space.f_favail < files:  # a file system that counts none says 0
            text = (
                f"{os.strerror(errno.ENOSPC)}: {space.f_favail} more files can be made, and a checkpoint takes {files}"
            )
            raise OSError(errno.ENOSPC, text)

    def write_manifest(
        self,
        step: int,
        epoch: int,
        tensorflow: str,
        *,
        replacement: bool = False,
        final: bool = False,
        loss: float | None = None,
        sound: bool | None = None,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the files that TensorFlow has written a checkpoint that counts, or a complete replacement of one.

        They are on disk before the manifest says so: TensorFlow leaves them to the system, which takes its time.
        """
        self._refresh()
        prefix = self.prefix(step, replacement=replacement)
        written = self._files(step, replacement=replacement)
        for name in written:
            sync(self.path / name)
        sync(self.path)
        endings = [name.partition(".")[2] for name in written]
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
            loss=loss,
            sound=sound,
            input=position,
        )
        write_record(self.manifest(step, replacement=replacement), dataclasses.asdict(manifest))

    def finish_replacements(self) -> None:
        """Rename complete replacements to what they replace, also when another process has begun to.

        What is not complete is removed, and what is older than a later coordinator's checkpoints.
        """
        for step in steps_of(REPLACEMENT, names_in(self.path)):
            try:
                manifest = Manifest.read(self.manifest(step, replacement=True))
            except ValueError as error:
                log.warning("%s: removing it", error)
                manifest = None
            if manifest is None or manifest.epoch < self.saved_epoch():
                self.manifest(step, replacement=True).unlink(missing_ok=True)
                self._remove([name for name in self._named(step) if REPLACEMENT.fullmatch(name)])
                continue
            for name in manifest.files:
                with contextlib.suppress(FileNotFoundError):  # it exists already
                    Path(f"{self.prefix(step, replacement=True)}.{name.partition('.')[2]}").replace(self.path / name)
            self._remove([name for name in self._files(step) if name not in manifest.files])
            self._evaluation(step).unlink(missing_ok=True)  # which was of other weights
            sync(self.path)
            self.manifest(step, replacement=True).replace(self.manifest(step))
            sync(self.path)

    def remove(self, step: int, *, set_aside_too: bool = False) -> None:
        """Remove what there is of a checkpoint, the manifest first; `set_aside_too` also what was set aside."""
        self.manifest(step).unlink(missing_ok=True)
        self._remove([name for name in self._named(step) if set_aside_too or not name.endswith(SET_ASIDE)])

    def _remove(self, found: Sequence[str]) -> None:
        for name in found:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def adopt(self, other: Catalogue, step: int) -> None:
        """Take a checkpoint of another run as one's own; the files are shared where the file system can do that.

        A checkpoint's files are not written to once it counts, and to remove one takes its name away. Raises
        FileNotFoundError when the other run removes or replaces it meanwhile.
        """
        manifest = Manifest.read(other.manifest(step))
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "the checkpoint is gone", str(other.manifest(step)))
        make_directory(self.path)
        self.remove(step)
        for name in manifest.files:
            try:
                os.link(other.path / name, self.path / name)
            except OSError:
                shutil.copyfile(other.path / name, self.path / name)
        if wrong := self._compare(manifest):
            raise FileNotFoundError(errno.ENOENT, f"the checkpoint has changed meanwhile: {wrong}", str(other.path))
        self.write_manifest(
            step, 0, manifest.tensorflow, loss=manifest.loss, sound=manifest.sound, position=manifest.input
        )

    def saved(self) -> list[CheckpointInfo]:
        """Return what is known of each checkpoint that counts, oldest first."""
        found = []
        for step in self.steps():
            manifest = Manifest.read(self.manifest(step))
            if manifest is None:
                continue  # it has gone meanwhile
            size = sum(manifest.files.values())
            sound = bool(manifest.sound)
            found.append(CheckpointInfo(step, manifest.created, size, manifest.loss, sound, self.evaluation(step)))
        return found

    def evaluation(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a checkpoint's evaluation, or None."""
        try:
            record = read_record(self._evaluation(step))
            return None if record is None else numbers_of(record["metrics"])
        except (KeyError, TypeError, ValueError) as error:
            log.warning("%s: going on as if it had not been evaluated", error)
            return None

    def write_evaluation(self, step: int, metrics: Mapping[str, float], saved: int | None = None) -> None:
        """Keep what an evaluation of a checkpoint gave for as long as the checkpoint is kept.

        Nothing is kept of one that is missing, or that is not the one that was saved at `saved` (nanoseconds).
        """
        found = self.saved_at(step)
        if found is not None and saved in (None, found):
            write_record(self._evaluation(step), {"step": step, "metrics": dict(metrics)})

    def _evaluation(self, step: int) -> Path:
        return Path(f"{self.prefix(step)}.evaluation.json")

    def prune(self, rules: Retention) -> None:
        """Remove what the rules keep not, with what was set aside at those steps, and all that never was one."""
        for step, reasons in rules.reasons(self.saved()).items():
            if not reasons:
                self.remove(step, set_aside_too=True)
        self.remove_orphans()

    def remove_orphans(self) -> None:
        """Remove what interrupted saves left: only the lease's holder may."""
        with contextlib.suppress(FileNotFoundError):  # nothing was ever saved
            self._refresh()
        self.finish_replacements()
        # In this order: a manifest that comes to light in between spares its checkpoint.
        found = [name for name in names_in(self.path) if not name.endswith(SET_ASIDE)]
        spared = {*self.steps(), *self.unreadable()}
        for step in steps_of(OF_CHECKPOINT, found) - spared:
            log.info("removing what there is of %s, which is no checkpoint that counts", self.prefix(step))
            self.remove(step)

    def set_aside(self, step: int) -> Path:
        """Rename a bad checkpoint's files, so that it counts no more; returns the manifest's new name."""
        manifest = self.manifest(step)
        for name in (manifest.name, *self._files(step)):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).replace(self.path / (name + SET_ASIDE))
        return manifest.with_name(manifest.name + SET_ASIDE)

    def set_aside_files(self) -> list[Path]:
        """Return the manifests that were set aside and not removed since."""
        return sorted(self.path.glob(f"ckpt-*.manifest.json{SET_ASIDE}"))

    def _refresh(self) -> None:
        """Make a file, whereupon an NFS client knows of those that others have made."""
        with tempfile.TemporaryFile(dir=self.path):
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
        return sorted(int(match[1]) for name in names_in(self.path) if (match := MANIFEST.fullmatch(name)))

    def _named(self, step: int) -> list[str]:
        found = names_in(self.path)
        return sorted(name for name in found if (match := OF_CHECKPOINT.fullmatch(name)) and int(match[1]) == step)

    def _files(self, step: int, *, replacement: bool = False) -> list[str]:
        """Return the names of the files that TensorFlow wrote, those of dynamic tables' pieces too."""
        new = "_new" if replacement else ""
        written = re.compile(rf"ckpt-{step}{new}\.(table-[\w-]+\.\d+-of-\d+\.\d+\.)?(index|data-[\d-]+of-\d+)")
        return [name for name in self._named(step) if written.fullmatch(name)]

    def list_for_tensorflow(self) -> None:
        """Write the `checkpoint` file that tf.train.latest_checkpoint reads; nothing here reads it."""
        listed = [f'"ckpt-{step}"' for step in self.steps()]
        lines = [f"model_checkpoint_path: {listed[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in listed)]
        write_text(self.path / "checkpoint", "\n".join(lines) + "\n")


def steps_of(pattern: re.Pattern[str], found: Sequence[str]) -> set[int]:
    return {int(match[1]) for name in found if (match := pattern.fullmatch(name))}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
