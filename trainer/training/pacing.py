"""How many steps one call packs, and how many calls make a block.

A call is what a worker is given at once; a block is what the coordinator waits for before it logs, saves or stops.
"""

from __future__ import annotations

import math

CALL_SECONDS = 0.5
BLOCK_SECONDS = 5.0
GROWTH = 10  # a block measured badly must not lead to a call of minutes
CALLS_PER_WORKER = 50


class Pacer:
    """Sizes calls and blocks from how long the last block took."""

    def __init__(self, steps_per_execution: int | str, workers: int, block_seconds: float = BLOCK_SECONDS) -> None:
        self._auto = steps_per_execution == "auto"
        self._per_call = 1 if isinstance(steps_per_execution, str) else steps_per_execution
        self._workers = max(1, workers)
        self._block_seconds = min(block_seconds, BLOCK_SECONDS)
        self._calls_per_worker = 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Steps of a call, and calls of a block for each worker."""
        return self._per_call, self._calls_per_worker

    @sizes.setter
    def sizes(self, sizes: tuple[int, int]) -> None:
        self._per_call, self._calls_per_worker = sizes

    def plan(self, remaining: int) -> list[int]:
        """Return the number of steps of each call of the next block: at most `remaining` in all."""
        total = min(remaining, self._per_call * self._calls_per_worker * self._workers)
        if total <= 0:
            return []
        if not self._auto:
            full, rest = divmod(total, self._per_call)
            return [self._per_call] * full + ([rest] if rest else [])
        # The same number of calls for every worker, of nearly the same size, so that none waits for the last.
        calls = min(total, math.ceil(total / self._per_call / self._workers) * self._workers)
        small, larger = divmod(total, calls)
        return [small + 1] * larger + [small] * (calls - larger)

    def measured(self, calls: list[int], seconds: float) -> None:
        """Learn from a block: the calls it had and how long it took (seconds)."""
        if not calls or seconds <= 0:
            return
        rounds = math.ceil(len(calls) / self._workers)
        call_seconds = seconds / rounds
        if self._auto:
            step_seconds = call_seconds / (sum(calls) / len(calls))
            wanted = max(1, round(CALL_SECONDS / step_seconds))
            # Small corrections are not worth another size.
            if wanted < self._per_call or wanted > 1.25 * self._per_call:
                self._per_call = min(wanted, GROWTH * self._per_call)
            call_seconds = step_seconds * self._per_call
        wanted_calls = max(1, round(self._block_seconds / call_seconds))
        self._calls_per_worker = min(wanted_calls, GROWTH * self._calls_per_worker, CALLS_PER_WORKER)
