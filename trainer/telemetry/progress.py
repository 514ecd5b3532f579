"""One writer for what is measured: the log, TensorBoard, status.json and systemd show the same numbers."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

from trainer.core.settings.config import Config
from trainer.core.states import Phase, RunState
from trainer.run.catalogue import Manifest
from trainer.run.directory import RunDirectory
from trainer.telemetry.counters import Counters, NewestCheckpoint
from trainer.telemetry.events import FAULTS, EventLog
from trainer.telemetry.goodput import Ledger, describe_ledger
from trainer.telemetry.history import History
from trainer.telemetry.outlets.journald import about
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.outlets.tensorboard import EventWriter, describe_settings, write_mark
from trainer.telemetry.outlets.webhook import Notifications
from trainer.telemetry.status import Status, read_status, render_metrics

log = logging.getLogger(__name__)
QUEUED = 1000
CLOSE_SECONDS = 10.0
ROOM_SECONDS = 10.0  # how often the shared path's room is looked at
NOT_FINITE = (
    "Lower the learning rate, clip the gradients, or go back to a checkpoint before that: fab checkpoints, then "
    "fab start-cluster --run NEW --from RUN@STEP. The callback TerminateOnNaN ends such a run"
)


def add_up(known: Mapping[str, Mapping[str, Any]], given: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """Return each worker's steps, and its recent steps per second: 0 for an idle one, None where none trains."""
    names = sorted({*known, *given}, key=lambda task: (len(task), task))
    return {
        task: {
            "steps": known.get(task, {}).get("steps", 0) + given.get(task, 0),
            "steps_per_second": round(given.get(task, 0) / seconds, 3) if seconds > 0 and given else None,
        }
        for task in names
    }


class Writer:
    """One thread for all that is written to the shared path, so that one that hangs stops no thread that reports."""

    def __init__(self, limit: int = QUEUED) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._full = False

    def post(self, write: Callable[[], None]) -> bool:
        """Have it written, in the order of posting; returns False when too much waits for that already."""
        with self._lock:
            try:
                self._queue.put_nowait(write)
            except queue.Full:
                if not self._full:
                    log.warning("the shared path does not take what is reported: it is lost until it does")
                self._full = True
                return False
            self._full = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write, name="reports", daemon=True)
                self._thread.start()
        return True

    def close(self, seconds: float) -> None:
        """Wait until all is written, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            pass
        else:
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("the shared path does not take the last reports: they are lost")

    def _write(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                write()
            except Exception:
                log.exception("a report is lost")


class Page(Protocol):
    """A run's page, written on the thread of the reports."""

    def write(self) -> None:
        """Write it now."""

    def write_if_due(self) -> None:
        """Write it if it is time to."""


