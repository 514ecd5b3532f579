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
from functools import partial
from typing import Any

from trainer.cluster.deadlines import Phases
from trainer.cluster.formation import MembershipChanged
from trainer.cluster.membership import Membership
from trainer.config import Config
from trainer.failures import Infrastructure, StalePath, Stopped, UserError
from trainer.reporting.progress import Progress
from trainer.run.checkpoints import SLOW_SECONDS, Checkpoints
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.run.records import read_record
from trainer.signals import STOP_PATIENCE_SECONDS
from trainer.states import Phase, RunState
from trainer.training.evaluation import Results
from trainer.training.handover import Handover
from trainer.training.scheduler import Blocks, Schedule, Scheduler
from trainer.training.step_runner import POLL_SECONDS, Call, StepRunner, fetch_numbers

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 5.0


class Controller:
    """Where a run stands: its step, its calls in flight, its checkpoints, its numbers."""

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
        that somebody hears of each epoch's end, and calls `end_epoch` then.
        """
        self._config = config
        self._runner = runner
        self._directory = directory
        self._progress = progress
        self._stopping = stopping
        self._evaluate = evaluate
        self._phases = phases
        self._members = members
        self._handover = handover
        self._read_initial_weights = read_initial_weights
        self._tells_epochs = tells_epochs
        self._began = began
        self._in_step = config.strategy != "parameter_server"
        self._schedule: Schedule
        if self._in_step:
            self._schedule = Blocks(config.steps_per_execution, config.log_seconds)
        else:
            self._schedule = Scheduler(config.steps_per_execution, workers)
        self._workers = workers
        self._trained: set[int] = set()
        named = [] if self._in_step else members.workers if members else [f"worker-{each}" for each in range(workers)]
        self._names = dict(enumerate(named))
        self._given = dict.fromkeys(named, 0)  # the steps that each worker gave since they were shown
        self._checkpoints = Checkpoints(
            directory,
            runner.trained,
            runner.step,
            config,
            leads=progress.leads,
            lease=lease,
            saved=self._saved,
            set_aside=lambda message: progress.events.write("checkpoint-set-aside", message=message),
            told=lambda: fetch_numbers(self.outputs) if self._outputs is not None else {},
            position=lambda: runner.position,
            copy=runner.copy,
        )
        self.step = 0
        """The step that was read last; calls in flight may have gone on since."""
        self.looked = False
        """Whether the last `next_call` looked at what is due: members in step do so at the same place."""
        self._counted = 0  # the highest step that a call has told
        self._from = 0  # the step where the present stretch of calls began
        self._ended_epoch = False
        self._told = False  # whether those who hear of the epoch's end have heard of this one
        self._save_after = False  # a save that waits for that
        self._asked_at: float | None = None
        self._advanced = False
        self._idle_at: float | None = None
        self._used = 0.0
        self._returned_members: list[str] = []
        self._saved_at = self._logged_at = time.monotonic()
        self._save_waits = False
        self._logged_step = 0
        self._outputs: Any = None  # of train_step, in the call that ended last
        self.values: dict[str, float] = {}
        self._results: Results | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})  # the last evaluation by this process, and its step
        self._unsaved: dict[int, dict[str, float]] = {}  # evaluations whose checkpoints are not written yet
        self._evaluated = int((read_record(directory.evaluation) or {}).get("step", -1))

    @property
    def has_trained(self) -> bool:
        """Whether a call has ended."""
        return bool(self._trained)

    @property
    def every_worker_has_trained(self) -> bool:
        """Whether a call of each worker has ended."""
        return len(self._trained) >= self._workers

    def restore(self) -> None:
        """Go on with what is on the ps, or go back to the newest checkpoint; a new run has neither: step 0."""
        runner, checkpoints = self._runner, self._checkpoints
        if attached := self._attach():
            agreed = -1 if (saved := self._directory.catalogue.newest()) is None else saved
        else:
            saved = checkpoints.restore() if self._progress.leads else None
            # The coordinator tries them; the other members read the one that it took.
            (agreed,) = runner.agree([-1 if saved is None else saved])
            if agreed >= 0 and saved is None:
                checkpoints.read(agreed)
        if not attached and agreed < 0 and self._read_initial_weights is not None:
            self._progress.events.write("initial-weights", message=self._read_initial_weights())
            checkpoints.prepare()
            checkpoints.save_and_wait()  # from which a recovery takes them, wherever they came from
        position = self._handover.position if self._handover is not None and attached else None
        if position is None and agreed >= 0 and self._config.input_position == "exact":
            position = checkpoints.position(agreed)
        if position is not None and (why := runner.go_on_from(position)):
            log.warning("the pass over the data begins anew: %s", why)
            self._progress.events.write("pass-begun-anew", message=why)
        self.step = int(runner.step.numpy())
        self._ended_epoch = self.step > 0 and self.step % self.epoch_steps == 0
        if self._evaluated != self.step:
            self._evaluated = -1  # if it was a later step, of weights that are lost
        lost = self._progress.ledger.restored(self.step)
        event = "attached" if attached else "restored"
        self._progress.events.write(event, steps_lost=lost, message=f"step {self.step}")
        if self._handover is not None:
            self._handover.offer(runner.trained, runner.step, runner.position)
        checkpoints.prepare()
        if agreed >= 0:
            self._progress.checkpointed(self._directory.catalogue.prefix(agreed), self.step)
        if attached or agreed >= 0:
            log.info("going on at step %d of %d", self.step, self._config.steps)

    def _attach(self) -> bool:
        """Take the variables that an earlier coordinator left on the ps, if they are there; returns whether."""
        newest = self._directory.catalogue.newest()
        # At the run's end `fit` changes the weights once more: only the checkpoint is sure to be of before that.
        if self._handover is None or (newest or 0) >= self._config.steps:
            return False
        if not self._handover.take(self._runner.trained, self._runner.step, newest or 0, self._runner.copy):
            return False
        log.info("attached to the variables on the ps, at step %d", int(self._runner.step.numpy()))
        self._checkpoints.skip_restore(newest)
        return True

    @property
    def done(self) -> bool:
        return self.step >= self._config.steps

    @property
    def outputs(self) -> Any:
        """What train_step returned in the call that ended last, with metrics over all calls since they were reset."""
        return self._runner.over_all_calls(self._outputs)

    def last_output(self, name: str, default: Any) -> Any:
        """Return one output of the call that ended last, by itself."""
        return self._outputs.get(name, default) if isinstance(self._outputs, dict) else default

    @property
    def final(self) -> bool:
        """Return whether the checkpoint of this step is what `fit` has made of it at the end of the training."""
        return bool(self._runner.agree([int(self._progress.leads and self._checkpoints.is_final(self.step))])[0])

    @property
    def epoch_steps(self) -> int:
        return self._config.epoch_steps or self._config.steps

    @property
    def epoch_ended(self) -> bool:
        return self.done or self._ended_epoch

    def begin(self) -> None:
        """Start the clocks: the training begins now. Evaluates an epoch after whose end it was stopped."""
        self._saved_at = self._logged_at = time.monotonic()
        self._logged_step = self.step
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
            self._aim()
        while True:
            if self._schedule.is_look_due(time.monotonic()):
                self._look()
                if self._schedule.is_over:
                    if self.epoch_ended:
                        return 0
                    self._aim()
            if steps := self._schedule.size(time.monotonic()):
                return steps
            if not self._collect():
                self._wait()

    def call(self, steps: int) -> Call:
        """Give out a call of so many steps, as `next_call` said."""
        call = self._runner.call(steps)
        self._schedule.given(steps)
        return call

    def end_epoch(self) -> None:
        """Do what is due at an epoch's end, now that those who hear of it have; raises as `next_call` does."""
        self._told = True
        try:
            if self._save_after:
                self._save_after = False
                self.save(wait=False, patience=SLOW_SECONDS)
            self._look()
        finally:
            self._told = False

    def drain(self) -> None:
        """Wait until no call is in flight; those that were not given yet are given by later `next_call`s."""
        self._schedule.close()
        while not self._schedule.is_over:
            if not self._collect():
                self._wait()
        self.step = int(self._runner.step.numpy())

    def _aim(self) -> None:
        """Have calls given up to the next step that must be met exactly; nothing is in flight."""
        config, self._from, self._ended_epoch = self._config, self.step, False
        ends = [config.steps]
        if self._in_step or self._evaluate is not None or self._tells_epochs:
            ends.append((self.step // self.epoch_steps + 1) * self.epoch_steps)
        if self._in_step and config.checkpoint_steps:
            ends.append((self.step // config.checkpoint_steps + 1) * config.checkpoint_steps)
        self._schedule.begin(self.step, min(ends))

    def _collect(self) -> bool:
        """Take note of the calls that have ended; returns whether any has."""
        ended = self._runner.returned()
        if not ended:
            return False
        self._wait_for_workers(alive=True)  # by the next call at the latest it is seen whether one is there
        now = time.monotonic()
        for call in ended:
            self._trained.add(call.worker)
            if task := self._names.get(call.worker):
                self._given[task] += call.steps
                self._progress.history.gave(task, call.steps)
            self._counted = max(self._counted, call.counted)
            seconds = self._schedule.returned(call.steps, call.began, call.worker, now)
            self._progress.tally.returned(call.worker, call.steps, seconds, call.stale)
            self._outputs = call.outputs
        self._progress.tally.update_wait_seconds = self._runner.seconds_waited
        return True

    def _wait(self) -> None:
        """Look around while calls are in flight.

        Leaves when asked to stop and they will not end in time, or when no worker came for the user's limit; raises
        Stopped, and UserError. Raises MembershipChanged when nobody reaches a ps: calls in flight would not end.
        """
        if self._members is not None and (unreachable := self._members.unreachable_ps()):
            raise MembershipChanged("; ".join(unreachable.values()))
        alive = self._members is None or bool(self._members.workers_serving())
        self._wait_for_workers(alive)
        if self._stopping():
            self._schedule.close()
            self._asked_at = self._asked_at or time.monotonic()
            why = ""
            if time.monotonic() - self._asked_at > STOP_PATIENCE_SECONDS:
                why = f"a call has not ended {STOP_PATIENCE_SECONDS:.0f} s after the request to stop"
            elif not alive:
                why = "no worker is there to end the calls in flight"
            elif self._runner.is_failing and not self.has_trained:
                why = "the calls in flight fail again and again"
            if why:
                log.warning("%s: saving without it", why)
                self.save()
                raise Stopped
        time.sleep(POLL_SECONDS)

    def _wait_for_workers(self, alive: bool) -> None:
        """Tell the time in which no worker is there from that of the training, which it neither is nor slows down."""
        now, limit = time.monotonic(), self._config.member_wait_timeout_seconds
        if not alive and self._idle_at is None:
            self._idle_at, self._used = now, self._phases.seconds
            self._phases.enter(Phase.WAITING)
            self._progress.enter(RunState.WAITING, "no worker answers: going on with the first that is back")
        elif not alive and self._idle_at is not None and self._members and self._members.leaving_workers():
            self._logged_at += now - self._idle_at  # their hosts are rebooted: no limit is for that
            self._idle_at = now
        elif not alive and self._idle_at is not None and 0 < limit < now - self._idle_at:
            self.save()
            raise UserError(f"waited {now - self._idle_at:.0f} s (member_wait_timeout_seconds) for a worker: start one")
        elif alive and self._idle_at is not None:
            self._schedule.paused(now)
            self._logged_at += now - self._idle_at
            self._idle_at = None
            # A worker that comes and goes shall not have the deadline begin anew each time.
            self._phases.enter(Phase.TRAINING, self._used)
            self._progress.enter(RunState.TRAINING)

    def _look(self) -> None:
        """Do what is due, with calls in flight or without; raises Stopped when asked to stop, once none is."""
        config, runner, schedule = self._config, self._runner, self._schedule
        self.looked = True
        lost = self._members.lost_ps() if self._members else []
        leaving = self._leaving()
        if lost and not schedule.in_flight:
            raise MembershipChanged(f"{', '.join(lost)} has ended")  # which no step needed: TensorFlow has not said so
        # With calls in flight, what the last ones said: reading it would be one more thing that a ps may hang.
        before, self.step = self.step, int(runner.step.numpy()) if not schedule.in_flight else self._counted
        now = time.monotonic()
        self._phases.progressed()
        self._progress.ledger.trained(self.step)
        if self._handover is not None:
            self._handover.refresh(runner.position)
        if before < self.step and not self._advanced:
            self._advanced = True
            self._progress.events.write("training", seconds=now - self._began, message=f"step {self.step}")
            self._progress.advanced(self.step)
        every, interval = config.checkpoint_steps, config.checkpoint_seconds
        passed = bool(every and self.step // every > before // every)
        save_due = self._save_waits or passed or bool(interval and now - self._saved_at >= interval)
        # One that is written just now is not waited for, while it is no slow one.
        self._save_waits = save_due and not self._checkpoints.settle(0) and now - self._saved_at < PATIENCE_SECONDS
        save_due = save_due and not self._save_waits
        log_due = now - self._logged_at >= config.log_seconds
        leads = self._progress.leads
        stop, save, show, *sizes = runner.agree(
            [self._stopping(), *(int(leads and number) for number in (save_due, log_due, *schedule.sizes))]
        )
        schedule.sizes = tuple(sizes)
        schedule.looked(self.step, time.monotonic())
        is_quiet = not schedule.in_flight
        # A call that ran twice, because its worker died, takes the step beyond where the calls were to end.
        self._ended_epoch = is_quiet and self.step // self.epoch_steps > self._from // self.epoch_steps
        if self._tells_epochs and self._ended_epoch and not self.done and not self._told:
            # Callbacks may change the model yet, and what they remember is of before: `end_epoch` looks again.
            self._save_waits = self._save_waits or bool(save)
            if stop or lost:
                schedule.close()
            if show:
                self._show()
            return
        ends = is_quiet and (stop or self.done)
        if save and not self._returned_members:
            self._returned_members = self._returned()
        if stop or lost or leaving or self._returned_members:
            schedule.close()
        changes = is_quiet and not ends and bool(leaving or self._returned_members)
        if self.done and is_quiet and not stop:
            self.save_the_end()
        elif ends or changes or (save and not self._returned_members):
            try:
                self.save(wait=bool(ends or changes))
            except Infrastructure as error:
                if ends or isinstance(error, StalePath):
                    raise
                log.warning("%s: training goes on with the members that it has", error)
                changes, self._returned_members = False, []
        if show or ends:
            self._show()
        if stop and is_quiet and not self.done:
            raise Stopped
        if changes and leaving:
            raise MembershipChanged(f"{', '.join(leaving)} leaves, and the checkpoint is saved")
        if changes:
            raise MembershipChanged(f"{', '.join(self._returned_members)} answers again")

    def save(
        self, *, again: bool = False, wait: bool = True, last: bool = False, patience: float | None = None
    ) -> None:
        """Save a checkpoint of this step, unless there is one; `again` replaces it, since the weights have changed.

        With calls in flight its step is the one that is copied with the other variables.
        `wait` says whether to return when it is on disk, or as soon as the training can go on; `last`, that there is
        as much time as the user gives the storage; `patience`, for how long a save in flight may last that goes first
        (None: as long as Checkpoints has it).
        """
        self.step = int(self._runner.step.numpy())
        if again:
            self._evaluated, self._measured = -1, (-1, {})
            self._unsaved.pop(self.step, None)
        with self._phases.during(Phase.SAVING):
            if wait:
                self._settle(last=last)
            # A member that is told to save must save, even when the coordinator's files are there already.
            (there,) = self._runner.agree([int(self._progress.leads and self._checkpoints.has(self.step))])
            if again or not there:
                if wait and not last:
                    self._checkpoints.save_and_wait(again=again)
                else:
                    end = self._checkpoints.save(again=again, patience=patience)
                    if last:
                        self._settle(last=last)
                        end.result()
        self._saved_at = time.monotonic()

    def save_the_end(self, *, again: bool = False) -> None:
        """Save what the training has come to, and try until it is saved: nothing is left to train meanwhile.

        Raises UserError when saves have failed for the user's limit, Infrastructure when asked to stop.
        """
        while True:
            try:
                self.save(again=again, last=True)
                return
            except Infrastructure as error:
                # Members in step save together, and so begin together anew.
                in_step = self._config.strategy == "multi_worker_mirrored"
                if self._stopping() or in_step or isinstance(error, StalePath):
                    raise
                self._progress.enter(RunState.TRAINING, str(error))
                time.sleep(PATIENCE_SECONDS)

    def _settle(self, *, last: bool) -> None:
        """Wait for the save in flight; for the last one no longer than the user gives a path that may hang."""
        began, limit = time.monotonic(), max(SLOW_SECONDS, self._config.storage_timeout_seconds)
        while not self._checkpoints.settle(PATIENCE_SECONDS if last else None):
            seconds = time.monotonic() - began
            if seconds > limit:
                raise UserError(
                    f"the last checkpoint is not written to {self._directory.checkpoints} after {seconds:.0f} s; "
                    f"that is longer than storage_timeout_seconds, {self._config.storage_timeout_seconds:g}"
                )
            self._phases.progressed()

    def _leaving(self) -> list[str]:
        """Return the ps that leave, and that can be let go of now: after a save, which must not fail."""
        if self._members is None or self._runner.is_recovering or self._checkpoints.trouble() is not None:
            return []
        return self._members.leaving_ps()

    def _returned(self) -> list[str]:
        """Return the members that can be taken in now: not while TensorFlow takes in another, or saves fail."""
        if self._members is None or not self._config.elastic or self._runner.is_recovering:
            return []
        if self._checkpoints.trouble() is not None or not self._checkpoints.settle(0):
            return []
        return self._members.returned()

    def settle(self, seconds: float) -> bool:
        """Wait for the save in flight, not longer than that; returns whether it has ended."""
        return self._checkpoints.settle(seconds)

    def _saved(self, step: int, seconds: float, error: str | None) -> None:
        """Say how a save has ended; called by the thread that made it."""
        if error:
            self._progress.events.write("save-failed", seconds=seconds, message=f"step {step}: {error}")
            return
        size = self._directory.catalogue.size(step)
        self._progress.events.write("checkpoint-saved", seconds=seconds, message=f"step {step}", size=size)
        self._progress.saved(step, seconds)
        self._progress.checkpointed(self._directory.catalogue.prefix(step), max(step, self.step))
        for evaluated in [each for each in self._unsaved.copy() if each <= step]:
            metrics = self._unsaved.pop(evaluated, None)
            if evaluated == step and metrics is not None:
                self._progress.post(partial(self._directory.catalogue.write_evaluation, step, metrics))

    def evaluate(self, *, again: bool = False) -> dict[str, float]:
        """Evaluate now, if the settings give that to the coordinator; returns the metrics, or nothing.

        What this process has evaluated at this step it says again; of an earlier process's it says nothing, and
        evaluates once more when it shall do so `again`.
        """
        self.step = int(self._runner.step.numpy())
        if self._evaluate is None:
            return {}
        # Members may have read different records of the last evaluation.
        (done,) = self._runner.agree([int(self._progress.leads and self._evaluated == self.step and not again)])
        if done:
            return self._measured[1] if self._measured[0] == self.step else {}
        kept = bool(self._config.checkpoints_kept_best)
        if kept and self._tells_epochs and not self.done:
            self._save_after = True  # callbacks may change the model yet
        elif kept:
            self.save(wait=False, patience=SLOW_SECONDS)  # that of a step without a checkpoint could not be kept
        self._progress.enter(RunState.TRAINING, "evaluating")
        started = time.monotonic()
        with self._phases.during(Phase.EVALUATING):
            metrics = self._evaluate()
        self._evaluated = self.step
        self._measured = (self.step, metrics)
        if self._progress.leads:
            if kept:
                self._unsaved[self.step] = metrics
            self._results = self._results or Results(self._directory, self._progress.post, self._config.best_metric)
            self._results.publish(self.step, metrics, time.monotonic() - started, checkpointed=kept)
            self._progress.evaluated(self.step, metrics)
            self._progress.events.write("evaluated", seconds=time.monotonic() - started, message=f"step {self.step}")
        self._progress.enter(RunState.TRAINING)
        # Evaluating is no training: the speed that is shown next leaves it out.
        self._logged_at += time.monotonic() - started
        return metrics

    def _show(self) -> None:
        """Show the numbers since the last time; none when no step has ended since."""
        now = time.monotonic()
        if self.step <= self._logged_step:
            return
        self.values = fetch_numbers(self.outputs)
        speed = (self.step - self._logged_step) / max(now - self._logged_at, 1e-9)
        self._progress.trained(self.step, speed, self.values, self._given, now - self._logged_at)
        self._given = dict.fromkeys(self._given, 0)
        if not self._tells_epochs:  # else they are the epoch's
            self._runner.reset_metrics()
        self._logged_step, self._logged_at = self.step, time.monotonic()
