"""What a run tells of its training: how far it is, and its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.core.states import Phase, RunState
from trainer.training.loop.progress_meter import ProgressMeter
from trainer.training.run_context import RunContext


class Account:
    """Keeps the step, and tells of it, of the first one that is made, and of checkpoints and numbers."""

    def __init__(self, context: RunContext, meter: ProgressMeter, began: float) -> None:
        """`began` (of time.monotonic) is when the time without training began that ends with the first step."""
        self._progress, self._phases, self._directory = context.progress, context.phases, context.directory
        self.meter = meter
        self.leads = context.progress.leads
        """Whether this process is the one that tells of the run."""
        self._began: float | None = began
        self.step = 0
        """The step that was read last; calls in flight may have gone on since."""
        self.values: dict[str, float] = {}
        """The numbers that were shown last."""

    def begin(self) -> None:
        """The training begins now."""
        self.meter.begin(self.step, time.monotonic())
        self._progress.status.step = self.step
        self._phases.enter(Phase.TRAINING)
        self._progress.enter(RunState.TRAINING)

    def reach(self, step: int) -> int:
        """Note how far the training is; returns the step that was read before."""
        before, self.step = self.step, step
        self._phases.progressed()
        self._progress.ledger.trained(step)
        if before < step and self._began is not None:
            seconds, self._began = time.monotonic() - self._began, None
            self._progress.events.write("training", seconds=seconds, message=f"step {step}")
            self._progress.advanced(step)
        return before

    def checkpointed(self, step: int) -> None:
        """A checkpoint is on disk; called by the thread that wrote it."""
        self._progress.checkpointed(self._directory.catalogue.prefix(step), max(step, self.step))

    def show(self, read: Callable[[], dict[str, float]]) -> bool:
        """Show the numbers of the training since the last time, which `read` returns; False where there is nothing."""
        stretch = self.meter.stretch(self.step, time.monotonic())
        if stretch is None:
            return False
        self.values = read()
        self._progress.trained(self.step, stretch.speed, self.values, stretch.given, stretch.seconds)
        self.meter.begin(self.step, time.monotonic())
        return True
