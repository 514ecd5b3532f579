"""The directory of one run: its paths, and the records that outlive its processes.

<shared>/runs/<run>/run.json state.json status.json evaluation.json evaluating.json export.json attempts.json
                    events.jsonl history.jsonl evaluations.jsonl tasks/<task>.jsonl report.html lease-<epoch>.json
                    checkpoints/ (trainer/run/catalogue.py) callbacks/ (trainer/run/callback_store.py)
                    events/{train,eval} export/ exports/<step>{,.changes}/
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.settings.parameters import describe_values
from trainer.core.states import RunState
from trainer.run.catalogue import SET_ASIDE, Catalogue
from trainer.run.records import names_in, read_record, write_record

log = logging.getLogger(__name__)
LEASE = re.compile(r"lease-(\d+)\.json")


class LeasedDirectory:
    """A directory that one process at a time may write: lease-<epoch>.json, of which the newest counts."""

    def __init__(self, path: Path, name: str, role: str) -> None:
        self.path = path
        self.leased = name
        """What messages call it."""
        self.role = role
        """What they call the one who holds its lease."""

    def lease(self, epoch: int) -> Path:
        return self.path / f"lease-{epoch}.json"

    def lease_epoch(self) -> int:
        """Return the newest lease's epoch, 0 when there has been none."""
        return max(self._lease_epochs(), default=0)

    def written_epoch(self) -> int:
        """Return the newest epoch in which something was written that must not be taken for a later one's."""
        return 0

    def clear_up(self, epoch: int) -> None:
        """Remove what earlier holders left, whose epochs are lower: only the lease's holder may."""
        for earlier in self._lease_epochs():
            if earlier < epoch:
                self.lease(earlier).unlink(missing_ok=True)

    def _lease_epochs(self) -> list[int]:
        return [int(match[1]) for name in names_in(self.path) if (match := LEASE.fullmatch(name))]


