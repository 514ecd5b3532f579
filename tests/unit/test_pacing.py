"""How steps are packed into calls and calls into blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.training.pacing import CALL_SECONDS, Pacer


def train(pacer: Pacer, steps: int, workers: int, call_seconds: Callable[[int], float]) -> list[list[int]]:
    """Train with a pretended duration of each call; returns the blocks."""
    blocks = []
    while steps:
        calls = pacer.plan(steps)
        rounds = [calls[start : start + workers] for start in range(0, len(calls), workers)]
        pacer.measured(calls, sum(max(map(call_seconds, each)) for each in rounds))
        blocks.append(calls)
        steps -= sum(calls)
    return blocks


@pytest.mark.parametrize("workers", [1, 2, 7, 300])
@pytest.mark.parametrize("steps", [1, 2, 1000, 9999])
@pytest.mark.parametrize("per_call", [1, 7, 100, "auto"])
def test_blocks_add_up_to_the_steps(workers: int, steps: int, per_call: int | str) -> None:
    blocks = train(Pacer(per_call, workers), steps, workers, lambda size: 0.002 * size)
    assert sum(map(sum, blocks)) == steps
    assert all(size >= 1 for calls in blocks for size in calls)


def test_auto_reaches_half_a_second_a_call() -> None:
    blocks = train(Pacer("auto", 2), 100_000, 2, lambda size: 0.003 + 0.002 * size)
    durations = [0.003 + 0.002 * max(calls) for calls in blocks[8:-1]]
    assert durations
    assert all(0.7 * CALL_SECONDS < duration < 1.3 * CALL_SECONDS for duration in durations)


def test_auto_keeps_slow_steps_single() -> None:
    blocks = train(Pacer("auto", 2), 40, 2, lambda size: 1.0 * size)
    assert all(size == 1 for calls in blocks for size in calls)


def test_auto_recovers_from_a_slow_first_block() -> None:
    pacer = Pacer("auto", 2)
    pacer.measured(pacer.plan(1000), 20.0)
    assert sum(pacer.plan(1000)) <= 4
    blocks = train(pacer, 100_000, 2, lambda size: 0.001 * size)
    assert max(blocks[10]) > 300


def test_auto_gives_every_worker_the_same_number_of_calls() -> None:
    pacer = Pacer("auto", 3)
    train(pacer, 5000, 3, lambda size: 0.002 * size)
    calls = pacer.plan(10_000)
    assert len(calls) % 3 == 0
    assert max(calls) - min(calls) <= 1


def test_a_fixed_size_is_never_exceeded() -> None:
    pacer = Pacer(64, 2)
    blocks = train(pacer, 1000, 2, lambda size: 0.001 * size)
    assert {size for calls in blocks for size in calls} <= {64, 1000 % 64}
    assert pacer.sizes[0] == 64


def test_a_block_lasts_no_longer_than_the_log_interval_asks() -> None:
    blocks = train(Pacer("auto", 2, block_seconds=1.0), 100_000, 2, lambda size: 0.001 * size)
    assert all(0.001 * sum(calls) / 2 <= 1.3 for calls in blocks)
