"""Where a run begins to read its data when it goes on, and in which order (docs/input.md)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from processes import run_check

pytestmark = pytest.mark.timeout(600)
RENEWED = ["shuffled", "interleaved", "fixed", "drawn", "permuted", "asked"]


@pytest.fixture(scope="module")
def read() -> Any:
    return run_check("reading_check.py", deadline=500)


@pytest.mark.parametrize("strategy", ["parameter_server", "one_device"])
@pytest.mark.parametrize("kind", [*RENEWED, "in the step"])
def test_what_a_run_reads_when_it_goes_on_is_not_its_beginning_again(read: Any, strategy: str, kind: str) -> None:
    before, after = read[strategy][kind][0]
    assert before != after


@pytest.mark.parametrize("strategy", ["parameter_server", "one_device"])
@pytest.mark.parametrize("kind", [*RENEWED, "split"])
def test_a_seed_gives_the_same_order_to_the_same_run(read: Any, strategy: str, kind: str) -> None:
    first, second = read[strategy][kind]
    assert first == second


def test_a_seed_has_steps_draw_the_same_where_this_process_trains(read: Any) -> None:
    first, second = read["one_device"]["in the step"]
    assert first == second


@pytest.mark.parametrize("strategy", ["parameter_server", "one_device"])
def test_a_split_by_a_shuffle_that_does_not_reshuffle_stays(read: Any, strategy: str) -> None:
    before, after = read[strategy]["split"][0]
    assert sorted(itertools.chain(*before)) == sorted(itertools.chain(*after))


def test_a_split_is_the_same_for_training_and_evaluation(read: Any) -> None:
    assert len({tuple(part) for part in read["divided"]}) == 1


FAULTS, IN_FLIGHT, CALL, BATCH, PART = 10, 4, 2, 2, 48
READINGS = 11


@pytest.fixture(scope="module")
def visits() -> Any:
    return run_check("visits_check.py", deadline=500)


def test_an_exact_position_reads_each_example_once_a_pass_whatever_the_batch(visits: Any) -> None:
    """Over three faults, each after a save without calls in flight, and before batches of another size."""
    found = visits["exact"]
    assert found["trained"] == found["step"] * BATCH * 1.5
    for (least, most), (passes, _) in zip(found["parts"], found["position"]["parts"], strict=True):
        assert passes <= least <= most <= passes + 1


@pytest.mark.parametrize("how", ["exact, fit", "exact, Keras 3"])
def test_a_run_that_was_stopped_reads_on_under_fit_and_with_keras_3(visits: Any, how: str) -> None:
    assert visits[how]["trained"] == 2 * PART
    for least, most in visits[how]["parts"]:
        assert most <= least + 1


def test_an_exact_position_leaves_nothing_out_with_calls_in_flight(visits: Any) -> None:
    """Over ten faults; and reads twice only what the calls had done that were in flight at one of eleven saves."""
    found = visits["exact, in flight"]
    passes = [number for number, _ in found["position"]["parts"]]
    for (least, most), number in zip(found["parts"], passes, strict=True):
        assert least >= number > 0
        assert most <= number + 1 + FAULTS
    counted = sum(number * PART + taken for number, taken in found["position"]["parts"])
    assert counted <= found["trained"] <= counted + (FAULTS + 1) * IN_FLIGHT * CALL * BATCH


def test_a_position_of_other_data_begins_its_pass_again(visits: Any) -> None:
    found = visits["of another run"]
    assert found["problem"] == "program_args is {'batch': 4} and was {}, seed is 5 and was 3"
    assert found["position"] == {
        "seed": 5,
        "parts": [[1, 0], [1, 0]],
        "data": {"program": "a:B", "program_args": {"batch": 4}},
    }


def test_a_position_is_about_the_same_for_other_workers(visits: Any) -> None:
    """The number of workers changes twice, in a pass."""
    found = visits["exact, other workers"]
    assert sum(count > 0 for count in found["counts"]) >= 0.6 * len(found["counts"])
    assert max(most for _, most in found["parts"]) <= 4


def test_readings_that_begin_again_read_all_files(visits: Any) -> None:
    """Each of eleven takes about a third of them; in the same order, the others would never come."""
    counts = visits["beginning"]
    assert sum(counts) == READINGS * 96 / 3
    assert all(sum(counts[number : number + 8]) > 0 for number in range(0, 96, 8))
    assert max(counts) <= READINGS


def test_an_endless_pass_is_refused(visits: Any) -> None:
    assert len(visits["endless"]) == 3
    for message in visits["endless"].values():
        assert "leave repeat() out" in message


def test_a_pass_that_ends_may_have_a_part_without_end(visits: Any) -> None:
    assert set(visits["ending"].values()) == {"read 1"}


def test_an_empty_part_with_an_exact_position_is_no_endless_search(visits: Any) -> None:
    assert "a worker's part of the training data is empty" in visits["empty"]


def test_elements_may_be_named_tuples(visits: Any) -> None:
    assert visits["named"] == [1, 2, 0, 1]
