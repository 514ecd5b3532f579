"""bench/recommender judges checkpoints of dynamic tables, too, and counts what goes over the wire."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import interleaved
from bench.interleaved import Side, sent_and_got
from bench.recommender import Judge, SavedCheckpoint
from bench.tasks import LocalCluster
from trainer import testing
from trainer.examples import criteo

STEPS = 60
TABLES = {f"kind_{number:02}": {"capacity": 4000} for number in range(2)}


@pytest.mark.matrix
def test_dynamic_tables_have_the_auc_that_their_training_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "KINDS", (200, 700))
    monkeypatch.setattr(criteo, "EVALUATED", 8)
    program, wanted = "bench.programs:WideAndDeep", {"evaluation": "inline", "export": False}
    result = testing.train(program, STEPS, workers=2, ps=2, directory=tmp_path, dynamic_tables=TABLES, **wanted)
    judge = Judge("WideAndDeep", TABLES)
    found = judge.auc(str(tmp_path / "runs/test/checkpoints" / f"ckpt-{STEPS}"))
    assert found == pytest.approx(result.evaluation["auc"], abs=2e-3)
    assert 0.55 < found < judge.best


def test_a_checkpoint_is_there_when_its_index_is(tmp_path: Path) -> None:
    index = tmp_path / "ckpt-3.index"
    index.write_text("")
    assert SavedCheckpoint.at(tmp_path / "ckpt-3", began=index.stat().st_mtime - 2).seconds == pytest.approx(2)


def test_what_all_connections_have_sent_and_got_is_added_up() -> None:
    said = "ESTAB 0 0 a:1 b:2\n\t bytes_sent:5 bytes_acked:6 bytes_received:10\nESTAB 0 0 a:1 c:2\n\t bytes_sent:100\n"
    assert sent_and_got(said) == 115


@pytest.mark.parametrize(("traffic", "later", "shown"), [(True, 51_000, "5"), (True, 500, "-"), (False, 51_000, "-")])
def test_only_who_shows_traffic_counts_it_and_ended_connections_make_no_number(
    traffic: bool, later: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are gone with them."""
    counted = [1000, later]
    monkeypatch.setattr(interleaved, "bytes_of", lambda addresses: counted.pop(0))
    cluster: Any = SimpleNamespace(tasks=[], spec=lambda job: {"ps": ["a:1"]})
    side = Side(cluster, SimpleNamespace(until=lambda *_: None), lambda: [])  # type: ignore[arg-type]
    side.warm_up(0.0, traffic)
    monkeypatch.setattr(side, "_steps", lambda: 10.0)
    assert side.step_kilobytes() == shown
    assert len(counted) == (0 if traffic else 2)


def test_one_process_that_trains_alone_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(LocalCluster(0, 0, tmp_path), SimpleNamespace(until=lambda *_: None), lambda: [])  # type: ignore[arg-type]
    side.warm_up(0.0, traffic=True)
    monkeypatch.setattr(side, "_steps", lambda: 10.0)
    assert side.step_kilobytes() == "0"
