"""Since when members of a generation lack ways to others; time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

# A call that has no way to a ps ends with an error by then, unless it waits for an answer that was lost.
STUCK_SECONDS = 10.0
# For which a ps must have been without any way to a worker.
LOST_SECONDS = 5.0


class MissingWays:
    """Finds the members that are to be left out, since a way is missing for too long."""

    def __init__(self) -> None:
        self._parted_since: dict[str, float] = {}  # since when a worker that trains lacks a way
        self._lost_since: dict[str, float] = {}  # likewise a ps, to all workers

    def forget(self) -> None:
        """No generation trains now."""
        self._parted_since, self._lost_since = {}, {}

    def find_lasting(
        self,
        training: Collection[str],
        parted: Mapping[str, str],
        lost: Mapping[str, str],
        busy: Mapping[str, float],
        now: float,
    ) -> Iterator[tuple[str, str]]:
        """Yield each member to be left out, and why.

        `training` are the workers that train, `parted` those that lack a way, `lost` the ps to which no worker has
        one: each with the reason. `busy` tells since when each worker runs the call that it runs now.
        """
        lost = {} if training else lost
        self._parted_since = {task: self._parted_since.get(task, now) for task in training if task in parted}
        self._lost_since = {task: self._lost_since.get(task, now) for task in lost}
        for task, since in self._parted_since.items():
            # A way that takes no new connection may still have those that there are.
            if now - max(since, busy.get(task, now)) > STUCK_SECONDS:
                yield task, parted[task]
        for task, since in self._lost_since.items():
            if now - since > LOST_SECONDS:
                yield task, lost[task]
