"""The evaluations that the coordinator makes itself, at the ends of epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from trainer.core.states import Phase, RunState
from trainer.run.records import read_record
from trainer.training.evaluation import Results
from trainer.training.loop.evaluation_log import EvaluationLog
from trainer.training.run_context import RunContext


class Evaluations:
    """Evaluates, publishes the metrics, and keeps them beside the checkpoints where the best are kept."""

    def __init__(self, context: RunContext, evaluate: Callable[[], dict[str, float]] | None) -> None:
        """`evaluate` returns the metrics of the model as it is; None where the settings leave that to others."""
        self._evaluate = evaluate
        self.are_made_here = evaluate is not None
        self.may_write = getattr(evaluate, "may_write", True)
        """Whether an evaluation may change weights, as a test_step of the program's may."""
        self._progress, self._phases, self._directory = context.progress, context.phases, context.directory
        self._best_metric = context.config.best_metric
        self._results: Results | None = None
        self.are_kept = bool(context.config.checkpoints_kept_best)
        """Whether metrics belong beside their checkpoints, by which these are kept."""
        self.log = EvaluationLog(int((read_record(self._directory.evaluation) or {}).get("step", -1)))

    def make(self, step: int) -> dict[str, float]:
        """Evaluate the model, which is of this step, and publish the metrics; returns them by name."""
        assert self._evaluate is not None
        self._progress.enter(RunState.TRAINING, "evaluating")
        started = time.monotonic()
        with self._phases.during(Phase.EVALUATING):
            metrics = self._evaluate()
        self.log.evaluated(step, metrics, is_kept=self.are_kept and self._progress.leads)
        if self._progress.leads:
            self._publish(step, metrics, started)
        self._progress.enter(RunState.TRAINING)
        return metrics

    def _publish(self, step: int, metrics: dict[str, float], started: float) -> None:
        self._results = self._results or Results(self._directory, self._progress.post, self._best_metric)
        self._results.publish(step, metrics, time.monotonic() - started, checkpointed=self.are_kept)
        self._progress.evaluated(step, metrics)
        self._progress.events.write("evaluated", seconds=time.monotonic() - started, message=f"step {step}")

    def checkpointed(self, step: int) -> None:
        """Write the metrics that waited for this step's checkpoint; called by the thread that wrote it."""
        if (metrics := self.log.checkpointed(step)) is not None:
            self._progress.post(partial(self._directory.catalogue.write_evaluation, step, metrics))
