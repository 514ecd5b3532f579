"""Incremental saves of large variables: what they write, what is read of them, and when a save is a whole one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import testing  # before TensorFlow: it chooses the Keras
from trainer.core.settings.config import Config
from trainer.core.variables import flatten
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints
from trainer.run.saves.save_failures import SaveFailed

# isort: split
import tensorflow as tf

from trainer.training.tables import row_saves
from trainer.training.tables.row_restores import open_checkpoint, reader_of_slices, reading
from trainer.training.tables.row_saves import snapshots_of
from trainer.training.tf_internals.datasets import sleep
from trainer.training.updates.row_marks import MARKED, RowMarks

pytestmark = pytest.mark.timeout(120)
ROWS, WIDTH, SERVERS = 2000, 4, 2
BATCH, IDS, ITEMS = 16, 4, 8000


class Trained:
    """A table in shards, with slots, a small variable and the step: no training, only values."""

    def __init__(self, servers: int = SERVERS) -> None:
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers)
        self.strategy = testing.in_process_cluster(1, servers, partitioner)
        with self.strategy.scope():
            self.model = tf.Module()
            self.model.metrics = ()
            self.model.table = tf.Variable(tf.zeros([ROWS, WIDTH]), name="table")
            self.model.small = tf.Variable(tf.zeros([]))
            self.model.optimizer = tf.keras.optimizers.Adam()
            self.model.optimizer.build(list(self.model.table.variables))
            self.step = tf.Variable(0, dtype=tf.int64)
        self.marks = RowMarks(flatten(self.large), lambda handle: "")

    @property
    def large(self) -> list[Any]:
        optimizer = [one for one in self.model.optimizer.variables if one.shape.rank == 2]
        return [*self.model.table.variables, *optimizer]

    def values(self) -> list[np.ndarray]:
        return [one.numpy() for one in (self.model.table, self.model.small, *self.large, self.step)]

    def set_rows(self, rows: list[int], value: float) -> None:
        for variable in self.large:
            # Of Python's numbers TensorFlow takes -0.0 for 0.0.
            values = np.full([len(rows), WIDTH], value, np.float32)
            variable.scatter_update(tf.IndexedSlices(tf.constant(values), tf.constant(rows, tf.int64)))
            first = 0
            for shard in flatten([variable]):
                own = [row - first for row in rows if first <= row < first + shard.shape[0]]
                marks, first = self.marks.of(shard), first + shard.shape[0]
                assert marks is not None
                marked = tf.fill([len(own)], tf.constant(MARKED, tf.int8))
                marks.scatter_update(tf.IndexedSlices(marked, tf.constant(own, tf.int64)))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few rows are large ones."""
    monkeypatch.setattr(row_saves, "MIN_BYTES", WIDTH * 4 * 100)


def saves_of(directory: Path, trained: Trained, most: int = 9, **settings: Any) -> Checkpoints:
    config = Config(program="mine:One", incremental_saves=most, **settings)
    return Checkpoints(
        RunDirectory(directory, "mine"),
        CheckpointState(
            trained.model,
            trained.step,
            local_run_dir=config.local_run_dir,
            reading=reading,
            make_snapshot=snapshots_of(config, trained.marks),
        ),
        config,
    )


def save(saves: Checkpoints, trained: Trained, step: int) -> str:
    trained.step.assign(step)
    trained.model.small.assign(step)
    saves.save_and_wait()
    return str(saves._catalogue.prefix(step))


def written(prefix: str) -> int:
    """Return the bytes of a checkpoint that no other one has; call it before the next save."""
    found = [path.stat() for path in Path(prefix).parent.glob(f"{Path(prefix).name}.[itd]*")]
    return sum(each.st_size for each in found if each.st_nlink == 1)


def is_whole(prefix: str) -> bool:
    return not list(Path(prefix).parent.glob(f"{Path(prefix).name}.table-*"))


def is_same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    """Return whether numbers are the same, bit by bit."""
    return [one.tobytes() for one in found] == [one.tobytes() for one in expected]


