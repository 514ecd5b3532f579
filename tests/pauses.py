"""How long nothing was trained, as the history of a run tells it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise


def longest_pause(history: Iterable[str], since: float, until: float) -> float:
    """Return the longest time between two steps, in seconds: between two lines of `history.jsonl` that name one.

    Such a line is written where steps have ended, every `log_seconds` at most. Times are in seconds since 1970. What
    went on at `since` or `until` counts as a whole.
    """
    lines = [json.loads(line) for line in history]
    times = [line["t"] for line in lines if "step" in line]
    return max(after - before for before, after in pairwise(times) if after >= since and before <= until)
