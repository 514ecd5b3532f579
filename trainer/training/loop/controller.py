"""What drives a run: it gives out calls, and does beside them what is due.

Both loops ask it for the next call, so that they save, log and stop by the same rules. Under parameter_server nothing
here waits for all calls but an end: of the run, of an epoch that is evaluated or that callbacks are told of, and of the
present members. Under multi_worker_mirrored every member has one of these, and the members agree after each block of
calls on what is due by time or was asked of one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.cluster.deadlines import Phases
from trainer.cluster.formation import MembershipChanged
from trainer.cluster.membership import Membership
from trainer.core.config import Config
from trainer.core.contracts import Structure
from trainer.core.failures import Infrastructure, StalePath, Stopped, UserError
from trainer.core.states import Phase, RunState
from trainer.run.checkpoints import SLOW_SECONDS
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.telemetry.progress import Progress
from trainer.training.handover import Handover
from trainer.training.loop.calls import Calls
from trainer.training.loop.epoch_ends import EpochEnds
from trainer.training.loop.evaluations import Evaluations
from trainer.training.loop.member_changes import MemberChanges
from trainer.training.loop.progress_meter import ProgressMeter
from trainer.training.loop.resumption import Resumption
from trainer.training.loop.saves import Saves
from trainer.training.loop.scheduler import make_schedule
from trainer.training.loop.stop_patience import StopPatience
from trainer.training.loop.worker_absence import WorkerAbsence
from trainer.training.steps.outputs import fetch_numbers
from trainer.training.steps.runner import POLL_SECONDS, Call, StepRunner

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """What a look finds to be due."""

    stop: bool
    save: bool
    show: bool


class Controller:
    """Where a run stands: its step, its calls in flight, its checkpoints, its numbers."""

    step = 0
    """The step that was read last; calls in flight may have gone on since."""
    looked = False
    """Whether the last `next_call` looked at what is due: members in step do so at the same place."""

    def __init__(
        self,
        config: Config,
        runner: StepRunner,
        directory: RunDirectory,
        progress: Progress,
        stopping: Callable[[], bool],
        evaluate: Callable[[], dict[str, float]] | None,
        phases: Phases,
        *,
        workers: int = 1,
        members: Membership | None = None,
        began: float = 0.0,
        lease: Lease | None = None,
        handover: Handover | None = None,
        read_initial_weights: Callable[[], str] | None = None,
        tells_epochs: bool = False,
    ) -> None:
        """Take what trains, where it is recorded, and who is asked what is due.

        `members` knows of members that are gone or back. `began` (of time.monotonic) is when the time without training
        began that ends with the first call. `handover` has what an earlier coordinator left on the ps.
        `read_initial_weights` gives a new run the weights that it begins with, and tells which. `tells_epochs` says
        that a callback hears of each epoch's end, and calls `end_epoch` then.
        """
        self._config = config
        self._runner = runner
        self._directory = directory
        self._progress = progress
        self._stopping = stopping
        self._phases = phases
        self._members = members
        self._handover = handover
        self._tells_epochs = tells_epochs
        self._began = began
        self._workers = workers
        tasks = members.workers if members else [f"worker-{each}" for each in range(workers)]
        tasks = tasks if config.traits.remote else []
        self._schedule = make_schedule(config, workers)
        self._meter = ProgressMeter(config.log_seconds, tasks)
        self._calls = Calls(runner, self._schedule, progress, self._meter, tasks)
        self._patience = StopPatience()
        self._absence = WorkerAbsence(config.member_wait_timeout_seconds)
        self._ends = EpochEnds.of(config, is_heard=evaluate is not None or tells_epochs)
        self._evaluations = Evaluations(config, evaluate, directory, progress, phases)
        self._saves = Saves(
            config, runner, directory, progress, phases, stopping, lease, told=self._told, written=self._written
        )
        checkpoints = self._saves.checkpoints
        self._resumption = Resumption(config, runner, directory, progress, checkpoints, handover, read_initial_weights)
        self._changes = MemberChanges(members, checkpoints, elastic=config.elastic)
        self.values: dict[str, float] = {}
        """The numbers that were shown last."""
        self._callbacks_heard = False  # of the end of this epoch
        self._advanced = False

    @property
    def has_trained(self) -> bool:
        """Whether a call has ended."""
        return bool(self._calls.workers)

    @property
    def every_worker_has_trained(self) -> bool:
        """Whether a call of each worker has ended."""
        return len(self._calls.workers) >= self._workers

    def restore(self) -> None:
        """Go on with what is on the ps, or go back to the newest checkpoint; a new run has neither: step 0."""
        self.step = self._resumption.restore()
        self._ends.restored(self.step)
        self._evaluations.log.restored(self.step)

    @property
    def done(self) -> bool:
        return self.step >= self._config.steps

    @property
    def outputs(self) -> Structure:
        """What train_step returned in the call that ended last, with metrics over all calls since they were reset."""
        return self._runner.over_all_calls(self._calls.outputs)

    def last_output(self, name: str, default: object) -> Any:
        """Return one output of the call that ended last, by itself."""
        outputs = self._calls.outputs
        return outputs.get(name, default) if isinstance(outputs, dict) else default

    @property
    def final(self) -> bool:
        """Return whether the checkpoint of this step is what `fit` has made of it at the end of the training."""
        return bool(self._runner.agree([int(self._progress.leads and self._saves.checkpoints.is_final(self.step))])[0])

    @property
    def epoch_steps(self) -> int:
        return self._ends.epoch_steps

    @property
    def epoch_ended(self) -> bool:
        return self.done or self._ends.ended

    def begin(self) -> None:
        """Start the clocks: the training begins now. Evaluates an epoch after whose end it was stopped."""
        now = time.monotonic()
        self._saves.schedule.saved(now)
        self._meter.begin(self.step, now)
        self._progress.status.step = self.step
        self._phases.enter(Phase.TRAINING)
        self._progress.enter(RunState.TRAINING)
        if self.epoch_ended:
            self.evaluate()

    def next_call(self) -> int:
        """Return the steps of the next call, once it is time for it; 0 at the run's end, and at that of an epoch.

        What is due is done meanwhile. At such an end all calls have ended. Raises Stopped, after a checkpoint, when
        asked to stop; MembershipChanged when members have ended or come back.
        """
        self.looked = False
        if self._schedule.is_over:
            self._begin_calls()
        while True:
            if self._schedule.is_look_due(time.monotonic()):
                self._look()
                if self._schedule.is_over:
                    if self.epoch_ended:
                        return 0
                    self._begin_calls()
            if steps := self._schedule.size(time.monotonic()):
                return steps
            if not self._collect():
                self._wait()

    def call(self, steps: int) -> Call:
        """Give out a call of so many steps, as `next_call` said."""
        return self._calls.give(steps)

    def end_epoch(self) -> None:
        """Do what is due at an epoch's end, now that those who hear of it have; raises as `next_call` does."""
        self._callbacks_heard = True
        try:
            if self._saves.schedule.callbacks_heard():
                self.save(wait=False, patience=SLOW_SECONDS)
            self._look()
        finally:
            self._callbacks_heard = False

    def drain(self) -> None:
        """Wait until no call is in flight; those that were not given yet are given by later `next_call`s."""
        self._schedule.close()
        while not self._schedule.is_over:
            if not self._collect():
                self._wait()
        self.step = int(self._runner.step.numpy())

    def _begin_calls(self) -> None:
        """Have calls given up to the next step that must be met exactly; nothing is in flight."""
        self._schedule.begin(self.step, self._ends.begin(self.step))

    def _collect(self) -> bool:
        """Take note of the calls that have ended; returns whether any has."""
        ended = self._runner.returned()
        if ended:
            self._note_workers(alive=True)  # by the next call at the latest it is seen whether one is there
            self._calls.take(ended, time.monotonic())
        return bool(ended)

    def _wait(self) -> None:
        """Look around while calls are in flight.

        Leaves when asked to stop and they will not end in time, or when no worker came for the user's limit; raises
        Stopped, and UserError. Raises MembershipChanged when nobody reaches a ps: calls in flight would not end.
        """
        if self._members is not None and (unreachable := self._members.unreachable_ps()):
            raise MembershipChanged("; ".join(unreachable.values()))
        alive = self._members is None or bool(self._members.workers_serving())
        self._note_workers(alive)
        if self._stopping():
            self._schedule.close()
            is_failing = self._runner.is_failing and not self.has_trained
            if why := self._patience.why_leave(time.monotonic(), has_workers=alive, is_failing=is_failing):
                log.warning("%s: saving without it", why)
                self.save()
                raise Stopped
        time.sleep(POLL_SECONDS)

    def _note_workers(self, alive: bool) -> None:
        """Tell the time in which no worker is there from that of the training, which it neither is nor slows down."""
        now, absence = time.monotonic(), self._absence
        if not alive and not absence.lasts:
            absence.begin(now, self._phases.seconds)
            self._phases.enter(Phase.WAITING)
            self._progress.enter(RunState.WAITING, "no worker answers: going on with the first that is back")
        elif not alive and self._members and self._members.leaving_workers():
            self._meter.leave_out(absence.excuse(now))  # their hosts are rebooted: no limit is for that
        elif not alive and absence.is_too_long(now):
            self.save()
            seconds = absence.seconds(now)
            raise UserError(f"waited {seconds:.0f} s (member_wait_timeout_seconds) for a worker: start one")
        elif alive and absence.lasts:
            self._schedule.paused(now)
            seconds, used = absence.end(now)
            self._meter.leave_out(seconds)
            self._phases.enter(Phase.TRAINING, used)
            self._progress.enter(RunState.TRAINING)

    def _look(self) -> None:
        """Do what is due, with calls in flight or without; raises Stopped when asked to stop, once none is."""
        self.looked = True
        is_quiet, changes = not self._schedule.in_flight, self._changes
        changes.look(self._runner.is_recovering)
        if changes.lost and is_quiet:  # which no step needed: TensorFlow has not reported it
            raise MembershipChanged(f"{', '.join(changes.lost)} has ended")
        due = self._agree_on_due(self._read_step(is_quiet))
        self._ends.look(self.step, is_quiet=is_quiet)
        if self._tells_epochs and self._ends.ended and not self.done and not self._callbacks_heard:
            self._leave_to_callbacks(due)
            return
        if due.save:
            changes.look_for_returned(self._runner.is_recovering)
        if due.stop or changes.lost or changes.are_wanted:
            self._schedule.close()
        ends = is_quiet and (due.stop or self.done)
        must_change = is_quiet and not ends and changes.are_wanted
        if ends and not due.stop:
            self.save_the_end()
        elif ends or must_change or (due.save and not changes.returned):
            must_change &= self._save_now(ends, must_change)
        if due.show or ends:
            self._show()
        if due.stop and is_quiet and not self.done:
            raise Stopped
        if must_change:
            raise MembershipChanged(changes.message)

    def _read_step(self, is_quiet: bool) -> int:
        """Note how far the training is; returns the step that was read before."""
        # With calls in flight, what the last ones counted: reading it would be one more thing that a ps may hang.
        before, self.step = self.step, int(self._runner.step.numpy()) if is_quiet else self._calls.counted
        self._phases.progressed()
        self._progress.ledger.trained(self.step)
        if self._handover is not None:
            self._handover.refresh(self._runner.position)
        if before < self.step and not self._advanced:
            self._advanced = True
            seconds = time.monotonic() - self._began
            self._progress.events.write("training", seconds=seconds, message=f"step {self.step}")
            self._progress.advanced(self.step)
        return before

    def _agree_on_due(self, before: int) -> Due:
        """Return what is due by time, or was asked of a member: of all members in step."""
        now = time.monotonic()
        save = self._saves.schedule.is_due(before, self.step, now, lambda: self._saves.is_writing)
        show, leads = self._meter.is_due(now), self._progress.leads
        numbers = (int(leads and number) for number in (save, show, *self._schedule.sizes))
        agreed = self._runner.agree([self._stopping(), *numbers])
        self._schedule.sizes = tuple(agreed[3:])
        self._schedule.looked(self.step, time.monotonic())
        return Due(*map(bool, agreed[:3]))

    def _leave_to_callbacks(self, due: Due) -> None:
        """Leave what is due to `end_epoch`: callbacks may change the model yet, and remember what was before."""
        if due.save:
            self._saves.schedule.put_off()
        if due.stop or self._changes.lost:
            self._schedule.close()
        if due.show:
            self._show()

    def _save_now(self, ends: bool, must_change: bool) -> bool:
        """Save; returns False where that failed and the training goes on with the members that it has."""
        try:
            self.save(wait=ends or must_change)
        except Infrastructure as error:
            if ends or isinstance(error, StalePath):
                raise
            log.warning("%s: training goes on with the members that it has", error)
            self._changes.put_off()
            return False
        return True

    def save(
        self, *, again: bool = False, wait: bool = True, last: bool = False, patience: float | None = None
    ) -> None:
        """Save a checkpoint of this step as Saves does; `again` replaces it, since the weights have changed."""
        self.step = int(self._runner.step.numpy())
        if again:
            self._evaluations.log.forget(self.step)
        self._saves.save(self.step, again=again, wait=wait, last=last, patience=patience)

    def save_the_end(self, *, again: bool = False) -> None:
        """Save what the training has come to, and try until it is saved, as Saves does."""
        self._saves.save_the_end(lambda: self.save(again=again, last=True))

    def settle(self, seconds: float) -> bool:
        """Wait for the save in flight, not longer than that; returns whether it has ended."""
        return self._saves.checkpoints.settle(seconds)

    def _told(self) -> dict[str, float]:
        """Return what train_step returned last, by name."""
        return {} if self._calls.outputs is None else fetch_numbers(self.outputs)

    def _written(self, step: int) -> None:
        """Tell of a checkpoint that is on disk; called by the thread that wrote it."""
        self._progress.checkpointed(self._directory.catalogue.prefix(step), max(step, self.step))
        self._evaluations.checkpointed(step)

    def evaluate(self, *, again: bool = False) -> dict[str, float]:
        """Evaluate now, if the settings give that to the coordinator; returns the metrics, or nothing.

        What this process has evaluated at this step it says again; of an earlier process's it says nothing, and
        evaluates once more when it is to do so `again`.
        """
        self.step = int(self._runner.step.numpy())
        if not self._evaluations.are_made_here:
            return {}
        # Members may have read different records of the last evaluation.
        is_done = self._evaluations.log.is_done(self.step)
        (done,) = self._runner.agree([int(self._progress.leads and is_done and not again)])
        if done:
            return self._evaluations.log.metrics(self.step)
        if self._evaluations.are_kept and self._tells_epochs and not self.done:
            self._saves.schedule.wait_for_callbacks()
        elif self._evaluations.are_kept:
            self.save(wait=False, patience=SLOW_SECONDS)  # that of a step without a checkpoint could not be kept
        started = time.monotonic()
        metrics = self._evaluations.make(self.step)
        # Evaluating is no training: the speed that is shown next leaves it out.
        self._meter.leave_out(time.monotonic() - started)
        return metrics

    def _show(self) -> None:
        """Show the numbers since the last time; none when no step has ended since."""
        stretch = self._meter.stretch(self.step, time.monotonic())
        if stretch is None:
            return
        self.values = fetch_numbers(self.outputs)
        self._progress.trained(self.step, stretch.speed, self.values, stretch.given, stretch.seconds)
        if not self._tells_epochs:  # else they are the epoch's
            self._runner.reset_metrics()
        self._meter.begin(self.step, time.monotonic())
