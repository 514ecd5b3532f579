"""The tests' own measure of how long nothing was trained."""

from __future__ import annotations

import json

import pytest

from tests.pauses import longest_pause

HISTORY = [json.dumps({"t": at, "step": 7}) for at in (10.0, 10.3, 12.0, 12.2, 20.0)]
HISTORY.insert(2, '{"t":11.0,"ledger":{}}')  # of which nobody knows whether a step has ended


@pytest.mark.parametrize(
    ("since", "until", "expected"), [(0.0, 12.1, 1.7), (11.9, 12.1, 1.7), (12.1, 12.2, 7.8), (0.0, 10.2, 0.3)]
)
def test_what_reaches_into_a_time_counts_as_a_whole(since: float, until: float, expected: float) -> None:
    assert longest_pause(HISTORY, since, until) == pytest.approx(expected)
