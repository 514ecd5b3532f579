"""The course of a run: how long the next block of calls is, and what is due after it.

Both loops follow it, so that they save, log and stop by the same rules. Under multi_worker_mirrored every member
follows one, and the members agree after each block on what is due by time or was asked of one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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
from trainer.training.evaluation import Results
from trainer.training.pacing import Pacer
from trainer.training.step_runner import fetch_numbers

log = logging.getLogger(__name__)
STOP_PATIENCE_SECONDS = 20.0
PATIENCE_SECONDS = 5.0


class Controller:
    """Where a run stands: its step, its checkpoints, its numbers."""

    def __init__(
        self,
        config: Config,
        replicas: Any,
        directory: RunDirectory,
        progress: Progress,
        stopping: Callable[[], bool],
        evaluate: Callable[[], dict[str, float]] | None,
        phases: Phases,
        members: Membership | None = None,
        began: float = 0.0,
        lease: Lease | None = None,
    ) -> None:
        """Take what trains, where it is recorded, and who is asked what is due.

        `members` knows of members that are gone or back. `began` (of time.monotonic) is when the time without training
        began that ends with the first block.
        """
        self._config = config
        self._replicas = replicas
        self._directory = directory
        self._progress = progress
        self._stopping = stopping
        self._evaluate = evaluate
        self._phases = phases
        self._members = members
        self._asked_at: float | None = None
        self._idle_at: float | None = None
        self._used = 0.0
        self._began = began
        self.advanced = False
        """Whether a block has ended."""
        self._pacer = Pacer(config.steps_per_execution, replicas.parallel, config.log_seconds)
        self._checkpoints = Checkpoints(
            directory,
            replicas.model,
            replicas.step,
            config,
            leads=progress.leads,
            lease=lease,
            saved=self._saved,
            set_aside=lambda message: progress.events.write("checkpoint-set-aside", message=message),
        )
        self.step = 0
        self._ended_epoch = False
        self._saved_at = self._logged_at = self._block_at = time.monotonic()
        self._logged_step = 0
        self.values: dict[str, float] = {}
        self._results: Results | None = None
        self._evaluated = int((read_record(directory.evaluation) or {}).get("step", -1))

    def restore(self) -> None:
        """Go back to the newest checkpoint; a new run has none and stays at step 0."""
        replicas, checkpoints = self._replicas, self._checkpoints
        saved = checkpoints.restore() if self._progress.leads else None
        # The coordinator tries them; the other members read the one that it took.
        (agreed,) = replicas.agree([-1 if saved is None else saved])
        if agreed >= 0 and saved is None:
            checkpoints.read(agreed)
        self.step = int(replicas.step.numpy())
        self._ended_epoch = self.step > 0 and self.step % self.epoch_steps == 0
        if self._evaluated != self.step:
            self._evaluated = -1  # if it was a later step, of weights that are lost
        lost = self._progress.ledger.restored(self.step)
        self._progress.events.write("restored", steps_lost=lost, message=f"step {self.step}")
        if agreed < 0:
            return
        self._progress.checkpointed(self._directory.catalogue.prefix(agreed), self.step)
        log.info("going on at step %d of %d", self.step, self._config.steps)

    @property
    def done(self) -> bool:
        return self.step >= self._config.steps

    @property
    def final(self) -> bool:
        """Return whether the checkpoint of this step is what `fit` has made of it at the end of the training."""
        return bool(self._replicas.agree([int(self._progress.leads and self._checkpoints.is_final(self.step))])[0])

    @property
    def epoch_steps(self) -> int:
        return self._config.epoch_steps or self._config.steps

    @property
    def epoch_ended(self) -> bool:
        return self.done or self._ended_epoch

    def begin(self) -> None:
        """Start the clocks: the training begins now. Evaluates an epoch after whose end it was stopped."""
        self._saved_at = self._logged_at = self._block_at = time.monotonic()
        self._logged_step = self.step
        self._progress.status.step = self.step
        self._phases.enter("training")
        self._progress.enter("training")
        if self.epoch_ended:
            self.evaluate()

    def plan(self) -> list[int]:
        """Return the steps of each call of the next block, which ends where something is due."""
        config, every = self._config, self._config.checkpoint_steps
        ends = [config.steps, (self.step // self.epoch_steps + 1) * self.epoch_steps]
        if every:
            ends.append((self.step // every + 1) * every)
        self._calls = self._pacer.plan(min(ends) - self.step)
        self.block_begins()
        return self._calls

    def block_begins(self) -> None:
        """Start the clock of a block whose first call was not made at once."""
        self._block_at = time.monotonic()

    def waiting(self) -> None:
        """Look around while calls are in flight.

        Leaves when asked to stop and they will not end in time, or when no worker came for the user's limit; raises
        Stopped, and UserError.
        """
        alive = self._members is None or bool(self._members.workers_serving())
        self._wait_for_workers(alive)
        if not self._stopping():
            return
        self._asked_at = self._asked_at or time.monotonic()
        why = ""
        if time.monotonic() - self._asked_at > STOP_PATIENCE_SECONDS:
            why = f"a call has not ended {STOP_PATIENCE_SECONDS:.0f} s after the request to stop"
        elif not alive:
            why = "no worker is there to end the calls in flight"
        if why:
            log.warning("%s: saving without it", why)
            self.save()
            raise Stopped

    def _wait_for_workers(self, alive: bool) -> None:
        """Tell the time in which no worker is there from that of the training, which it neither is nor slows down."""
        now, limit = time.monotonic(), self._config.member_wait_timeout_seconds
        if not alive and self._idle_at is None:
            self._idle_at, self._used = now, self._phases.seconds
            self._phases.enter("waiting")
            self._progress.enter("waiting", "no worker answers: going on with the first that is back")
        elif not alive and self._idle_at is not None and 0 < limit < now - self._idle_at:
            self.save()
            raise UserError(f"waited {now - self._idle_at:.0f} s (member_wait_timeout_seconds) for a worker: start one")
        elif alive and self._idle_at is not None:
            self._block_at += now - self._idle_at
            self._logged_at += now - self._idle_at
            self._idle_at = None
            # A worker that comes and goes shall not have the deadline begin anew each time.
            self._phases.enter("training", self._used)
            self._progress.enter("training")

    def block_ended(self, outputs: Any, reset_metrics: bool = True) -> None:
        """Do what is due now that all calls of the block have ended; raises Stopped when asked to stop."""
        config, replicas = self._config, self._replicas
        if self._members and (lost := self._members.lost_ps()):
            raise MembershipChanged(f"{', '.join(lost)} has ended")  # which no step needed: TensorFlow has not said so
        self._wait_for_workers(alive=True)  # by the next call at the latest it is seen whether one is there
        self._pacer.measured(self._calls, time.monotonic() - self._block_at)
        before, self.step = self.step, int(replicas.step.numpy())
        now = time.monotonic()
        self._phases.progressed()
        self._progress.ledger.trained(self.step)
        if not self.advanced:
            self.advanced = True
            self._progress.events.write("training", seconds=now - self._began, message=f"step {self.step}")
        every, interval = config.checkpoint_steps, config.checkpoint_seconds
        # A call that ran twice, because its worker died, takes the step beyond where the block was to end.
        self._ended_epoch = self.step // self.epoch_steps > before // self.epoch_steps
        passed = bool(every and self.step // every > before // every)
        save_due = passed or bool(interval and now - self._saved_at >= interval)
        log_due = now - self._logged_at >= config.log_seconds
        leads = self._progress.leads
        stop, save, show, *sizes = replicas.agree(
            [self._stopping(), *(int(leads and number) for number in (save_due, log_due, *self._pacer.sizes))]
        )
        self._pacer.sizes = (sizes[0], sizes[1])
        ends = stop or self.done
        returned = self._returned() if save and not ends else []
        if self.done and not stop:
            self.save_the_end()
        elif save or ends:
            try:
                self.save(wait=bool(ends or returned))
            except Infrastructure as error:
                if ends or isinstance(error, StalePath):
                    raise
                log.warning("%s: training goes on, without %s", error, ", ".join(returned))
                returned = []
        if show or ends:
            self._show(outputs, reset_metrics)
        if stop and not self.done:
            raise Stopped
        if returned:
            raise MembershipChanged(f"{', '.join(returned)} answers again")

    def save(self, again: bool = False, wait: bool = True, last: bool = False) -> None:
        """Save a checkpoint of this step, unless there is one; `again` replaces it, since the weights have changed.

        `wait` says whether to return when it is on disk, or as soon as the training can go on; `last`, that there is
        as much time as the user gives the storage.
        """
        self.step = int(self._replicas.step.numpy())
        if again:
            self._evaluated = -1
        with self._phases.during("saving"):
            if wait:
                self._settle(last)
            # A member that is told to save must save, even when the coordinator's files are there already.
            (there,) = self._replicas.agree([int(self._progress.leads and self._checkpoints.has(self.step))])
            if again or not there:
                if wait and not last:
                    self._checkpoints.save_and_wait(again=again)
                else:
                    end = self._checkpoints.save(again=again)
                    if last:
                        self._settle(last)
                        end.result()
        self._saved_at = time.monotonic()

    def save_the_end(self, again: bool = False) -> None:
        """Save what the training has come to, and try until it is saved: nothing is left to train meanwhile.

        Raises UserError when saves have failed for the user's limit, Infrastructure when asked to stop.
        """
        while True:
            try:
                self.save(again, last=True)
                return
            except Infrastructure as error:
                # Members in step save together, and so begin together anew.
                in_step = self._config.strategy == "multi_worker_mirrored"
                if self._stopping() or in_step or isinstance(error, StalePath):
                    raise
                self._progress.enter("training", str(error))
                time.sleep(PATIENCE_SECONDS)

    def _settle(self, last: bool) -> None:
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

    def _returned(self) -> list[str]:
        """Return the members that can be taken in now: not while TensorFlow takes in another, or saves fail."""
        if self._members is None or not self._config.elastic or self._replicas.recovering:
            return []
        if self._checkpoints.trouble() is not None or not self._checkpoints.settle(PATIENCE_SECONDS):
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
        self._progress.events.write("checkpoint-saved", seconds=seconds, message=f"step {step}")
        self._progress.checkpointed(self._directory.catalogue.prefix(step), max(step, self.step))

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, if the settings give that to the coordinator; returns the metrics, or nothing."""
        self.step = int(self._replicas.step.numpy())
        if self._evaluate is None:
            return {}
        # Members may have read different records of the last evaluation.
        (done,) = self._replicas.agree([int(self._progress.leads and self._evaluated == self.step)])
        if done:
            return {}
        self._progress.enter("training", "evaluating")
        started = time.monotonic()
        with self._phases.during("evaluating"):
            metrics = self._evaluate()
        self._evaluated = self.step
        if self._progress.leads:
            self._results = self._results or Results(self._directory, self._progress.post)
            self._results.publish(self.step, metrics, time.monotonic() - started)
            self._progress.events.write("evaluated", seconds=time.monotonic() - started, message=f"step {self.step}")
        self._progress.enter("training")
        # Evaluating is no training: the speed that is shown next leaves it out.
        self._logged_at += time.monotonic() - started
        return metrics

    def _show(self, outputs: Any, reset_metrics: bool) -> None:
        now = time.monotonic()
        self.values = fetch_numbers(outputs)
        speed = (self.step - self._logged_step) / max(now - self._logged_at, 1e-9)
        self._progress.trained(self.step, speed, self.values)
        if reset_metrics:
            self._replicas.model.reset_metrics()
        self._logged_step, self._logged_at = self.step, time.monotonic()
