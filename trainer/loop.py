"""The custom loop: blocks of calls, each call a packed number of steps on one worker.

restore, then {train a block, save if due, log if due} until the last step or a request to stop
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.checkpoints import Checkpoints, RunDirectory
from trainer.config import Config
from trainer.failures import UserError
from trainer.input import train_dataset_fn
from trainer.metrics import Progress
from trainer.pacing import Pacer
from trainer.program import build_model

log = logging.getLogger(__name__)


class CustomLoop:
    """A program's model and data on a parameter server strategy, ready to train."""

    def __init__(
        self, config: Config, program: Any, strategy: Any, workers: int, directory: RunDirectory, progress: Progress
    ) -> None:
        self._config = config
        self._progress = progress
        self._workers = workers
        self._pacer = Pacer(config.steps_per_call, workers, config.log_seconds)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._model = build_model(program)
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self._dataset = self._coordinator.create_per_worker_dataset(train_dataset_fn(program, workers))
        self._iterator = iter(self._dataset)
        self._call = self._trace(strategy)
        self.checkpoints = Checkpoints(directory, self._model, self._step, config.checkpoints_kept)

    @property
    def step(self) -> int:
        return int(self._step.numpy())

    @property
    def element_spec(self) -> Any:
        """What the program's training data consists of."""
        return self._dataset.element_spec

    def _trace(self, strategy: Any) -> Any:
        """Trace the packed call; this makes what a lazily built model and its optimizer still lack."""
        model, step = self._model, self._step

        @tf.function
        def train_call(iterator: Any, steps: tf.Tensor) -> Any:
            for _ in tf.range(steps):
                outputs = strategy.run(model.train_step, args=(next(iterator),))
            # Once a call, so that a call that is run again on another worker counts once.
            step.assign_add(steps)
            return outputs

        # The worker-specific type of a per-worker value has no public name; `schedule` takes it from here too.
        element = self._iterator._values[0]._type_spec
        with strategy.scope(), quiet_tracing():
            return train_call.get_concrete_function(element, tf.TensorSpec([], tf.int64))

    def restore(self) -> None:
        """Go back to the newest checkpoint; a new run has none and stays at step 0."""
        saved = self.checkpoints.restore()
        if saved:
            self._progress.checkpointed(saved, self.step)
            log.info("going on at step %d of %d", self.step, self._config.steps)

    def train(self, stopping: Callable[[], bool]) -> dict[str, float]:
        """Train to the last step, or until `stopping`; leaves a checkpoint and returns the last loss and metrics."""
        config, progress = self._config, self._progress
        step = logged_step = self.step
        saved_at = logged_at = time.monotonic()
        values: dict[str, float] = {}
        progress.status.step = step
        progress.enter("training")
        while step < config.steps and not stopping():
            outputs = self._train_block(min(config.steps, self._next_save(step)) - step)
            step = self.step
            now = time.monotonic()
            done = step >= config.steps or stopping()
            if done or self._save_due(step, now - saved_at):
                progress.checkpointed(self.checkpoints.save(), step)
                saved_at = time.monotonic()
            if done or now - logged_at >= config.log_seconds:
                values = fetch_numbers(outputs)
                progress.trained(step, (step - logged_step) / max(now - logged_at, 1e-9), values)
                self._model.reset_metrics()
                logged_step, logged_at = step, time.monotonic()
        if not progress.status.checkpoint:
            progress.checkpointed(self.checkpoints.save(), step)
        return values

    def _train_block(self, remaining: int) -> Any:
        """Train at most `remaining` steps on all workers and wait for them; returns the last call's outputs."""
        calls = self._pacer.plan(remaining)
        started = time.monotonic()
        outputs = None
        for steps in calls:
            outputs = self._coordinator.schedule(self._call, args=(self._iterator, tf.constant(steps, tf.int64)))
        try:
            self._coordinator.join()
        except tf.errors.OutOfRangeError as error:
            raise UserError(
                f"a worker's part of the training data is empty: {self._workers} workers share it"
            ) from error
        self._pacer.measured(calls, time.monotonic() - started)
        return outputs

    def _next_save(self, step: int) -> int:
        every = self._config.checkpoint_steps
        return (step // every + 1) * every if every else self._config.steps

    def _save_due(self, step: int, seconds: float) -> bool:
        every, interval = self._config.checkpoint_steps, self._config.checkpoint_seconds
        return bool((every and step % every == 0) or (interval and seconds >= interval))


def fetch_numbers(outputs: Any) -> dict[str, float]:
    """Fetch what train_step returned last: the loss and the metrics since they were reset."""
    fetched = outputs.fetch()
    if not isinstance(fetched, dict):
        fetched = {"loss": fetched}
    return {str(name): float(value) for name, value in fetched.items() if getattr(value, "ndim", 0) == 0}


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Drop TensorFlow's warning that `run` was called outside `schedule`: it is only being traced."""

    def keep(record: logging.LogRecord) -> bool:
        return "method is invoked without using `ClusterCoordinator.schedule`" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
