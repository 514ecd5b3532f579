"""Incremental saves of large variables: what they write, what is read of them, and when a save is a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import testing  # before TensorFlow: it chooses the Keras
from trainer.core.config import Config
from trainer.run.checkpoints import Checkpoints
from trainer.run.directory import RunDirectory

# isort: split
import tensorflow as tf

from trainer.training import row_saves
from trainer.training.row_restores import reading
from trainer.training.row_saves import snapshots_of

pytestmark = pytest.mark.timeout(120)
ROWS, WIDTH, SERVERS = 2000, 4, 2


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

    @property
    def large(self) -> list[Any]:
        optimizer = [one for one in self.model.optimizer.variables if one.shape.rank == 2]
        return [*self.model.table.variables, *optimizer]

    def values(self) -> list[np.ndarray]:
        return [one.numpy() for one in (self.model.table, self.model.small, *self.large, self.step)]

    def set_rows(self, rows: list[int], value: float) -> None:
        for variable in self.large:
            variable.scatter_update(tf.IndexedSlices(tf.fill([len(rows), WIDTH], value), tf.constant(rows, tf.int64)))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few rows are large ones, and are compared in several turns."""
    monkeypatch.setattr(row_saves, "LEAST_BYTES", WIDTH * 4 * 100)
    monkeypatch.setattr(row_saves, "COMPARED_BYTES", WIDTH * 4 * 64)


def saves_of(directory: Path, trained: Trained, most: int = 9, **settings: Any) -> Checkpoints:
    config = Config(program="mine:One", incremental_saves=most, **settings)
    return Checkpoints(
        RunDirectory(directory, "mine"),
        trained.model,
        trained.step,
        config,
        reading=reading,
        make_snapshot=snapshots_of(config),
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


def test_an_incremental_save_writes_the_rows_that_have_changed_by_whatever(trained: Trained, tmp_path: Path) -> None:
    saves = saves_of(tmp_path, trained)
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
    shard.assign(np.where(shard.numpy() == shard.numpy()[3, 2], np.nan, shard.numpy()))  # as a callback may
    saved(3)
    trained.set_rows([500], 0.0)  # an equal number, and other bits
    saved(4)
    prefixes, sizes, values = zip(*found, strict=True)
    assert [is_whole(prefix) for prefix in prefixes] == [True, False, False, False]
    assert all(0 < size < sizes[0] / 4 for size in sizes[1:]), sizes
    for number in (3, 1, 0, 2):
        trained.set_rows(list(range(1000)), 5.0)
        assert saves_of(tmp_path, trained).restore([number + 1]) == number + 1
        assert is_same(trained.values(), values[number])
