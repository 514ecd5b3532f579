"""How steps become calls, with pretended workers and a pretended clock."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

import pytest

from trainer.training.loop.scheduler import (
    CALL_SECONDS,
    QUEUED_CALLS,
    AsyncSchedule,
    CallSize,
    LockstepSchedule,
    Schedule,
    WorkerSpeeds,
)

POLL_SECONDS = 0.005
DISPATCH_SECONDS = 0.003  # of each call, whatever it does
JITTER = 0.3


class Workers:
    """Workers that take calls from one queue in turn, as TensorFlow's do."""

    def __init__(self, step_seconds: list[float], jitter: float = JITTER) -> None:
        self.step_seconds = step_seconds
        self._jitter = jitter
        self._random = random.Random(1)
        self._free = list(range(len(step_seconds)))
        self._queue: deque[tuple[int, float]] = deque()
        self._running: list[tuple[float, int, int, float]] = []
        self.now = 0.0
        self.calls: list[int] = []
        self.taken = [0] * len(step_seconds)
        self.idle = 0
        """How often a worker was free while there were steps that no call had."""

    def train(self, schedule: Schedule, steps: int) -> float:
        """Train so many steps; returns their number for each second."""
        begins = self.now
        schedule.begin(0, steps)
        while not schedule.is_over:
            while size := schedule.size(self.now):
                schedule.given(size)
                self.calls.append(size)
                self._queue.append((size, self.now))
                self._start(self.now)
            self.idle += bool(self._free) and sum(self.calls) < steps
            for size, began, worker in self._poll():
                schedule.returned(size, began, worker, self.now)
            if schedule.is_look_due(self.now):
                schedule.polled(0, self.now)
        return steps / (self.now - begins)

    def _start(self, now: float) -> None:
        while self._free and self._queue:
            worker, (size, began) = self._free.pop(), self._queue.popleft()
            self.taken[worker] += size
            # The mean of `size` steps spreads less than one of them.
            spread = self._random.uniform(-self._jitter, self._jitter) / size**0.5
            seconds = DISPATCH_SECONDS + size * self.step_seconds[worker] * (1 + spread)
            heapq.heappush(self._running, (now + seconds, worker, size, began))

    def _poll(self) -> list[tuple[int, float, int]]:
        """Let time pass until the coordinator sees that calls have returned; returns them."""
        seen = self._running[0][0] + POLL_SECONDS
        returned = []
        while self._running and self._running[0][0] <= seen:
            ended, worker, size, began = heapq.heappop(self._running)
            returned.append((size, began, worker))
            self._free.append(worker)
            self._start(ended)
        self.now = seen
        return returned


def uneven(workers: int, step_seconds: float, slower: float) -> list[float]:
    """Return the step times (seconds) of workers of which one is slower."""
    return [step_seconds] * (workers - 1) + [slower * step_seconds]


# Of 1,000 workers fewer cells: each takes seconds.
CELLS = [
    (workers, step_seconds, slower)
    for workers in (20, 200, 1000)
    for step_seconds in (0.05, 0.5, 1.0, 6.0)
    for slower in (1, 2, 4, 10)
    if workers == 20
    or (workers == 200 and slower in (4, 10))
    or (workers == 1000 and (step_seconds, slower) in ((0.05, 10), (0.5, 10)))
]


@pytest.mark.parametrize(("workers", "step_seconds", "slower"), CELLS)
def test_a_slow_worker_and_jitter_hold_up_nobody(workers: int, step_seconds: float, slower: float) -> None:
    pretended = Workers(uneven(workers, step_seconds, slower))
    alone = sum(1 / seconds for seconds in pretended.step_seconds)
    steps = round(alone * max(60.0, 400 * step_seconds))
    assert pretended.train(AsyncSchedule("auto", workers), steps) >= 0.97 * alone
    assert sum(pretended.calls) == steps


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_met_exactly_and_no_worker_is_idle_before(seed: int) -> None:
    chance = random.Random(seed)
    workers = chance.choice([1, 2, 3, 7, 40])
    pretended = Workers([chance.choice([0.001, 0.02, 0.3, 2.0]) for _ in range(workers)], jitter=chance.random() / 2)
    per_call = chance.choice([1, 7, 100, "auto", "auto"])
    schedule = AsyncSchedule(per_call, workers)
    for steps in (chance.choice([1, 2, 37, 1000]), chance.choice([5, 500])):  # two epochs
        pretended.calls.clear()
        pretended.train(schedule, steps)
        assert sum(pretended.calls) == steps
        assert min(pretended.calls) >= 1
        assert per_call == "auto" or max(pretended.calls) <= int(per_call)
    # Only at the very beginning, where the coordinator knows of no call that ended, are there too few of short ones.
    assert pretended.idle == 0 or min(pretended.step_seconds) < POLL_SECONDS


