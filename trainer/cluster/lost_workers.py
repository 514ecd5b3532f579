"""The workers that TensorFlow has lost, and those that it is to be given back; time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trainer.cluster.member import to_take_in


class LostWorkers:
    """Knows since when each lost worker is lost, and asks all of them again once one is back."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}
        """The lost workers, and since when; other threads add to it."""
        self._asked_again: float | None = None

    def look(
        self, workers: Collection[str], serving: Callable[[float], Collection[str]], now: float
    ) -> tuple[set[str], set[str]] | None:
        """Return those to be given back now, perhaps none yet, and those that stay lost; None while none is back.

        `serving` returns the workers that have answered since a time.
        """
        lost = dict(self.since)
        if lost.keys().isdisjoint(serving(max(lost.values(), default=0.0))):
            self._asked_again = None
            return None
        # A worker is back: the others must say once more that they are.
        self._asked_again = self._asked_again or now
        back = to_take_in(workers, lost, serving(self._asked_again))
        if back:
            self._asked_again = None
        return back, lost.keys() - back
