"""What drives a run: it gives out calls, and does beside them what is due.

Both loops ask it for the next call, so that they save, log and stop by the same rules. Under parameter_server nothing
here waits for all calls but an end: of the run, of an epoch that is evaluated or that callbacks hear of, and of the
present members. Under multi_worker_mirrored every member has one of these, and the members agree after each block of
calls on what is due by time or was asked of one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.cluster.members.formation import MembershipChanged
from trainer.core.contracts import Structure
from trainer.core.failures import Infrastructure, StalePath, Stopped
from trainer.run.saves.checkpoints import SLOW_SECONDS
from trainer.training.handover import Handover
from trainer.training.loop.account import Account
from trainer.training.loop.calls import Calls
from trainer.training.loop.epoch_ends import EpochEnds
from trainer.training.loop.evaluations import Evaluations
from trainer.training.loop.joining import Joining
from trainer.training.loop.member_changes import MemberChanges
from trainer.training.loop.member_watch import MemberWatch
from trainer.training.loop.progress_meter import ProgressMeter
from trainer.training.loop.resumption import Resumption
from trainer.training.loop.saves import Saves
from trainer.training.loop.scheduler import make_schedule
from trainer.training.run_context import RunContext
from trainer.training.steps.runner import Call, StepRunner

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """What a look finds to be due."""

    stop: bool
    save: bool
    show: bool


class Controller:
    """Gives out calls, and has each part of the loop do its work when that is due."""

    polled = False
    """Whether the last `next_call` looked at what is due: members in step do so at the same place."""

    def __init__(
        self,
        context: RunContext,
        runner: StepRunner,
        evaluate: Callable[[], dict[str, float]] | None,
        *,
        workers: int = 1,
        began: float = 0.0,
        handover: Handover | None = None,
        read_initial_weights: Callable[[], str] | None = None,
        for_callbacks: bool = False,
    ) -> None:
        """Take the process's part of the run, and what trains.

        `began` (of time.monotonic) is when the time without training began that ends with the first call. `handover`
        has what an earlier coordinator left on the ps. `read_initial_weights` gives a new run the weights that it
        begins with, and tells which. `for_callbacks` says that a callback hears of each epoch's end, and calls
        `end_epoch` then.
        """
        config, members = context.config, context.membership
        tasks = context.workers(workers)
        schedule = make_schedule(config, workers)
        meter = ProgressMeter(config.log_seconds, tasks)
        self._runner = runner
        self._account = Account(context, meter, began)
        self._calls = calls = Calls(runner, schedule, context.progress, meter, tasks, workers)
        self._ends = EpochEnds.from_config(config, evaluated=evaluate is not None, for_callbacks=for_callbacks)
        self._evaluations = Evaluations(context, evaluate)
        self._saves = Saves(context, runner, numbers=calls.alone, written=self._written)
        checkpoints = self._saves.checkpoints
        self._resumption = Resumption(context, runner, checkpoints, handover, read_initial_weights)
        self._members = MemberWatch(context, schedule, meter, self.save)
        self._changes = MemberChanges(members, checkpoints, Joining(members, runner, calls), elastic=config.elastic)

    @property
    def step(self) -> int:
        """The step that was read last; calls in flight may have gone on since."""
        return self._account.step

    @property
    def values(self) -> dict[str, float]:
        """The numbers that were shown last."""
        return self._account.values

    @property
    def has_trained(self) -> bool:
        """Whether a call has ended."""
        return bool(self._calls.workers)

    @property
    def every_worker_has_trained(self) -> bool:
        """Whether a call of each worker has ended."""
        return len(self._calls.workers) >= self._calls.count

    def restore(self) -> None:
        """Go on with what is on the ps, or go back to the newest checkpoint; a new run has neither: step 0."""
        self._account.step = self._resumption.restore()
        self._ends.restored(self.step)
        self._evaluations.log.restored(self.step)

    @property
    def done(self) -> bool:
        return self.step >= self._ends.steps

    @property
    def outputs(self) -> Structure:
        """What train_step returned in the call that ended last, with metrics over all calls since they were reset."""
        return self._runner.aggregate_outputs(self._calls.outputs)

    def last_output(self, name: str, default: object) -> Any:
        """Return one output of the call that ended last, by itself."""
        outputs = self._calls.outputs
        return outputs.get(name, default) if isinstance(outputs, dict) else default

    @property
    def final(self) -> bool:
        """Return whether the checkpoint of this step is what `fit` has made of it at the end of the training."""
        return bool(self._runner.agree([int(self._account.leads and self._saves.checkpoints.is_final(self.step))])[0])

    @property
    def epoch_steps(self) -> int:
        return self._ends.epoch_steps

    @property
    def epoch_ended(self) -> bool:
        return self.done or self._ends.ended

    def begin(self) -> None:
        """Start the clocks: the training begins now. Evaluates an epoch after whose end it was stopped."""
        self._saves.schedule.saved(time.monotonic())
        self._account.begin()
        if self.epoch_ended:
            self.evaluate()

    def next_call(self) -> int:
        """Return the steps of the next call, once it is time for it; 0 at the run's end, and at that of an epoch.

        What is due is done meanwhile. At such an end all calls have ended. Raises Stopped, after a checkpoint, when
        asked to stop; MembershipChanged when members have ended or come back.
        """
        self.polled = False
        if self._calls.schedule.is_over:
            self._begin_calls()
        while True:
            if self._calls.schedule.is_look_due(time.monotonic()):
                self._poll()
                if self._calls.schedule.is_over:
                    if self.epoch_ended:
                        return 0
                    self._begin_calls()
            if steps := self._calls.schedule.size(time.monotonic()):
                return steps
            self._collect_or_wait()

    def call(self, steps: int) -> Call:
        """Give out a call of so many steps, as `next_call` said."""
        return self._calls.give(steps)

    def end_epoch(self) -> None:
        """Do what is due at an epoch's end, now that those who hear of it have; raises as `next_call` does."""
        self._ends.heard = True
        try:
            if any((self._saves.schedule.callbacks_heard(), self._saves.checkpoints.outdate(self.step))):
                self.save(wait=False, patience=SLOW_SECONDS)
            self._poll()
        finally:
            self._ends.heard = False

    def drain(self) -> None:
        """Wait until no call is in flight; those that were not given yet are given by later `next_call`s."""
        self._calls.schedule.close()
        while not self._calls.schedule.is_over:
            self._collect_or_wait()
        self._account.step = int(self._runner.step.numpy())

    def _begin_calls(self) -> None:
        """Have calls given up to the next step that must be met exactly; nothing is in flight."""
        self._calls.schedule.begin(self.step, self._ends.begin(self.step))

    def _collect_or_wait(self) -> None:
        """Take note of the calls that have ended, or look around while none has; raises as MemberWatch does."""
        if ended := self._runner.returned():
            self._members.note(alive=True)  # by the next call at the latest it is seen whether one is there
            self._calls.count_ended(ended, time.monotonic())
        else:
            self._members.wait(lambda: self._runner.is_failing and not self.has_trained)

    def _poll(self) -> None:
        """Do what is due, with calls in flight or without; raises Stopped when asked to stop, once none is."""
        self.polled = True
        is_quiet, changes = not self._calls.schedule.in_flight, self._changes
        changes.poll(self._runner.is_recovering)
        if changes.lost and is_quiet:  # which no step needed: TensorFlow has not reported it
            raise MembershipChanged(f"{', '.join(changes.lost)} has ended")
        due = self._agree_on_due(self._read_step(is_quiet))
        self._ends.update(self.step, is_quiet=is_quiet)
        if self._ends.waits_for_callbacks(self.step):
            self._leave_to_callbacks(due)
            return
        if due.save:
            changes.look_for_returned(self._runner.is_recovering)
        if due.stop or changes.lost or changes.are_wanted:
            self._calls.schedule.close()
        if is_quiet and (due.stop or self.done):
            self._end(due)
        elif is_quiet and changes.are_wanted:
            self._change_members(due)
        else:
            if due.save and not changes.returned:
                self._try_to_save(wait=False)
            if due.show:
                self._show()

    def _end(self, due: Due) -> None:
        """Save and show what the training has come to; raises Stopped where that is before its last step."""
        if due.stop:
            self.save()
        else:
            self.save_the_end()
        self._show()
        if due.stop and not self.done:
            raise Stopped

    def _change_members(self, due: Due) -> None:
        """Save, and raise MembershipChanged; returns where the save failed."""
        is_saved = self._try_to_save(wait=True)
        if due.show:
            self._show()
        if is_saved:
            raise MembershipChanged(self._changes.message)

    def _read_step(self, is_quiet: bool) -> int:
        """Note how far the training is; returns the step that was read before."""
        # With calls in flight, what the last ones counted: reading it would be one more thing that a ps may hang.
        before = self._account.reach(int(self._runner.step.numpy()) if is_quiet else self._calls.counted)
        self._resumption.refresh()
        return before

    def _agree_on_due(self, before: int) -> Due:
        """Return what is due by time, or was asked of a member: of all members in step."""
        now = time.monotonic()
        save = self._saves.schedule.is_due(before, self.step, now, lambda: self._saves.is_writing)
        show, leads = self._account.meter.is_due(now), self._account.leads
        numbers = (int(leads and number) for number in (save, show, *self._calls.schedule.sizes))
        agreed = self._runner.agree([self._members.stopping(), *numbers])
        self._calls.schedule.sizes = tuple(agreed[3:])
        self._calls.schedule.polled(self.step, time.monotonic())
        return Due(*map(bool, agreed[:3]))

    def _leave_to_callbacks(self, due: Due) -> None:
        """Leave what is due to `end_epoch`: callbacks may change the model yet, and remember what was before."""
        if due.save:
            self._saves.schedule.put_off()
        if due.stop or self._changes.lost:
            self._calls.schedule.close()
        if due.show:
            self._show()

    def _try_to_save(self, *, wait: bool) -> bool:
        """Save; returns False where that failed and the training goes on with the members that it has."""
        try:
            self.save(wait=wait)
        except StalePath:
            raise
        except Infrastructure as error:
            log.warning("%s: training goes on with the members that it has", error)
            self._changes.put_off()
            return False
        return True

    def save(
        self, *, again: bool = False, wait: bool = True, last: bool = False, patience: float | None = None
    ) -> None:
        """Save a checkpoint of this step as Saves does; `again` replaces it, since the weights have changed."""
        self._account.step = int(self._runner.step.numpy())
        if again:
            self._evaluations.log.forget(self.step)
        self._saves.save(self.step, again=again, wait=wait, last=last, patience=patience)

    def save_the_end(self, *, again: bool = False) -> None:
        """Save what the training has come to, and try until it is saved, as Saves does."""
        self._saves.save_the_end(lambda: self.save(again=again, last=True))

    def settle(self, seconds: float) -> bool:
        """Wait for the save in flight, not longer than that; returns whether it has ended."""
        return self._saves.checkpoints.settle(seconds)

    def _written(self, step: int) -> None:
        """Tell of a checkpoint that is on disk; called by the thread that wrote it."""
        self._account.checkpointed(step)
        self._evaluations.checkpointed(step)

    def evaluate(self, *, again: bool = False) -> dict[str, float]:
        """Evaluate now, if the settings give that to the coordinator; returns the metrics, or nothing.

        What this process has evaluated at this step it says again; of an earlier process's it says nothing, and
        evaluates once more when it is to do so `again`.
        """
        self._account.step = int(self._runner.step.numpy())
        if not self._evaluations.are_made_here:
            return {}
        # Members may have read different records of the last evaluation.
        is_done = self._evaluations.log.is_done(self.step)
        (done,) = self._runner.agree([int(self._account.leads and is_done and not again)])
        if done:
            return self._evaluations.log.metrics(self.step)
        if self._evaluations.are_kept and self._ends.for_callbacks and not self.done:
            self._saves.schedule.wait_for_callbacks()
        elif self._evaluations.are_kept:
            self.save(wait=False, patience=SLOW_SECONDS)  # that of a step without a checkpoint could not be kept
        started = time.monotonic()
        metrics = self._evaluations.make(self.step)
        if self._evaluations.may_write:
            self._runner.doubt()
        # Evaluating is no training: the speed that is shown next leaves it out.
        self._account.meter.leave_out(time.monotonic() - started)
        return metrics

    def _show(self) -> None:
        """Show the numbers since the last time; none when no step has ended since."""
        if self._account.show(self._calls.last) and not self._ends.for_callbacks:  # else they are the epoch's
            self._runner.reset_metrics()
