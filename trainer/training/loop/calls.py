"""The calls of a generation: given out, returned, and counted for each worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from trainer.core.states import RunState
from trainer.telemetry.progress import Progress
from trainer.training.loop.progress_meter import ProgressMeter
from trainer.training.loop.scheduler import Schedule
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.steps.runner import Call, StepRunner

log = logging.getLogger(__name__)


class Calls:
    """Gives calls to the runner as the schedule says, and counts those that have ended."""

    def __init__(
        self,
        runner: StepRunner,
        schedule: Schedule,
        progress: Progress,
        meter: ProgressMeter,
        tasks: Sequence[str],
        workers: int,
    ) -> None:
        """Take the tasks whose steps are shown, in the order in which calls number their workers, and how many train.

        Where this process trains, it is the only one and no task is shown.
        """
        self.count = workers
        """How many workers train."""
        self._runner = runner
        self.schedule = schedule
        self._progress = progress
        progress.counters.file_sizes, progress.counters.lookups = lambda: runner.file_sizes, lambda: runner.lookups
        self._meter = meter
        self._tasks = dict(enumerate(tasks))
        self.workers: set[int] = set()
        """The workers that have ended a call."""
        self.counted = 0
        """The highest step that a call has counted."""
        self._news = ""
        self.outputs: Any = None
        """What train_step returned in the call that ended last."""

    def last(self) -> dict[str, float]:
        """Return the numbers of the call that ended last by name, with metrics over all calls since they were reset."""
        return {} if self.outputs is None else fetch_numbers(self._runner.aggregate_outputs(self.outputs))

    def alone(self) -> dict[str, float]:
        """Return the numbers of the call that ended last by name, of its own steps."""
        return {} if self.outputs is None else fetch_numbers(self.outputs)

    def join(self, task: str) -> None:
        """One more worker takes calls; its number is the next one."""
        self._tasks[self.count] = task
        self.count += 1
        self.schedule.join()
        self._meter.join(task)
        self._progress.counters.workers = [*self._progress.counters.workers, task]

    def give(self, steps: int) -> Call:
        """Give out a call of so many steps."""
        call = self._runner.call(steps)
        self.schedule.given(steps)
        return call

    def count_ended(self, ended: list[Call], now: float) -> None:
        """Count calls that have ended."""
        for call in ended:
            self.workers.add(call.worker)
            done = call.steps if call.done is None else call.done
            if task := self._tasks.get(call.worker):
                self._meter.add_steps(task, done)
                self._progress.history.add_steps(task, done)
            self.counted = max(self.counted, call.counted)
            # One that waited for data says nothing of how long a step takes.
            is_whole = done == call.steps
            seconds = self.schedule.returned(done if is_whole else 0, call.began, call.worker, now)
            if not is_whole:
                self.schedule.undone(call.steps - done)
            self._progress.counters.returned(call.worker, done, seconds, call.stale, call.input_wait)
            if done:
                self.outputs = call.outputs
        if (news := self._runner.news) != self._news:
            self._news = news
            if news:
                log.info("%s", news)
            self._progress.enter(RunState.TRAINING, news)
        self._progress.counters.update_wait_seconds = self._runner.seconds_waited
        if self._runner.tables is not None:
            self._progress.counters.tables = dict(self._runner.tables.counts)
        self._progress.counters.files = self._runner.files
