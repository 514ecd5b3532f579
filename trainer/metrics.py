"""One writer for what is measured: the log, TensorBoard, status.json and systemd show the same numbers."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.checkpoints import RunDirectory
from trainer.config import Config
from trainer.failures import first_line
from trainer.notify import Notifier
from trainer.status import numbers, read_status

log = logging.getLogger(__name__)


class EventWriter:
    """Scalars for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        import tensorflow as tf

        self._summary, self._errors = tf.summary, tf.errors
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the values; what can't be written is lost, with a warning: no training ends for it."""
        try:
            with self._writer.as_default(step):
                for name, value in values.items():
                    self._summary.scalar(name, value)
            self._writer.flush()
        except self._errors.OpError as error:
            log.warning("cannot write TensorBoard's events of step %d: %s", step, first_line(error))


class Progress:
    """Says how training is doing, everywhere at once; a member that does not lead tells only systemd."""

    def __init__(self, config: Config, directory: RunDirectory, notifier: Notifier, leads: bool = True) -> None:
        self.leads = leads
        self._directory = directory
        self._notifier = notifier
        self._events: EventWriter | None = None
        self.status = read_status(directory)
        self.status.program, self.status.steps = config.program, config.steps
        self.status.steps_per_second = self.status.eta_seconds = None

    def enter(self, state: str, message: str = "") -> None:
        """Enter a state, with what the operator should know about it."""
        self.status.state, self.status.message = state, message
        if state != "training":
            self.status.steps_per_second = self.status.eta_seconds = None
        self._show()

    def checkpointed(self, checkpoint: str, step: int) -> None:
        self.status.checkpoint, self.status.step = checkpoint, step
        self._show()

    def exported(self, export: str) -> None:
        self.status.export = export

    def trained(self, step: int, steps_per_second: float, values: dict[str, float]) -> None:
        """Show the step, the speed since the last time, and the loss and metrics since then."""
        status = self.status
        status.step, status.steps_per_second = step, round(steps_per_second, 3)
        status.eta_seconds = round(max(0, (status.steps or 0) - step) / steps_per_second, 1)
        status.loss = values.get("loss")
        status.metrics = {name: value for name, value in values.items() if name != "loss"}
        if not self.leads:
            return self._show()
        if self._events is None:
            self._events = EventWriter(self._directory.train_events)
        self._events.write(step, {**values, "steps_per_second": steps_per_second})
        log.info("step %d of %d, %.4g steps/s, %s", step, status.steps, steps_per_second, numbers(values))
        self._show()

    def _show(self) -> None:
        self._notifier.status(self.status.line())
        if not self.leads:
            return
        try:
            self.status.write(self._directory)
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.status, error)
