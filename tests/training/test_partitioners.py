"""What each partitioner does with a table of 100 rows of 32 bytes on two ps (input_check.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.training.placement import summary

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ("min_size", [50, 50]),  # 1,024 bytes at least: three would fit, but there are two ps
        ("min_size_larger", [100]),  # the default, 256 KiB
        ("max_size", [25, 25, 25, 25]),  # 1,024 bytes at most
        ("fixed_shards", [34, 33, 33]),
        ("none", [100]),
    ],
)
def test_a_table_and_its_slots_are_split_as_the_setting_says(
    input_check: dict[str, Any], settings: str, rows: list[int]
) -> None:
    assert input_check["placement"][settings]["shards"] == rows
    assert input_check["placement"][settings]["slots"] == rows


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ("min_size", ["3.12 KiB", "3.13 KiB"]),
        ("max_size", ["3.12 KiB", "3.13 KiB"]),
        ("fixed_shards", ["2.07 KiB", "4.19 KiB"]),
        ("none", ["8 B", "6.25 KiB"]),
    ],
)
def test_the_report_counts_what_lies_on_each_ps(input_check: dict[str, Any], settings: str, held: list[str]) -> None:
    [line] = input_check["placement"][settings]["report"]
    assert line.startswith("variables: 6.26 KiB on 2 ps (")
    assert sorted(held) == sorted(part.split(" ", 1)[1] for part in line.split("(")[1].rstrip(")").split(", "))


def test_the_report_names_a_variable_whose_shape_is_open() -> None:
    """A Discretization keeps its bounds in one, and a small model has no five larger ones."""
    float32 = SimpleNamespace(size=4)
    bounds = SimpleNamespace(name="bins/bin_boundaries:0", shape=(None,), dtype=float32)
    kernel = SimpleNamespace(name="dense/kernel:0", shape=(4, 2), dtype=float32)
    assert summary([bounds, kernel]) == {
        "bytes": 32,
        "variables": 2,
        "largest": [["dense/kernel", [4, 2], 32], ["bins/bin_boundaries", [None], 0]],
    }
