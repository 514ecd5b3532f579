"""Incremental saves find the rows that two workers' steps have changed by marks; where these lack, saves are whole."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import testing  # before TensorFlow: it chooses the Keras
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints
from trainer.tasks.in_process import start_cluster
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.strategies import make_strategy

# isort: split
import keras
import tensorflow as tf

from trainer.training.tables import row_saves
from trainer.training.tables.row_restores import reading, row_files
from trainer.training.tables.row_saves import snapshots_of
from trainer.training.tf_internals.graphs import inner_graphs, outermost
from trainer.training.updates.row_marks import RowMarks, rows_changed

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("rounds_of_two")]
ITEMS, WIDTH, BATCH, IDS, WORKERS = 4000, 4, 16, 4, 2
two, legacy = tf.keras.optimizers, tf.keras.optimizers.legacy


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few rows are large ones."""
    monkeypatch.setattr(row_saves, "MIN_BYTES", WIDTH * 4 * 100)


class Items:
    """Two tables, one of which is looked up twice in a step, and a dense layer."""

    def __init__(self, library: Any, optimizer: Any) -> None:
        self._library, self._optimizer = library, optimizer

    def build_model(self) -> Any:
        layers = self._library.layers
        ids = self._library.Input([IDS], dtype="int64")
        items, others = (layers.Embedding(ITEMS, WIDTH, name=name) for name in ("items", "others"))
        rows = layers.Concatenate()([items(ids), others(ids), items((ids + 1) % ITEMS)])
        model = self._library.Model(ids, layers.Dense(1)(layers.Flatten()(rows)))
        model.compile(optimizer=self._optimizer(), loss="mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        ids = np.random.default_rng().integers(ITEMS // 2, size=[BATCH * 20, IDS])
        return tf.data.Dataset.from_tensor_slices((ids, np.ones(len(ids)))).repeat().batch(BATCH)


class Training:
    """Steps of two workers on two ps, and saves of what they train."""

    def __init__(self, program: Any, directory: Path, **settings: Any) -> None:
        config = Config(program="mine:One", incremental_saves=9, partitioner_min_bytes=1024, **settings)
        strategy = make_strategy(config, start_cluster("parameter_server", WORKERS, 2))
        self.runner = RemoteStepRunner(config, program, strategy, WORKERS)
        self.saves = Checkpoints(
            RunDirectory(directory, "mine"),
            CheckpointState(
                self.runner.trained,
                self.runner.step,
                copy=self.runner.copy,
                reading=reading,
                make_snapshot=snapshots_of(config, self.runner.marks),
            ),
            config,
        )
        self.saves.prepare()
        self.large = [one.variable for one in self.saves._state._snapshot._large]

    def begin(self, calls: int) -> None:
        for _ in range(calls):
            self.runner.call(5)

    def values(self) -> list[bytes]:
        return [one.numpy().tobytes() for one in self.large]

    def marked(self) -> list[bool]:
        assert self.runner.marks is not None
        return [self.runner.marks.of(one) is not None for one in self.large]


def locks_before(operation: Any) -> set[str]:
    return {one.name for one in operation.control_inputs if one.type == "MutexLock"}


def assert_marks_come_first(runner: RemoteStepRunner) -> None:
    """Of a table and its slots, each write waits for a mark of the same act: what is cut off may lack the write."""
    assert runner.marks is not None
    writes, marks = 0, {id(one.handle) for one in runner.marks.variables}
    for graph in inner_graphs(runner._call.graph):
        for operation in graph.get_operations():
            handle = outermost(operation.inputs[0]) if rows_changed(operation) is not None else None
            if handle is None or id(handle) in marks:
                continue
            before = [one for one in operation.control_inputs if rows_changed(one) is not None]
            made = [one for one in before if id(outermost(one.inputs[0])) in marks]
            assert any(locks_before(one) & locks_before(operation) for one in made)
            writes += 1
    assert writes


CASES = {
    "SGD": (tf.keras, two.SGD, {}, 0),
    "Adam": (tf.keras, two.Adam, {"lazy_optimizers": True}, 2),
    "ahead": (tf.keras, two.Adagrad, {"weights_ahead": True}, 1),
    "legacy.Adagrad": (tf.keras, legacy.Adagrad, {}, 1),
    "Keras 3, Adagrad": (keras, keras.optimizers.Adagrad, {}, 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Adam" else pytest.mark.matrix) for name in CASES]
)
def test_rows_that_steps_have_changed_are_found_by_marks(name: str, tmp_path: Path) -> None:
    library, optimizer, settings, slots = CASES[name]
    training = Training(Items(library, optimizer), tmp_path, **settings)
    assert training.marked() == [True] * 4 * (1 + slots)
    assert_marks_come_first(training.runner)
    training.begin(2)
    training.runner.join()
    training.saves.save_and_wait()
    for _ in range(3):
        training.begin(4)
        training.saves.save_and_wait()
    training.runner.join()
    training.saves.save_and_wait()
    step, expected = int(training.runner.step.numpy()), training.values()
    assert list(tmp_path.glob(f"runs/mine/checkpoints/ckpt-{step}.table-_rows.*"))
    training.begin(2)
    training.runner.join()
    assert training.values() != expected
    assert training.saves.restore() == step
    assert training.values() == expected


@pytest.mark.parametrize("why", ["much is written", pytest.param("many files", marks=pytest.mark.matrix)])
def test_incremental_saves_of_the_same_rows_are_joined(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save after them links the whole one alone, and has what has changed since, before and after the others."""
    monkeypatch.setattr(row_saves, "MAX_WRITTEN_SHARE" if why == "much is written" else "MAX_LINKED", 0.05)
    monkeypatch.setattr(row_saves, "MAX_JOINED", 1.0)
    training, values, rows = Training(Items(tf.keras, two.Adagrad), tmp_path), dict[int, list[bytes]](), []

    def save(calls: int) -> None:
        training.begin(calls)
        training.runner.join()
        training.saves.save_and_wait()
        step = int(training.runner.step.numpy())
        values[step] = training.values()
        rows.append(sorted(row_files(training.saves._catalogue.prefix(step)).values()))

    for calls in (1, 12, 1, 1):
        save(calls)
    training.begin(1)
    training.runner.join()
    for step in reversed(values):
        assert training.saves.restore([step]) == step
        assert training.values() == values[step]
    assert [len(one) for one in rows] == [0, 4, 4, 4], "two files of each ps, of one save"


def test_a_save_is_whole_where_joined_ones_would_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_saves, "MAX_WRITTEN_SHARE", 0.01)
    monkeypatch.setattr(row_saves, "MAX_JOINED", 0.02)
    training, found = Training(Items(tf.keras, two.SGD), tmp_path), []
    for _ in range(3):
        training.begin(8)
        training.runner.join()
        training.saves.save_and_wait()
        found.append(bool(row_files(training.saves._catalogue.prefix(int(training.runner.step.numpy())))))
    assert found == [False, True, False]


def test_the_rows_of_each_kind_of_write_are_known() -> None:
    with tf.Graph().as_default():
        table, slot = (tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[8, 2]) for _ in range(2))
        rows, values = tf.constant([1, 3]), tf.ones([2, 2])
        scattered = tf.raw_ops.ResourceScatterAdd(resource=table, indices=rows, updates=values)
        applied = tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=table, accum=slot, lr=0.1, epsilon=1e-7, grad=values, indices=rows
        )
        whole = tf.raw_ops.AssignVariableOp(resource=table, value=tf.ones([8, 2]))
    changed = [rows_changed(write) for write in (scattered, applied, whole)]
    assert [one if one is None else one.name for one in changed] == [rows.name, rows.name, None]


def test_a_table_that_is_updated_as_a_whole_is_saved_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Items(tf.keras, two.Adam), tmp_path)
    assert training.large == []
    assert "each save is whole, in spite of incremental_saves" in caplog.text
    for _ in range(2):
        training.begin(1)
        training.runner.join()
        training.saves.save_and_wait()
    assert not list(tmp_path.glob("runs/mine/checkpoints/*.table-*"))


class Hears(tf.keras.callbacks.Callback):
    """A callback of the program's, which may change weights."""


class WithCallbacks(Items):
    def __init__(self, *callbacks: Any) -> None:
        super().__init__(tf.keras, two.SGD)
        self._callbacks = callbacks

    def callbacks(self) -> list[Any]:
        return list(self._callbacks)

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(2).shard(context.num_input_pipelines, context.input_pipeline_id)


@pytest.mark.parametrize(("callback", "expected"), [(Hears, True), (tf.keras.callbacks.History, False)])
def test_a_callback_of_the_programs_is_a_doubt(
    callback: Any, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts: list[str] = []
    monkeypatch.setattr(RowMarks, "doubt", lambda marks: doubts.append(inspect.stack()[2].function))
    settings = {"incremental_saves": 9, "epoch_steps": 10, "evaluation": "none", "export": False}
    testing.train(WithCallbacks(callback()), 20, ps=2, directory=tmp_path, **settings)
    # As the training begins, and twice an epoch.
    assert doubts.count("_called") == (5 if expected else 0)
    assert doubts[-1] == "save", "what the end has changed"


class Remembers(tf.keras.Model):
    """Keeps in its table what it has been evaluated with."""

    def test_step(self, data: Any) -> Any:
        table = self.get_layer("items").embeddings
        for shard in getattr(table, "variables", [table]):
            shard.scatter_update(tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([0], tf.int64)))
        return super().test_step(data)


@pytest.mark.parametrize(("evaluation", "expected"), [("inline", True), ("distributed", True), ("distributed", False)])
def test_an_evaluation_that_writes_to_a_table_is_a_doubt(
    evaluation: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program(WithCallbacks):
        def build_model(self) -> Any:
            plain = super().build_model()
            model = (Remembers if expected else tf.keras.Model)(plain.inputs, plain.outputs)
            model.compile(optimizer=plain.optimizer, loss="mse")
            return model

    doubts: list[str] = []
    monkeypatch.setattr(RowMarks, "doubt", lambda marks: doubts.append(inspect.stack()[2].function))
    settings = {"incremental_saves": 9, "epoch_steps": 10, "evaluation": evaluation, "export": False}
    testing.train(Program(), 20, ps=2, directory=tmp_path, **settings)
    assert doubts.count("evaluate") == (2 if expected else 0)
