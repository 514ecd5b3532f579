"""The example with data of Criteo's shape: its data, its files, and that both models learn; about 30 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer import testing
from trainer.examples import criteo
from trainer.examples.criteo import DLRM, KINDS, NUMBERS, SCATTERED, WideAndDeep, examples, parsed, true_logit
from trainer.run.directory import RunDirectory
from trainer.telemetry.status import read_status
from trainer.training.data.context import InputContext

CONTEXT = InputContext(2, 1)


def batches(count: int, part: int = 1) -> list[Any]:
    return list(tf.data.Dataset.range(count).map(lambda number: examples(512, number, tf.constant(part, tf.int64))))


def test_the_data_has_criteos_shape_and_is_the_same_each_time() -> None:
    [(given, clicked)], [(again, _)], [(other, _)] = batches(1), batches(1), batches(1, part=2)
    assert (given["numbers"].shape, given["ids"].shape, clicked.shape) == ((512, NUMBERS), (512, len(KINDS)), (512, 1))
    np.testing.assert_array_equal(given["ids"], again["ids"])
    assert not np.array_equal(given["ids"], other["ids"])
    ranks = np.concatenate([each["ids"].numpy() for each, _ in batches(20)]) // SCATTERED
    assert np.all(ranks >= 0)
    assert np.all(ranks < np.array(KINDS))
    # By Zipf the first half of the orders of magnitude gets half of the draws.
    assert np.mean(ranks[:, 2] < np.sqrt(KINDS[2])) == pytest.approx(0.5, abs=0.05)


def test_what_is_planted_tells_clicks_as_far_as_chance_lets_it() -> None:
    auc = tf.keras.metrics.AUC(from_logits=True)
    for given, clicked in batches(40):
        auc.update_state(clicked, true_logit(given["numbers"], given["ids"] // SCATTERED))
    assert 0.84 < float(auc.result()) < 0.9


@pytest.mark.parametrize("program", [WideAndDeep, DLRM])
def test_a_model_learns_and_serves_what_it_computes(program: Any) -> None:
    made = program(rows=2_000, batch=512, hidden=(32,))
    model = made.build_model()
    model.fit(made.train_dataset(CONTEXT), steps_per_epoch=150, verbose=0)
    found = model.evaluate(made.eval_dataset(CONTEXT), return_dict=True, verbose=0)
    assert found["auc"] > 0.56
    [(given, _)] = batches(1)
    chances = made.serving_signature(model)(given["numbers"], given["ids"])["chance"]
    np.testing.assert_allclose(chances, tf.sigmoid(model(given))[:, 0], rtol=1e-5)


def test_with_a_capacity_each_id_has_a_row_of_its_own_on_parameter_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows a table would be shared by all ids of a kind."""
    monkeypatch.setattr(criteo, "KINDS", (3, 20_000))
    program = WideAndDeep(rows=2, capacity=5_000, batch=64, hidden=(8,))
    result = testing.train(program, 10, ps=2, directory=tmp_path, evaluation="none")
    tables = read_status(RunDirectory(tmp_path, "test")).tables
    assert tables["kind_00"]["rows"] == 3
    assert tables["kind_01"]["rows"] > 50
    [(given, _)] = batches(1)
    served = tf.saved_model.load(str(result.directory / "export")).signatures["serving_default"]
    assert len(np.unique(served(numbers=0 * given["numbers"], ids=given["ids"])["chance"])) > 20


def test_criteos_lines_are_read(tmp_path: Path) -> None:
    numbers, texts = ["5", "", "-2", *["0"] * 10], ["68fd1e64", "", *["80e26c9b"] * 24]
    line = "\t".join(["1", *numbers, *texts])
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / name).write_text(f"{line}\n" * 3)
    given, clicked = parsed(tf.constant([line]))
    assert clicked.numpy().tolist() == [[1]]
    assert given["numbers"].numpy()[0, :3].tolist() == [5, 0, 0]
    made = WideAndDeep(rows=50, batch=2, files=str(tmp_path / "train-*"), eval_files=str(tmp_path / "test-*"))
    for dataset in (made.train_dataset(CONTEXT), made.eval_dataset(CONTEXT)):
        read, _ = next(iter(dataset))
        np.testing.assert_array_equal(read["ids"][0], given["ids"][0])
    model = made.build_model()
    chances = made.serving_signature(model)(given["numbers"], tf.constant([texts]))["chance"]
    np.testing.assert_allclose(chances, tf.sigmoid(model(given))[:, 0], rtol=1e-5)
    with pytest.raises(ValueError, match="eval_files is '': give both"):
        WideAndDeep(files="x")
