"""Bytes per ps: what is counted, what is said, and which setting is named."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.core.settings.config import Config
from trainer.core.sizes import size
from trainer.core.variables import bytes_of
from trainer.training.placement import report_placement

MIB = 1024 * 1024


@dataclasses.dataclass(eq=False)
class Variable:
    """What TensorFlow's variables have of what is looked at."""

    name: str
    shape: tuple[int, ...]
    server: int | None = 0
    dtype: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(size=4))

    @property
    def device(self) -> str:
        job = "chief" if self.server is None else "ps"
        return f"/job:{job}/replica:0/task:{self.server or 0}/device:CPU:0"

    def __bool__(self) -> bool:
        raise ValueError("The truth value of an array with more than one element is ambiguous")


def sharded(*shards: Variable) -> SimpleNamespace:
    return SimpleNamespace(name="ShardedVariable", variables=list(shards))


def model(*variables: Any, slots: tuple[Any, ...] = (), metrics: tuple[Any, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        variables=variables,
        metrics=[SimpleNamespace(variables=metrics)],
        optimizer=SimpleNamespace(variables=list(slots)),
    )


def report(
    caplog: pytest.LogCaptureFixture, counted: SimpleNamespace, servers: int, **settings: Any
) -> tuple[str, str | None]:
    """Return the line and the warning."""
    caplog.set_level(logging.INFO)
    report_placement(Config(program="a:B", **settings), counted, servers)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    return lines[0], warnings[0] if warnings else None


def test_every_ps_is_named_with_the_bytes_of_variables_shards_slots_and_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Variable("d/kernel:0", (256,), server=1)
    counted = model(
        kernel,
        sharded(Variable("t/part_0:0", (128,), server=0), Variable("t/part_1:0", (128,), server=1)),
        Variable("local:0", (1000,), server=None),
        slots=(sharded(Variable("m/t/part_0:0", (128,), server=0), Variable("m/t/part_1:0", (128,), server=1)),),
        metrics=(Variable("total:0", (), server=0), kernel),
    )
    line, warning = report(caplog, counted, 3)
    assert line == "variables: 3 KiB on 3 ps (ps-0 1 KiB, ps-1 2 KiB, ps-2 0 B)"
    assert warning is None


def test_optimizers_whose_variables_are_a_method_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    counted = model(Variable("a:0", (256,)))
    counted.optimizer = SimpleNamespace(variables=lambda: [Variable("a/m:0", (256,), server=1)])
    assert report(caplog, counted, 2)[0] == "variables: 2 KiB on 2 ps (ps-0 1 KiB, ps-1 1 KiB)"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"partitioner": "none"}, "set partitioner to min_size"),
        ({"partitioner": "min_size"}, f"set partitioner_min_bytes to {4 * MIB // 3} or less"),
        ({"partitioner": "max_size"}, f"set partitioner_max_bytes to {4 * MIB // 3} or less"),
        ({"partitioner": "fixed_shards", "partitioner_shards": 2}, "set partitioner_shards to 3"),
        ({"partitioner": "fixed_shards", "partitioner_shards": 4}, "set partitioner to min_size"),
    ],
)
def test_a_ps_with_over_twice_the_mean_is_warned_of_with_what_fixes_it(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], advice: str
) -> None:
    counted = model(
        Variable("table/embeddings/part_3:0", (MIB,), server=2),
        Variable("small:0", (MIB // 4,), server=2),
        Variable("other:0", (MIB // 4,), server=0),
    )
    warning = report(caplog, counted, 3, **settings)[1]
    assert warning is not None
    assert "ps-2 holds 5 MiB of the variables, more than twice the mean of 2 MiB" in warning
    assert f"table/embeddings ({MIB},) with 4 MiB" in warning
    assert advice in warning


def test_a_variable_of_one_row_cannot_be_fixed_by_a_setting(caplog: pytest.LogCaptureFixture) -> None:
    warning = report(caplog, model(Variable("row:0", (1, MIB))), 3)[1]
    assert warning is not None
    assert "split the first axis only" in warning


def test_exactly_twice_the_mean_and_little_variables_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert report(caplog, model(Variable("all:0", (MIB,))), 2)[1] is None
    caplog.clear()
    assert report(caplog, model(Variable("all:0", (MIB // 4 - 1,))), 4)[1] is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1536, "1.5 KiB"),
        (1010 * MIB, "1010 MiB"),
        (2**30 - 1, "1 GiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_a_scalar_has_the_bytes_of_its_type() -> None:
    assert bytes_of(Variable("step:0", ())) == 4
