"""What is said of the ids that steps look up, from samples, and of the files that workers read."""

from __future__ import annotations

import pytest

from trainer.telemetry.counters import Counters
from trainer.telemetry.lookups import SAMPLED, STEPS, TAKE_SECONDS, Lookups, LookupSample, describe_lookups
from trainer.telemetry.uneven_files import sizes_of_data


def sample(*ids: int, rows: tuple[int, ...] = ()) -> LookupSample:
    some = ids * (SAMPLED // len(ids))
    return LookupSample(1000, 400, some, (rows or ids) * (SAMPLED // len(rows or ids)))


def of_halves() -> Lookups:
    """Tables of which ps-0 has the even rows."""
    return Lookups({name: lambda rows: [row % 2 for row in rows] for name in ("items", "unused")})


NOTHING = LookupSample(0, 0, [0] * SAMPLED, [0] * SAMPLED)


def test_shares_are_those_of_the_samples_and_tables_that_nobody_looks_up_are_left_out() -> None:
    lookups = of_halves()
    assert lookups.summary() == {}
    for step in range(100):
        lookups.add_samples([sample(7, 7, 2, step * 10, rows=(2, 4, 6, 7)), NOTHING], step)
    asked = lookups.summary()
    assert list(asked) == ["items"]
    items = asked["items"]
    assert (items["ids_per_step"], items["rows_per_step"]) == (1000, 400)
    assert items["by_ps"] == {0: 0.75, 1: 0.25}
    assert items["hot"] == [[7, 0.5, 1], [2, 0.25, 0]]  # the others are rare
    counters = Counters(lookups=lambda: asked, servers=["ps-0", "ps-2"])  # ps-1 is left out
    assert describe_lookups(counters.asked()) == [
        "items, 1,000 ids and 400 rows a step: ps-0 75%, ps-2 25%; hot keys 7 (50%), 2 (25%)"
    ]


def test_only_the_last_steps_count() -> None:
    lookups = of_halves()
    for step in range(2 * STEPS):
        lookups.add_samples([sample(1 if step < STEPS else 2), NOTHING], step)
    assert lookups.summary()["items"]["hot"] == [[2, 1.0, 0]]


def test_keys_that_a_few_samples_have_may_be_chance() -> None:
    lookups = of_halves()
    lookups.add_samples([LookupSample(SAMPLED, SAMPLED, range(SAMPLED), range(SAMPLED)), NOTHING], 0)
    assert lookups.summary()["items"]["hot"] == []


def test_a_sample_is_taken_now_and_then() -> None:
    lookups = of_halves()
    taken = 0
    for milliseconds in range(0, 1000, 10):
        if lookups.is_due(milliseconds / 1000):
            lookups.add_samples([sample(1), NOTHING], milliseconds / 1000)
            taken += 1
    assert taken == round(1 / TAKE_SECONDS)


@pytest.mark.parametrize(("parts", "expected"), [(2, [1 + 4 + 10, 2 + 20]), (3, [1 + 10, 2 + 20, 4]), (0, [])])
def test_files_go_to_the_parts_in_turn_those_of_each_pattern_by_themselves(parts: int, expected: list[int]) -> None:
    groups = [[("a", 1), ("b", 2), ("c", 4)], [("x", 10), ("y", 20)]]
    asked = sizes_of_data(groups, parts)
    assert asked == {"files": 5, "bytes": 37, "largest": "y", "largest_bytes": 20, "parts": expected}


def test_parts_have_the_names_of_the_workers() -> None:
    counters = Counters(workers=["worker-0", "worker-3"])
    assert counters.data() == {}
    counters.file_sizes = lambda: sizes_of_data([[("a", 1), ("b", 2)]], 2)
    assert counters.data()["parts"] == {"worker-0": 1, "worker-3": 2}
    counters.file_sizes = lambda: sizes_of_data([[("a", 1), ("b", 2)]], 0)
    assert "parts" not in counters.data()