def test_a_slow_worker_gets_fewer_steps() -> None:
    pretended = Workers(uneven(4, 0.05, 10))
    pretended.train(AsyncSchedule("auto", 4), 20_000)
    assert pretended.taken[3] == pytest.approx(20_000 * 0.1 / 3.1, rel=0.1)


def train_evenly(schedule: Schedule, steps: int, workers: int, step_seconds: float) -> list[int]:
    """Return the calls of a training on equal workers."""
    pretended = Workers([step_seconds] * workers, jitter=0.0)
    pretended.train(schedule, steps)
    return pretended.calls


def test_auto_reaches_half_a_second_a_call() -> None:
    calls = train_evenly(AsyncSchedule("auto", 2), 100_000, 2, 0.002)
    middle = calls[50 : len(calls) // 2]
    assert middle
    assert all(0.7 * CALL_SECONDS < 0.002 * size < 1.3 * CALL_SECONDS for size in middle)


def test_auto_keeps_slow_steps_single() -> None:
    assert set(train_evenly(AsyncSchedule("auto", 2), 40, 2, 1.0)) == {1}


def test_auto_sizes_calls_for_the_median_worker() -> None:
    pretended = Workers([0.005, 0.005, 0.005, 0.5], jitter=0.0)
    pretended.train(AsyncSchedule("auto", 4), 50_000)
    assert 60 < pretended.calls[len(pretended.calls) // 2] < 140


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([(0.0, 20.0)] + [(0.0, 0.001)] * 8, id="a first call that takes long is soon forgotten"),
        pytest.param([(0.0, 0.001)] * 8 + [(3600.0, 0.001)], id="and so is time in which no worker was there"),
    ],
)
def test_what_is_no_steps_doing_makes_calls_no_shorter(calls: list[tuple[float, float]]) -> None:
    schedule = AsyncSchedule("auto", 1)
    schedule.begin(0, 10**6)
    now = 0.0
    for pause, seconds_each in calls:
        now += 0.1
        began, size = now, schedule.size(now)
        schedule.given(size)
        if pause:
            now += pause
            schedule.paused(now)
        now += seconds_each * size
        schedule.returned(size, began, 0, now)
    assert schedule.size(now + 0.1) > 300


def test_about_two_calls_for_each_worker_are_given() -> None:
    schedule = AsyncSchedule(10, 3)
    schedule.begin(0, 10**6)
    while size := schedule.size(0.0):
        schedule.given(size)
    assert schedule.in_flight == QUEUED_CALLS * 3


def test_short_calls_are_queued_until_the_coordinator_looks_again() -> None:
    pretended = Workers([0.001] * 2, jitter=0.0)
    assert pretended.train(AsyncSchedule(1, 2), 20_000) > 0.95 * 2 / (0.001 + DISPATCH_SECONDS)


def test_the_end_does_not_wait_long_for_the_slowest() -> None:
    pretended = Workers(uneven(20, 0.005, 10), jitter=0.0)
    schedule = AsyncSchedule("auto", 20)
    pretended.train(schedule, 200_000)
    # The longest calls take the slowest worker 5 s; the last ones must be far shorter.
    assert 0.05 * max(pretended.calls) > 4.0
    assert 0.05 * max(pretended.calls[-40:]) < 1.0


def test_a_closed_schedule_gives_no_more_and_is_over_when_all_has_returned() -> None:
    schedule = AsyncSchedule(10, 1)
    schedule.begin(0, 100)
    schedule.given(schedule.size(0.0))
    schedule.close()
    assert schedule.size(0.0) == 0
    assert not schedule.is_over
    schedule.returned(10, 0.0, 0, 1.0)
    assert schedule.is_over
    schedule.begin(10, 100)
    assert schedule.size(1.0) == 10


def test_steps_that_were_counted_twice_are_not_trained_again() -> None:
    schedule = AsyncSchedule(10, 1)
    schedule.begin(0, 100)
    for _ in range(5):
        schedule.given(10)
        schedule.returned(10, 0.0, 0, 1.0)
    schedule.polled(60, 1.0)
    left = 0
    while size := schedule.size(1.0):
        schedule.given(size)
        schedule.returned(size, 1.0, 0, 2.0)
        left += size
    assert left == 40


