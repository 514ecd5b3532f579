"""Which checkpoints a run keeps, and what a new run begins with."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_check

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    said: dict[str, Any] = run_check("beginnings_check.py", deadline=280)
    return said


def test_the_best_the_newest_and_two_from_before_the_nan_are_kept(found: dict[str, Any]) -> None:
    assert {step: why for step, (why, _) in found["kept"].items()} == {
        "10": ["best"],
        "20": ["sound"],
        "25": ["sound"],
        "35": ["newest"],
        "40": ["newest"],
        "45": ["newest"],
    }
    assert found["kept"]["10"][1]["loss"] == 0.0


def test_a_run_that_begins_from_a_checkpoint_goes_on_at_its_step(found: dict[str, Any]) -> None:
    assert found["branch"] == [[10, 12], 12.0]
