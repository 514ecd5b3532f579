"""What has changed since an export: written by a run that trains, and applied where the model is served."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import MINUTE, Runs, last_json, until

from trainer.training.export_changes import VARIABLES, apply_changes, main, write_changes

OPTIONS = (
    *("--dynamic-tables", json.dumps({"items": {"capacity": 5_000_000, "evict_after_steps": 60}})),
    *("--export", "false", "--evaluation", "none", "--set", "new=0.2", "--set", "pause_ms=5"),
    *("--checkpoint-steps", "50", "--checkpoint-seconds", "0", "--steps-per-execution", "10"),
    *("--checkpoints-kept", "30"),
)
TABLES = {"layer/dynamic_keys/.ATTRIBUTES/VARIABLE_VALUE": "layer/dynamic_rows/.ATTRIBUTES/VARIABLE_VALUE"}


class Model(tf.Module):
    """A table, a dynamic one and a number."""

    def __init__(self, table: Any, keys: Any, rows: Any, number: float) -> None:
        self.table = tf.Variable(table)
        self.layer = tf.Module()
        self.layer.dynamic_keys = tf.Variable(keys, shape=[None], dtype=tf.int64, trainable=False)
        self.layer.dynamic_rows = tf.Variable(rows, shape=[None, 2], dtype=tf.float32, trainable=False)
        self.number = tf.Variable(number)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def sums(self, keys: Any) -> Any:
        places = tf.minimum(tf.searchsorted(self.layer.dynamic_keys, keys), tf.size(self.layer.dynamic_keys) - 1)
        return self.number + tf.reduce_sum(tf.gather(self.layer.dynamic_rows, places), 1) + tf.reduce_sum(self.table)


def saved(path: Path, *values: Any) -> Path:
    model = Model(*values)
    tf.saved_model.save(model, str(path), signatures=model.sums)
    return path


def tensors(path: Path) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(path / VARIABLES))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def is_same(one: Path, other: Path) -> bool:
    found, expected = tensors(one), tensors(other)
    assert set(found) == set(expected)
    numbers = [name for name, value in expected.items() if isinstance(value, np.ndarray)]
    return all(np.array_equal(found[name], expected[name], equal_nan=True) for name in numbers)


TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)
TABLE_NOW = np.where(np.arange(20).reshape(10, 2) == 7, np.float32("nan"), TABLE)


@pytest.fixture
def exports(tmp_path: Path) -> tuple[Path, Path]:
    base = saved(tmp_path / "1", TABLE, [-5, 2, 9, 12], np.eye(4, 2), 1.0)
    rows = [[1, 0], [7, 7], [0.5, 0], [0, 0]]  # of 9 it is another, 2 has gone, and 3 and 12 stay or are new
    return base, saved(tmp_path / "2", TABLE_NOW, [-5, 3, 9, 12], rows, 1.0)


def test_a_newer_export_is_made_of_the_older_one_and_its_changes(exports: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = exports
    write_changes(base, new, tmp_path / "2.changes", (1, 2), TABLES)
    reader = tf.train.load_checkpoint(str(tmp_path / "2.changes" / "values"))
    parts = {name.rpartition("#")[2]: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    assert sorted(parts) == ["gone", "keys", "places", "rows"]
    assert (parts["gone"].tolist(), parts["keys"].tolist(), parts["places"].tolist()) == ([2], [3, 9], [3])
    assert main([str(base), str(tmp_path / "2.changes"), str(tmp_path / "made")]) == 0
    assert is_same(tmp_path / "made", new)
    signature = [tf.saved_model.load(str(path)).signatures["serving_default"] for path in (tmp_path / "made", new)]
    found, expected = (next(iter(one(keys=tf.constant([3, 9], tf.int64)).values())) for one in signature)
    np.testing.assert_array_equal(found, expected)


def test_an_export_that_has_not_changed_has_no_changes(exports: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = exports
    write_changes(base, base, tmp_path / "none.changes", (1, 2), TABLES)
    assert json.loads((tmp_path / "none.changes" / "changes.json").read_text())["tensors"] == []
    apply_changes(base, tmp_path / "none.changes", tmp_path / "made")
    assert is_same(tmp_path / "made", base)


def test_changes_of_another_export_are_refused(
    exports: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = exports
    write_changes(base, new, tmp_path / "2.changes", (1, 2), TABLES)
    assert main([str(new), str(tmp_path / "2.changes"), str(tmp_path / "made")]) == 1
    assert "are the changes since step 1, and" in capsys.readouterr().err
    assert main([str(base), str(tmp_path / "2.changes"), str(new)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_run_that_trains_is_exported_and_then_what_changes(runs: Runs) -> None:
    """On two workers and two ps, with keys that come and go."""
    run = "exported"
    words = ("-m", "trainer", "export", "--run", run, "--shared-dir", str(runs.shared))
    process = runs.local("keys:Keys", run, 1_000_000, *OPTIONS)

    def export(*more: str) -> dict[str, Any]:
        made = runs.script(*words, "--json", *more)
        assert made.wait(2 * MINUTE) == 0, made.output
        return dict(last_json(made.output))

    process.search(r"saved \S+/ckpt-\d+ in")
    early = runs.script(*words, "--changes")
    assert early.wait(2 * MINUTE) == 78
    assert "has no whole export whose changes could be written" in early.output
    first = export()
    until(lambda: runs.checkpoints(run)[-1] >= first["step"] + 150, "newer checkpoints", say=lambda: process.output)
    changed = export("--changes")
    assert process.code is None  # it trains on
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    last, whole = export("--changes"), export()
    assert Path(first["export"]) == runs.directory(run) / "exports" / str(first["step"])
    assert changed["export"] == f"{runs.directory(run)}/exports/{changed['step']}.changes"
    assert whole["step"] == last["step"] > changed["step"] > first["step"]
    assert Path(whole["export"]) == runs.directory(run) / "export"
    made = Path(last["export"]).with_suffix(".made")
    apply_changes(Path(first["export"]), Path(last["export"]), made)
    assert is_same(made, Path(whole["export"]))
    reader = tf.train.load_checkpoint(f"{last['export']}/values")
    gone = [reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name.endswith("#gone")]
    assert len(gone) == 1
    assert len(gone[0]) > 100