def blocks_of(schedule: LockstepSchedule, steps: int, call_seconds: Callable[[int], float]) -> list[list[int]]:
    """Train with a pretended duration of each call; returns the blocks."""
    schedule.begin(0, steps)
    blocks: list[list[int]] = [[]]
    now, step = 0.0, 0
    while not schedule.is_over:
        began, size = now, schedule.size(now)
        schedule.given(size)
        blocks[-1].append(size)
        now += call_seconds(size)
        schedule.returned(size, began, 0, now)
        step += size
        if schedule.is_look_due(now):
            schedule.polled(step, now)
            blocks.append([])
    return blocks[:-1]


@pytest.mark.parametrize("steps", [1, 2, 1000, 9999])
@pytest.mark.parametrize("per_call", [1, 7, 100, "auto"])
def test_blocks_add_up_to_the_steps(steps: int, per_call: int | str) -> None:
    blocks = blocks_of(LockstepSchedule(per_call), steps, lambda size: 0.002 * size)
    assert sum(map(sum, blocks)) == steps
    assert all(size >= 1 for calls in blocks for size in calls)
    assert per_call == "auto" or max(map(max, blocks)) <= int(per_call)


def test_blocks_reach_half_a_second_a_call_and_five_seconds() -> None:
    blocks = blocks_of(LockstepSchedule("auto"), 100_000, lambda size: 0.003 + 0.002 * size)
    steady = blocks[8:-1]
    assert steady
    assert all(0.35 < 0.003 + 0.002 * max(calls) < 0.65 for calls in steady)
    assert all(3 < sum(0.003 + 0.002 * size for size in calls) < 7 for calls in steady)


def test_a_block_recovers_from_a_slow_first_call() -> None:
    first = [20.0]
    blocks = blocks_of(LockstepSchedule("auto"), 100_000, lambda size: first.pop() if first else 0.001 * size)
    assert max(blocks[10]) > 300


def test_a_block_lasts_no_longer_than_the_log_interval_asks() -> None:
    blocks = blocks_of(LockstepSchedule("auto", block_seconds=1.0), 100_000, lambda size: 0.001 * size)
    assert all(0.001 * sum(calls) <= 1.3 for calls in blocks)


def test_members_in_step_do_blocks_of_the_sizes_that_they_agreed_on() -> None:
    schedule = LockstepSchedule("auto")
    schedule.begin(0, 1000)
    schedule.given(schedule.size(0.0))
    schedule.returned(1, 0.0, 0, 0.01)
    schedule.sizes = (3, 2)
    schedule.polled(1, 0.01)
    calls = []
    while size := schedule.size(0.01):
        schedule.given(size)
        schedule.returned(size, 0.01, 0, 0.04)
        calls.append(size)
    assert calls == [3, 3]


def test_a_size_that_the_settings_have_is_not_learnt() -> None:
    size = CallSize(7)
    size.learn(CALL_SECONDS / 100, 7)
    assert size.most == 7


def test_a_size_grows_to_half_a_second_and_leaves_small_corrections() -> None:
    size = CallSize("auto")
    for longest, most in ((1, 10), (10, 100), (100, 100)):
        size.learn(CALL_SECONDS / 110, longest)
        assert size.most == most
    size.learn(CALL_SECONDS / 20, 100)
    assert size.most == 20


def test_a_call_takes_from_the_end_of_its_workers_one_before() -> None:
    speeds = WorkerSpeeds(2)
    assert speeds.returned(10, 0.0, 0, 1.0) == 1.0
    assert speeds.returned(10, 0.0, 0, 1.5) == 0.5  # queued meanwhile
    speeds.paused(9.0)
    assert speeds.returned(10, 1.5, 0, 10.0) == 1.0


def test_the_slowest_workers_share_is_that_of_all_speeds() -> None:
    speeds = WorkerSpeeds(2)
    speeds.returned(10, 0.0, 0, 1.0)
    speeds.returned(20, 0.0, 1, 6.0)
    assert speeds.learn(6.0) == 20
    assert speeds.median == pytest.approx(0.1)
    assert speeds.share == pytest.approx(0.25)
    speeds.returned(30, 6.0, 0, 6.05)
    assert not speeds.learn(6.05)  # a moment ago
    assert speeds.learn(7.0) == 30
    assert not speeds.learn(8.0)  # nothing new
