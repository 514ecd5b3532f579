"""Where a run goes on: at the variables on the ps, at its newest checkpoint, or at its initial weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainer.run.saves.checkpoints import Checkpoints
from trainer.training.handover import Handover
from trainer.training.run_context import RunContext
from trainer.training.steps.runner import StepRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Brings a run's variables to where the run stands."""

    context: RunContext
    runner: StepRunner
    checkpoints: Checkpoints
    handover: Handover | None
    read_initial_weights: Callable[[], str] | None

    def restore(self) -> int:
        """Go on with what is on the ps, or go back to the newest checkpoint; a new run has neither. Returns the step.

        Members in step agree: the coordinator tries checkpoints, the others read the one that it took.
        """
        progress, membership = self.context.progress, self.context.membership
        lacking = self.handover.lacking if self.handover is not None else set()
        attached = self._attach_in_part() if lacking else self._attach()
        if not attached and self.runner.tables is not None:
            self.runner.tables.begin()
        taken = self._newest() if attached else self._read_checkpoint()
        if not attached and taken < 0 and self.read_initial_weights is not None:
            progress.events.write("initial-weights", message=self.read_initial_weights())
            self.checkpoints.prepare()
            self.checkpoints.save_and_wait()  # from which a recovery takes them, wherever they came from
        self._read_on(attached, taken)
        step = int(self.runner.step.numpy())
        lost = progress.ledger.restored(step)
        message = f"step {step}"
        if attached and lacking and membership is not None:
            message += f"; {', '.join(membership.servers[each] for each in sorted(lacking))} of step {taken}"
        progress.events.write("attached" if attached else "restored", steps_lost=lost, message=message)
        self.checkpoints.prepare()
        if self.handover is not None:  # last: until then counts what an earlier one offers, with its step
            self.handover.offer(self.runner.trained, self.runner.step, self.runner.position, self.runner.tables)
        if taken >= 0:
            progress.checkpointed(self.context.directory.catalogue.prefix(taken), step)
        if attached or taken >= 0:
            log.info("going on at step %d of %d", step, self.context.config.steps)
        return step

    def refresh(self) -> None:
        """Leave to a later coordinator how far the training is, beside the variables on the ps."""
        if self.handover is not None:
            self.handover.refresh(self.runner.position)

    def _newest(self) -> int:
        newest = self.context.directory.catalogue.newest()
        return -1 if newest is None else newest

    def _attach(self) -> bool:
        """Take the variables that an earlier coordinator left on the ps, if they are there; returns whether."""
        newest = self.context.directory.catalogue.newest()
        # At the run's end `fit` changes the weights once more: only the checkpoint is sure to be older.
        if self.handover is None or (newest or 0) >= self.context.config.steps:
            return False
        runner = self.runner
        if not self.handover.take_over(runner.trained, runner.step, newest or 0, runner.copy, runner.tables):
            return False
        log.info("attached to the variables on the ps, at step %d", int(self.runner.step.numpy()))
        self.checkpoints.skip_restore(newest)
        return True

    def _attach_in_part(self) -> bool:
        """Take the newest checkpoint's variables for ps that are other processes since, and of the others their own."""
        assert self.handover is not None
        runner, steps = self.runner, self.context.config.steps
        # Without a checkpoint, or at the run's end, all go back.
        if not 0 <= self._newest() < steps or (runner.tables is not None and not runner.tables.are_left):
            return False
        taken = self._read_checkpoint()
        if not self.handover.take_over(runner.trained, runner.step, max(taken, 0), runner.copy, runner.tables):
            return False
        log.info("only what lost ps had is of the checkpoint")
        return True

    def _read_checkpoint(self) -> int:
        """Restore the checkpoint that the coordinator takes; returns its step, -1 for none."""
        saved = self.checkpoints.restore() if self.context.progress.leads else None
        (agreed,) = self.runner.agree([-1 if saved is None else saved])
        if agreed >= 0 and saved is None:
            self.checkpoints.read(agreed)
        return agreed

    def _read_on(self, attached: bool, taken: int) -> None:
        """Read the data on from where they were read, as far as that is known."""
        position = self.handover.position if self.handover is not None and attached else None
        if position is None and taken >= 0 and self.runner.position is not None:
            position = self.checkpoints.position(taken)
        if position is not None and (why := self.runner.go_on_from(position)):
            log.warning("the pass over the data begins again: %s", why)
            self.context.progress.events.write("pass-restarted", message=why)
