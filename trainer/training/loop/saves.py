"""How a run is saved: beside the training, before a process leaves, and at the run's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trainer.core.failures import Infrastructure, StalePath, UserError
from trainer.core.states import Phase, RunState
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import SLOW_SECONDS, Checkpoints
from trainer.training.loop.save_schedule import PATIENCE_SECONDS, SaveSchedule
from trainer.training.run_context import RunContext
from trainer.training.steps.runner import StepRunner
from trainer.training.tables.row_restores import reading
from trainer.training.tables.row_saves import snapshots_of


class Saves:
    """Makes the saves that are due, and those at an end, which must not be lost."""

    def __init__(
        self,
        context: RunContext,
        runner: StepRunner,
        *,
        numbers: Callable[[], Mapping[str, float]],
        written: Callable[[int], None],
    ) -> None:
        """`numbers` returns the numbers of the steps that ended last, by name.

        `written` hears of each step whose checkpoint is on disk, from the thread that wrote it.
        """
        config, progress = context.config, context.progress
        self._context = context
        self._runner = runner
        self._written = written
        self.schedule = SaveSchedule(config.checkpoint_steps, config.checkpoint_seconds)
        self.checkpoints = Checkpoints(
            context.directory,
            CheckpointState(
                runner.trained,
                runner.step,
                copy=runner.copy,
                tables=runner.tables,
                local_run_dir=config.local_run_dir,
                reading=reading,
                make_snapshot=snapshots_of(config, runner.marks),
            ),
            config,
            leads=progress.leads,
            lease=context.lease,
            saved=self._saved,
            set_aside=lambda message: progress.events.write("checkpoint-set-aside", message=message),
            numbers=numbers,
            position=lambda: runner.position,
        )

    def _saved(self, step: int, seconds: float, error: str | None) -> None:
        """Report how a save has ended; called by the thread that made it."""
        progress = self._context.progress
        if error:
            progress.events.write("save-failed", seconds=seconds, message=f"step {step}: {error}")
            return
        size = self._context.directory.catalogue.size(step)
        progress.events.write("checkpoint-saved", seconds=seconds, message=f"step {step}", size=size)
        progress.saved(step, seconds)
        self._written(step)

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight."""
        return not self.checkpoints.settle(0)

    def save(
        self, step: int, *, again: bool = False, wait: bool = True, last: bool = False, patience: float | None = None
    ) -> None:
        """Save a checkpoint of this step, unless there is all of one; `again` replaces it: weights have changed.

        With calls in flight its step is the one that is copied with the other variables.
        `wait` says whether to return when it is on disk, or as soon as the training can go on; `last`, that there is
        as much time as the user gives the storage; `patience`, for how long a save in flight may last that goes first
        (None: as long as Checkpoints has it).
        """
        if again:
            self._runner.doubt()
        with self._context.phases.during(Phase.SAVING):
            if wait:
                self._settle(last=last)
            # A member that is asked to save must save, even when the coordinator's files exist already.
            (there,) = self._runner.agree([int(self._context.progress.leads and self.checkpoints.has_all(step))])
            if again or not there:
                if wait and not last:
                    self.checkpoints.save_and_wait(again=again)
                else:
                    end = self.checkpoints.save(again=again, patience=patience)
                    if last:
                        self._settle(last=last)
                        end.result()
        self.schedule.saved(time.monotonic())

    def save_the_end(self, save: Callable[[], None]) -> None:
        """Try until `save` has saved the training's end: nothing is left to train meanwhile.

        Raises UserError when saves have failed for the user's limit, Infrastructure when asked to stop.
        """
        while True:
            try:
                return save()
            except Infrastructure as error:
                # Members in step save together, and so begin together again.
                in_step = self._context.config.traits.in_step
                if self._context.stopping() or in_step or isinstance(error, StalePath):
                    raise
                self._context.progress.enter(RunState.TRAINING, str(error))
                time.sleep(PATIENCE_SECONDS)

    def _settle(self, *, last: bool) -> None:
        """Wait for the save in flight; for the last one no longer than the user gives a path that may hang."""
        config, directory = self._context.config, self._context.directory
        began, limit = time.monotonic(), max(SLOW_SECONDS, config.storage_timeout_seconds)
        while not self.checkpoints.settle(PATIENCE_SECONDS if last else None):
            seconds = time.monotonic() - began
            if seconds > limit:
                raise UserError(
                    f"the last checkpoint is not written to {directory.checkpoints} after {seconds:.0f} s; "
                    f"that is longer than storage_timeout_seconds, {config.storage_timeout_seconds:g}"
                )
            self._context.phases.progressed()
