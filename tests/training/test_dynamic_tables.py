"""Dynamic tables: a key gets one row, whichever worker asks first; what was trained is neither lost nor another's."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# isort: split
import keras
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.core.settings.dynamic_tables import TableSettings
from trainer.training.keras.keras3 import row_updates as rows_of_keras3
from trainer.training.keras.keras3.shards import train_shards
from trainer.training.tables.dynamic.arrays import Index
from trainer.training.tables.dynamic.eviction import Eviction
from trainer.training.tables.dynamic.hashing import constant, keys_of, normal, owner_of, uniform
from trainer.training.tables.dynamic.layers import attach, take_over_layers
from trainer.training.tables.dynamic.optimizers import clips, leave_out, row_slots, train_rows
from trainer.training.tables.dynamic.pieces import EVER, Pieces, pieces_of
from trainer.training.tables.dynamic.served import ServedTable
from trainer.training.tables.dynamic.shard import FIRST, NEXT, NO_KEY, REFUSED, ROWS, Shard
from trainer.training.tables.dynamic.table import Table, giving_rows, leave_at_ps
from trainer.training.tables.dynamic.tables import DynamicTables, destroy
from trainer.training.tables.dynamic.together import made_together
from trainer.training.tables.row_updates import update_by_rows
from trainer.training.tables.table_lookups import GIVEN
from trainer.training.updates.atomic_updates import AtomicUpdates
from trainer.training.updates.one_update import gather, gather_keras3
from trainer.training.updates.optimizers import clip_whole
from trainer.training.updates.orders import waits_for

pytestmark = pytest.mark.timeout(300)
WIDTH, CPU = 4, "/device:CPU:0"
two, three = tf.keras.optimizers, keras.optimizers


class Trained(tf.Module):
    """What an optimizer trains, as `trainer` has its lazy ones: a table, and another variable."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer, self.other = optimizer, tf.Variable([2.0, -1.0])

    def prepare(self) -> None:
        is_three = isinstance(self.optimizer, three.Optimizer)
        gather_keras3(self.optimizer) if is_three else gather(self.optimizer)
        (rows_of_keras3.update_by_rows if is_three else update_by_rows)(self, lazy=True)

    def train(self, found: Callable[[], Any], variables: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((found() - 1) ** 2) + tf.reduce_sum(self.other**2)
        variables = [*variables, self.other]
        self.optimizer.apply_gradients(list(zip(tape.gradient(loss, variables), variables, strict=True)))


class Made(Trained):
    """A table on this process's CPU that an optimizer trains, as on so many ps."""

    def __init__(
        self,
        name: str,
        optimizer: Any = None,
        servers: int = 2,
        capacity: int = 5000,
        first: Any = None,
        rows: int = 1,
        sightings: int = 1,
    ) -> None:
        super().__init__(two.SGD(0.1) if optimizer is None else optimizer)
        first = first or constant(WIDTH, 0.5)
        shards = [Shard(f"{name}/{n}", f"test/{name}/{n}", WIDTH, capacity, first, sightings) for n in range(servers)]
        self.table = Table(name, WIDTH, shards, [CPU] * servers)
        self.table.asks_once = not clips(self.optimizer)
        slots = row_slots(self.optimizer, lazy=True)
        if self.optimizer.clipnorm:
            clip_whole(self.optimizer, "aggregate_gradients")
        leave_out(self.optimizer)
        self.prepare()
        train_rows(self.optimizer, self)
        for shard in shards:
            shard.add_slots(slots)
            tf.function(shard.reserve, autograph=False)()
        self.lookups = rows
        self.updates = AtomicUpdates(tf.distribute.get_strategy())
        self.step = tf.function(self._step, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.int64))
        self.values = tf.function(self.table.look_up, autograph=False)

    def update(self, optimizer: Any, variable: Any, gradient: Any, change: Any) -> None:
        assert optimizer is self.optimizer
        self.table.update(variable, gradient, change)

    def _step(self, ids: Any) -> Any:
        found: list[Any] = []

        def look_up() -> Any:
            found.extend(self.table.look_up(ids) for _ in range(self.lookups))
            return tf.add_n(found)

        with self.updates.active(), giving_rows(), made_together():
            self.train(look_up, self.table.variables)
        return found[0]

    def numbers(self, which: int) -> int:
        return sum(int(shard.numbers.read()[which]) for shard in self.table.shards)

    def rows(self) -> dict[int, dict[str, np.ndarray]]:
        """Return all that is kept of each key; raises AssertionError where a key has two rows."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for shard in self.table.shards:
            piece = shard.piece(tf.constant(FIRST, tf.int64), shard.numbers.read()[NEXT], EVER, "")
            keys = piece["keys"].numpy()
            assert not set(map(int, keys)) & set(found)
            assert len(set(keys)) == len(keys) == int(shard.index.size())
            for place, key in enumerate(keys):
                found[int(key)] = {name: value.numpy()[place] for name, value in piece.items() if name != "clock"}
        return found


def test_keys_get_rows_in_training_alone() -> None:
    made = Made("alone")
    ids = tf.constant([7, 7, 9, 2**40, -3, 9], tf.int64)
    np.testing.assert_array_equal(made.values(ids), np.zeros([6, WIDTH]))
    assert made.numbers(ROWS) == 0
    np.testing.assert_array_equal(made.step(ids), np.full([6, WIDTH], 0.5))
    assert made.numbers(ROWS) == made.numbers(NEXT) - 2 * FIRST == 4
    assert made.values(tf.constant([[7, 8]], tf.int64)).shape == [1, 2, WIDTH]
    assert not made.values(tf.constant([8], tf.int64)).numpy().any()
    ragged = made.values(tf.ragged.constant([[7, 7], [], [9]], dtype=tf.int64))
    assert ragged.shape.as_list() == [3, None, WIDTH]
    assert made.numbers(ROWS) == 4


@pytest.mark.usefixtures("rounds_of_two")  # with graphs as TensorFlow optimises them, as users have
def test_workers_that_ask_at_once_for_new_keys_get_one_row_of_each_and_lose_no_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGD on a constant gradient: a key's value tells how often it was trained."""
    monkeypatch.setattr("trainer.training.tables.dynamic.arrays.PART_KEYS", 1500)  # several hash tables
    made = Made("at-once", servers=2)
    workers, calls = 8, 30

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with made.updates.active(), giving_rows(), made_together():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(made.table.look_up(ids))
            gradients = tape.gradient(loss, made.table.variables)
            made.optimizer.apply_gradients(list(zip(gradients, made.table.variables, strict=True)))

    trained = step.get_concrete_function(tf.TensorSpec([None], tf.int64))
    # All workers ask for the same new keys at the same time, in other orders.
    batches = [np.random.default_rng(call).integers(2000, size=200) for call in range(calls)]

    def work(worker: int) -> None:
        for call, ids in enumerate(batches):
            trained(tf.constant(np.random.default_rng([worker, call]).permutation(ids)))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    times = np.zeros(2000, int)
    steps = np.zeros(2000, int)
    for ids in batches:
        times += np.bincount(ids, minlength=2000) * workers
        steps += (np.bincount(ids, minlength=2000) > 0) * workers
    rows = made.rows()
    assert set(rows) == set(np.flatnonzero(times))
    assert made.numbers(ROWS) == len(rows) == made.numbers(NEXT) - 2 * FIRST
    for key, row in rows.items():
        np.testing.assert_allclose(row["values"], 0.5 - 0.1 * times[key], rtol=1e-3)
        assert row["told"][0] == steps[key]
    assert {int(shard.clock.read()[0]) for shard in made.table.shards} == {workers * calls}


