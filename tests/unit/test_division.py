"""Whether the data can be divided among one more worker while a run trains."""

from __future__ import annotations

import pytest

from trainer.training.steps.division import Division


def division(batch_of_three: str = "8") -> Division:
    """Return the data of two workers; a trace is its workers and the shape of its batches."""

    def trace(workers: int) -> str:
        if workers > 3:
            raise ValueError("no part left")
        return f"{workers}:{batch_of_three if workers == 3 else '8'}"

    return Division(2, trace, lambda dataset: str(dataset).partition(":")[2])


def test_what_can_be_divided_is_given_once() -> None:
    data = division()
    assert (data.dataset, data.spec) == ("2:8", "8")
    assert data.can_be(3)
    assert data.coming(3) == "3:8"
    assert data.coming(3) is None
    assert data.dataset == "2:8"


def test_batches_of_another_shape_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert not division("7").can_be(3)
    assert "divided among 3 workers the data have batches of another shape" in caplog.text


def test_data_that_can_t_be_traced_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    data = division()
    assert not data.can_be(4)
    assert "the data can't be divided among 4 workers now: " in caplog.text
    assert "no part left" in caplog.text
    assert data.coming(4) is None