class Below:
    """A path of a run: its directory's, with what follows."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, directory: RunDirectory, owner: object = None) -> Path:
        return directory.path.joinpath(*self._names)


class RunDirectory(LeasedDirectory):
    """The paths of one run, its catalogue of checkpoints, and the records that outlive its processes."""

    settings = Below("run.json")
    state = Below("state.json")
    status = Below("status.json")
    evaluation = Below("evaluation.json")
    evaluating = Below("evaluating.json")
    attempts = Below("attempts.json")
    event_log = Below("events.jsonl")
    history = Below("history.jsonl")
    evaluations = Below("evaluations.jsonl")
    tasks = Below("tasks")
    report = Below("report.html")
    callbacks = Below("callbacks")
    checkpoints = Below("checkpoints")
    events = Below("events")
    train_events = Below("events", "train")
    eval_events = Below("events", "eval")
    export = Below("export")
    exports = Below("exports")
    export_record = Below("export.json")

    def __init__(self, shared_dir: str | Path, run: str) -> None:
        super().__init__(Path(shared_dir) / "runs" / run, f"run {run}", "coordinator")
        self.run = run
        self.catalogue = Catalogue(self.checkpoints)
        self.failing_since: float | None = None
        """Since when (of time.monotonic) no checkpoint could be saved, over all the generations of this process."""
        self._changing = threading.Lock()

    def read_settings(self) -> dict[str, Any] | None:
        """Return what the run remembers of itself, None for a new one.

        Where that is damaged, it is what the status says that the run began with. Raises ValueError where that is not
        known either.
        """
        try:
            return self._read_settings()
        except ValueError:
            with contextlib.suppress(ValueError):
                status = read_record(self.status) or {}
                if isinstance(status.get("program"), str) and isinstance(status.get("program_args"), dict):
                    known = {"program": status["program"], "program_args": status["program_args"]}
                    return known | ({"from": status["begun_from"]} if status.get("begun_from") else {})
            raise

    def _read_settings(self) -> dict[str, Any] | None:
        record = read_record(self.settings)
        if record is not None and not isinstance(record.get("program"), str):
            raise ValueError(f"{self.settings} names no program")
        return record

    def _keep_damaged_settings(self) -> None:
        """Keep a copy of them where they are damaged: they are about to be replaced, in one step."""
        try:
            self._read_settings()
        except ValueError as error:
            aside = self.settings.with_name(self.settings.name + SET_ASIDE)
            shutil.copyfile(self.settings, aside)
            log.warning("%s: it is made again of the run's other records, and kept as %s", error, aside.name)

    def read_claim(self, config: Config) -> dict[str, Any] | None:
        """Return what the run remembers of itself, None for a new one.

        Raises UserError where it began with another program or other parameters, ValueError where the record is
        damaged.
        """
        record = self.read_settings()
        if record is None or self.failed_untrained():
            return None
        if record.get("program") != config.program:
            raise UserError(
                f"run {self.run} belongs to the program {record.get('program')}, not to {config.program}: "
                "start the new program with another --run NAME"
            )
        began = record.get("program_args", {})
        items = config.program_args.items()
        other = {name: value for name, value in items if name not in began or began[name] != value}
        if other:
            raise UserError(
                f"run {self.run} began with {describe_values(began) or 'no parameters'} and keeps that; it can't go on "
                f"with {describe_values(other)}: start another run with --run NAME"
            )
        return record

    def failed_untrained(self) -> bool:
        """Return whether an error of the user's ended it before anything was trained: its name is free again."""
        if self.state.exists() or self.catalogue.newest() is not None:
            return False
        status = read_record(self.status) or {}
        return status.get("state") == RunState.FAILED and not status.get("step")

    def claim(self, config: Config) -> None:
        """Remember the run's program and its parameters, or raise UserError when the run began with others."""
        try:
            record = {"created": time.time(), **(self.read_claim(config) or {})}
        except ValueError as error:
            raise UserError(f"{error}; remove the file, or put a good one there, and start the run again") from error
        began = {"program": config.program, "program_args": dict(config.program_args)}
        self._keep_damaged_settings()
        write_record(self.settings, {**record, **began, "settings": config.as_dict()})

    def declare_tables(self, names: Collection[str]) -> None:
        """Remember these layers as those with dynamic tables, whatever the settings name later."""
        record = read_record(self.settings) or {}
        declared = {"declared_tables": sorted(names)} if names else {}
        changed = {key: value for key, value in record.items() if key != "declared_tables"} | declared
        if changed != record:
            write_record(self.settings, changed)

    @property
    def dynamic_tables(self) -> list[str]:
        """The names of the layers with dynamic tables, by the settings or by the program, in one order everywhere."""
        record = read_record(self.settings) or {}
        return sorted({*record.get("settings", {}).get("dynamic_tables", {}), *record.get("declared_tables", ())})

    def set_damaged_records_aside(self) -> None:
        """Rename the damaged records that a run can do without: only the lease's holder may."""
        for path in (self.state, self.status, self.evaluation, self.evaluating, self.export_record, self.attempts):
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
        except ValueError:  # a coordinator sets it aside
            return None
        if record is None or record.get("state") != RunState.FINISHED:
            return None
        # A callback may have ended the training before the last step that was asked for.
        return int(record["step"]) if max(record["step"], record.get("asked", 0)) >= steps else None

    def set_state(
        self, state: RunState, step: int, *, asked: int = 0, epoch: int | None = None, model_bytes: int | None = None
    ) -> None:
        """Record the run's state for its other tasks. What is None stays as it was.

        `asked`, of a finished run, is the number of steps that it was to train. `epoch` is the lease's. `model_bytes`
        is what the model takes, without its optimizer's slots.
        """
        self._change_state({"state": state, "step": step, "asked": asked, "epoch": epoch, "model_bytes": model_bytes})

    def set_members(
        self,
        members: Mapping[str, str] | None = None,
        without: Sequence[str] | None = None,
        restart: Mapping[str, str] | None = None,
    ) -> None:
        """Record the tasks that the coordinator uses, those that it goes on without, and the ps that must restart.

        The first and the last are given with their incarnations. What is None stays as it was.
        """
        self._change_state({"members": members, "without": without, "restart": restart})

    def read_state(self) -> dict[str, Any]:
        """Return the state record; a missing or damaged one reads as that of a new run."""
        new = {"state": RunState.WAITING, "step": 0, "epoch": 0, "members": {}, "without": [], "restart": {}}
        try:
            return {**new, **(read_record(self.state) or {})}
        except ValueError as error:
            log.warning("%s: going on without it", error)
            return new

    def _change_state(self, changes: Mapping[str, Any]) -> None:
        # The heartbeat's thread may write last words while the main one goes on.
        with self._changing:
            known = {key: value for key, value in changes.items() if value is not None}
            write_record(self.state, {**self.read_state(), **known})

    def is_export_left(self) -> bool:
        """Return whether an export was to be made, and has neither been made nor failed."""
        try:
            return (read_record(self.export_record) or {"ended": True})["ended"] is False
        except ValueError as error:
            log.warning("%s: no export is made", error)
            return False

    def written_epoch(self) -> int:
        return self.catalogue.saved_epoch()

    def clear_up(self, epoch: int) -> None:
        self.catalogue.remove_orphans()
        super().clear_up(epoch)


def run_directories(shared_dir: Path) -> list[RunDirectory]:
    """Return every run on the shared path."""
    runs = shared_dir / "runs"
    with contextlib.suppress(FileNotFoundError):
        names = sorted(path.name for path in runs.iterdir() if path.is_dir())
        return [RunDirectory(shared_dir, name) for name in names if not name.startswith(".")]  # a copy that is coming
    return []