def test_an_index_of_several_hash_tables_says_what_one_does_and_no_two_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(1).integers(-(2**62), 2**62, size=3000)
    gone, left, new = np.split(np.stack([np.arange(3000), drawn], 1).reshape(-1), 3)
    found, name = [], "several"
    for part_keys in (10_000, 1000):
        monkeypatch.setattr("trainer.training.tables.dynamic.arrays.PART_KEYS", part_keys)
        made = Made(f"{name}-{part_keys}", servers=1, first=uniform(WIDTH, 1, -1.0, 1.0))
        made.table.name = name
        for ids in (gone, left, left):
            made.step(tf.constant(ids))
        assert Eviction(made.table, [""], TableSettings(5000, evict_after_steps=1)).make() == len(gone)
        made.step(tf.constant(new))
        found.append(made.rows())
        if part_keys == 10_000:
            Pieces(made.table, [""]).save(str(tmp_path / "ckpt-1"))
    for rows in (found[1], restored(str(tmp_path / "ckpt-1"), name, 2, optimizer=two.SGD(0.1))):
        assert_same(rows, found[0])
    assert set(found[0]) == {*map(int, left), *map(int, new)}
    sizes = [int(tf.raw_ops.LookupTableSizeV2(table_handle=one)) for one in made.table.shards[0].index.handles]
    shares = 2.0 ** (np.arange(5) / 5)
    np.testing.assert_allclose(sizes, 4000 * shares / shares.sum(), rtol=0.15)


class Fixed(Trained):
    """A table with a row for each number, as Made has one of keys."""

    def __init__(self, optimizer: Any, lookups: int) -> None:
        super().__init__(optimizer)
        self.table, self.lookups = tf.Variable(tf.fill([64, WIDTH], 0.5)), lookups
        self.prepare()
        optimizer.build([self.table, self.other])

    @tf.function(autograph=False, reduce_retracing=True)
    def step(self, ids: Any) -> None:
        self.train(lambda: tf.add_n([tf.gather(self.table, ids) for _ in range(self.lookups)]), [self.table])


# What each optimizer is given, beside the rate.
MAKES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"clipvalue": 0.3}),
    ("SGD", {"clipnorm": 0.3}),
    ("Adagrad", {"initial_accumulator_value": 0.2}),
    ("Adagrad", {"global_clipnorm": 0.3}),
    ("Adadelta", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"clipnorm": 0.3}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("Ftrl", {"l1_regularization_strength": 0.1}),
    ("Lion", {}),
    ("Nadam", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("RMSprop", {"weight_decay": 0.1}),
]
QUICK = [("tf_keras", "Ftrl", 1), ("tf_keras", "Nadam", 1), ("keras3", "RMSprop", 1), ("tf_keras", "Adam", 2)]
TRAINED = [
    pytest.param(
        *(library, name, arguments, lookups),
        id="-".join([library, name, *arguments, str(lookups)]),
        marks=[] if (library, name, lookups) in QUICK else pytest.mark.matrix,
    )
    for library in ("tf_keras", "keras3")
    for name, arguments in MAKES
    for lookups in (1, 2)
    if library == "tf_keras" or ("clipnorm" not in arguments and (name, lookups) != ("Adagrad", 2))
]


@pytest.mark.parametrize(("library", "name", "arguments", "lookups"), TRAINED)
def test_rows_are_trained_as_those_of_a_fixed_table(
    library: str, name: str, arguments: dict[str, Any], lookups: int
) -> None:
    """Bit by bit where a row's gradients are added up in the same order: with one lookup, and without clipping."""
    kind = getattr(two if library == "tf_keras" else three, name)
    table = Made(f"{library}-{name}-{'-'.join(arguments)}-{lookups}", kind(0.1, **arguments), rows=lookups)
    fixed = Fixed(kind(0.1, **arguments), lookups)
    batches = [[3, 3, 40], [63, 3, 0], [3], [40, 40, 40], [3, 40, 63]]
    if (library, name) == ("keras3", "Adagrad"):  # in a fixed table it doesn't add up what a batch says of a row
        batches = [sorted(set(ids)) for ids in batches]
    for ids in batches:
        table.step(tf.constant(ids, tf.int64))
        fixed.step(tf.constant(ids, tf.int64))
    rows = table.rows()
    assert set(rows) == {key for ids in batches for key in ids}
    is_same = lookups == 1 and not clips(table.optimizer)
    for key, row in rows.items():
        np.testing.assert_allclose(row["values"], fixed.table[key], rtol=0 if is_same else 2e-5, atol=1e-7 * lookups)
    np.testing.assert_allclose(table.other, fixed.other, rtol=1e-5)


def test_a_step_has_few_operations_for_each_ps_and_sends_no_numbers_of_rows_back() -> None:
    graphs = [Made(f"operations-{servers}", two.Adagrad(0.1), servers).step.graph for servers in (2, 3)]
    fewer, more = (len(graph.get_operations()) for graph in graphs)
    assert more - fewer < 110  # it was 176 when each step had the operations by which keys without a row get one
    given = [one.outputs[0] for one in graphs[0].get_operations() if GIVEN in one.name and one.type == "Identity"]
    assert len(given) == 2
    assert {"Size", "Reshape"}.isdisjoint(user.type for rows in given for user in rows.consumers())


def test_lookups_that_wait_for_no_other_have_one_hash_and_one_condition_of_each_ps() -> None:
    """All lie on one device here. The third table's keys come from the rows of the first one."""
    first, second, third = (Made(f"together-{n}", first=constant(WIDTH, float(n))) for n in (1, 2, 3))

    @tf.function(autograph=False)
    def step(ids: Any, others: Any) -> Any:
        with giving_rows(), made_together():
            found = first.table.look_up(ids)
            after = third.table.look_up(tf.cast(found[:, 0], tf.int64) + ids)
            return found, second.table.look_up(others), after

    specs = [tf.TensorSpec([None], tf.int64)] * 2
    kinds = [one.type for one in step.get_concrete_function(*specs).graph.get_operations()]
    assert (kinds.count("If"), kinds.count("LookupTableFindV2")) == (2, 6)
    one_hash = [one.type for one in tf.function(owner_of).get_concrete_function(specs[0], 2).graph.get_operations()]
    assert kinds.count("BitwiseXor") == 2 * one_hash.count("BitwiseXor")
    for ids, others in (([7, 9], [7, 5, 7]), ([7, 9], [6, 6, 6]), ([3, 9], [5, 6, 7]), ([3, 9], [5, 6, 7])):
        found = step(*(tf.constant(one, tf.int64) for one in (ids, others)))
        for number, (rows, asked) in enumerate(zip(found, (ids, others, ids), strict=True), 1):
            np.testing.assert_array_equal(rows, np.full([len(asked), WIDTH], number))
    assert [one.numbers(ROWS) for one in (first, second, third)] == [3, 3, 3]
    assert third.values(tf.constant([4, 8, 10], tf.int64)).numpy().all()


def test_tables_of_one_condition_each_keep_their_own_room_and_admission() -> None:
    """Workers look the same new keys up, twice in a step: one table is full, and one gives rows at the third look."""
    full, late, plain = (
        Made(f"mixed-{n}", servers=1, first=constant(WIDTH, float(n)), capacity=capacity, sightings=sightings)
        for n, (capacity, sightings) in enumerate(((5, 1), (5000, 3), (5000, 1)), 1)
    )

    @tf.function(autograph=False)
    def step(ids: Any) -> Any:
        with giving_rows(), made_together():
            return [made.table.look_up(keys) for keys in (ids, ids[::-1] + 1) for made in (full, late, plain)]

    traced = step.get_concrete_function(tf.TensorSpec([None], tf.int64))
    assert [one.type for one in traced.graph.get_operations()].count("If") == 1
    first = traced(tf.constant([1000], tf.int64))
    assert [float(one[0, 0]) for one in first] == [1, 0, 3, 1, 0, 3]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: traced(tf.range(start, start + 40, dtype=tf.int64)), [0, 0, 0, 0, 20, 20]))
    assert [made.numbers(ROWS) for made in (full, late, plain)] == [5, 60, 63]
    assert [len(made.rows()) for made in (full, late, plain)] == [5, 60, 63]
    assert full.numbers(REFUSED) > 0
    assert {*np.unique([each[2::3] for each in found])} == {3.0}
    assert {*np.unique([each[::3] for each in found])} <= {0.0, 1.0}


