"""Where a run's time went, over all the processes that its coordinator has had."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.core.states import Phase

KINDS = ("productive", "recomputed", "down", "waiting", "checkpointing", "compiling", "evaluating")
# Training whose step counter has stood for so many times as long as usual has stalled ...
STALL = 5.0
# ... if that is more than some calls of half a second, which is what the trainer packs into one.
SHORTEST_STALL_SECONDS = 3.0
GAPS = 50  # so many tell what is usual
# What each phase counts as; training is told apart by the steps that it gave.
COUNTED = {
    Phase.TRAINING: "training",
    Phase.WAITING: "waiting",
    Phase.RESTORING: "down",
    Phase.COMPILING: "compiling",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "checkpointing",
}


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that is not set while this process runs."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Ledger:
    """Seconds of each kind.

    Training is productive for steps beyond the highest that was ever trained, and recomputed for those that were
    trained before. It is down while the step counter stands still for much longer than usual, and when its steps were
    lost before anyone heard of them. So is restoring, and what lies between the last word of a process that died and
    the first phase of the next one. Time in which the run was stopped, finished or failed counts nowhere.
    Its methods may be called from any thread.
    """

    def __init__(self, record: Mapping[str, Any] | None = None, now: Callable[[], float] | None = None) -> None:
        """Take up the ledger that the process before left in status.json, if there is one."""
        self._lock = threading.Lock()
        self._now = now or steady_clock()
        record = record or {}
        self._seconds = {kind: float(record.get(kind, 0.0)) for kind in KINDS}
        self.taken_up = dict(self._seconds)
        """The seconds of each kind that the process before had written."""
        self._step = int(record.get("step", 0))
        self._highest = int(record.get("highest_step", 0))
        self._training = 0.0  # since the step counter was last seen to move
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._since = self._now()
        died = not record.get("ended", True)
        if died:
            unheard = float(record.get("elapsed", 0.0)) - sum(self._seconds.values())
            silent = self._since - float(record.get("until", self._since))
            self._seconds["down"] += max(0.0, unheard) + max(0.0, silent)
        self._kind: str | None = "down" if died else "compiling"

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        with self._lock:
            self._settle()
            self._kind = COUNTED[phase]

    def trained(self, step: int) -> None:
        """The step counter stands here; call it as often as that is known, also while calls are in flight."""
        with self._lock:
            self._settle()
            done = step - self._step
            if done <= 0:
                return
            new = min(done, max(0, step - self._highest))
            trained = self._trained_in(self._training)
            self._seconds["productive"] += trained * new / done
            self._seconds["recomputed"] += trained * (done - new) / done
            self._seconds["down"] += self._training - trained
            self._training = 0.0
            self._step, self._highest = step, max(self._highest, step)

    def _trained_in(self, gap: float) -> float:
        """Return how much of the time between two moves of the step counter was training: all, unless it stalled."""
        if not self._gaps:
            self._gaps.append(gap)
            return gap
        usual = middle(self._gaps)
        limit = max(SHORTEST_STALL_SECONDS, STALL * usual)
        # Steps that have become slower for good are soon the usual; one stall is not.
        self._gaps.append(min(gap, limit))
        return gap if gap <= limit else usual

    def restored(self, step: int) -> int:
        """The run stands at this step again; returns the steps that are lost by it."""
        with self._lock:
            self._lose()
            lost = max(0, self._step - step)
            self._step, self._highest = step, max(self._highest, step)
        return lost

    def end(self) -> None:
        """The run is stopped, finished or failed: from now on no time is counted."""
        with self._lock:
            self._lose()
            self._kind = None

    def as_dict(self) -> dict[str, Any]:
        """Return the seconds of each kind until now, their share that was productive, and what the next process needs.

        Training whose steps have not ended is in `elapsed` alone.
        """
        with self._lock:
            self._settle()
            elapsed = sum(self._seconds.values()) + self._training
            return {
                **{kind: round(seconds, 3) for kind, seconds in self._seconds.items()},
                "elapsed": round(elapsed, 3),
                "goodput": round(self._seconds["productive"] / elapsed, 4) if elapsed else 0.0,
                "step": self._step,
                "highest_step": self._highest,
                "until": round(self._since, 3),
                "ended": self._kind is None,
            }

    def _settle(self) -> None:
        now = self._now()
        passed, self._since = max(0.0, now - self._since), now
        if self._kind == "training":
            self._training += passed
        elif self._kind is not None:
            self._seconds[self._kind] += passed

    def _lose(self) -> None:
        self._settle()
        self._seconds["down"] += self._training
        self._training = 0.0


def middle(gaps: Iterable[float]) -> float:
    """Return the gap in whose like, or longer ones, half of all the time was spent.

    Not the median: the calls of many workers may return together, and leave one long gap among many of nothing.
    """
    longest_first = sorted(gaps, reverse=True)
    left = sum(longest_first) / 2
    for gap in longest_first:
        left -= gap
        if left <= 0:
            return gap
    return 0.0


def describe_ledger(record: Mapping[str, Any]) -> str:
    """Say a ledger in one line: goodput, and the seconds of each kind that there are, most first."""
    spent = sorted(((float(record.get(kind, 0.0)), kind) for kind in KINDS), reverse=True)
    text = f"goodput {100 * float(record['goodput']):.1f} % of {float(record['elapsed']):.1f} s"
    kinds = ", ".join(f"{kind} {seconds:.1f} s" for seconds, kind in spent if seconds)
    return f"{text}: {kinds}" if kinds else text
