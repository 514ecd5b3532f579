"""A plain program trains a table without a vocabulary, in one process and with tasks that die."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, Process, Runs, kill, until

from trainer import testing
from trainer.core.failures import UserError
from trainer.core.settings.config import ConfigError
from trainer.run.catalogue import Manifest
from trainer.run.directory import RunDirectory
from trainer.telemetry.counters import Counters
from trainer.telemetry.status import describe, read_status

# isort: split
import keras
import tensorflow as tf

from trainer.training.tables.dynamic.hashing import keys_of
from trainer.training.tables.dynamic.pieces import pieces_of

pytestmark = pytest.mark.timeout(600)
TABLES = {"items": {"capacity": 200_000}}
SETTINGS: dict[str, Any] = {"export": False, "evaluation": "distributed", "dynamic_tables": TABLES}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import keys

    return keys


def rows_of(prefix: str, table: str = "items") -> dict[int, np.ndarray]:
    """Return the values of each key in a checkpoint; raises AssertionError where a key stands there twice."""
    found: dict[int, np.ndarray] = {}
    for *_, path in pieces_of(prefix, table):
        reader = tf.train.load_checkpoint(path)
        keys, values = reader.get_tensor("keys"), reader.get_tensor("values")
        assert len(set(keys)) == len(keys)
        assert not set(map(int, keys)) & set(found)
        found |= dict(zip(map(int, keys), values, strict=True))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "three"),
    [("Subclassed", True), ("Keys", False), ("Subclassed", False), ("Keys", True)],
)
def test_a_plain_program_trains_rows_by_key(programs: Any, kind: str, three: bool, tmp_path: Path) -> None:
    """Trained on 2 ps, and then on 3, from the checkpoint, with tf_keras by `fit`."""
    made = getattr(programs, kind)
    program = (programs.of_keras3(made) if three else made)()
    lazy = {"lazy_optimizers": True} if kind == "Subclassed" else {}
    first = testing.train(program, 100, ps=2, directory=tmp_path, **SETTINGS, **lazy)
    before = rows_of(str(first.directory / "checkpoints" / "ckpt-100"))
    assert set(before) == {key * programs.STRIDE for key in range(programs.KNOWN)}
    api = "custom_loop" if three else "fit"
    result = testing.train(program, 200, ps=3, directory=tmp_path, api=api, **SETTINGS, **lazy)
    after = rows_of(str(result.directory / "checkpoints" / "ckpt-200"))
    assert set(after) == set(before)
    # Chance has 0.693. Without the first run's rows the second one would be near it again.
    assert max(first.evaluation["loss"], result.evaluation["loss"]) < 0.68
    status = read_status(RunDirectory(tmp_path, "test"))
    assert status.tables["items"]["rows"] == programs.KNOWN
    assert "items: 2,000 rows" in describe(status)


@pytest.mark.parametrize("three", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_several_tables_are_trained_by_several_optimizers(programs: Any, three: bool, tmp_path: Path) -> None:
    """One is of texts. Each is trained, saved and restored by itself, with tf_keras by `fit`."""
    program = (programs.of_keras3(programs.Several) if three else programs.Several)()
    tables = {name: {"capacity": 20_000} for name in ("items", "users", "wide")}
    settings = {**SETTINGS, "dynamic_tables": tables, "lazy_optimizers": True, "evaluation": "none"}
    settings["api"] = "custom_loop" if three else "fit"
    texts = set(keys_of(tf.strings.as_string(tf.range(programs.KNOWN, dtype=tf.int64) * programs.STRIDE)).numpy())
    numbers = {key * programs.STRIDE for key in range(programs.KNOWN)}
    for steps, ps in ((70, 2), (100, 1)):  # of 64 steps one worker's are 32 or more, which have every key
        result = testing.train(program, steps, ps=ps, directory=tmp_path, **settings)
        found = {name: rows_of(str(result.directory / "checkpoints" / f"ckpt-{steps}"), name) for name in tables}
        assert set(found["items"]) == set(found["wide"]) == numbers
        assert set(found["users"]) == texts
        for name, first in (("items", 0.05), ("users", 0.05), ("wide", 0.0)):
            assert np.abs(list(found[name].values())).max() > first  # they are trained


class Repeated:
    """A batch names the row 7 three times and 8 once, each with the same gradient: any order of workers is the same.

    Its model is built by its first call.
    """

    def __init__(self, library: Any) -> None:
        self.library = library

    def build_model(self) -> Any:
        library = self.library

        class Model(library.Model):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.items = library.layers.Embedding(10, 4, name="items", embeddings_initializer="ones")
                self.flat = library.layers.Flatten()

            def call(self, ids: Any) -> Any:
                return self.flat(self.items(ids))

        model = Model()
        model.compile(library.optimizers.Adagrad(0.1), loss=lambda _, found: 4.0 * (found[:, 0] + found[:, 4]))
        return model

    def train_dataset(self, context: Any) -> Any:
        batch = np.array([[7, 7], [7, 8]]), np.zeros([2, 1], np.float32)
        return tf.data.Dataset.from_tensors(batch).repeat()

    eval_dataset = train_dataset


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_two_workers_train_rows_that_a_batch_repeats_as_keras_does(library: Any, tmp_path: Path) -> None:
    """Adagrad of Keras 3 adds up the squares of single ids' gradients, and that of tf_keras the square of a row's."""
    program, settings = Repeated(library), {**SETTINGS, "evaluation": "none"}
    alone = program.build_model()
    alone.fit(program.train_dataset(None).take(40), verbose=0)
    expected = alone.get_layer("items").get_weights()[0]
    result = testing.train(program, 40, workers=2, ps=2, directory=tmp_path, **settings)
    rows = rows_of(str(result.directory / "checkpoints" / "ckpt-40"))
    np.testing.assert_allclose([rows[7], rows[8]], expected[7:9], rtol=1e-6)
    apart = expected[8, 0] - expected[7, 0]
    assert (apart < 0.01) == (library is tf.keras)  # not none with it: the first accumulator is 0.1


@pytest.mark.parametrize(
    ("kind", "three", "functional"),
    [("sparse", True, True),
     *(pytest.param(*one, marks=pytest.mark.matrix) for one in [
        ("sparse", False, True),
        ("sparse", False, False), ("ragged", False, True), ("sparse", True, False), ("ragged", True, False)])],
)  # fmt: skip
def test_two_workers_train_sparse_and_ragged_ids_as_in_a_fixed_table(
    programs: Any, kind: str, three: bool, functional: bool, tmp_path: Path
) -> None:
    """To the bit, and so do evaluations and the exported model."""
    program = (programs.of_keras3(programs.Bags) if three else programs.Bags)(kind, functional)
    settings = {**SETTINGS, **({} if three else {"evaluation": "sidecar", "export": True})}
    fixed = testing.train(program, 40, ps=2, directory=tmp_path / "fixed", **(settings | {"dynamic_tables": {}}))
    result = testing.train(program, 40, ps=2, directory=tmp_path / "dynamic", **settings)
    reader = tf.train.load_checkpoint(str(fixed.directory / "checkpoints" / "ckpt-40"))
    name = next(name for name, shape in reader.get_variable_to_shape_map().items() if shape == [100, 4])
    table, rows = reader.get_tensor(name), rows_of(str(result.directory / "checkpoints" / "ckpt-40"))
    assert set(rows) == set(np.flatnonzero(table[:, 0]))
    for key, row in rows.items():
        np.testing.assert_array_equal(row, table[key])
    assert result.evaluation == fixed.evaluation
    if not three:
        (ids, _) = next(iter(program.train_dataset(None)))
        loaded = [tf.saved_model.load(str(each.directory / "export")) for each in (fixed, result)]
        np.testing.assert_array_equal(*(each.serve(ids) for each in loaded))


@pytest.mark.matrix
def test_an_evaluation_gives_no_row(programs: Any, tmp_path: Path) -> None:
    class Evaluated(programs.Keys):  # type: ignore[misc, name-defined]
        def eval_dataset(self, context: Any) -> Any:
            return super().eval_dataset(context).map(lambda ids, labels: (ids + 1, labels))

    result = testing.train(Evaluated(), 20, ps=1, directory=tmp_path, **SETTINGS)
    keys = rows_of(str(result.directory / "checkpoints" / "ckpt-20"))
    assert keys
    assert not any(key % programs.STRIDE for key in keys)
    assert result.evaluation["loss"] == pytest.approx(np.log(2), abs=0.2)  # nothing is known of these


def test_rows_that_no_step_trains_leave(programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of new keys none comes again, and each save takes away those that are 20 steps old."""
    rates: list[float] = []

    def table_rates(counters: Counters, now: float) -> Any:
        found = plain(counters, now)
        rates.extend(table["evicted_per_minute"] for table in found.values())
        return found

    plain = Counters.table_rates
    monkeypatch.setattr(Counters, "table_rates", table_rates)
    tables = {"items": {"capacity": 200_000, "evict_after_steps": 20}}
    settings = {**SETTINGS, "dynamic_tables": tables, "checkpoint_steps": 30, "checkpoint_seconds": 0}
    settings |= {"steps_per_execution": 5, "log_seconds": 0.2}
    result = testing.train(programs.Keys(new=0.5, pause_ms=40), 150, ps=2, directory=tmp_path, **settings)
    last = rows_of(str(result.directory / "checkpoints" / "ckpt-150"))
    new = [key for key in last if key >= programs.KNOWN * programs.STRIDE]
    in_all = 150 * programs.BATCH * programs.IDS // 2
    assert len(new) < 0.7 * in_all
    known = {key * programs.STRIDE for key in range(programs.KNOWN)}
    assert len(known & set(last)) > 0.85 * programs.KNOWN  # in 20 steps some are not drawn
    assert max(rates) > 0  # of one status or another: each is of the time since the one before
    assert 0 < read_status(RunDirectory(tmp_path, "test")).tables["items"]["rows"] < 0.7 * in_all + programs.KNOWN


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"evaluation": "exact"}, "take distributed, inline or sidecar"),
        ({"strategy": "one_device"}, "has no parameter servers"),
        ({"initial_weights": "other@5"}, "initial_weights"),
        ({"dynamic_tables": {"items": {}}}, "capacity is missing"),
        ({"dynamic_tables": {"items": {"capacity": 0}}}, "from 1 to"),
        ({"dynamic_tables": {"items": {"capacity": 5, "sighting": 3}}}, "did you mean sightings"),
        ({"dynamic_tables": {"a/b": {"capacity": 5}}}, "no name of a layer"),
        ({"dynamic_tables": {"items": 5}}, "expected a mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    from trainer.core.settings.config import Config

    with pytest.raises(ConfigError, match=why):
        Config.from_dict({"program": "a:B", **SETTINGS, **settings})


def test_a_model_that_has_no_such_layer_is_refused(programs: Any) -> None:
    settings = {**SETTINGS, "dynamic_tables": {"itmes": {"capacity": 5}}}
    with pytest.raises(UserError, match="no Embedding layer named 'itmes'"):
        testing.train(programs.Keys(), 5, **settings)


@pytest.mark.parametrize(
    ("layer", "why"),
    [({"embeddings_regularizer": "l2"}, "embeddings_regularizer"), ({"embeddings_initializer": "orthogonal"}, "Orth")],
)
def test_a_layer_that_does_more_is_refused(programs: Any, layer: dict[str, Any], why: str) -> None:
    class More(programs.Keys):  # type: ignore[misc, name-defined]
        def build_model(self) -> Any:
            ids = tf.keras.Input([8], dtype="int64")
            rows = tf.keras.layers.Embedding(10, 4, name="items", **layer)(ids)
            model = tf.keras.Model(ids, tf.keras.layers.Dense(2)(tf.reduce_mean(rows, 1)))
            model.compile(optimizer="adagrad", loss="mse")
            return model

    with pytest.raises(UserError, match=why):
        testing.train(More(), 5, **SETTINGS)


OPTIONS = (
    *("--dynamic-tables", json.dumps({"items": {"capacity": 5_000_000}})),
    *("--export", "false", "--evaluation", "none", "--set", "new=0.2", "--set", "pause_ms=5"),
    *("--checkpoint-steps", "100", "--checkpoint-seconds", "0", "--log-seconds", "0.5", "--steps-per-execution", "10"),
)


def test_tasks_that_die_lose_no_key_and_give_none_two_rows(runs: Runs) -> None:
    """A worker dies three times in the middle of its insertions, then the coordinator, then a ps."""
    run = "dying"
    process = runs.local("keys:Keys", run, 1_000_000, *OPTIONS)
    process.search(r"saved \S+/ckpt-\d+ in")

    def reached() -> int:
        return int(read_status(RunDirectory(runs.shared, run)).step or 0)

    def goes_on(steps: int) -> None:
        began = reached()
        until(lambda: reached() >= began + steps, f"{steps} steps more", say=lambda: process.output)

    for times in range(1, 4):
        until(lambda times=times: len(process.pids("worker-0")) >= times, "worker-0", say=lambda: process.output)
        kill(process.pids("worker-0")[-1])
        goes_on(40)
    kill(process.pids("chief-0")[-1])
    process.search(r"attached to the variables on the ps")
    goes_on(100)
    kill(process.pids("ps-1")[-1])
    process.search(r"restored \S+/ckpt-\d+")
    goes_on(100)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    catalogue = RunDirectory(runs.shared, run).catalogue
    for step in catalogue.steps():
        assert not catalogue.check(step)
        rows = rows_of(catalogue.prefix(step))
        assert len({key for key in rows if key < 2_000 * 1_000_003}) > 1_900
        assert all(np.isfinite(values).all() for values in rows.values())


@pytest.mark.matrix
@pytest.mark.parametrize("incremental_saves", [0, 3])
def test_workers_that_die_in_their_acts_leave_no_half_of_one_and_no_lock(runs: Runs, incremental_saves: int) -> None:
    """Each row has to the bit what as many steps give as it counts, and no step that was counted is missing."""
    run, deaths, steps_a_call = f"counted-{incremental_saves}", 8, 10
    tables = {"items": {"capacity": 5_000_000, "incremental_saves": incremental_saves}}
    process = runs.local("keys:CountedSteps", run, 1_000_000, "--dynamic-tables", json.dumps(tables), *OPTIONS[2:])
    process.search(r"saved \S+/ckpt-\d+ in")

    def reached() -> int:
        return int(read_status(RunDirectory(runs.shared, run)).step or 0)

    for death in range(deaths):
        kill_and_go_on(process, f"worker-{death % 2}", reached, 5 * steps_a_call)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    catalogue, keys_a_step, increments = RunDirectory(runs.shared, run).catalogue, 64 * 8, list[int]()
    for step in catalogue.steps():
        pieces = pieces_of(catalogue.prefix(step), "items")
        readers = [tf.train.load_checkpoint(path) for *_, path in pieces]
        keys, values, usage = (
            np.concatenate([reader.get_tensor(part) for reader in readers]) for part in ("keys", "values", "told")
        )
        once, newest = np.unique(keys, return_index=True)
        increments.append(max(number for _, _, number, _ in pieces))
        assert len(once) == len(keys) or increments[-1]
        keys, values, usage = once, values[newest], usage[newest]
        np.testing.assert_array_equal(values, np.repeat(-usage[:, :1] / 64, values.shape[1], 1))
        in_all = int(usage[:, 0].sum())
        assert keys_a_step * step <= in_all
    assert in_all <= keys_a_step * (step + 3 * steps_a_call * (deaths + 1))
    assert any(increments) == bool(incremental_saves)
    print(f"{deaths} deaths, {step:,} steps, {len(keys):,} keys, {in_all:,} updates of rows")


@pytest.mark.parametrize(("lost", "incremental_saves"), [(1, 3), pytest.param(0, 0, marks=pytest.mark.matrix)])
def test_only_the_rows_of_a_lost_ps_go_back_where_that_is_asked_for(
    programs: Any, runs: Runs, lost: int, incremental_saves: int
) -> None:
    run = f"lost-rows-{incremental_saves}"
    directory, catalogue = RunDirectory(runs.shared, run), RunDirectory(runs.shared, run).catalogue
    tables = {"items": {"capacity": 5_000_000, "incremental_saves": incremental_saves}}
    # With fewer workers the data would be divided again.
    more = ("--ps-recovery", "lost", "--input-position", "exact", "--checkpoint-steps", "200", "--elastic", "false")
    process = runs.local("keys:Counted", run, 1_000_000, "--dynamic-tables", json.dumps(tables), *OPTIONS[2:], *more)
    process.search(r"saved \S+/ckpt-\d+ in[\s\S]*" * (1 + bool(incremental_saves)))
    saved = catalogue.steps()[-1]
    until(lambda: (read_status(directory).step or 0) > saved + 100, "steps", say=lambda: process.output)
    kill(process.pids(f"ps-{lost}")[0])
    process.search(r"only what lost ps had[\s\S]* steps/s")
    # The other ps may have trained batches of a call that was in flight: they are trained once more first.
    reached = read_status(directory).step or 0
    until(lambda: (read_status(directory).step or 0) > reached + 150, "steps", say=lambda: process.output)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    events = map(json.loads, directory.event_log.read_text().splitlines())
    (message,) = [event["message"] for event in events if event["event"] == "attached"]
    old, end = int(message.removeprefix("step ").split(f"; ps-{lost} of step ")[1]), catalogue.steps()[-1]
    assert (max(number for _, _, number, _ in pieces_of(catalogue.prefix(old), "items")) > 0) == bool(incremental_saves)
    before, after = (times_trained(programs, catalogue.prefix(each)) for each in (old, end))
    position = Manifest.read(catalogue.manifest(end)).input["parts"]  # type: ignore
    for worker, (_, taken) in enumerate(position):
        kept, back = after[1 - lost][worker], after[lost][worker]
        assert sorted(kept) == list(range(taken // programs.BATCH))
        gone = sorted(kept.keys() - back.keys())
        assert gone == list(range(gone[0], gone[-1] + 1))
        assert before[lost][worker] == {batch: times for batch, times in back.items() if batch < gone[0]}


def times_trained(programs: Any, prefix: str) -> list[list[dict[int, int]]]:
    """Return for each ps, and each worker, how often a checkpoint's rows have been trained by each of its batches.

    That is what a batch's own keys say. Raises AssertionError where any row has another sum of updates than the batches
    of its key add up to, or a ps another number of steps.
    """
    found, own = [], programs.GROUPS * programs.OF_A_GROUP
    for server in range(2):
        readers = [
            tf.train.load_checkpoint(path) for number, *_, path in pieces_of(prefix, "items") if number == server
        ]
        keys, values, usage = (
            np.concatenate([reader.get_tensor(part) for reader in readers]) for part in ("keys", "values", "told")
        )
        keys, newest = np.unique(keys, return_index=True)
        values, times = values[newest], usage[newest, 0]
        np.testing.assert_array_equal(values, np.repeat(-times[:, np.newaxis] / programs.BATCH, values.shape[1], 1))
        keys, times = keys[times > 0], times[times > 0]  # a call in flight may have asked for a row
        batches, firsts, counts = np.unique(
            (keys[keys >= own] - own) // programs.OF_A_BATCH, return_index=True, return_counts=True
        )
        by_batch = times[keys >= own][firsts]
        assert set(counts) == {programs.NEW // 2}
        np.testing.assert_array_equal(times[keys >= own], np.repeat(by_batch, counts))
        of_group = np.bincount(batches // 2 % programs.GROUPS, by_batch, programs.GROUPS)
        np.testing.assert_array_equal(times[keys < own], of_group[keys[keys < own] // programs.OF_A_GROUP])
        assert by_batch.sum() == max(reader.get_tensor("clock")[0] for reader in readers)
        of_worker = [batches % 2 == worker for worker in range(2)]
        found.append(
            [dict(zip((batches[each] // 2).tolist(), by_batch[each].tolist(), strict=True)) for each in of_worker]
        )
    return found


def kill_and_go_on(process: Process, worker: str, reached: Callable[[], int], steps: int) -> None:
    """Kill a worker at some moment; the others go on, and it comes back."""
    time.sleep(random.uniform(0, 1))
    pids = process.pids(worker)
    kill(pids[-1])
    began = reached()
    until(lambda: reached() >= began + steps, f"{steps} steps more", say=lambda: process.output)
    until(lambda: len(process.pids(worker)) > len(pids), f"another {worker}", say=lambda: process.output)
