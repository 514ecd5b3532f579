"""How steps become calls: how many steps a worker is given at once, and when.

A call is what a worker is given at once. Two classes answer, with the same methods. `AsyncSchedule` is for workers that
go at their own pace: it keeps calls queued for them, and none waits for another. `LockstepSchedule` is for replicas
in step, which do the same calls at the same time and agree after each block of them. Neither knows TensorFlow; time is
an argument.
"""

from __future__ import annotations

import math
import statistics
from typing import Protocol

from trainer.core.settings.config import Config

CALL_SECONDS = 0.5
GROWTH = 10  # a size that was measured badly must not lead to a call of minutes
# What is queued must last until the coordinator looks again, however short the calls are.
QUEUED_CALLS = 2
QUEUED_SECONDS = 0.1
MAX_QUEUED_CALLS = 50
POLL_SECONDS = 0.2
RESIZE_SECONDS = 0.1
# Towards an end calls shrink to this: shorter ones would cost more than the wait for the last of them.
SHORTEST_SECONDS = 0.02
# A worker that is slower than this, compared with the average, may hold up an end; the others' calls stay worth it.
SLOWEST = 10
BLOCK_SECONDS = 5.0
CALLS_PER_BLOCK = 50


class Schedule(Protocol):
    """What both have in common. Steps are those of the run: they begin at the step from which it goes on."""

    in_flight: int
    """Calls that were given and have not returned."""
    sizes: tuple[int, ...]
    """What members in step must agree on before the next block; nothing where none is in step."""

    def begin(self, step: int, end: int) -> None:
        """Give calls from this step until `end` is met; nothing may be in flight."""

    def size(self, now: float) -> int:
        """Return the steps of the call to be given now, 0 when none is."""

    def given(self, steps: int) -> None:
        """A call of so many steps was given."""

    def returned(self, steps: int, began: float, worker: int, now: float) -> float:
        """A call returned that was given at the time `began` and run by this worker; returns how long that took it."""

    def undone(self, steps: int) -> None:
        """So many steps of a call that has returned were not done: there were no data."""

    def is_look_due(self, now: float) -> bool:
        """Return whether it is time to look at what is due beside the calls."""

    def polled(self, step: int, now: float) -> None:
        """The coordinator has looked, and read this step."""

    def join(self) -> None:
        """One more worker takes calls."""

    def paused(self, until: float) -> None:
        """No worker was present until then: calls in flight did not take so long."""

    def close(self) -> None:
        """Give no more calls until `begin`."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight and no call will be given until `begin`."""


class CallSize:
    """The most steps of a call: as the settings have it, or such that a call lasts about half a second."""

    def __init__(self, steps_per_execution: int | str) -> None:
        """Take the number of steps, or "auto"."""
        self.auto = isinstance(steps_per_execution, str)
        self.most = 1 if isinstance(steps_per_execution, str) else steps_per_execution

    def learn(self, step_seconds: float, longest: int) -> None:
        """Size calls by how long a step took, in calls of at most `longest` steps."""
        wanted = max(1, round(CALL_SECONDS / step_seconds))
        # Small corrections are not worth another size.
        if self.auto and not self.most <= wanted <= 1.25 * self.most:
            self.most = min(wanted, max(self.most, GROWTH * longest))


class WorkerSpeeds:
    """How long a step takes each worker, by the calls that have returned."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._step_seconds: dict[int, float] = {}  # of each worker
        self._returned_at: dict[int, float] = {}
        self._paused_until = -math.inf
        self._longest = 0  # of the calls since the last `learn`
        self._learnt_at = -math.inf
        self.median = 0.0
        """Seconds of a step on the median worker; 0 where that is not known yet."""
        self.share = 1 / (QUEUED_CALLS * workers)
        """Of the speed of all, the slowest worker's."""

    def returned(self, steps: int, began: float, worker: int, now: float) -> float:
        """A call has returned that was given at the time `began`; returns how long it took its worker."""
        # It waited in the queue while its worker was busy with the one before.
        seconds = now - max(began, self._returned_at.get(worker, began), self._paused_until)
        self._returned_at[worker] = now
        if seconds <= 0 or steps <= 0:
            return 0.0
        measured, known = seconds / steps, self._step_seconds.get(worker, math.inf)
        # A worker's first call includes what TensorFlow prepares; that is forgotten at once.
        self._step_seconds[worker] = measured if measured < known / 2 else (known + measured) / 2
        self._longest = max(self._longest, steps)
        return seconds

    def paused(self, until: float) -> None:
        """Calls in flight did not take so long: no worker answered."""
        self._paused_until = until

    def learn(self, now: float) -> int:
        """Set median and share by what was measured; returns the steps of the longest call since the last time.

        Returns 0, and does nothing, where no call has returned since, or where that was a moment ago.
        """
        if not self._longest or now - self._learnt_at < RESIZE_SECONDS:
            return 0
        seconds = self._step_seconds.values()
        self.median = statistics.median_low(seconds)
        speeds = [1 / each for each in seconds]
        average = sum(speeds) / len(speeds)
        self.share = max(min(speeds), average / SLOWEST) / (average * self.workers)
        longest, self._longest, self._learnt_at = self._longest, 0, now
        return longest