@pytest.mark.parametrize("local", [False, True])
def test_an_incremental_save_writes_the_rows_that_are_marked_and_one_after_a_doubt_all(
    local: bool, trained: Trained, tmp_path: Path
) -> None:
    saves = saves_of(tmp_path, trained, local_run_dir=local)
    generator = np.random.default_rng(1)
    for one in trained.large:
        one.assign(generator.normal(size=one.shape).astype(np.float32))
    shard, found = trained.model.table.variables[1], list[Any]()

    def saved(step: int) -> None:
        prefix = save(saves, trained, step)
        found.append((prefix, written(prefix), trained.values()))

    saved(1)
    trained.set_rows([0, 7, 999], 2.0)
    saved(2)
    trained.set_rows([7, 500], -0.0)
    saved(3)
    shard.assign(np.where(shard.numpy() == shard.numpy()[3, 2], np.nan, shard.numpy()))
    trained.marks.doubt()  # as after a callback
    saved(4)
    trained.set_rows([500], 0.0)
    saved(5)
    prefixes, sizes, values = zip(*found, strict=True)
    assert [is_whole(prefix) for prefix in prefixes] == [True, False, False, True, False]
    assert all(0 < sizes[number] < sizes[0] / 4 for number in (1, 2, 4)), sizes
    for number in (4, 1, 0, 3, 2):
        trained.set_rows(list(range(1000)), 5.0)
        assert saves_of(tmp_path, trained, local_run_dir=local).restore([number + 1]) == number + 1
        assert is_same(trained.values(), values[number])


def test_it_is_restored_in_other_shards(trained: Trained, tmp_path: Path) -> None:
    """As on another number of ps; two shards lie on one of them, and the table is read as a whole and in slices."""
    saves = saves_of(tmp_path, trained)
    whole = np.random.default_rng(2).normal(size=[ROWS, WIDTH]).astype(np.float32)
    trained.model.table.assign(whole)
    save(saves, trained, 1)
    for step, rows in ((2, [0, 999]), (3, [5, 999])):
        trained.set_rows(rows, step)
        prefix = save(saves, trained, step)
    expected = trained.model.table.numpy()
    assert np.array_equal(expected[[0, 999, 5]], [[2.0] * WIDTH, [3.0] * WIDTH, [3.0] * WIDTH])
    reader = open_checkpoint(prefix)
    [key] = [key for key in reader.get_variable_to_shape_map() if key.startswith("model/table/")]
    np.testing.assert_array_equal(reader.get_tensor(key), expected)
    assert reader.get_tensor("model/small/.ATTRIBUTES/VARIABLE_VALUE") == 3.0
    part = reader_of_slices(prefix)(key, f"{ROWS} {WIDTH} 3,1600:-", tf.float32)
    np.testing.assert_array_equal(part, expected[3:1603])
    other = tf.train.Checkpoint(model=tf.train.Checkpoint(table=tf.Variable(tf.zeros([ROWS, WIDTH]))))
    with reading(prefix):
        other.read(prefix).expect_partial()
    np.testing.assert_array_equal(other.model.table, expected)
    with pytest.raises(tf.errors.NotFoundError, match=r"table.*not found in checkpoint"):
        other.read(prefix)


