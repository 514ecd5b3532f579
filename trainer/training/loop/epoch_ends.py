"""The steps that a run must meet exactly: ends of epochs, of saves in step, and the run's own."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.settings.config import Config


@dataclass
class EpochEnds:
    """Where calls must end, and whether the last look stood at an epoch's end."""

    steps: int
    """Of the run."""
    epoch_steps: int
    meets_epochs: bool
    """Whether each epoch's end must be met, or only the run's."""
    checkpoint_steps: int = 0
    """The steps between saves that must be met as well; 0 where none must."""
    for_callbacks: bool = False
    """Whether callbacks hear of each epoch's end."""
    heard: bool = False
    """Whether they have heard of this one."""
    begun_at: int = 0
    """The step where the present stretch of calls began."""
    ended: bool = False

    @classmethod
    def from_config(cls, config: Config, *, evaluated: bool, for_callbacks: bool) -> EpochEnds:
        """Return the ends of the settings' run, and whether each epoch's end is evaluated, and callbacks hear of it."""
        in_blocks = not config.traits.remote
        saves = config.checkpoint_steps if in_blocks else 0
        meets_epochs = in_blocks or evaluated or for_callbacks
        return cls(config.steps, config.epoch_steps or config.steps, meets_epochs, saves, for_callbacks)

    def restored(self, step: int) -> None:
        """Go on from this step."""
        self.ended = step > 0 and step % self.epoch_steps == 0

    def begin(self, step: int) -> int:
        """Begin a stretch of calls at this step; returns the next step that must be met exactly."""
        self.begun_at, self.ended = step, False
        periods = [self.epoch_steps] if self.meets_epochs else []
        periods += [self.checkpoint_steps] if self.checkpoint_steps else []
        return min([self.steps, *((step // period + 1) * period for period in periods)])

    def update(self, step: int, *, is_quiet: bool) -> None:
        """Note whether an epoch has ended with no call in flight.

        A call that ran twice, because its worker died, takes the step beyond where the calls were to end.
        """
        self.ended = is_quiet and step // self.epoch_steps > self.begun_at // self.epoch_steps

    def waits_for_callbacks(self, step: int) -> bool:
        """Return whether callbacks must hear of an epoch's end before more is done; not of the run's end."""
        return self.for_callbacks and self.ended and not self.heard and step < self.steps
