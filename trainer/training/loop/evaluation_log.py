"""Which step was evaluated last, what came out, and which evaluations wait for their checkpoints."""

from __future__ import annotations


class EvaluationLog:
    """Remembers a run's evaluations. A thread that writes a checkpoint may call `checkpointed`."""

    def __init__(self, step: int = -1) -> None:
        """Take the step that an earlier process evaluated last; -1 for none."""
        self._step = step
        self._measured: tuple[int, dict[str, float]] = (-1, {})  # by this process
        self._unsaved: dict[int, dict[str, float]] = {}

    def is_done(self, step: int) -> bool:
        """Return whether this step is evaluated."""
        return self._step == step

    def metrics(self, step: int) -> dict[str, float]:
        """Return this process's metrics of this step; nothing where it is another's, or another step was evaluated."""
        return self._measured[1] if self._measured[0] == step else {}

    def restored(self, step: int) -> None:
        """Go on from this step: an evaluation of another step was of weights that are lost."""
        if self._step != step:
            self._step = -1

    def evaluated(self, step: int, metrics: dict[str, float], *, is_kept: bool) -> None:
        """Remember the metrics; `is_kept` says that they belong beside this step's checkpoint once it is written."""
        self._step = step
        self._measured = (step, metrics)
        if is_kept:
            self._unsaved[step] = metrics

    def forget(self, step: int) -> None:
        """The weights of this step have changed: no evaluation is of them."""
        self._step, self._measured = -1, (-1, {})
        self._unsaved.pop(step, None)

    def checkpointed(self, step: int) -> dict[str, float] | None:
        """Return the metrics that waited for this step's checkpoint. Those of earlier steps wait no more."""
        metrics = None
        for evaluated in [each for each in self._unsaved.copy() if each <= step]:
            found = self._unsaved.pop(evaluated, None)
            metrics = found if evaluated == step else metrics
        return metrics
