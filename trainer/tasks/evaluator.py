"""The side-car evaluator: for each new checkpoint, restore and evaluate. It is no member of the cluster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.cluster.deadlines import Phases
from trainer.core.contracts import Program
from trainer.core.failures import (
    FINISHED,
    RAISED,
    TRY_AGAIN,
    USER_ERROR,
    UserError,
    explain,
    is_infrastructure,
    is_signal,
    is_stale,
)
from trainer.core.memory_limit import check_room
from trainer.core.own_frames import exception_info
from trainer.core.program import build_model, load_program, program_file
from trainer.core.settings.config import Config, ConfigError
from trainer.core.signals import end_when_asked
from trainer.core.states import Phase
from trainer.process.supervisor import NEEDED
from trainer.report.html import PageWriter
from trainer.run.directory import RunDirectory
from trainer.run.records import numbers_of, read_record, readable, write_record
from trainer.run.saves.checkpoint_reader import read_model
from trainer.run.selections.selection import sweep_or_none
from trainer.telemetry.counters import Counters
from trainer.telemetry.logs import load_tensorflow
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.journald import about
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.resources import record_resources

log = logging.getLogger(__name__)
TRIES = 3
HELD = 2  # times a model's bytes are taken: by its values, and by those that are read
ROOM = "take evaluation: distributed, which leaves tables on the ps, or a larger host for the evaluator"


def run_evaluator(
    config: Config,
    notifier: Notifier,
    selected: Callable[[], Config],
    *,
    only_wait: bool = False,
    collector: MetricsCollector | None = None,
) -> int:
    """Evaluate the run's checkpoints until the run is finished and its last one is evaluated; returns the exit code.

    `selected` reads the settings again: when another run is chosen, this process ends (75) so that the next one
    evaluates that. With `only_wait` it ends (NEEDED) when there is a checkpoint to evaluate, and needs no TensorFlow.
    `collector` serves its numbers to Prometheus.
    """
    if config.evaluation != "sidecar":
        who = "no task evaluates" if config.evaluation == "none" else "the coordinator evaluates"
        log.info("nothing to do: %s, evaluation is %s", who, config.evaluation)
        notifier.ready(f"{who}: evaluation is {config.evaluation}")
        return FINISHED
    watched = WatchedRun.from_config(config, notifier)
    if collector is not None:
        collector.report_on(config.run, watched.counters)
    try:
        while True:
            finished = watched.directory.finished(config.steps)  # before the newest: that of a finished run is its last
            newest, saved = watched.newest()
            if newest is not None and watched.is_new(newest, saved):
                if only_wait:
                    return NEEDED
                watched.evaluate(newest, saved)
            elif (code := watched.end(finished, newest, selected)) is not None:
                return code
            else:
                time.sleep(config.evaluate_poll_seconds)
    except RAISED as error:
        if is_signal(error):
            raise
        return watched.failed(error)


@dataclass
class WatchedRun:
    """A run whose checkpoints this process evaluates, and how far it is with that."""

    config: Config
    directory: RunDirectory
    notifier: Notifier
    phases: Phases
    counters: Counters
    last: int
    """The step that was evaluated last, or given up; -1 for none."""
    last_saved: int | None
    """When its checkpoint was saved."""
    program: Program | None = None
    evaluator: Evaluator | None = None
    tries: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    skipped: bool = False
    """Whether the last checkpoint could not be read."""
    present: int | None = None
    """The step that is being evaluated, or was last; None before the first."""

    @classmethod
    def from_config(cls, config: Config, notifier: Notifier) -> WatchedRun:
        """Begin to watch the settings' run, and tell systemd so."""
        directory = RunDirectory(config.shared_dir, config.run)
        notifier.ready(f"waiting for a checkpoint of {config.run}")
        phases = Phases({Phase.EVALUATING: config.evaluating_timeout_seconds})
        notifier.watch(phases.in_time)
        counters = Counters(evaluation=read_evaluation(directory))
        return cls(config, directory, notifier, phases, counters, *last_evaluated(directory))

    def newest(self) -> tuple[int | None, int | None]:
        """Return the step of the newest checkpoint, and when it was saved: waiting for one begins here."""
        newest = self.directory.catalogue.newest()
        # A checkpoint that was damaged may be saved again under the same step.
        saved = self.directory.catalogue.saved_at(newest) if newest is not None else None
        self.phases.enter(Phase.WAITING)
        return newest, saved

    def is_new(self, step: int, saved: int | None) -> bool:
        """Return whether this checkpoint is another one than that of the last evaluation."""
        return step != self.last or (self.last_saved is not None and saved != self.last_saved)

    def evaluate(self, step: int, saved: int | None) -> None:
        """Evaluate a checkpoint, or give it up after some tries."""
        config, directory = self.config, self.directory
        self.present = step
        self.phases.enter(Phase.EVALUATING)
        if sweep_or_none(config) is None:
            count_try(directory, step, config.max_restarts_without_step, self.notifier)
        elif not begin_try(directory, step, saved):
            give_up(directory, step, f"{TRIES} processes have ended while they evaluated step {step}")
            self.last, self.last_saved = step, saved
            return
        evaluator = self._load()
        about(step=step)
        self.notifier.status(f"evaluating {config.run}: step {step}")
        done = evaluator.evaluate(step, saved)
        end_try(directory)
        self.notifier.status(f"{'evaluated' if done else 'skipped'} {config.run}: step {step}")
        # One that can't be read is mostly gone, for a newer one; or it is bad, or the storage is slow.
        self.tries[step, saved] += 1
        if done or self.tries[step, saved] == TRIES:
            self.last, self.last_saved, self.skipped = step, saved, not done
            self.tries.clear()
        else:
            time.sleep(config.evaluate_poll_seconds)

    def _load(self) -> Evaluator:
        if self.evaluator is None:
            load_tensorflow()
            self.program = load_program(self.config.program, self.config.program_args)
            end_when_asked()  # also where the program ignores or handles a stop
            self.evaluator = Evaluator(self.program, self.directory, self.config.best_metric, self.counters)
            record_resources("evaluator-0", lambda: self.directory)
        return self.evaluator

    def end(self, finished: int | None, newest: int | None, selected: Callable[[], Config]) -> int | None:
        """Return this process's exit code where nothing is left to evaluate, or another run is chosen; else None."""
        config, directory = self.config, self.directory
        sweep = sweep_or_none(config)
        if newest is None and sweep is None:  # a sweep's next point may be smaller
            check_room(HELD * directory.read_state().get("model_bytes", 0), "evaluation: sidecar", ROOM)
        if self.skipped and sweep is not None and (finished is not None or config.run in sweep.ends()):
            give_up(directory, self.last, f"the last checkpoint, of step {self.last}, can't be read")
            self.skipped = False
        if sweep is not None and sweep.unevaluated() is None:
            log.info("%s is over, and all of it is evaluated", sweep.title)
            return FINISHED
        if finished is not None and sweep is None:
            if page_lacks_evaluation(directory):
                PageWriter(directory).write()
            log.info("run %s finished at step %d; step %d is evaluated", config.run, finished, self.last)
            return FINISHED
        chosen = config_or_none(selected)
        if chosen and what_is_trained(chosen) != what_is_trained(config):
            log.info("run %s is chosen instead of %s: restarting", chosen.run, config.run)
            return TRY_AGAIN
        return None

    def failed(self, error: BaseException) -> int:
        """Report an error, and give the checkpoint up where a sweep goes on without it; returns the exit code."""
        file = program_file(self.program) if self.program is not None else None
        end_try(self.directory)
        if is_infrastructure(error, file):
            log.error("trouble, trying again: %s", explain(error, file))
            if is_stale(error):
                self.notifier.restart_unit()
            return TRY_AGAIN
        message = str(error) if isinstance(error, UserError) else explain(error, file)
        info = None if isinstance(error, UserError) else exception_info(error, file)
        log.error("evaluating %s failed: %s", self.config.run, message, exc_info=info)
        step = self.present  # a newer one may be there by now
        if sweep_or_none(self.config) is not None and step is not None:
            give_up(self.directory, step, message)
            return TRY_AGAIN
        with contextlib.suppress(OSError, ValueError):  # the log has it
            record_failure(self.directory, message if step is None else f"step {step}: {message}")
            if self.directory.finished(self.config.steps) is not None:
                PageWriter(self.directory).write()
        return USER_ERROR


