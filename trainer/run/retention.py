"""Which checkpoints of a run are kept, and why: a pure function of what is known of each. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from trainer.core.settings.config import Config

HOUR = 3600.0
# The weights may have become NaN in the very step whose loss was still a number.
SOUND = 2


def is_sound(numbers: Mapping[str, float]) -> bool | None:
    """Return whether a training step reported numbers: its loss, or all that it reports where it names none so.

    None where it reports nothing.
    """
    looked_at = [numbers["loss"]] if "loss" in numbers else list(numbers.values())
    return all(map(math.isfinite, looked_at)) if looked_at else None


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint that counts."""

    step: int
    created: float
    """Seconds since 1970."""
    size: int = 0
    """Bytes."""
    loss: float | None = None
    """The training loss when it was saved, None where it is not known."""
    sound: bool = False
    """Whether what the training reported when it was saved were numbers."""
    evaluation: Mapping[str, float] | None = None
    """The metrics of its evaluation, None without any."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rules; a checkpoint that none of them keeps is removed."""

    newest: int
    best: int = 0
    metric: str = "loss"
    mode: str = "min"
    hours: float = 0.0

    @classmethod
    def from_config(cls, config: Config) -> Retention:
        return cls(
            config.checkpoints_kept,
            config.checkpoints_kept_best,
            config.checkpoints_best_metric,
            config.best_mode,
            config.checkpoints_kept_hours,
        )

    def reasons(self, saved: Sequence[CheckpointInfo]) -> dict[int, list[str]]:
        """Say why each checkpoint is kept, by its step; `saved` has the oldest first. No reason: it can go."""
        reasons: dict[int, list[str]] = {each.step: [] for each in saved}
        for each in saved[-self.newest :]:
            reasons[each.step].append("newest")
        for step in self._best(saved):
            reasons[step].append("best")
        for step in self._spaced(saved):
            reasons[step].append("hours")
        # Else a run whose loss became NaN would soon have no other checkpoints.
        for each in [each for each in saved if each.sound][-SOUND:]:
            reasons[each.step].append("sound")
        return reasons

    def _best(self, saved: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps with the best evaluations; of equal ones the later."""
        sign = 1 if self.mode == "min" else -1
        found = {each.step: (each.evaluation or {}).get(self.metric, math.nan) for each in saved}
        ranked = sorted((sign * value, -step) for step, value in found.items() if math.isfinite(value))
        return [-step for _, step in ranked[: self.best]]

    def _spaced(self, saved: Sequence[CheckpointInfo]) -> list[int]:
        """Return the first step, and each that was saved so many hours after the one before of these."""
        found: list[CheckpointInfo] = []
        for each in saved if self.hours else ():
            if not found or abs(each.created - found[-1].created) >= self.hours * HOUR:  # a clock may be put back
                found.append(each)
        return [each.step for each in found]