@pytest.mark.parametrize("why", ["so many", "no links", "a save that was removed", "much has changed", "a restore"])
def test_a_save_is_a_whole_one(
    why: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no links":

        def link(self: Path, target: Path) -> None:
            raise PermissionError("Operation not permitted")

        monkeypatch.setattr(Path, "hardlink_to", link)
    saves = saves_of(tmp_path, trained, most=1 if why == "so many" else 9)
    first = save(saves, trained, 1)
    trained.set_rows(list(range(800 if why == "much has changed" else 20)), 2.0)
    if why in ("so many", "much has changed"):
        assert not is_whole(save(saves, trained, 2))
        trained.set_rows([1], 3.0)
    elif why == "a restore":
        assert saves.restore() == 1
        trained.set_rows([1], 3.0)
    elif why == "a save that was removed":
        for path in Path(first).parent.glob("ckpt-1.*"):
            path.unlink()
    prefix, expected = save(saves, trained, 3), trained.values()
    assert is_whole(prefix)
    assert ("saved whole: can't link" in caplog.text) == (why == "no links")
    trained.set_rows([1, 2], 9.0)
    assert saves_of(tmp_path, trained).restore() == 3
    assert is_same(trained.values(), expected)


def test_a_save_that_is_not_written_is_made_up_for_by_the_next_one(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = saves_of(tmp_path, trained)
    save(saves, trained, 1)
    trained.set_rows([1], 7.0)
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        snapshot = saves._state._snapshot
        patched.setattr(snapshot, "_traces", snapshot._traces._replace(write_rest=fail))
        with pytest.raises(SaveFailed):
            save(saves, trained, 2)
    prefix, expected = save(saves, trained, 3), trained.values()
    assert is_whole(prefix)
    trained.set_rows([1], 0.0)
    assert saves_of(tmp_path, trained).restore() == 3
    assert is_same(trained.values(), expected)


def test_no_copy_stays_after_a_save(trained: Trained, tmp_path: Path) -> None:
    saves = saves_of(tmp_path, trained)

    def held() -> set[int]:
        snapshot = saves._state._snapshot
        rows = [one for large in snapshot._large for one in (large.changed, large.values)]
        return {int(tf.size(one.value())) for one in (*(copy for _, copy in snapshot._pairs), *rows)}

    for step, whole in ((1, True), (2, False), (3, False)):
        trained.set_rows([1], 4.0)
        assert is_whole(save(saves, trained, step)) == whole
        assert held() == {0}


def test_a_save_that_lacks_a_part_of_the_one_before_fails_and_the_next_one_is_whole(
    trained: Trained, tmp_path: Path
) -> None:
    saves = saves_of(tmp_path, trained)
    first = save(saves, trained, 1)
    trained.set_rows([1], 6.0)
    max(Path(first).parent.glob("ckpt-1.data-*")).unlink()
    with pytest.raises(SaveFailed, match=r"parts of the checkpoint .*ckpt-1 are gone"):
        save(saves, trained, 2)
    assert is_whole(save(saves, trained, 3))


@pytest.mark.parametrize(
    "part",
    [
        "_base.0-of-1.000000.data",
        pytest.param("_rows.0-of-2.000000.data", marks=pytest.mark.matrix),
        pytest.param("_rows.1-of-2.000000.index", marks=pytest.mark.matrix),
    ],
)
def test_damage_is_found_as_in_whole_ones(part: str, trained: Trained, tmp_path: Path) -> None:
    saves = saves_of(tmp_path, trained)
    save(saves, trained, 1)
    first = trained.values()
    trained.set_rows([1, 2], float(trained.large[0][1, 0]) + 1)
    prefix = save(saves, trained, 2)
    path = max(Path(prefix).parent.glob(f"ckpt-2.table-{part}*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    path.unlink()  # else it would be damage of the first one, too
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    messages: list[str] = []
    again = Checkpoints(
        RunDirectory(tmp_path, "mine"),
        CheckpointState(trained.model, trained.step, reading=reading),
        Config(program="mine:One"),
        set_aside=messages.append,
    )
    assert again.restore() == 1
    assert is_same(trained.values(), first)
    assert len(messages) == 1, messages


class Counted:
    """A row's numbers are how often it was looked up: no update may be lost in what is restored."""

    keras = tf.keras

    def build_model(self) -> Any:
        ids = self.keras.Input([IDS], dtype="int64")
        rows = self.keras.layers.Embedding(ITEMS, WIDTH, embeddings_initializer="zeros", name="items")(ids)
        model = self.keras.Model(ids, self.keras.layers.Flatten()(rows))
        rate = float(BATCH * IDS * WIDTH)
        model.compile(optimizer=self.keras.optimizers.SGD(rate), loss=lambda _, found: tf.reduce_mean(found, -1))
        return model

    def train_dataset(self, context: Any) -> Any:
        ids = np.random.default_rng().integers(ITEMS, size=[BATCH * 20, IDS])
        return tf.data.Dataset.from_tensor_slices((ids, np.zeros(len(ids)))).repeat().batch(BATCH).apply(sleep(20_000))

    def eval_dataset(self, context: Any) -> Any:
        ids = np.arange(ITEMS).reshape(-1, IDS)
        return tf.data.Dataset.from_tensor_slices((ids, np.zeros(len(ids)))).batch(BATCH)


@pytest.mark.parametrize("three", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_no_update_is_lost_by_two_workers(three: bool, tmp_path: Path) -> None:
    """Trained on 2 ps, and then on 3, evaluated and exported from incremental saves."""

    class Counted3(Counted):
        keras = importlib.import_module("keras")

    program, steps = (Counted3 if three else Counted)(), 60
    settings = {"incremental_saves": 9, "checkpoint_steps": 10, "checkpoints_kept": 20, "partitioner_min_bytes": 1024}
    for servers, until, ends in ((2, steps, False), (3, 2 * steps, True)):
        settings |= {"evaluation": "sidecar" if ends else "none", "export": ends}
        result = testing.train(program, until, ps=servers, directory=tmp_path, **settings)
        prefix = str(result.directory / "checkpoints" / f"ckpt-{until}")
        assert not is_whole(prefix)
        reader = open_checkpoint(prefix)
        [key] = [
            key
            for key, shape in reader.get_variable_to_shape_map().items()
            if shape == [ITEMS, WIDTH] and "optimizer" not in key
        ]
        table = reader.get_tensor(key)
        assert -table.sum() == until * BATCH * IDS * WIDTH
    assert result.evaluation["loss"] == pytest.approx(table.mean())
    loaded = tf.saved_model.load(str(result.directory / "export"))
    ids = np.arange(ITEMS).reshape(-1, IDS)
    np.testing.assert_array_equal(loaded.serve(ids), table[ids].reshape(len(ids), -1))