def page_lacks_evaluation(directory: RunDirectory) -> bool:
    """Return whether the run's page was written before its last evaluation, as the coordinator may do."""
    try:
        evaluated = directory.evaluation.stat().st_mtime_ns
        return not directory.report.exists() or directory.report.stat().st_mtime_ns < evaluated
    except OSError:
        return False


def begin_try(directory: RunDirectory, step: int, saved: int | None) -> bool:
    """Note that this process evaluates a checkpoint; returns False when so many have ended in it that none should.

    A sweep's next points wait for it: one evaluation that hangs, or takes too much memory, must not keep them for ever.
    """
    before = readable(directory.evaluating)
    is_same = (before.get("step"), before.get("saved")) == (step, saved)
    tries = int(before.get("tries", 0)) + 1 if is_same else 1
    if tries > TRIES:
        return False
    write_record(directory.evaluating, {"step": step, "saved": saved, "tries": tries})
    return True


def count_try(directory: RunDirectory, step: int, limit: int, notifier: Notifier) -> None:
    """Note that this process evaluates, of a run that has no sweep.

    Raises UserError when more than `limit` in a row have ended in that. The unit's own start begins with a new budget.
    """
    tries = int(readable(directory.evaluating).get("tries", 0)) if notifier.restarts else 0
    if tries > limit:
        why = notifier.lack or "does the program call os._exit? The evaluator's journal has their last lines"
        raise UserError(
            f"{tries} processes have ended while they evaluated, and max_restarts_without_step is {limit}; {why}. "
            "The training goes on. Start the evaluator again when that is fixed"
        )
    write_record(directory.evaluating, {"step": step, "tries": tries + 1})


