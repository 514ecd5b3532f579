"""Steps that read weights before the step before has changed them: what they read and train, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer import testing
from trainer.core.failures import UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.training.measures.staleness import Staleness
from trainer.training.steps.ahead import CopyAhead, early_reads
from trainer.training.steps.traced_call import trace_call
from trainer.training.tables.dynamic.pieces import pieces_of
from trainer.training.tables.table_lookups import GIVEN
from trainer.training.updates.atomic_updates import GATE, AtomicUpdates, mutex_name
from trainer.training.updates.one_update import gather
from trainer.training.updates.orders import sources

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)
RATE = 0.5


def trained(batches: list[list[int]], *, ahead: bool, unrolled: int = 4) -> tuple[np.ndarray, list[float], Staleness]:
    """Train a table of ones, in rounds of four; returns it, the sum of the rows that each step has read, and more."""
    table, read = tf.Variable(tf.ones([6, 2])), tf.Variable(tf.zeros([len(batches)]), trainable=False)
    count = tf.Variable(0, trainable=False)
    stale = Staleness(SimpleNamespace(iterations=count))

    @tf.function
    def step(iterator: Any) -> Any:
        ids = next(iterator)
        with stale.measured(ids):
            rows = tf.gather(table, ids)
            read.scatter_update(tf.IndexedSlices([tf.reduce_sum(rows)], [count.assign_add(1) - 1]))
            table.scatter_sub(tf.IndexedSlices(RATE * rows, ids))
        return {}

    iterator = iter(tf.data.Dataset.from_tensor_slices(batches))
    traced, counter = step.get_concrete_function(iterator), tf.Variable(0, dtype=tf.int64)
    call = trace_call(tf.distribute.get_strategy(), traced, counter, iterator, unrolled=unrolled, ahead=ahead)
    call(iterator, tf.constant([len(batches)], tf.int64))
    assert int(counter) == len(batches)
    return table.numpy(), list(read.numpy()), stale


def test_each_step_of_a_round_reads_rows_that_lack_the_update_before() -> None:
    """First one step alone, then a round of four."""
    in_turn, ahead = (trained([[3]] * 5, ahead=ahead) for ahead in (False, True))
    assert in_turn[1] == [2, 1, 0.5, 0.25, 0.125]
    assert ahead[1] == [2, 1, 1, 0.5, 0]
    assert [one[0][3].tolist() for one in (in_turn, ahead)] == [[2**-5] * 2, [-0.125] * 2]


def test_no_update_is_lost() -> None:
    table, read, _ = trained([[3]] * 9, ahead=True)
    assert table[3, 0] == 1 - RATE * sum(read) / 2


def test_batches_that_share_no_row_with_the_next_one_train_the_same() -> None:
    batches = [[0, 1], [2, 3], [4, 5]] * 3
    (in_turn, read, _), (ahead, read_ahead, _) = (trained(batches, ahead=ahead) for ahead in (False, True))
    np.testing.assert_array_equal(ahead, in_turn)
    assert read_ahead == read


def test_the_update_before_counts_as_staleness() -> None:
    """Of five steps three have read ahead: the first one is alone, and the second one begins the round."""
    for ahead, expected in ((False, (0, 0)), (True, (4, 1))):
        *_, stale = trained([[3]] * 5, ahead=ahead)
        assert stale.found([one for one, _ in stale.states], steps=5) == expected


def test_an_update_takes_its_mutex_when_the_next_step_has_read() -> None:
    """It would wait for it with the mutex held, and so for the worker that names the rows."""
    table, optimizer = tf.Variable(tf.ones([6, 2])), tf.keras.optimizers.Adam(0.1)
    optimizer.build([table])
    gather(optimizer)
    updates = AtomicUpdates(tf.distribute.get_strategy())

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with updates.active():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    ids = tf.constant([1, 2])
    copy = CopyAhead(step.get_concrete_function(ids))
    steps = tf.function(lambda ids: copy.make_round([ids], 3) and None, autograph=False)
    operations = steps.get_concrete_function(ids).graph.get_operations()
    gates = [one for one in operations if one.type == "MutexLock" and mutex_name(one).endswith(GATE)]
    before = [sum(each.type == "ResourceGather" for each in all_before(one)) for one in gates]
    assert before == [2, 3, 3]
    for _ in range(20):
        steps(ids)
    assert int(optimizer.iterations) == 60


def all_before(operation: Any) -> list[Any]:
    """Return all that an operation waits for."""
    found, todo = {}, [operation]
    while todo:
        new = {one.name: one for one in sources(todo.pop()) if one.name not in found}
        found |= new
        todo += new.values()
    return list(found.values())


def traced(own_step: Callable[[Any], Any]) -> Any:
    iterator = iter(tf.data.Dataset.from_tensor_slices([[0, 1]]))
    return tf.function(lambda iterator: own_step(next(iterator))).get_concrete_function(iterator)


def test_a_step_that_cannot_read_ahead_is_refused() -> None:
    table, chosen = tf.Variable(tf.ones([6, 2])), tf.Variable([1, 0], trainable=False)

    def has_a_condition(ids: Any) -> Any:
        return tf.cond(ids[0] > 1, lambda: tf.gather(table, ids), lambda: tf.gather(table, ids + 1))

    def reads_last(ids: Any) -> Any:
        table.scatter_sub(tf.IndexedSlices(tf.ones([2, 2]), ids))
        return tf.gather(table, ids)

    def has_ids_that_it_changes(ids: Any) -> Any:
        chosen.assign_add(ids)
        return tf.gather(table, chosen)

    def writes_what_it_has_read(ids: Any) -> Any:
        table.scatter_update(tf.IndexedSlices(2 * tf.gather(table, ids), ids))
        return {}

    refused = {has_a_condition: "has a loop, a condition or another function"}
    refused |= dict.fromkeys((reads_last, has_ids_that_it_changes, writes_what_it_has_read), "reads no weights that")
    for own_step, expected in refused.items():
        with pytest.raises(UserError, match=f"weights_ahead: train_step {expected}.*: leave weights_ahead out"):
            CopyAhead(traced(own_step))


def test_a_table_that_is_no_captured_one_makes_no_other_read_early() -> None:
    """What of a graph's handles is not captured may be anything: it stands for no trained variable."""
    table, other = tf.Variable(tf.ones([6, 2])), tf.Variable(1.0, trainable=False)

    @tf.function
    def step(table: Any, other: Any) -> Any:
        ids = tf.identity([0, 1], name=GIVEN)
        rows = tf.raw_ops.ResourceGather(resource=table, indices=ids, dtype=tf.float32, name="rows")
        return rows, tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32, name="other")

    assert early_reads(step.get_concrete_function(table.handle, other.handle).graph) == ([], [], [])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategy": "mirrored"}, "strategy mirrored"),
        ({"input_sharding": "dynamic", "input_new_files_seconds": 5.0}, "input_new_files_seconds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"weights_ahead: .*{expected}"):
        Config(program="a:B", weights_ahead=True, **settings)


class Halved:
    """Each worker has rows of its own, and a batch shares none with the next one: each lookup halves its row.

    All look up the last row as well, from which each step takes 1. The table is split over the ps.
    """

    def build_model(self) -> Any:
        model = Table()
        model.compile(tf.keras.optimizers.SGD(0.25))
        return model

    def train_dataset(self, context: Any) -> Any:
        batches = tf.constant([[0, 1], [2, 3], [4, 5]], tf.int64) + 6 * tf.cast(context.input_pipeline_id, tf.int64)
        return tf.data.Dataset.from_tensor_slices(batches).repeat()

    eval_dataset = train_dataset


class Table(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(name="table", shape=[13, 8], initializer="ones")

    def call(self, ids: Any) -> Any:
        return tf.nn.embedding_lookup(self.table, ids)

    def train_step(self, ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(ids) ** 2) + 4 * tf.reduce_sum(self(tf.zeros_like(ids[:1]) + 12))
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


def test_two_workers_train_right_numbers_and_lose_no_update(tmp_path: Path) -> None:
    result = testing.train(
        Halved(),
        steps=120,
        ps=2,
        directory=tmp_path,
        weights_ahead=True,
        steps_per_execution=17,
        evaluation="none",
        export=False,
        partitioner_min_bytes=64,
    )
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / f"ckpt-{result.step}"))
    table = reader.get_tensor("model/table/.ATTRIBUTES/VARIABLE_VALUE")
    assert table[12].tolist() == [1.0 - 120] * 8
    halvings = -np.log2(table[:12, 0])
    np.testing.assert_array_equal(table[:12], np.exp2(-halvings)[:, np.newaxis] * np.ones(8))
    assert np.array_equal(halvings, np.round(halvings))
    assert halvings.sum() == 2 * 120
    assert np.ptp(halvings[:6]) <= 1
    assert np.ptp(halvings[6:]) <= 1