def test_what_a_worker_does_with_numbers_of_rows_it_does_with_their_keys() -> None:
    """A strategy copies the gradients there, and nothing needs the numbers that they name."""
    with tf.Graph().as_default():
        keys = tf.constant([5, 7], tf.int64)
        with tf.device("/job:ps/replica:0/task:0/device:CPU:0"):
            rows = tf.identity(keys)
            there = tf.identity(rows)
        here = tf.identity(rows), tf.concat([keys, rows], 0)
        leave_at_ps(rows, keys)
    assert there.op.inputs[0] is rows
    assert here[0].op.inputs[0] is keys
    assert [one is keys for one in list(here[1].op.inputs)[:2]] == [True, True]


def test_new_rows_are_written_one_array_after_the_other_and_the_index_last() -> None:
    """Writes side by side would each wake a thread."""
    shard = Made("written-in-turn", two.Adam(), servers=1).table.shards[0]

    def give(keys: Any) -> Any:
        return shard.with_own_handles().give(keys, tf.size(keys, tf.int64))[0]

    graph = tf.function(give, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    kinds = ("AssignVariableOp", "ResourceScatterUpdate", "LookupTableInsertV2")
    writes = [one for one in graph.get_operations() if one.type in kinds]
    assert [one.type for one in writes] == [kinds[0], *[kinds[1]] * 5, kinds[2]]
    assert all(waits_for([after], [before]) for before, after in itertools.pairwise(writes))


def test_an_update_looks_at_keys_with_its_mutex_held() -> None:
    operations = Made("held").step.graph.get_operations()
    looks = [one for one in operations if one.type == "ResourceGather" and one.outputs[0].dtype == tf.int64]
    assert len(looks) == 2
    assert all(any(each.type == "MutexLock" for each in look.control_inputs) for look in looks)


def test_first_values_and_owners_depend_on_the_key_alone() -> None:
    keys = tf.constant([5, -(2**62), 2**62, 0, 6], tf.int64)
    for first in (uniform(8, 1, -0.05, 0.05), normal(8, 1, 0.0, 1.0)):
        values = first(keys).numpy()
        np.testing.assert_array_equal(first(keys[::-1]).numpy()[::-1], values)
        assert len(np.unique(values)) == values.size
    many = tf.range(20_000, dtype=tf.int64) * 1_000_003
    drawn = uniform(8, 1, -0.05, 0.05)(many).numpy()
    assert drawn.min() >= -0.05
    assert drawn.max() < 0.05
    assert abs(drawn.mean()) < 0.001
    found = normal(8, 2, 1.0, 2.0)(many).numpy()
    assert abs(found.mean() - 1) < 0.02
    assert abs(found.std() - 2) < 0.02
    assert not np.array_equal(uniform(8, 2, -0.05, 0.05)(many).numpy(), drawn)
    shares = np.bincount(owner_of(many, 7).numpy())
    assert len(shares) == 7
    assert shares.min() > 0.9 * 20_000 / 7


def test_keys_keep_their_owners_since_checkpoints_have_rows_by_owner() -> None:
    keys = tf.constant([0, 1, 2, 3, 7, -1, -(2**62), 2**62, 1_000_003], tf.int64)
    assert owner_of(keys, 2).numpy().tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1]
    assert owner_of(keys, 3).numpy().tolist() == [2, 0, 2, 2, 1, 2, 2, 1, 1]


def test_a_key_gets_a_row_when_it_was_seen_often_enough() -> None:
    made = Made("seen", servers=1, sightings=3)
    for step in range(3):
        assert not made.step(tf.constant([1, 1, 2 + step], tf.int64)).numpy().any() or step == 2
    assert set(made.rows()) == {1}
    Eviction(made.table, [""], TableSettings(5000)).make()
    made.step(tf.constant([2], tf.int64))
    assert set(made.rows()) == {1}
    made.step(tf.constant([2], tf.int64))
    assert set(made.rows()) == {1, 2}


def test_rows_that_are_old_go_and_are_given_again_and_what_still_trains_them_is_dropped() -> None:
    made = Made("old", servers=1)
    [shard] = made.table.shards
    made.step(tf.range(10, dtype=tf.int64))
    for _ in range(5):
        made.step(tf.range(5, dtype=tf.int64))
    rows = shard.index.find(tf.range(5, 10, dtype=tf.int64))
    assert Eviction(made.table, [""], TableSettings(5000, evict_after_steps=4)).make() == 5
    assert set(made.rows()) == set(range(5))
    made.step(tf.range(100, 105, dtype=tf.int64))
    assert made.numbers(NEXT) - FIRST == 10  # none beyond
    before = made.rows()
    assert set(before) == {*range(5), *range(100, 105)}

    @tf.function(autograph=False)
    def late() -> None:
        with shard.changing(rows, tf.range(5, 10, dtype=tf.int64)) as numbers:
            shard.values.set(numbers, tf.fill([5, WIDTH], 9.0))

    late()
    for key, row in made.rows().items():
        np.testing.assert_array_equal(row["values"], before[key]["values"])


def test_a_full_table_trains_on_and_counts_the_keys_without_a_row() -> None:
    made = Made("full", servers=1, capacity=3)
    made.step(tf.constant([1, 2, 3, 4, 5, NO_KEY], tf.int64))
    assert (made.numbers(ROWS), made.numbers(REFUSED)) == (3, 2)
    before = made.rows()
    assert set(before) == {1, 2, 3}
    made.step(tf.constant([4, 5, 4, 1], tf.int64))
    np.testing.assert_array_equal(made.rows()[2]["values"], before[2]["values"])
    assert (made.rows()[1]["values"] != before[1]["values"]).all()
    np.testing.assert_array_equal(made.values(tf.constant([4, 5], tf.int64)), np.zeros([2, WIDTH]))


def test_rows_that_nobody_asked_for_so_many_seconds_go() -> None:
    made, now = Made("seconds"), [0.0]
    eviction = Eviction(made.table, ["", ""], TableSettings(5000, evict_after_seconds=10), lambda: now[0])
    gone = []
    for keys in (range(100), range(50), range(50), range(50)):
        made.step(tf.constant([*keys], tf.int64))
        gone.append(eviction.make())
        now[0] += 6
    assert gone == [0, 0, 50, 0]  # at 12 s those that were last trained before the look at 0 s
    assert set(made.rows()) == set(range(50))


def test_near_capacity_the_least_used_rows_go_but_none_that_was_trained_since_the_last_look() -> None:
    made = Made("near", servers=1, capacity=100)
    eviction = Eviction(made.table, [""], TableSettings(100))
    for times in range(4):
        made.step(tf.range(20 * times, 80, dtype=tf.int64))  # trained once, twice, three and four times
    assert eviction.make() == 0
    made.step(tf.range(80, 100, dtype=tf.int64))
    assert made.numbers(ROWS) == 100
    assert eviction.make() == 20
    assert set(made.rows()) == set(range(20, 100))  # the new ones have counts as low, and were trained since
    made.step(tf.concat([tf.range(60, 80, dtype=tf.int64), tf.range(100, 120, dtype=tf.int64)], 0))
    assert made.numbers(REFUSED) == 0
    assert eviction.make() == 20
    left = set(made.rows())
    assert left == {*range(20, 80), *range(100, 120)}
    made.step(tf.range(200, 220, dtype=tf.int64))
    assert set(made.rows()) == left | set(range(200, 220))


def test_of_rows_that_are_used_as_little_only_as_many_go_as_must() -> None:
    made = Made("quota", servers=1, capacity=100)
    eviction = Eviction(made.table, [""], TableSettings(100))
    made.step(tf.range(95, dtype=tf.int64))
    eviction.make()
    assert eviction.make() == 15
    assert eviction.make() == 0
    assert set(made.rows()) == set(range(15, 95))