def end_try(directory: RunDirectory) -> None:
    """Note that this process outlived its evaluation, whatever came of it."""
    with contextlib.suppress(OSError):
        directory.evaluating.unlink(missing_ok=True)


def give_up(directory: RunDirectory, step: int, why: str) -> None:
    """Write down that a point is not evaluated: the sweep's other points are evaluated all the same."""
    write_record(directory.evaluation, {"step": step, "metrics": {}, "failed": why, "updated": time.time()})


def record_failure(directory: RunDirectory, why: str) -> None:
    """Write down why nothing is evaluated, for the status and the page, beside what was evaluated before.

    The next evaluation overwrites it: the checkpoint is owed one, once the program is fixed.
    """
    before = read_record(directory.evaluation) or {"step": -1, "metrics": {}}
    write_record(directory.evaluation, {**before, "failed": why, "updated": time.time()})


def last_evaluated(directory: RunDirectory) -> tuple[int, int | None]:
    """Return the step of the last evaluation and when its checkpoint was saved; -1 where none can be read."""
    try:
        record = read_record(directory.evaluation) or {}
        return int(record.get("step", -1)), record.get("saved")
    except ValueError as error:
        log.warning("evaluating again what may have been evaluated: %s", error)
        return -1, None


def read_evaluation(directory: RunDirectory) -> tuple[int, dict[str, float]] | None:
    """Return the last evaluation's step and metrics; None where none can be read."""
    try:
        record = read_record(directory.evaluation)
        return (int(record["step"]), numbers_of(record["metrics"])) if record and record.get("metrics") else None
    except (KeyError, TypeError, ValueError):
        return None


def what_is_trained(config: Config) -> tuple[str, str, Mapping[str, Any]]:
    return config.run, config.program, config.program_args


def config_or_none(selected: Callable[[], Config]) -> Config | None:
    """Read the settings again; what can't be read now (they are being edited) chooses no other run."""
    try:
        return selected()
    except ConfigError as error:
        log.warning("the settings can't be read, going on with those at the start: %s", error)
        return None


class Evaluator:
    """A whole model in this process, and the data to evaluate it on."""

    def __init__(
        self, program: Program, directory: RunDirectory, best_metric: str = "", counters: Counters | None = None
    ) -> None:
        import tensorflow as tf

        from trainer.training.data.input import eval_dataset
        from trainer.training.evaluation import Results, TestStep, reject_own_evaluation
        from trainer.training.exports.export import bytes_of_checkpoint, lacks_evaluation
        from trainer.training.keras.adapters import keras_of
        from trainer.training.tables.dynamic.served import ServedTables

        self._directory = directory
        if (newest := directory.catalogue.newest()) is not None:
            check_room(HELD * bytes_of_checkpoint(directory, newest), "evaluation: sidecar", ROOM)
        self._tables = ServedTables.from_directory(directory)
        with self._tables.of_layers():
            self._model = build_model(program)
            if why := lacks_evaluation(self._model):
                raise UserError(why)
            self._dataset = eval_dataset(program)
            keras = keras_of(self._model)
            keras.ensure_built(self._dataset.element_spec)
            self._step = TestStep(program, self._model, tf.distribute.get_strategy(), self._dataset.element_spec)
        if self._step.own:
            reject_own_evaluation(program, self._model, "have test_step return results of metrics alone")
        self._trained = keras.trained(with_optimizers=False)
        self._results = Results(directory, best_metric=best_metric)
        self._counters = counters or Counters()

    def evaluate(self, step: int, saved: int | None = None) -> bool:
        """Evaluate one checkpoint and publish the result; returns False when it has gone or can't be read.

        `saved` is when it was saved, to be known again by a later process.
        """
        import tensorflow as tf

        from trainer.training.measures.outputs import fetch_numbers
        from trainer.training.tables.row_restores import reading

        started = time.monotonic()
        # Looked at before and after: it may be removed, or saved again, while it is read.
        wrong = self._directory.catalogue.check(step)
        try:
            if not wrong:
                read_model(self._directory, self._trained, step, self._tables, reading=reading)
        except (tf.errors.OpError, IndexError, UserError) as error:
            wrong = self._directory.catalogue.check(step)
            if not wrong and isinstance(error, UserError):
                raise
            wrong = wrong or str(error)
        if wrong:
            log.warning("skipping step %d: %s", step, wrong)
            return False
        if self._step.own:
            metrics = self._step.evaluate(self._dataset)
        else:
            metrics = fetch_numbers(self._model.evaluate(self._dataset, verbose=0, return_dict=True))
        self._results.publish(step, metrics, time.monotonic() - started, saved, checkpointed=True)
        self._counters.evaluation = step, metrics
        return True
