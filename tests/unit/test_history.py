"""What a run's page is drawn from: what is written, how often, and what is left of it when it grows too large."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer.telemetry import history
from trainer.telemetry.history import History, read_lines, thin, thin_file


def written(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.jsonl"


def test_numbers_are_written_with_where_the_time_went(path: Path) -> None:
    History(path).numbers(
        20, 12.3456789, {"loss": math.nan, "accuracy": 0.123456789}, {"productive": 1.25, "down": 0.0}
    )
    (line,) = written(path)
    assert line.pop("t") > 1_700_000_000
    assert line == {
        "step": 20,
        "speed": 12.346,
        "values": {"loss": "NaN", "accuracy": 0.12346},
        "ledger": {"productive": 1.2},
    }


def test_short_phases_are_not_all_written(path: Path) -> None:
    writer = History(path)
    for _ in range(100):
        writer.ledger({"productive": 1.0})
    writer.ledger({"productive": 2.0}, at_once=True)
    assert [line["ledger"] for line in written(path)] == [{"productive": 1.0}, {"productive": 2.0}]


def test_only_members_whose_state_changed_are_written(path: Path) -> None:
    writer = History(path)
    for states in ({"ps-0": "serving", "worker-0": "serving"}, {"ps-0": "serving", "worker-0": "silent"}) * 2:
        writer.members(states)
    writer.members({"worker-0": "silent"})
    assert [line["members"] for line in written(path)] == [
        {"ps-0": "serving", "worker-0": "serving"},
        {"worker-0": "silent"},
        {"worker-0": "serving"},
        {"worker-0": "silent"},
    ]


def test_steps_of_workers_are_added_up_until_they_are_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = History(path)
    writer.add_steps("worker-0", 20)
    writer.add_steps("worker-1", 20)
    writer.add_steps("worker-0", 20)
    writer.numbers(60, 1.0, {}, None)  # too soon
    monkeypatch.setattr(history, "WORKER_STEPS_SECONDS", 0.0)
    writer.numbers(61, 1.0, {}, None)
    writer.write_worker_steps()  # nothing since
    assert [line["gave"] for line in written(path) if "gave" in line] == [{"worker-0": 40, "worker-1": 20}]


def test_half_of_the_lines_are_kept_and_sums_stay() -> None:
    lines: list[dict[str, Any]] = [{"t": n, "step": n, "values": {"loss": 1.0}} for n in range(100)]
    lines += [{"t": 100 + n, "gave": {"worker-0": 1, f"worker-{n}": 2}} for n in range(1, 8)]
    lines += [{"t": 200 + n, "ledger": {"productive": n}} for n in range(10)]
    lines += [{"t": 300, "members": {"ps-0": "away"}}]
    kept = thin(lines)
    assert sum("step" in line for line in kept) == 50
    parts = [line["gave"] for line in kept if "gave" in line]
    assert len(parts) == 4
    assert sum(part.get("worker-0", 0) for part in parts) == 7
    assert sum(sum(part.values()) for part in parts) == 7 + 14
    assert sum("ledger" in line and "step" not in line for line in kept) == 5
    assert kept[-1] == {"t": 300, "members": {"ps-0": "away"}}
    assert [line["t"] for line in kept] == sorted(line["t"] for line in kept)


def test_a_peak_and_a_loss_that_is_no_number_outlast_every_thinning() -> None:
    lines = [{"t": n, "step": n, "values": {"loss": 1.0}} for n in range(256)]
    lines[77]["values"] = {"loss": "NaN"}
    while len(lines) > 4:
        lines = [dict(line) for line in thin(lines)]
    assert "NaN" in [line["values"]["loss"] for line in lines]  # type: ignore[index]


def test_of_changes_without_number_the_last_of_each_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CHANGES", 10)
    lines: list[dict[str, Any]] = [
        {"t": 1, "members": {"worker-0": "starting", "worker-1": "training"}}, {"t": 2, "batch": 32},
        {"t": 3, "members": {"worker-0": "training"}}, {"t": 4, "placed": {"ps-0": {"bytes": 1}}},
    ]  # fmt: skip
    lines += [{"t": 5 + n, "members": {"worker-2": f"state {n}"}} for n in range(10)]
    kept = thin(thin(lines))
    assert kept[0] == {
        "t": 4,
        "members": {"worker-0": "training", "worker-1": "training"},
        "batch": 32,
        "placed": {"ps-0": {"bytes": 1}},
    }
    assert kept[1:] == lines[4:]


def test_of_a_month_each_day_is_known() -> None:
    lines: list[dict[str, Any]] = []
    for at in range(30_000):
        kind = {"ledger": {"productive": at}} if at % 3 else {"step": at, "values": {"loss": 1 / (1 + at)}}
        lines.append({"t": at, **kind})
        if len(lines) > 1000:
            lines = [dict(line) for line in thin(lines)]
            assert len(lines) <= 800
    for kind in ("step", "ledger"):
        days = Counter(line["t"] // 1000 for line in lines if kind in line)
        assert sorted(days) == list(range(30)), kind
        assert min(days.values()) > 3, kind


def test_a_file_is_thinned_when_it_is_too_large_and_only_then(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"t": n, "step": n}) + "\n" for n in range(1000)) + '{"cut off')
    thin_file(path, path.stat().st_size)
    assert len(written(path)) == 1000
    thin_file(path, path.stat().st_size - 1)
    assert len(written(path)) == 500
    thin_file(path.with_name("none"), 10)


def test_a_file_that_grows_for_ever_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 20_000)
    writer = History(path)
    for step in range(2000):
        writer.numbers(step, 1.0, {"loss": 1 / (step + 1)}, None)
    assert path.stat().st_size <= 20_200
    steps = [line["step"] for line in written(path)]
    assert steps[0] < 100
    assert steps[-1] == 1999