class ByKey:
    """A table of ones, of which a batch names some rows twice, and each row comes again in one of the next batches."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def build_model(self) -> Any:
        library = self.library
        ids = library.Input([4], dtype="int64")
        rows = library.layers.Embedding(40, 8, name="items", embeddings_initializer="ones")(ids)
        sums = library.layers.GlobalAveragePooling1D()(rows)
        model = library.Model(ids, library.layers.Dot(1)([sums, sums]))
        model.compile(library.optimizers.Adagrad(0.1), loss=lambda _, found: found[:, 0])
        return model

    def train_dataset(self, context: Any) -> Any:
        ids = np.random.default_rng(1).integers(40, size=(50, 2, 4))
        return tf.data.Dataset.from_tensor_slices((ids, np.zeros([50, 2, 1], np.float32))).repeat()

    eval_dataset = train_dataset


@pytest.mark.parametrize(
    "library", [tf.keras, pytest.param(keras, marks=pytest.mark.matrix)], ids=["tf_keras", "keras3"]
)
def test_rows_by_key_are_trained_as_those_of_a_fixed_table(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.steps.remote.ROUND_OPERATIONS", 1_000_000)  # the same rounds for both

    def train(name: str, **settings: Any) -> Any:
        more = {"evaluation": "none", "export": False, "steps_per_execution": 17, "partitioner_min_bytes": 64}
        result = testing.train(ByKey(library), 60, workers=1, ps=2, directory=tmp_path / name, **more, **settings)
        return str(result.directory / "checkpoints" / "ckpt-60")

    dynamic = {"dynamic_tables": {"items": {"capacity": 100}}}
    ahead, in_turn = (rows_by_key(train(f"dynamic-{ahead}", weights_ahead=ahead, **dynamic)) for ahead in (True, False))
    reader = tf.train.load_checkpoint(train("fixed", weights_ahead=True))
    [fixed] = [
        reader.get_tensor(name)
        for name, shape in reader.get_variable_to_shape_map().items()
        if shape == [40, 8] and "optimizer" not in name
    ]
    assert sorted(ahead) == sorted(in_turn) == list(range(40))
    np.testing.assert_array_equal([ahead[key] for key in range(40)], fixed)
    assert any((ahead[key] != in_turn[key]).any() for key in range(40))


def rows_by_key(prefix: str, name: str = "items") -> dict[int, np.ndarray]:
    """Return the rows of a dynamic table in a checkpoint."""
    readers = [tf.train.load_checkpoint(path) for *_, path in pieces_of(prefix, name)]
    return {
        int(key): row
        for reader in readers
        for key, row in zip(reader.get_tensor("keys"), reader.get_tensor("values"), strict=True)
    }


class HalvedByKey(Halved):
    """The same with a dynamic table, which a step looks up twice, and with new keys in each batch."""

    def build_model(self) -> Any:
        model = TableByKey()
        model.compile(tf.keras.optimizers.SGD(0.25))
        return model

    def train_dataset(self, context: Any) -> Any:
        def with_new(number: Any, known: Any) -> Any:
            new = 1000 + 4 * number + 2 * tf.cast(context.input_pipeline_id, tf.int64)
            return tf.concat([known, [new, new + 1]], 0)

        return super().train_dataset(context).enumerate().map(with_new)


class TableByKey(Table):
    def __init__(self) -> None:
        tf.keras.Model.__init__(self)
        self.items = tf.keras.layers.Embedding(13, 8, name="items", embeddings_initializer="ones")

    def call(self, ids: Any) -> Any:
        return self.items(ids)


def test_two_workers_train_right_numbers_by_key_and_each_new_key_once(tmp_path: Path) -> None:
    result = testing.train(
        HalvedByKey(),
        steps=120,
        ps=2,
        directory=tmp_path,
        weights_ahead=True,
        steps_per_execution=17,
        evaluation="none",
        export=False,
        dynamic_tables={"items": {"capacity": 1000}},
    )
    rows = rows_by_key(str(result.directory / "checkpoints" / f"ckpt-{result.step}"))
    np.testing.assert_array_equal(rows.pop(12), [1.0 - 120] * 8)
    known, new = ({key: row for key, row in rows.items() if (key < 12) == which} for which in (True, False))
    np.testing.assert_array_equal(list(new.values()), np.full([2 * 120, 8], 0.5))
    halvings = np.array([-np.log2(known[key]) for key in range(12)])
    np.testing.assert_array_equal(halvings, np.round(halvings))
    assert np.ptp(halvings, 1).max() == 0
    assert halvings[:, 0].sum() == 2 * 120
    assert np.ptp(halvings[:6]) <= 1
    assert np.ptp(halvings[6:]) <= 1