def test_texts_are_keys_by_a_hash_that_is_always_the_same(tmp_path: Path) -> None:
    made = Made("texts")
    texts = tf.constant([["left", "right"], ["left", "links"]])
    keys = keys_of(texts).numpy()
    assert keys.tolist() == [[646027942878634177, 9122646651253914292], [646027942878634177, 3664987735402009609]]
    assert made.values(texts).shape == [2, 2, WIDTH]
    made.step(tf.constant(keys[0]))
    found = made.values(texts).numpy()
    assert found[0].all()
    assert found[1, 0].all()
    assert not found[1, 1].any()
    Pieces(made.table, ["", ""]).save(str(tmp_path / "ckpt-1"))
    served = ServedTable("texts", WIDTH)
    served.restore(str(tmp_path / "ckpt-1"))
    np.testing.assert_array_equal(served.look_up(texts), found)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_checkpoint_is_restored_on_any_number_of_ps_bit_by_bit(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.PIECE_BYTES", 4096)  # several pieces
    saved = Made(f"saved-{servers}", two.Adagrad(0.1), servers=2)
    for seed in range(3):
        saved.step(tf.constant(np.random.default_rng(seed).integers(-(2**62), 2**62, size=300)))
    prefix = str(tmp_path / "ckpt-3")
    name = saved.table.name
    Pieces(saved.table, ["", ""]).save(prefix)
    assert len({piece for _, _, piece, _ in pieces_of(prefix, name)}) > 3
    made = Made(f"restored-{servers}", two.Adagrad(0.1), servers=servers)
    made.table.name = name
    Pieces(made.table, [""] * servers).restore(prefix)
    before, after = saved.rows(), made.rows()
    assert before.keys() == after.keys()
    assert len(before) == 900
    for key, row in before.items():
        for each, value in row.items():
            np.testing.assert_array_equal(after[key][each], value)
    assert {int(shard.clock.read()[0]) for shard in made.table.shards} == {3}
    ids = tf.constant(list(before)[:50], tf.int64)
    saved.step(ids), made.step(ids)
    np.testing.assert_array_equal(saved.values(ids), made.values(ids))


def restored(
    prefix: str, name: str, servers: int, capacity: int = 5000, optimizer: Any = None
) -> dict[int, dict[str, np.ndarray]]:
    again = f"{name}-again-{Path(prefix).name}-{servers}"
    made = Made(again, optimizer or two.Adagrad(0.1), servers=servers, capacity=capacity)
    made.table.name = name
    Pieces(made.table, [""] * servers).restore(prefix)
    return made.rows()


def assert_same(rows: dict[int, dict[str, np.ndarray]], expected: dict[int, dict[str, np.ndarray]]) -> None:
    assert rows.keys() == expected.keys()
    for key, row in expected.items():
        for each, value in row.items():
            np.testing.assert_array_equal(rows[key][each], value)


def test_an_incremental_save_writes_what_has_changed_and_is_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.PIECE_BYTES", 4096)  # several pieces
    name, random = "increments", np.random.default_rng(1)
    made = Made(name, two.Adagrad(0.1), servers=2)
    pieces = Pieces(made.table, ["", ""], incremental_saves=2)
    keys = random.integers(-(2**62), 2**62, size=900)
    made.step(tf.constant(keys))
    made.step(tf.constant(keys[:5]))
    written = []
    for step in range(1, 5):
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
        own = [path for path in tmp_path.glob(f"ckpt-{step}.table-*") if path.stat().st_nlink == 1]
        written.append(sum(path.stat().st_size for path in own))
        for old in tmp_path.glob(f"ckpt-{step - 1}.*"):  # only the newest is kept
            old.unlink()
        for servers in (1, 2, 3) if step == 3 else (2,):
            assert_same(restored(prefix, name, servers), made.rows())
        served = ServedTable(name, WIDTH)
        served.restore(prefix)
        np.testing.assert_array_equal(served.look_up(tf.constant(keys)), made.values(tf.constant(keys)))
        made.step(tf.constant([*keys[step : step + 20], *random.integers(-(2**62), 2**62, size=5)]))
    whole, first, second, again = written
    assert max(first, second) < whole / 4
    assert again >= whole


def test_what_was_taken_away_since_a_whole_save_comes_back_at_most_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.MAX_WRITTEN_SHARE", 9)  # only room counts
    name = "resurrected"
    made = Made(name, two.Adagrad(0.1), servers=1, capacity=130)
    pieces = Pieces(made.table, [""], incremental_saves=9)
    eviction = Eviction(made.table, [""], TableSettings(130, evict_after_steps=1))
    made.step(tf.range(60, dtype=tf.int64))
    before = made.rows()
    pieces.save(str(tmp_path / "ckpt-1"))
    for _ in range(3):
        made.step(tf.range(50, 80, dtype=tf.int64))
    eviction.make()
    made.step(tf.range(5, dtype=tf.int64))  # which are given other rows
    assert set(made.rows()) == {*range(5), *range(50, 80)}
    pieces.save(str(tmp_path / "ckpt-2"))
    gone = {key: before[key] for key in range(5, 50)}
    assert_same(restored(str(tmp_path / "ckpt-2"), name, 1), {**gone, **made.rows()})
    # Then there would be no room for them.
    made.step(tf.range(80, 130, dtype=tf.int64))
    pieces.save(str(tmp_path / "ckpt-3"))
    assert_same(restored(str(tmp_path / "ckpt-3"), name, 1), made.rows())


def saved_while_rows_are_given(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: str, kept: int, given: int
) -> tuple[Made, str]:
    """Save 60 rows of at most 100, take away all but the kept, and give others while the next save is written.

    Returns the table, and what that save is named.
    """
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.MAX_WRITTEN_SHARE", 9)
    made = Made(name, two.Adagrad(0.1), servers=1, capacity=100)
    pieces = Pieces(made.table, [""], incremental_saves=9)
    made.step(tf.range(60, dtype=tf.int64))
    pieces.save(str(path / "ckpt-1"))
    for _ in range(3):
        made.step(tf.range(kept, dtype=tf.int64))
    assert Eviction(made.table, [""], TableSettings(100, evict_after_steps=1)).make() == 60 - kept
    plain = getattr(pieces, write)

    def give_and_write(*asked: Any) -> Any:
        made.step(tf.range(100, 100 + given, dtype=tf.int64))
        return plain(*asked)

    monkeypatch.setattr(pieces, write, give_and_write)
    pieces.save(prefix := str(path / "ckpt-2"))
    return made, prefix


def test_there_is_room_for_what_is_given_while_an_incremental_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prefix = saved_while_rows_are_given(tmp_path, monkeypatch, "room", "_write", kept=10, given=50)
    assert_same(restored(prefix, "room", 1, 100), made.rows())


@pytest.mark.parametrize("why", ["no links", "a save that was removed", "much has changed"])
def test_a_save_is_a_whole_one_where_an_incremental_one_is_not_possible(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"whole {why}".replace(" ", "-")
    made = Made(name, two.Adagrad(0.1), servers=1)
    pieces = Pieces(made.table, [""], incremental_saves=9)
    made.step(tf.range(60, dtype=tf.int64))
    pieces.save(str(tmp_path / "ckpt-1"))
    if why == "no links":

        def link(self: Path, target: str) -> None:
            if self.suffix != ".index":
                raise PermissionError("Operation not permitted")
            shutil.copy(target, self)

        monkeypatch.setattr(Path, "hardlink_to", link)
    elif why == "a save that was removed":
        for path in tmp_path.iterdir():
            path.unlink()
    else:
        made.step(tf.range(60, dtype=tf.int64))
        pieces.save(str(tmp_path / "ckpt-2"))
    made.step(tf.range(3, dtype=tf.int64))
    pieces.save(prefix := str(tmp_path / "ckpt-3"))
    assert ("saved whole: can't link its files" in caplog.text) == (why == "no links")
    assert [number for _, _, number, _ in pieces_of(prefix, name)] == [0]
    assert_same(restored(prefix, name, 1), made.rows())


@pytest.mark.parametrize(
    ("trained", "expected"), [(10, [1, 2, 3, 4, 2, 3]), (20, [1, 2, 3, 1, 2, 3])], ids=["joined", "whole"]
)
def test_what_incremental_saves_write_again_and_again_is_joined_or_a_whole_save(
    trained: int, expected: list[int], tmp_path: Path
) -> None:
    """Else a checkpoint, and an evaluation that reads all of it, may take many times what the rows do."""
    name = f"again-{trained}"
    made = Made(name, two.Adagrad(0.1), servers=2)
    pieces = Pieces(made.table, ["", ""], incremental_saves=99)
    made.step(tf.range(60, dtype=tf.int64))
    made.step(tf.constant([59, 58], tf.int64))  # else the rows of the last step count as changed
    found = []
    for step in range(1, 7):
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
        found.append(len(pieces_of(prefix, name)) // 2)
        if step >= 5:
            assert_same(restored(prefix, name, 2), made.rows())
        made.step(tf.range(trained, dtype=tf.int64))
    assert found == expected


def test_joined_saves_lack_what_was_taken_away_and_count_for_the_next_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.MAX_WRITTEN_SHARE", 0)
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.MAX_JOINED", 1)
    name, found = "joined", []
    made = Made(name, two.Adagrad(0.1), servers=1, capacity=200)
    pieces = Pieces(made.table, [""], incremental_saves=3)
    eviction = Eviction(made.table, [""], TableSettings(200, evict_after_steps=2))
    made.step(tf.range(60, dtype=tf.int64))
    for step in range(1, 6):
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
        found.append(len(pieces_of(prefix, name)))
        if step in (2, 3):
            rows = restored(prefix, name, 1, 200)
            assert (100 in rows) == (step == 2)
            assert set(rows) == {*range(60), *made.rows()}
        made.step(tf.constant([*range(10), 99 + step], tf.int64))  # 100, and others later
        if step == 2:
            for _ in range(3):
                made.step(tf.range(10, dtype=tf.int64))
            eviction.make()
            assert 100 not in made.rows()
    assert found == [1, 2, 2, 2, 1]


def test_many_small_saves_are_joined_since_each_link_takes_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.MAX_LINKED", 3)
    made = Made("small", two.Adagrad(0.1), servers=2)
    pieces = Pieces(made.table, ["", ""], incremental_saves=99)
    made.step(tf.range(600, dtype=tf.int64))
    found = []
    for step in range(1, 8):
        made.step(tf.constant([step], tf.int64))
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
        found.append(len(pieces_of(prefix, "small")) // 2)
        if step == 5:
            assert_same(restored(prefix, "small", 2), made.rows())
    assert found == [1, 2, 3, 4, 2, 3, 4]


def test_what_is_given_and_trained_while_a_save_begins_is_in_the_next_one(tmp_path: Path) -> None:
    name = "meanwhile"
    made = Made(name, two.Adagrad(0.1), servers=1)
    clock, steps = made.table.shards[0].clock, [[100], [1]]
    made.step(tf.range(60, dtype=tf.int64))
    read = clock.read

    def train() -> None:
        while steps:
            made.step(tf.constant(steps.pop(0), tf.int64))

    def read_later() -> Any:
        with tf.control_dependencies([tf.py_function(train, [], [])]):
            return read()

    clock.read = read_later
    pieces = Pieces(made.table, [""], incremental_saves=9)
    for step in (1, 2):
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
    assert len(pieces_of(prefix, name)) == 2
    assert_same(restored(prefix, name, 1), made.rows())


@pytest.mark.parametrize(
    ("kind", "piece_bytes"),
    [
        ("whole", 1 << 20),
        ("incremental", 4096),
        pytest.param("whole", 4096, marks=pytest.mark.matrix),
        pytest.param("incremental", 1 << 20, marks=pytest.mark.matrix),
    ],
)
def test_a_save_has_of_each_ps_the_rows_of_one_moment(
    kind: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given and trained while it is written is in it, as far as its clock counts the steps."""
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.PIECE_BYTES", piece_bytes)  # several pieces, or one
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.SPARSER", 1)
    name, most, servers = f"moment-{kind}-{piece_bytes}", 40, 2
    made = Made(name, two.Adagrad(0.1), servers=servers)
    pieces = Pieces(made.table, [""] * servers, incremental_saves=9)
    numbers = np.arange(3000)
    owners = owner_of(tf.constant(numbers), servers).numpy()
    by_owner = [numbers[owners == server] for server in range(servers)]
    trained: list[int] = []

    def train(*begins: int) -> None:
        """Train as many keys on each ps in each step."""
        for begin in begins:
            made.step(tf.constant(np.concatenate([own[begin : begin + most] for own in by_owner])))

    def write_later(plain: Any) -> Any:
        def write(*given: Any) -> Any:
            train(20 * len(trained), 380 + 20 * len(trained))  # known keys, and new ones
            trained.append(len(trained))
            return plain(*given)

        return write

    train(*range(0, 400, most))
    if kind == "incremental":
        pieces.save(str(tmp_path / "ckpt-1"))
        train(0, 80, 240)
    for each in [each for each in vars(pieces) if each.startswith("_write")]:
        monkeypatch.setattr(pieces, each, write_later(getattr(pieces, each)))
    pieces.save(prefix := str(tmp_path / "ckpt-2"))
    assert (len(trained) > 3) == (piece_bytes == 4096)
    again = Made(f"{name}-again", two.Adagrad(0.1), servers=servers)
    again.table.name = name
    Pieces(again.table, [""] * servers).restore(prefix)
    rows = again.rows()
    for server, shard in enumerate(again.table.shards):
        own = [row["told"][0] for key, row in rows.items() if owners[key] == server]
        assert sum(own) == most * int(shard.clock.read()[0])
    assert_same(rows, made.rows())


def test_an_incremental_save_that_outgrows_the_room_meanwhile_is_made_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore would have no room for what was taken away since the whole save, and comes back."""
    made, prefix = saved_while_rows_are_given(tmp_path, monkeypatch, "outgrown", "_write_last", kept=40, given=45)
    assert [number for _, _, number, _ in pieces_of(prefix, "outgrown")] == [0]
    assert_same(restored(prefix, "outgrown", 1, 100), made.rows())


def test_a_row_that_is_given_while_it_is_saved_is_saved_as_given_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, find = "half-given", Index.find
    made = Made(name, two.Adagrad(0.1), servers=1)
    made.step(tf.range(10, dtype=tf.int64))
    [shard] = made.table.shards
    rows, keys = shard.index.find(tf.constant([3], tf.int64)), tf.constant([30], tf.int64)
    shard.index.remove(tf.constant([3], tf.int64))  # and its row is just being given to another key
    shard.keys.set(rows, keys)

    def give() -> None:
        shard.values.set(rows, tf.fill([1, WIDTH], 9.0))
        shard.index.insert(keys, rows)

    def find_later(self: Index, asked: Any) -> Any:
        with tf.control_dependencies([tf.py_function(give, [], [])]):
            return find(self, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "find", find_later)
        pieces = Pieces(made.table, [""])
    pieces.save(prefix := str(tmp_path / "ckpt-1"))
    np.testing.assert_array_equal(restored(prefix, name, 1)[30]["values"], np.full(WIDTH, 9.0))


def test_rows_are_saved_and_kept_when_the_clock_has_outgrown_32_bits(tmp_path: Path) -> None:
    name = "clock"
    made = Made(name, two.Adagrad(0.1), servers=1)
    [shard] = made.table.shards
    shard.clock.assign(tf.constant([2**31 - 2], tf.int64))
    pieces = Pieces(made.table, [""], incremental_saves=9)
    eviction = Eviction(made.table, [""], TableSettings(5000, evict_after_steps=2))
    made.step(tf.range(60, dtype=tf.int64))  # the last step that 32 bits hold
    made.step(tf.range(50, dtype=tf.int64))
    for step in (1, 2):
        made.step(tf.range(5 * step, dtype=tf.int64))
        pieces.save(prefix := str(tmp_path / f"ckpt-{step}"))
        assert len(pieces_of(prefix, name)) == step
        assert_same(restored(prefix, name, 1), made.rows())
    assert eviction.make() == 10
    assert set(made.rows()) == set(range(50))


@pytest.mark.parametrize("saves", [0, 9])
def test_what_incremental_saves_alone_need_is_traced_for_them(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    made, traced, count = Made("traced", two.Adagrad(0.1), servers=2), [], Pieces._count_changed

    def counted(self: Pieces, since: tf.Tensor) -> tf.Tensor:
        traced.append(since)
        return count(self, since)

    monkeypatch.setattr(Pieces, "_count_changed", counted)
    Pieces(made.table, ["", ""], incremental_saves=saves)
    assert len(traced) == (1 if saves else 0)


def test_links_to_a_part_of_a_save_are_no_save(tmp_path: Path) -> None:
    name = "part"
    made = Made(name, two.Adagrad(0.1), servers=2)
    pieces = Pieces(made.table, ["", ""], incremental_saves=9)
    made.step(tf.range(60, dtype=tf.int64))
    pieces.save(prefix := str(tmp_path / "ckpt-1"))
    for path in tmp_path.glob(f"ckpt-1.table-{name}.0-of-2.*"):  # as where the storage has failed in between
        path.unlink()
    pieces.save(prefix := str(tmp_path / "ckpt-2"))
    assert_same(restored(prefix, name, 2), made.rows())


def test_a_link_whose_answer_was_lost_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, link = "answer", Path.hardlink_to
    made = Made(name, two.Adagrad(0.1), servers=1)
    pieces = Pieces(made.table, [""], incremental_saves=9)
    made.step(tf.range(60, dtype=tf.int64))
    made.step(tf.range(3, dtype=tf.int64))
    pieces.save(str(tmp_path / "ckpt-1"))
    made.step(tf.range(3, dtype=tf.int64))
    pieces.save(str(tmp_path / "ckpt-2"))
    made.step(tf.range(3, dtype=tf.int64))

    def link_twice(self: Path, target: str) -> None:
        link(self, target)
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", link_twice)
    pieces.save(prefix := str(tmp_path / "ckpt-3"))
    assert [number for _, _, number, _ in pieces_of(prefix, name)] == [0]
    assert_same(restored(prefix, name, 1), made.rows())


@pytest.mark.parametrize("kind", [lambda: Made("rank").table, lambda: ServedTable("rank", WIDTH)])
def test_ids_may_have_a_shape_that_nobody_knows_before(kind: Callable[[], Any]) -> None:
    table = kind()
    found = tf.function(table.look_up, autograph=False, input_signature=[tf.TensorSpec(None, tf.int64)])
    assert found(tf.zeros([2, 3], tf.int64)).shape == [2, 3, WIDTH]
    assert found(tf.zeros([], tf.int64)).shape == [WIDTH]
    assert tf.nn.embedding_lookup(table, [1, 2]).shape == [2, WIDTH]


@pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "uint64", "int64"])
def test_ids_of_any_whole_number_are_keys(library: Any, dtype: str) -> None:
    layer, made = layer_of(library, f"{library.__name__}-{dtype}")
    ids = tf.constant([[1, tf.dtypes.as_dtype(dtype).max // 3]], dtype)
    made.step(tf.cast(ids[0], tf.int64))
    np.testing.assert_allclose(layer(ids)[0], np.full([2, WIDTH], 0.6))


@pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
def test_other_ids_are_refused(library: Any) -> None:
    layer, made = layer_of(library, f"{library.__name__}-floats")
    for ids in (tf.constant([[1.0]]), tf.sparse.from_dense([[1.0]]), tf.ragged.constant([[1.0]])):
        with pytest.raises(UserError, match=f"{made.table.name}: its ids are float32, expected whole numbers or texts"):
            layer(ids)


SOME = tf.SparseTensor([[0, 0], [0, 2], [1, 1]], tf.constant([3, 7, 3], tf.int64), [2, 3])
IDS = {
    "some": SOME,
    "negative": SOME.with_values(-SOME.values),
    "in-another-order": tf.SparseTensor(SOME.indices[::-1], SOME.values, [2, 3]),
    "two-in-one-place": tf.SparseTensor([[0, 1], [0, 1], [1, 1]], SOME.values, [2, 3]),
    "of-32-bits": SOME.with_values(tf.cast(SOME.values, tf.int32)),
    "one-dimension": tf.sparse.from_dense([3, 0, 7]),
    "three-dimensions": tf.sparse.from_dense([[[3, 0], [0, 0]], [[7, 7], [0, 3]]]),
    "none": tf.sparse.from_dense(tf.zeros([2, 3], tf.int64)),
    "no-places": tf.sparse.from_dense(tf.zeros([2, 0], tf.int64)),
    "ragged": tf.ragged.constant([[3, 3], [], [7]]),
    "ragged-in-ragged": tf.ragged.constant([[[3, 7], []], []], tf.int64, ragged_rank=2),
}


@pytest.mark.parametrize(
    ("library", "kind"),
    [(two, kind) for kind in IDS] + [(three, kind) for kind in IDS if kind != "negative"],  # there these are keys
    ids=lambda given: given if isinstance(given, str) else given.__name__.split(".")[0],
)
def test_sparse_and_ragged_ids_get_the_rows_that_a_fixed_table_gives_them(library: Any, kind: str) -> None:
    """Also where a place has no id, which to tf_keras a negative one is."""
    ids = IDS[kind]
    layer, made = layer_of(library, f"{library.__name__}-{kind}")
    for steps, key in enumerate((0, 3, 7)):
        for _ in range(steps):
            made.step(tf.constant([key], tf.int64))
    fixed = (tf.keras if library is two else keras).layers.Embedding(10, WIDTH)
    fixed.build([None, 1])
    fixed.set_weights([made.values(tf.range(10, dtype=tf.int64)).numpy()])
    found = tf.function(lambda: layer(ids))()
    parts, expected = (tf.nest.flatten(one, expand_composites=True) for one in (found, fixed(ids)))
    for one, other in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
def test_sparse_texts_are_keys_and_a_place_without_one_has_that_of_an_empty_text(library: Any) -> None:
    layer, made = layer_of(library, f"{library.__name__}-sparse-texts")
    texts = tf.constant(["a", ""])
    made.step(keys_of(texts))
    made.step(keys_of(texts[1:]))
    ids = tf.SparseTensor([[0, 1], [1, 0]], ["a", "b"], [2, 2])
    np.testing.assert_array_equal(layer(ids), layer(tf.constant([["", "a"], ["b", ""]])))
    assert len(np.unique(layer(ids))) == 3


@pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
def test_texts_whose_zeros_are_masked_are_refused(library: Any) -> None:
    layer, made = layer_of(library, f"{library.__name__}-masked", mask_zero=True)
    assert layer(tf.constant([[0, 1]])).shape == [1, 2, WIDTH]
    with pytest.raises(UserError, match=f"{made.table.name}: its layer has mask_zero and its ids are texts"):
        layer(tf.constant([["a"]]))


@pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
def test_a_layer_whose_table_is_used_otherwise_says_so(library: Any) -> None:
    layer, made = layer_of(library, f"{library.__name__}-tied")
    for use in (
        lambda: tf.matmul(tf.ones([1, WIDTH]), layer.embeddings, transpose_b=True),
        lambda: tf.gather(layer.embeddings, [1]),
        lambda: tf.nn.embedding_lookup_sparse(layer.embeddings, tf.sparse.from_dense([[1]]), None),
    ):
        with pytest.raises(
            UserError, match=f"{made.table.name}.* is a dynamic table, .* leave it out of dynamic_tables"
        ):
            use()


def layer_of(library: Any, name: str, **more: Any) -> tuple[Any, Made]:
    """Return an Embedding of the library with a table, and the table."""
    train_shards()
    made = Made(name, rows=1)
    layer = (tf.keras if library is two else keras).layers.Embedding(10, WIDTH, name=name, **more)
    with take_over_layers(lambda one: attach(one, made.table) or made.table):
        layer.build([None, 1])
    return layer, made


@pytest.mark.parametrize("servers", [*(pytest.param(few, marks=pytest.mark.matrix) for few in (1, 2)), 9])
def test_a_full_table_is_restored_on_any_number_of_ps(servers: int, tmp_path: Path) -> None:
    def on(servers: int) -> tuple[DynamicTables, Callable[[int], int]]:
        tables = DynamicTables({"items": TableSettings(capacity=1000)}, [CPU] * servers, lazy=False)
        layer = tf.keras.layers.Embedding(10, WIDTH, name="items")
        with tables.of_layers():
            layer.build([None, 1])
        tables.bind([two.SGD(0.1)], own_step=False)
        tables.prepare_saves(None)

        def rows_with(keys: int) -> int:
            with giving_rows():
                tf.function(layer, autograph=False)(tf.range(keys, dtype=tf.int64))
            tables.update_counts(tables.numbers())
            return tables.counts["items"]["rows"]

        return tables, rows_with

    full, rows_with = on(4)
    rows = rows_with(5000)
    assert rows > 1000  # each ps has room for more than its share
    full.save(str(tmp_path / "ckpt-1"))
    other, rows_with = on(servers)
    other.restore(str(tmp_path / "ckpt-1"))
    assert rows_with(0) == rows
    assert (rows_with(6000) > rows) == (servers == 9)  # fewer give none beyond their capacity


def test_rows_of_a_lost_ps_alone_are_read_where_all_others_are_left(tmp_path: Path) -> None:
    def on(left: Any = None, lacking: Sequence[int] = ()) -> tuple[DynamicTables, Any]:
        settings = {"items": TableSettings(capacity=1000)}
        tables = DynamicTables(settings, [CPU] * 2, lazy=False, left=left, lacking=lacking)
        layer = tf.keras.layers.Embedding(10, WIDTH, name="items")
        with tables.of_layers():
            layer.build([None, 1])
        tables.bind([two.SGD(0.1)], own_step=False)
        tables.prepare_saves(None)
        return tables, layer

    def rows(tables: DynamicTables) -> list[int]:
        return [int(one[ROWS]) for one in tables.numbers()]

    def lose(server: int) -> None:
        shard = first.tables["items"].shards[server]
        for one in (*shard.kept.values(), shard.free, shard.numbers, shard.clock, shard.index):
            one.destroy()

    prefix, found = str(tmp_path / "ckpt-1"), []
    first, layer = on()
    for keys in (100, 300):
        with giving_rows():
            tf.function(layer, autograph=False)(tf.range(keys, dtype=tf.int64))
        found.append(rows(first))
        if keys == 100:
            first.save(prefix)
    saved, now = found
    first.keep()
    lose(1)
    second, _ = on(first.record, [1])
    assert second.are_left
    second.restore(prefix)
    assert rows(second) == [now[0], saved[1]]
    second.begin()
    second.restore(prefix)
    assert rows(second) == saved
    second.keep()
    lose(0)
    third, _ = on(first.record, [1])
    assert not third.are_left


def test_many_tables_are_made_without_a_warning_of_repeated_traces(caplog: pytest.LogCaptureFixture) -> None:
    settings = {f"many_{number}": TableSettings(capacity=10) for number in range(4)}
    tables = DynamicTables(settings, [CPU, CPU], lazy=True)
    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        with tables.of_layers():
            for name in settings:
                tf.keras.layers.Embedding(10, WIDTH, name=name).build(None)
        tables.bind([two.SGD(0.1)], own_step=False)
        tables.begin()
    finally:
        logger.removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_a_model_that_is_called_to_build_it_reads_zeros(library: Any) -> None:
    """In build_model nothing is on the ps yet: what a row takes follows from the optimizer."""
    train_shards()
    tables = DynamicTables({"items": TableSettings(capacity=1000)}, [CPU, CPU], lazy=False)
    layer = library.layers.Embedding(10, WIDTH, name="items")
    ids = tf.constant([[7, 2**40]], tf.int64)
    with tables.of_layers():
        assert not np.any(layer(ids))
    tables.bind([library.optimizers.SGD(0.1)], own_step=False)
    tables.begin()
    with giving_rows():
        rows = tf.function(layer, autograph=False)(ids)
    assert np.all(rows)
    np.testing.assert_array_equal(layer(ids), rows)


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_a_function_that_calls_the_model_to_build_it_is_refused(library: Any) -> None:
    train_shards()
    tables = DynamicTables({"items": TableSettings(capacity=1000)}, [CPU, CPU], lazy=False)
    layer = library.layers.Embedding(10, WIDTH, name="items")
    with pytest.raises(UserError, match="call the model itself there"), tables.of_layers():
        tf.function(layer, autograph=False)(tf.constant([[7, 2**40]], tf.int64))


def test_tables_that_are_collected_while_a_graph_is_made_are_freed_by_the_next_ones() -> None:
    """Their operations would belong to that graph, which may be one of a cluster with fewer ps."""

    def make() -> tuple[DynamicTables, Any]:
        tables = DynamicTables({"items": TableSettings(capacity=1000)}, [CPU], lazy=False)
        with tables.of_layers():
            tf.keras.layers.Embedding(10, WIDTH, name="items").build(None)
        tables.bind([two.SGD(0.1)], own_step=False)
        tables.begin()
        return tables, tables.tables["items"].shards[0].clock.handle

    graph = tf.Graph()
    tables, clock = make()
    with graph.as_default():
        del tables
        gc.collect()
    assert not graph.get_operations()
    assert tf.raw_ops.VarIsInitializedOp(resource=clock)
    make()
    assert not tf.raw_ops.VarIsInitializedOp(resource=clock)


def test_a_table_with_another_number_of_hash_tables_is_not_taken_over() -> None:
    """Keys that lie in a hash table that is not asked would get a second row."""
    settings = {"items": TableSettings(capacity=10_000_000)}
    left = DynamicTables(settings, [CPU] * 2, lazy=False).record
    assert DynamicTables(settings, [CPU] * 2, lazy=False, left=left).are_left
    left["look"] = {"items": [10_000_000, 2]}  # as a version with one hash table wrote it
    assert not DynamicTables(settings, [CPU] * 2, lazy=False, left=left).are_left


def test_a_capacity_that_no_ps_can_have_is_refused() -> None:
    tables = DynamicTables({"items": TableSettings(capacity=2**33)}, [CPU] * 2, lazy=False)
    layer = tf.keras.layers.Embedding(10, WIDTH, name="items")
    with tables.of_layers():
        layer.build([None, 1])
    with pytest.raises(UserError, match=r"items: capacity 8,589,934,592 is .* set a smaller one, or take more ps"):
        tables.bind([two.SGD(0.1)], own_step=False)


@pytest.mark.parametrize(
    ("servers", "lost"),
    [
        (2, "0-of-2.000000"),
        (3, "1-of-2.000001"),
        pytest.param(3, "0-of-2.000000", marks=pytest.mark.matrix),
        pytest.param(2, "1-of-2.000001", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_that_is_removed_while_it_is_read_is_no_smaller_table(
    lost: str, servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.pieces.PIECE_BYTES", 1000)
    made, other = Made(f"lost-{lost}-{servers}"), Made(f"lost-{lost}-{servers}-other", servers=servers)
    other.table.name = made.table.name
    made.step(tf.range(40, dtype=tf.int64))
    prefix = str(tmp_path / "ckpt-1")
    Pieces(made.table, ["", ""]).save(prefix)
    served = ServedTable(made.table.name, WIDTH)
    served.restore(prefix)
    for path in tmp_path.glob(f"*.{lost}.*"):
        path.unlink()
    for restore in (served.restore, Pieces(other.table, [""] * servers).restore):
        with pytest.raises(
            tf.errors.NotFoundError, match=f"1 of .* parts of the dynamic table {made.table.name} are gone"
        ):
            restore(prefix)


def test_a_checkpoint_that_does_not_fit_says_why(tmp_path: Path) -> None:
    saved = Made("misfit", servers=1)
    saved.step(tf.range(20, dtype=tf.int64))
    prefix = str(tmp_path / "ckpt-3")
    Pieces(saved.table, [""]).save(prefix)
    small, other = Made("small", servers=1, capacity=15), Made("other", two.Adagrad(0.1), servers=1)
    for made, why in ((small, "5 rows more"), (other, "was .* and is .*slot0")):
        made.table.name = saved.table.name
        with pytest.raises(ValueError, match=why):
            Pieces(made.table, [""]).restore(prefix)
    with pytest.raises(ValueError, match="no rows of the dynamic table misfit"):
        Pieces(saved.table, [""]).restore(str(tmp_path / "ckpt-4"))


def test_rows_in_the_files_of_another_ps_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    """Another version of the trainer may have given keys other owners."""
    name, prefix = "others", str(tmp_path / "ckpt-1")
    made = Made(name, servers=2)
    made.step(tf.range(20, dtype=tf.int64))
    Pieces(made.table, ["", ""]).save(prefix)
    first, second = (path.removesuffix(".index") for path in sorted(map(str, tmp_path.glob("*.index"))))
    for suffix in (".index", ".data-00000-of-00001"):
        Path(first + suffix).rename(kept := tmp_path / "kept")
        Path(second + suffix).rename(first + suffix)
        kept.rename(second + suffix)
    with pytest.raises(ValueError, match="20 rows of the dynamic table others are in the files of ps that they do not"):
        Pieces(made.table, ["", ""]).restore(prefix)
    made_again = Made("others-again", servers=3)
    made_again.table.name = name
    Pieces(made_again.table, [""] * 3).restore(prefix)
    assert made_again.rows().keys() == set(range(20))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: three.SGD(0.1, use_ema=True), "has use_ema"),
        (lambda: three.SGD(0.1, gradient_accumulation_steps=2), "has gradient_accumulation_steps"),
        (lambda: three.SGD(0.1, clipnorm=1.0), "has clipnorm.*take global_clipnorm"),
        (lambda: two.Adafactor(0.1), "is Adafactor; expected one of SGD"),
        (lambda: two.legacy.SGD(0.1), "is legacy.SGD"),
        (lambda: type("Own", (two.SGD,), {})(0.1), "is Own"),
    ],
)
def test_an_optimizer_that_does_more_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        row_slots(make(), lazy=True)


def test_what_changes_all_rows_is_refused_unless_it_is_lazy() -> None:
    for make in (lambda: two.Adam(0.1), lambda: two.SGD(0.1, momentum=0.9), lambda: three.Adagrad(0.1, weight_decay=1)):
        with pytest.raises(UserError, match="changes all rows at each step: set lazy_optimizers: true"):
            row_slots(make(), lazy=False)
        row_slots(make(), lazy=True)
    built = two.SGD(0.1)
    built.build([tf.Variable(1.0)])
    with pytest.raises(UserError, match="built already"):
        leave_out(built)


def test_a_table_that_is_asked_in_a_function_of_its_own_is_refused() -> None:
    made = Made("inner")
    inner = tf.function(made.table.look_up, autograph=False)

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with giving_rows(), tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(ids))
        gradients = tape.gradient(loss, made.table.variables)
        made.optimizer.apply_gradients(list(zip(gradients, made.table.variables, strict=True)))

    with pytest.raises(UserError, match="in a function of its own"):
        step(tf.constant([1], tf.int64))


def test_a_gradient_of_all_rows_is_refused() -> None:
    made = Made("dense")

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with giving_rows(), tf.GradientTape() as tape:
            loss = tf.reduce_sum(made.table.look_up(ids))
        gradients = [tf.multiply(one, 0.5) for one in tape.gradient(loss, made.table.variables)]
        made.optimizer.apply_gradients(list(zip(gradients, made.table.variables, strict=True)))

    with pytest.raises(UserError, match=r"dense: its gradient is a Tensor of all rows.*expected tf.IndexedSlices"):
        step(tf.constant([1], tf.int64))


@pytest.mark.parametrize(
    ("clip", "servers", "is_refused"),
    [(tf.clip_by_norm, 2, True), (tf.clip_by_norm, 1, False), (None, 2, False)],
)
def test_a_norm_of_each_ps_part_of_a_table_is_refused(clip: Any, servers: int, is_refused: bool) -> None:
    """A step of the program's would clip what each ps has of a gradient by that part's norm."""
    made = Made(f"clipped-{clip is None}-{servers}", servers=servers)
    made.table.asks_once = False

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with giving_rows(), tf.GradientTape() as tape:
            loss = tf.reduce_sum(made.table.look_up(ids) ** 2)
        gradients = tape.gradient(loss, made.table.variables)
        gradients = [clip(one, 1.0) for one in gradients] if clip else tf.clip_by_global_norm(gradients, 1.0)[0]
        made.optimizer.apply_gradients(list(zip(gradients, made.table.variables, strict=True)))

    refused = pytest.raises(UserError, match=r"each part of clipped.*out of dynamic_tables, or give the optimizer clip")
    with refused if is_refused else contextlib.nullcontext():
        step(tf.constant([1, 2, 3, 4], tf.int64))


def test_nobody_reads_a_table_as_a_whole() -> None:
    [variable, _] = Made("whole").table.variables
    for read in (variable.numpy, variable.read_value, lambda: tf.convert_to_tensor(variable), lambda: variable + 1):
        with pytest.raises(UserError, match="can't be read as a whole"):
            read()


def test_reserved_rows_take_no_memory_until_they_are_given() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096

    Made("small-first", servers=1).step(tf.constant([1], tf.int64))
    before = resident()
    made = Made("large", servers=1, capacity=20_000_000)  # 320 MB of values and more of the rest
    made.step(tf.range(1000, dtype=tf.int64))
    assert resident() - before < 64 * 1024 * 1024
    del made


def test_all_rows_are_read_without_a_second_copy(tmp_path: Path) -> None:
    rows, width, pieces = 5000, 64, 8
    for piece in range(pieces):
        keys = tf.range(piece, pieces * rows, pieces, dtype=tf.int64)
        values = tf.repeat(tf.cast(keys, tf.float32)[:, tf.newaxis], width, 1)
        path = f"{tmp_path}/ckpt-1.table-read.0-of-1.{piece:06}"
        tf.raw_ops.SaveV2(
            prefix=path, tensor_names=["keys", "values"], shape_and_slices=["", ""], tensors=[keys, values]
        )
    served = ServedTable("read", width)
    tracemalloc.start()
    try:
        served.restore(f"{tmp_path}/ckpt-1")
        assert tracemalloc.get_traced_memory()[1] < 4 * pieces * rows * width / 2
    finally:
        tracemalloc.stop()
    ids = tf.constant([7, pieces * rows - 1, -1], tf.int64)
    np.testing.assert_array_equal(served.look_up(ids)[:, 0], [7, pieces * rows - 1, 0])


@pytest.mark.parametrize("make", [lambda: two.Adam(amsgrad=True), lambda: two.RMSprop(momentum=0.5, centered=True)])
def test_all_that_a_table_has_is_freed(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.training.tables.dynamic.arrays.PART_KEYS", 1000)
    made = Made("freed/items", make(), servers=1, sightings=2)
    shard = made.table.shards[0]
    assert shard.sketch is not None
    arrays = [*shard.kept.values(), shard.free, shard.numbers, shard.clock, shard.sketch.counts]
    made.step(tf.range(100, dtype=tf.int64))
    made.step(tf.range(100, dtype=tf.int64))
    assert int(shard.index.size()) == 100
    destroy({"id": "freed", "look": {"items": [5000, 1, len(shard.index.handles)]}}, [CPU])
    assert not [one.name for one in arrays if tf.raw_ops.VarIsInitializedOp(resource=one.handle)]
    assert int(shard.with_own_handles().index.size()) == 0
