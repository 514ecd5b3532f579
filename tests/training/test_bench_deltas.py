"""bench/dynamic --deltas: its steps fill a table before they draw keys, and what a save has written is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.ahead import tables_of
from bench.deltas import last_megabytes
from bench.programs import TableFilled
from trainer.training.data.context import InputContext


def test_the_first_steps_of_two_workers_name_each_key_and_later_ones_some_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 50_000
    monkeypatch.setenv("BENCH_ROWS", str(rows))
    steps = TableFilled.filling_steps(rows)
    datasets = [TableFilled().train_dataset(InputContext(2, worker)) for worker in range(2)]
    found = [[ids.numpy() for ids, _ in dataset.take(steps)] for dataset in datasets]
    filling = [*found[0][: steps - steps // 2], *found[1][: steps // 2]]
    assert set(np.concatenate(filling).reshape(-1)) == set(range(rows))
    drawn = np.concatenate([*found[0][steps - steps // 2 :], *found[1][steps // 2 :]])
    assert drawn.min() >= 0
    assert drawn.max() < rows
    assert np.mean(drawn < np.sqrt(rows)) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("next_one", [False, True], ids=["the last", "with the next one begun"])
def test_what_a_save_has_linked_is_not_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_one: bool
) -> None:
    directory = tmp_path / "runs/run-0/checkpoints"
    directory.mkdir(parents=True)
    whole = directory / "ckpt-10.table-embedding.0-of-1.000000.data-00000-of-00001"
    whole.write_bytes(bytes(4_000_000))
    (directory / whole.name.replace("ckpt-10", "ckpt-20")).hardlink_to(whole)
    changed = directory / "ckpt-20.table-embedding.0-of-1.000001.data-00000-of-00001"
    changed.write_bytes(bytes(2_000_000))
    (directory / "ckpt-20.data-00000-of-00001").write_bytes(bytes(9))
    if next_one:
        for path in (whole, changed):
            (directory / path.name.replace("ckpt-20", "ckpt-30").replace("ckpt-10", "ckpt-30")).hardlink_to(path)
    monkeypatch.setattr("bench.deltas.newest_of", lambda _: 20)
    assert last_megabytes(tmp_path) == 2.0


def test_each_program_that_reads_ahead_has_dynamic_tables() -> None:
    assert tables_of("TableAdagrad", 50) == {"dynamic_tables": {"embedding": {"capacity": 100}}}
    assert len(tables_of("DLRMKept", 50)["dynamic_tables"]) == 26