class AsyncSchedule:
    """Keeps about two calls for each worker in flight or queued; whichever worker is free takes the next one.

    So a slow worker gets fewer calls by itself. A call lasts about half a second on the median worker. Near the end
    calls shrink, so that the others do not wait long for the last one of the slowest.
    """

    sizes: tuple[int, ...] = ()

    def __init__(self, steps_per_execution: int | str, workers: int) -> None:
        """`steps_per_execution` is the most steps of a call, or "auto"."""
        self._size = CallSize(steps_per_execution)
        self._workers = max(1, workers)
        self._speeds = WorkerSpeeds(self._workers)
        self._looked_at = -math.inf
        self._has_news = False
        self._given = self._end = 0
        self._closed = False
        self.in_flight = 0

    def begin(self, step: int, end: int) -> None:
        assert not self.in_flight
        self._given, self._end, self._closed = step, end, False

    def size(self, now: float) -> int:
        left = self._end - self._given
        if self._closed or left <= 0:
            return 0
        if longest := self._speeds.learn(now):
            self._size.learn(self._speeds.median, longest)
        size = min(self._size.most, left, self._last(left))
        return size if self.in_flight < self._workers * self._queued(size) else 0

    def given(self, steps: int) -> None:
        self._given += steps
        self.in_flight += 1

    def returned(self, steps: int, began: float, worker: int, now: float) -> float:
        self.in_flight -= 1
        self._has_news = True
        return self._speeds.returned(steps, began, worker, now)

    def join(self) -> None:
        self._workers += 1
        self._speeds.workers = self._workers

    def undone(self, steps: int) -> None:
        self._given -= steps

    def paused(self, until: float) -> None:
        self._speeds.paused(until)

    def is_look_due(self, now: float) -> bool:
        return self.is_over or (self._has_news and now - self._looked_at >= POLL_SECONDS)

    def polled(self, step: int, now: float) -> None:
        self._has_news, self._looked_at = False, now
        # A call that ran twice, because its worker died, was counted twice.
        self._given = max(self._given, step)

    def close(self) -> None:
        self._closed = True

    @property
    def is_over(self) -> bool:
        return not self.in_flight and (self._closed or self._given >= self._end)

    def _last(self, left: int) -> int:
        """Return the steps that even the slowest worker has done by the time when the others have done the rest."""
        shortest = round(SHORTEST_SECONDS / self._speeds.median) if self._speeds.median else 1
        return max(1, shortest, int(left * self._speeds.share))

    def _queued(self, size: int) -> int:
        """Return how many calls of this size are given for each worker."""
        seconds = size * self._speeds.median
        if not seconds:
            return QUEUED_CALLS
        return max(QUEUED_CALLS, min(MAX_QUEUED_CALLS, 1 + math.ceil(QUEUED_SECONDS / seconds)))


class LockstepSchedule:
    """Gives calls in blocks of at most five seconds to replicas in step; after each of them it is time to look.

    A call that a block is made of has ended when it was given: nothing else is in flight beside it.
    """

    def __init__(self, steps_per_execution: int | str, block_seconds: float = BLOCK_SECONDS) -> None:
        """`steps_per_execution` is the most steps of a call, or "auto"; `block_seconds`, how long a block may last."""
        self._size = CallSize(steps_per_execution)
        self._block_seconds = min(block_seconds, BLOCK_SECONDS)
        self._calls_per_block = 1
        self._left: list[int] = []
        self._done: list[int] = []
        self._seconds = 0.0
        self._step = self._end = 0
        self._closed = False
        self.in_flight = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Steps of a call, and calls of a block."""
        return self._size.most, self._calls_per_block

    @sizes.setter
    def sizes(self, sizes: tuple[int, ...]) -> None:
        self._size.most, self._calls_per_block = sizes

    def begin(self, step: int, end: int) -> None:
        self._step, self._end, self._closed = step, end, False
        self._plan()

    def size(self, now: float) -> int:
        return self._left[0] if self._left and not self.in_flight else 0

    def given(self, steps: int) -> None:
        self._left.pop(0)
        self.in_flight += 1

    def returned(self, steps: int, began: float, worker: int, now: float) -> float:
        self.in_flight -= 1
        self._done.append(steps)
        self._seconds += now - began
        if not self._left:
            self._learn()
        return now - began

    def is_look_due(self, now: float) -> bool:
        return not self._left and not self.in_flight

    def polled(self, step: int, now: float) -> None:
        self._step = step
        self._plan()

    def join(self) -> None:
        """No worker joins replicas in step."""

    def undone(self, steps: int) -> None:
        """Replicas in step do whole calls."""

    def paused(self, until: float) -> None:
        """Replicas in step train with this process or not at all."""

    def close(self) -> None:
        self._closed, self._left = True, []

    @property
    def is_over(self) -> bool:
        return not self.in_flight and not self._left and (self._closed or self._step >= self._end)

    def _plan(self) -> None:
        """Plan the calls of the next block: of nearly the same size, and no more than the end allows."""
        self._done, self._seconds = [], 0.0
        steps = min(self._end - self._step, self._size.most * self._calls_per_block)
        if steps <= 0:
            self._left = []
            return
        if not self._size.auto:
            full, rest = divmod(steps, self._size.most)
            self._left = [self._size.most] * full + ([rest] if rest else [])
            return
        calls = math.ceil(steps / self._size.most)
        small, larger = divmod(steps, calls)
        self._left = [small + 1] * larger + [small] * (calls - larger)

    def _learn(self) -> None:
        """Size calls and blocks by how long the calls of this block took."""
        if self._seconds <= 0:
            return
        call_seconds = self._seconds / len(self._done)
        if self._size.auto:
            step_seconds = self._seconds / sum(self._done)
            self._size.learn(step_seconds, self._size.most)
            call_seconds = step_seconds * self._size.most
        wanted_calls = max(1, round(self._block_seconds / call_seconds))
        self._calls_per_block = min(wanted_calls, GROWTH * self._calls_per_block, CALLS_PER_BLOCK)


def make_schedule(config: Config, workers: int) -> Schedule:
    """Return the schedule of the settings' strategy."""
    if config.traits.remote:
        return AsyncSchedule(config.steps_per_execution, workers)
    return LockstepSchedule(config.steps_per_execution, config.log_seconds)
