"""Which checkpoints a run keeps, and what a new run begins with."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_check

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answer: dict[str, Any] = run_check("beginnings_check.py", deadline=550)
    return answer


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
    steps, count, began, went_on = found["branch"]
    assert (steps, count) == ([10, 12, 14], 12.0)
    assert (began, went_on) == (0.5, 0.5), "the new run's own rate, which another start of the program does not change"


@pytest.mark.parametrize("kind", ["run", "checkpoint", "h5", "weights_h5", "keras", "saved_model", "export"])
def test_initial_weights_are_read_from(kind: str, found: dict[str, Any]) -> None:
    is_equal, message = found["weights"][kind]
    assert is_equal
    assert message.startswith("initial weights: 3 of 3 variables read from ")
    assert ";" not in message


def test_layers_without_names_are_found_by_their_place(found: dict[str, Any]) -> None:
    is_equal, message = found["weights"]["unnamed"]
    assert is_equal
    table = "embedding/embeddings from table/embeddings"  # split: its checkpoint has its name, too
    assert message.endswith(f"; by their place: {table}, dense/kernel from score/kernel, dense/bias from score/bias")


def test_what_does_not_fit_is_told_and_keeps_its_own_values(found: dict[str, Any]) -> None:
    is_equal, message = found["weights"]["other_head"]
    assert is_equal
    assert "1 of 3 variables read from source@5" in message
    assert "; not there: score/kernel (16, 2), score/bias (2,)" in message
    assert "; not used: score/bias (1,), score/kernel (16, 1)" in message


def test_averages_of_weights_begin_with_those_that_were_read(found: dict[str, Any]) -> None:
    assert len(found["weights"]["averages"]) >= 2
    assert sum(found["weights"]["averages"]) == 2  # the table and its average; a momentum is none


def test_what_a_second_optimizer_keeps_is_not_of_the_models_size(found: dict[str, Any]) -> None:
    counted, expected = found["weights"]["bytes"]
    assert counted == expected


def test_the_first_checkpoint_has_what_was_read(found: dict[str, Any]) -> None:
    assert found["weights"]["first"] == 0


def test_a_run_that_goes_on_reads_nothing_again(found: dict[str, Any]) -> None:
    assert found["weights"]["went_on"] == 3


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("nothing_fits", "0 of 1 variables read from source@5; not there: count ()"),
        ("no_such_metric", "'accuracy', which the evaluation does not have: name one of its metrics, loss"),
        ("no_such_step", "initial_weights: run source has no checkpoint of step 7; it has 5"),
        ("no_such_file", "initial_weights: there is nothing to read at /no/such.h5: name a checkpoint as RUN@STEP"),
    ],
)
def test_what_is_not_there_ends_the_run_before_its_first_step(case: str, expected: str, found: dict[str, Any]) -> None:
    assert expected in found["weights"][case]
