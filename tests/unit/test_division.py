"""Whether the data can be divided among other workers while a run trains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainer.training.steps.division import Division, part_of


def division(batch_of_three: str = "8") -> Division:
    """Return the data of two workers; a trace is its readers and the shape of its batches."""

    def trace(readers: Sequence[int]) -> str:
        if len(readers) > 3:
            raise ValueError("no part left")
        return f"{list(readers)}:{batch_of_three if len(readers) == 3 else '8'}"

    return Division(2, trace, lambda dataset: str(dataset).partition(":")[2])


def test_what_can_be_divided_is_given_once() -> None:
    data = division()
    assert (data.dataset, data.spec) == ("[0, 1]:8", "8")
    assert data.can_be(range(3))
    assert data.readers == (0, 1)
    assert data.coming((0, 1, 2)) == "[0, 1, 2]:8"
    assert data.readers == (0, 1, 2)
    assert data.coming((0, 1, 2)) is None
    assert data.dataset == "[0, 1]:8"


def test_a_division_is_traced_once() -> None:
    traced: list[Sequence[int]] = []
    data = Division(2, lambda readers: traced.append(readers) or len(traced), lambda dataset: "")
    assert data.can_be((0, 2))
    assert data.can_be((0, 2))
    assert traced == [(0, 1), (0, 2)]
    assert data.coming((0, 2)) == 2


def test_batches_of_another_shape_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    data = division("7")
    assert not data.can_be((0, 1, 2))
    assert data.coming((0, 1, 2)) is None
    assert "divided among 3 workers the data have batches of another shape" in caplog.text


def test_data_that_can_t_be_traced_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    data = division()
    assert not data.can_be(range(4))
    assert "the data can't be divided among 4 workers now: " in caplog.text
    assert "no part left" in caplog.text
    assert data.coming(range(4)) is None


@pytest.mark.parametrize(
    ("readers", "parts"), [((0, 1, 2), [0, 1, 2]), ((1, 2), [0, 0, 1]), ((0, 2), [0, 1, 1]), ((0,), [0, 0, 0])]
)
def test_each_reader_has_a_part_of_its_own(readers: Sequence[int], parts: list[int]) -> None:
    """One that is drained, and still answers for a moment, has one of theirs."""
    assert [part_of(worker, readers) for worker in range(3)] == parts