class Progress:
    """Says how training is doing, everywhere at once; a member that does not lead tells only systemd.

    Its methods may be called from any thread, and none waits for the shared path: `close` it before the process ends.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        notifier: Notifier,
        leads: bool = True,
        waits: bool = False,
        notifications: Notifications | None = None,
        page: Page | None = None,
    ) -> None:
        """Take the run; one that `waits` (for the lease) writes nothing until it may `begin`.

        `page` is the run's page, which is written at its end and now and then before; None for a run without one.
        """
        self.leads = leads
        self._notifications = notifications
        self._directory = directory
        self._notifier = notifier
        self._writer = Writer()
        self._writes = False
        self._lock = threading.RLock()
        self._unwritten: Status | None = None
        self._board: EventWriter | None = None
        self._marks: list[tuple[int, dict[str, Any]]] = []  # faults that TensorBoard does not show yet
        self.events = EventLog(directory.event_log, self.post, self._mark)
        self.history = History(directory.history, self.post)
        self._page = page
        self.counters = Counters()
        self._step_examples: int | None = None  # as the history has it
        self._looked_at = -math.inf
        self._config = config
        self._unsound = False
        self._read()
        if not waits:
            self.begin()

    def begin(self, tasks: Collection[str] | None = None) -> None:
        """Write to the run directory from now on, and take up what lies there by now.

        Of workers that are not among `tasks` any more nothing is taken up; None for whatever there was.
        """
        with self._lock:
            state, message = self.status.state, self.status.message
            self._read()
            if tasks is not None:
                workers = self.status.workers.items()
                self.status.workers = {task: numbers for task, numbers in workers if task in tasks}
            self.status.state, self.status.message = state, message
            self._writes = self.leads
        if self.leads:
            self.events.count()
            self.post(self._poll_shared_path)
        self.events.write("started", host=socket.gethostname(), message=f"process {os.getpid()}")

    def _read(self) -> None:
        self.status = read_status(self._directory)
        config = self._config
        self.status.program, self.status.steps = config.program, config.steps
        self.status.program_args = dict(config.program_args)
        self.status.steps_per_second = self.status.eta_seconds = None
        self.status.without, self.status.ways = {}, {}
        self.status.workers = add_up(self.status.workers, {}, 0.0)
        self.ledger = Ledger(self.status.ledger)

    def enter(self, state: RunState, message: str = "") -> None:
        """Enter a state, with what the operator should know about it."""
        with self._lock:
            self.status.state, self.status.message = state, message
            if state is not RunState.TRAINING:
                self.status.steps_per_second = self.status.eta_seconds = None
                self.status.workers = add_up(self.status.workers, {}, 0.0)
            if state.ended:
                self.status.phase = None
                self.ledger.end()
                self.events.write(state, message=message or f"step {self.status.step}")
                if self._writes and self._notifications is not None:
                    self._notifications.state(self.status)
                self.history.write_worker_steps()
                self.history.ledger(self.ledger.as_dict(), at_once=True)
            self._show()
            if state.ended and self._page is not None:
                self.post(self._page.write)
            if state.ended and self.leads and self.status.ledger:
                log.info("%s", describe_ledger(self.status.ledger))

    def phase(self, phase: Phase) -> None:
        """Enter a phase, as the ledger counts the time."""
        with self._lock:
            self.ledger.enter(phase)
            self.status.phase = phase
            self._show()
            self.history.ledger(self.status.ledger or {})

    def without(self, members: dict[str, str]) -> None:
        """Say which members take no part, and what they are instead."""
        with self._lock:
            if members != self.status.without:
                self.status.without = members
                self._show()
            if self._writes and self._notifications is not None:
                self._notifications.without(self.status, self.counters.drained())

    def ways(self, ways: dict[str, dict[str, str]]) -> None:
        """Say how the members reach each other."""
        self.counters.ways = ways
        with self._lock:
            if ways != self.status.ways:
                self.status.ways = ways
                self._show()

    def checkpointed(self, checkpoint: str, step: int) -> None:
        with self._lock:
            self.status.checkpoint, self.status.step = checkpoint, step
            self._show()

    def saved(self, step: int, seconds: float) -> None:
        """Count a save; called by the thread that made it."""
        self.counters.save_seconds.add(seconds)
        self.counters.checkpoint = newest_checkpoint(self._directory, step) or self.counters.checkpoint

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.counters.evaluation = step, dict(metrics)

    def exported(self, export: str) -> None:
        self.status.export = export

    def advanced(self, step: int) -> None:
        """Show the first step as soon as it is made: who has started the training waits for it."""
        with self._lock:
            self.status.step = step
            self._show()

    def trained(
        self,
        step: int,
        steps_per_second: float,
        values: dict[str, float],
        given: Mapping[str, int] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Show the step, the speed since the last time, and the loss and metrics since then.

        `given` has how many steps each worker gave in these `seconds`; those that are lost later are among them.
        """
        with self._lock:
            self.ledger.trained(step)
            status = self.status
            status.step, status.steps_per_second = step, round(steps_per_second, 3)
            about(step=step)
            status.workers = add_up(status.workers, given or {}, seconds)
            self._take_tally()
            status.eta_seconds = round(max(0, (status.steps or 0) - step) / steps_per_second, 1)
            status.loss = values.get("loss")
            status.metrics = {name: value for name, value in values.items() if name != "loss"}
            self._watch_numbers(step, values)
            if self.leads:
                if self._board is None:
                    self._board = EventWriter(self._directory.train_events)
                    self._write_settings(step)
                    self._write_marks()
                shown = {**values, "steps_per_second": steps_per_second}
                self.post(partial(self._board.write, step, shown, time.time()))
                numbers = render_metrics(values)
                log.info("step %d of %d, %.4g steps/s, %s", step, status.steps, steps_per_second, numbers)
            self._show()
            if self.counters.step_examples and self.counters.step_examples != self._step_examples:
                self._step_examples = self.counters.step_examples
                self.history.batch(self._step_examples)
            self.history.numbers(step, steps_per_second, values, status.ledger)
            if self._page is not None:
                self.post(self._page.write_if_due)

    def _take_tally(self) -> None:
        """Show what is counted of workers, tables and data."""
        status, counters = self.status, self.counters
        for task, each in status.workers.items():
            each |= counters.staleness(task) | counters.waited(task)
        status.tables, status.files = counters.table_rates(time.monotonic()), dict(counters.files)
        status.lookups, status.data = counters.asked(), counters.data()

    def _watch_numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Warn once when numbers become NaN or infinite: every step from there on is in vain."""
        unsound = {name: value for name, value in values.items() if not math.isfinite(value)}
        if self.leads and unsound and not self._unsound:
            shown = f"at step {step}: {render_metrics(unsound)}. {NOT_FINITE}"
            log.warning("numbers are not finite %s", shown)
            self.events.write("not-finite", message=shown)
        self._unsound = bool(unsound)

    def _write_settings(self, step: int) -> None:
        """Have TensorBoard show what is trained: the parameters for its HParams, all settings as a page."""
        board, program_args = self._board, self.status.program_args
        if board is None:
            return
        if program_args:
            self.post(partial(EventWriter(self._directory.events).write_parameters, program_args))
        self.post(partial(board.write_text, step, "settings", describe_settings(self._config)))

    def _mark(self, record: Mapping[str, Any]) -> None:
        """Have TensorBoard show a fault beside the curves, at the step and the time at which it was noticed."""
        if record["event"] in FAULTS:
            with self._lock:
                self.status.faults += 1
                self._marks.append((self.status.faults, {"step": self.status.step or 0, **record}))
                self._write_marks()

    def _write_marks(self) -> None:
        if self._board is not None:
            for number, record in self._marks:
                self.post(partial(write_mark, self._board, number, record))
            self._marks = []

    def post(self, write: Callable[[], None]) -> None:
        """Have something else written to the shared path, in its turn."""
        if self._writes:
            self._writer.post(write)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is not written yet, for so many seconds at most."""
        self._writer.close(seconds)

    def _show(self) -> None:
        about(run=self.status.run, step=self.status.step)
        self.status.ledger = self.ledger.as_dict()
        self._notifier.status(self.status.line())
        if not self._writes:
            return
        # One that waits to be written is replaced by a newer one.
        waits, self._unwritten = self._unwritten is not None, dataclasses.replace(self.status)
        if not waits and not self._writer.post(self._write_status):
            self._unwritten = None

    def _poll_shared_path(self) -> None:
        """Learn what only the shared path says; on the thread that may wait for it."""
        self._looked_at = time.monotonic()
        try:
            space = os.statvfs(self._config.shared_dir)
            self.counters.room = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
            if self.counters.checkpoint is None:
                self.counters.checkpoint = newest_checkpoint(self._directory)
        except OSError as error:
            log.debug("cannot look at %s: %s", self._config.shared_dir, error)

    def _write_status(self) -> None:
        with self._lock:
            status, self._unwritten = self._unwritten, None
        try:
            if status is not None:
                status.write(self._directory)
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.status, error)
        if time.monotonic() - self._looked_at >= ROOM_SECONDS:
            self._poll_shared_path()


def newest_checkpoint(directory: RunDirectory, step: int | None = None) -> NewestCheckpoint | None:
    """Return the newest checkpoint, or that of a step; None where it can't be read."""
    try:
        step = directory.catalogue.newest() if step is None else step
        manifest = None if step is None else Manifest.read(directory.catalogue.manifest(step))
    except (OSError, ValueError):
        return None
    return None if manifest is None else NewestCheckpoint(manifest.step, manifest.created, sum(manifest.files.values()))
