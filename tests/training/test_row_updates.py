"""Optimizers that change only the rows of a gradient do what tf_keras's own do, and lazy Adam what it is said to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer import testing
from trainer.core.settings.config import Config, ConfigError
from trainer.run.saves.checkpoint_reader import check_fit
from trainer.training.handover import NotCarried, carry, compare, looks
from trainer.training.keras.keras3.checkpoint import CheckpointedModel
from trainer.training.tables.row_updates import update_by_rows as replace_updates
from trainer.training.tables.whole_weights import see_whole_weights
from trainer.training.updates.one_update import gather
from trainer.training.updates.optimizers import build_optimizer, is_wrapper, optimizers_of, share_among_workers

# isort: split
import keras as keras3
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)
ROWS, WIDTH = 64, 8
START = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
# Row 3 twice in one batch, most rows in none.
SOME_ROWS = [[3, 3, 40], [63, 3, 0]]
ALL_ROWS = [[*range(ROWS), 3, 3, 40]]
Make = Callable[[], Any]
keras = tf.keras.optimizers


class Model(tf.Module):
    """A table whose gradient names rows, and a bias whose gradient doesn't."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.table = tf.Variable(START, name="table")
        self.bias = tf.Variable(START[0])

    def train(self, batches: list[list[int]], steps: int) -> list[np.ndarray]:
        """Train in this process; returns the table and the bias."""
        for step in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.gather(self.table, batches[step % len(batches)]) * self.bias - 1) ** 2)
            self.optimizer.minimize(loss, [self.table, self.bias], tape)
        return [self.table.numpy(), self.bias.numpy()] if tf.executing_eagerly() else []


def update_by_rows(model: Any, *, lazy: bool = False) -> None:
    """Have a model's optimizers do so, as `gather_updates` does."""
    for optimizer in optimizers_of(model):
        if not is_wrapper(optimizer):
            gather(optimizer)
    replace_updates(model, lazy=lazy)


def is_by_rows(optimizer: Any) -> bool:
    """Return whether the update for rows is one of row_updates: Keras's own is a method."""
    return getattr(vars(optimizer).get("update_step"), "__qualname__", "").startswith("replace_update")


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.SGD(0.1),
        lambda: keras.SGD(0.1, nesterov=True),
        lambda: keras.SGD(keras.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: keras.SGD(0.1, clipnorm=0.1),
        lambda: keras.SGD(0.1, clipvalue=0.1),
        lambda: keras.SGD(0.1, global_clipnorm=0.1),
    ],
)
def test_sgd_by_rows_is_keras_own(make: Make) -> None:
    plain, by_rows = Model(make()), Model(make())
    update_by_rows(by_rows)
    assert is_by_rows(by_rows.optimizer)
    for ours, expected in zip(by_rows.train(SOME_ROWS, 6), plain.train(SOME_ROWS, 6), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert not np.array_equal(by_rows.table, START)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.Adagrad(0.1),
        lambda: keras.Adagrad(keras.schedules.ExponentialDecay(0.1, 2, 0.5), initial_accumulator_value=0.01),
        lambda: keras.Adagrad(0.1, clipnorm=0.1),
        lambda: keras.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=0.5),
    ],
)
def test_adagrad_by_rows_is_keras_own(make: Make) -> None:
    plain, by_rows = Model(make()), Model(make())
    update_by_rows(by_rows)
    assert is_by_rows(by_rows.optimizer)
    for ours, expected in zip(by_rows.train(SOME_ROWS, 6), plain.train(SOME_ROWS, 6), strict=True):
        np.testing.assert_array_equal(ours, expected)
    for ours, expected in zip(by_rows.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), expected.numpy())
    assert not np.array_equal(by_rows.table, START)


@pytest.mark.parametrize("make", [keras.Adagrad, keras.Ftrl])
def test_the_first_values_of_an_optimizers_variables_are_computed_where_its_weights_lie(make: Make) -> None:
    """The coordinator would hold those of a whole shard, and send them."""
    optimizer = make()
    model = tf.Module()
    model.optimizer = optimizer
    share_among_workers(model)
    given = []
    optimizer.add_variable_from_reference = lambda *_, initial_value=None, **__: given.append(initial_value)
    weights = [SimpleNamespace(device=f"/job:ps/task:{number}", shape=[2], dtype=tf.float32) for number in (0, 1)]
    optimizer._build_index_dict = lambda variables: None
    with tf.Graph().as_default():
        optimizer.build(weights)
    assert [one.op.device for one in given if one is not None] == [one.device for one in weights]


def test_sgd_by_rows_has_no_slot() -> None:
    """It would take as much memory as the table, and to write it as long as the whole step."""
    model = Model(keras.SGD(0.1))
    update_by_rows(model)
    model.train(SOME_ROWS, 2)
    assert all(variable.shape.rank == 0 for variable in model.optimizer.variables)


def test_a_checkpoint_with_the_momentum_that_sgd_by_rows_has_not_is_restored(tmp_path: Path) -> None:
    """As one has that was saved under another strategy; what else is lacking is a misfit as ever."""
    plain, by_rows = Model(keras.SGD(0.1)), Model(keras.SGD(0.1))
    update_by_rows(by_rows)
    expected = plain.train(SOME_ROWS, 3)
    by_rows.train(SOME_ROWS, 1)
    prefix = tf.train.Checkpoint(model=plain).write(str(tmp_path / "ckpt"))
    check_fit(tf.train.Checkpoint(model=by_rows).read(prefix))
    np.testing.assert_array_equal(by_rows.table, expected[0])
    assert by_rows.optimizer.iterations == 3
    plain.m = tf.Variable(1.0, name="m/m")
    prefix = tf.train.Checkpoint(model=plain).write(str(tmp_path / "more"))
    with pytest.raises(AssertionError, match="m/m"):
        check_fit(tf.train.Checkpoint(model=by_rows).read(prefix))


@pytest.mark.parametrize("other", [lambda: keras.Adagrad(0.1), lambda: keras.SGD(0.1, use_ema=True)])
def test_a_checkpoint_of_another_optimizer_with_as_many_slots_is_a_misfit(other: Make, tmp_path: Path) -> None:
    """tf_keras numbers them, so that an accumulator would get the value of a momentum."""
    before, now = Model(keras.SGD(0.1, momentum=0.9)), Model(other())
    update_by_rows(now)  # an SGD has no momentum then
    before.train(SOME_ROWS, 3)
    now.train(SOME_ROWS, 1)
    prefix = tf.train.Checkpoint(model=before).write(str(tmp_path / "ckpt"))
    check_fit(tf.train.Checkpoint(model=before).read(prefix))
    left, here = (looks(carry(one, tf.Variable(0))) for one in (before, now))
    with pytest.raises(NotCarried, match=r"was float32 .* m and is"):
        compare("here", left, here)
    with pytest.raises(AssertionError, match=r"SGD/m/.* is now .*/(accumulator|average)/"):
        check_fit(tf.train.Checkpoint(model=now).read(prefix))


def three_layers(make: Make, names: Sequence[str], trained: str) -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, use_bias=False, name=name) for name in names])
    model.build((None, 2))
    for layer in model.layers:
        layer.trainable = layer.name in trained
    model.compile(make(), "mse")
    build_optimizer(model)
    return model


RATES: list[Any] = [0.1, tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)]


@pytest.mark.parametrize(("before", "now"), [RATES, RATES[::-1]])
def test_a_schedule_may_take_the_place_of_a_rate(before: Any, now: Any, tmp_path: Path) -> None:
    first, second = (three_layers(partial(keras.SGD, rate, momentum=0.9), "abc", "abc") for rate in (before, now))
    second.add(tf.keras.layers.Dropout(0.5))
    prefix = tf.train.Checkpoint(model=first).write(str(tmp_path / "ckpt"))
    check_fit(tf.train.Checkpoint(model=second).read(prefix))
    for one, same in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, same)
    second.more = tf.Variable(1.0, name="more")
    with pytest.raises(AssertionError, match="more"):
        check_fit(tf.train.Checkpoint(model=second).read(prefix))


@pytest.mark.parametrize(("before", "now"), [((), (0.5,)), ((0.5,), ())])
def test_a_dropout_of_keras3_may_come_or_go(before: Sequence[float], now: Sequence[float], tmp_path: Path) -> None:
    models = []
    for rates in (before, now):
        dense = keras3.layers.Dense(2, name="dense")
        models.append(keras3.Sequential([keras3.Input((2,)), dense, *map(keras3.layers.Dropout, rates)]))
    first, second = (CheckpointedModel(one, with_optimizers=False) for one in models)
    prefix = tf.train.Checkpoint(model=first).write(str(tmp_path / "ckpt"))
    check_fit(tf.train.Checkpoint(model=second).read(prefix))
    np.testing.assert_array_equal(models[1].layers[0].kernel, models[0].layers[0].kernel)


@pytest.mark.parametrize(("before", "now"), [("abc", "bac"), ("abc", "xbc"), (["one_1", "one"], ["one", "one_1"])])
def test_layers_that_have_changed_places_are_a_misfit(
    before: Sequence[str], now: Sequence[str], tmp_path: Path
) -> None:
    """By their places tf_keras finds them, so that each would get the other's weights; numbers count what was made."""
    made = (three_layers(keras.SGD, names, "") for names in (before, now))
    prefix = tf.train.Checkpoint(model=next(made)).write(str(tmp_path / "ckpt"))
    is_misfit = now == "bac"
    with pytest.raises(AssertionError, match="its a/kernel would become b") if is_misfit else nullcontext():
        check_fit(tf.train.Checkpoint(model=next(made)).read(prefix))


def test_a_name_for_one_of_several_layers_or_variables_is_no_misfit(tmp_path: Path) -> None:
    """The others' numbers change with it, and what is an attribute is found by that."""
    pairs = [[three_layers(keras.SGD, names, "") for names in (["d", "d_1", "d_2"], ["first", "d", "d_1"])], []]
    for name in (None, "bias"):
        model = three_layers(keras.SGD, "abc", "")
        model.one, model.other = tf.Variable(1.0, name=name), tf.Variable(2.0)
        pairs[1].append(model)
    for before, now in pairs:
        prefix = tf.train.Checkpoint(model=before).write(str(tmp_path / "ckpt"))
        check_fit(tf.train.Checkpoint(model=now).read(prefix))
        for one, same in zip(before.get_weights(), now.get_weights(), strict=True):
            np.testing.assert_array_equal(one, same)


def test_other_numbers_of_keras3s_layers_are_no_misfit(tmp_path: Path) -> None:
    """A process that has made another layer before counts from there; weights are found by names without numbers."""
    models = []
    for first in (0, 1):
        layers = [keras3.layers.Dense(2, name=f"dense_{first + number}") for number in range(3)]
        model = keras3.Sequential([keras3.Input((2,)), *layers], name="three")
        model.compile(keras3.optimizers.Adam(0.1, name="adam"))
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    before, now = map(CheckpointedModel, models)
    prefix = tf.train.Checkpoint(model=before).write(str(tmp_path / "ckpt"))
    check_fit(tf.train.Checkpoint(model=now).read(prefix))
    for one, same in zip(before.variables, now.variables, strict=True):
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("make", [lambda: keras.SGD(0.1, momentum=0.9), lambda: keras.Adam(0.1)])
@pytest.mark.parametrize(("before", "now"), [("abc", "bc"), ("bc", "ab")])
def test_a_weight_does_not_get_its_neighbours_momentum(make: Make, before: str, now: str, tmp_path: Path) -> None:
    """tf_keras numbers them, so that they move where another layer is frozen."""
    prefix = tf.train.Checkpoint(model=three_layers(make, "abc", before)).write(str(tmp_path / "ckpt"))
    reject_moved(prefix, make, before, now)


def reject_moved(prefix: str, make: Make, before: str, now: str) -> None:
    renamed = three_layers(make, "xyz", before.translate(str.maketrans("abc", "xyz")))
    check_fit(tf.train.Checkpoint(model=renamed).read(prefix))
    with pytest.raises(AssertionError, match=r"is now .*: the optimizer trains other weights"):
        check_fit(tf.train.Checkpoint(model=three_layers(make, "abc", now)).read(prefix))


def test_a_sum_of_steps_does_not_become_a_mean_of_gradients(tmp_path: Path) -> None:
    """tf_keras calls both m: the momentum of an SGD and that of a Lion."""
    kinds = (lambda: keras.SGD(0.1, momentum=0.9), lambda: keras.Lion(0.1))
    for before, now in (kinds, kinds[::-1]):
        prefix = tf.train.Checkpoint(model=three_layers(before, "abc", "abc")).write(str(tmp_path / "ckpt"))
        with pytest.raises(AssertionError, match=r"/m/.* is now .*/m/.*: the optimizer is another one"):
            check_fit(tf.train.Checkpoint(model=three_layers(now, "abc", "abc")).read(prefix))


def test_nor_does_one_that_is_split_or_was(tmp_path: Path) -> None:
    see_whole_weights()
    split = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    scope = testing.in_process_cluster(workers=2, ps=2, partitioner=split).scope

    def make() -> Any:
        return keras.Adam(0.1)

    with scope():
        prefix = tf.train.Checkpoint(model=three_layers(make, "abc", "abc")).write(str(tmp_path / "split"))
        reject_moved(prefix, make, "abc", "bc")
    reject_moved(prefix, make, "abc", "bc")
    whole = tf.train.Checkpoint(model=three_layers(make, "abc", "bc")).write(str(tmp_path / "whole"))
    with scope():
        reject_moved(whole, make, "bc", "ab")


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.SGD(0.1, momentum=0.9),
        lambda: keras.SGD(0.1, momentum=tf.Variable(0.0)),
        lambda: keras.SGD(0.1, weight_decay=0.1),
        lambda: keras.SGD(0.1, use_ema=True),
        lambda: keras.Adagrad(0.1, use_ema=True),
        lambda: keras.Adam(0.1),
        lambda: keras.Ftrl(0.1),
        lambda: keras.legacy.SGD(0.1),
        lambda: type("Own", (keras.SGD,), {})(0.1),
    ],
)
def test_what_would_differ_is_left_to_keras(make: Make) -> None:
    model = Model(make())
    update_by_rows(model)
    assert not is_by_rows(model.optimizer)


@pytest.mark.parametrize("make", [lambda: keras.SGD(0.1), lambda: keras.Adagrad(0.1), lambda: keras.Adagrad(0.1, 0.0)])
def test_an_update_of_rows_is_not_compiled_again_for_each_number_of_them(make: Make) -> None:
    model = Model(make())
    model.optimizer.jit_compile = True  # as Keras sets it where there is a GPU
    update_by_rows(model)
    assert not model.optimizer.jit_compile


@pytest.mark.parametrize(
    ("make", "warned"),
    [
        (lambda: keras.Adam(0.1), "Adam"),
        (lambda: keras.Adagrad(0.1, use_ema=True), "Adagrad"),
        (lambda: keras.Adagrad(0.1), ""),
        (lambda: keras.SGD(0.1), ""),
    ],
)
def test_an_optimizer_that_computes_on_a_whole_large_table_says_so_once(
    make: Make, warned: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.tables.row_updates.LARGE_BYTES", ROWS * WIDTH * 4)
    model = Model(make())
    update_by_rows(model)
    model.train(SOME_ROWS, 3)
    messages = [record.getMessage() for record in caplog.records if "large-tables.md" in record.getMessage()]
    expected = f"{warned} computes on all rows of table at each step, of which a shard is 2 KiB"
    assert [expected in line for line in messages] == [True] * bool(warned)


def test_every_optimizer_of_a_model_is_found() -> None:
    model = Model(keras.SGD(0.1))
    model.second = keras.SGD(0.2)
    model.scaled = tf.keras.mixed_precision.LossScaleOptimizer(keras.SGD(0.1))
    update_by_rows(model)
    assert all(map(is_by_rows, (model.optimizer, model.second, model.scaled.inner_optimizer)))


@pytest.mark.parametrize("adaptive_epsilon", [False, True])
def test_lazy_adam_is_adam_when_each_step_names_all_rows(adaptive_epsilon: bool) -> None:
    plain, lazy = (Model(keras.Adam(0.1, adaptive_epsilon=adaptive_epsilon)) for _ in range(2))
    update_by_rows(lazy, lazy=True)
    for ours, expected in zip(lazy.train(ALL_ROWS, 6), plain.train(ALL_ROWS, 6), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_lazy_optimizers_are_refused_under_other_strategies() -> None:
    with pytest.raises(ConfigError, match=r"lazy_optimizers: .*strategy mirrored.*leave it out"):
        Config(program="a:B", strategy="mirrored", lazy_optimizers=True)


class Program:
    """The same as Model, for a cluster: the table is split over the ps."""

    def __init__(self, make: Make, batches: list[list[int]]) -> None:
        self.make, self.batches = make, batches

    def build_model(self) -> Any:
        model = Rows()
        model.compile(self.make())
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors(self.batches[0])

    eval_dataset = train_dataset


class Rows(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        start = {"table": START, "bias": START[0]}
        make = lambda name: lambda shape, dtype=None, **_: tf.constant(start[name])  # noqa: E731
        self.table = self.add_weight(name="table", shape=START.shape, initializer=make("table"))
        self.bias = self.add_weight(name="bias", shape=[WIDTH], initializer=make("bias"))

    def call(self, ids: Any) -> Any:
        return tf.nn.embedding_lookup(self.table, ids) * self.bias

    def train_step(self, ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(ids) - 1) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


def saved(result: testing.Result) -> dict[str, np.ndarray]:
    """Return what the checkpoint of the last step has of the model, and its optimizer."""
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / f"ckpt-{result.step}"))
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("VARIABLE_VALUE")]
    return {name: reader.get_tensor(name) for name in names if "save_counter" not in name}


LAZY = {"lazy_optimizers": True}
OTHERS: dict[str, Make] = {
    "momentum": lambda: keras.SGD(0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.RMSprop(0.01, centered=True, momentum=0.5),
    "ftrl": lambda: keras.Ftrl(0.01),
    "adamw": lambda: keras.AdamW(0.01),
    "adamax": lambda: keras.Adamax(0.01),
    "averages": lambda: keras.Adagrad(0.01, use_ema=True),
}


def trained_alone(make: Make, batches: list[list[int]], parts: list[int]) -> list[np.ndarray]:
    """Train so many steps in each part, at whose end Keras takes the averages for the weights, as a run does."""
    model = Model(make())
    for steps in parts:
        model.train(batches, steps)
        if model.optimizer.use_ema:
            model.optimizer.finalize_variable_values([model.table, model.bias])
    return [model.table.numpy(), model.bias.numpy()]


@pytest.mark.parametrize(
    ("make", "batches", "settings"),
    [
        pytest.param(lambda: keras.SGD(0.01), SOME_ROWS, {}, marks=pytest.mark.matrix),
        pytest.param(lambda: keras.Adagrad(0.1), SOME_ROWS, {}, marks=pytest.mark.matrix),
        (lambda: keras.Adam(0.01), ALL_ROWS, LAZY),
        *(pytest.param(make, ALL_ROWS, LAZY, marks=pytest.mark.matrix) for make in OTHERS.values()),
    ],
    ids=["sgd", "adagrad", "lazy-adam", *(f"lazy-{name}" for name in OTHERS)],
)
def test_tables_of_two_shards_train_as_whole_ones_do_alone(
    tmp_path: Path, make: Make, batches: list[list[int]], settings: dict[str, Any]
) -> None:
    """With `fit` in one go, and with the custom loop on two ps, then from the checkpoint on one."""
    common = {"workers": 1, "evaluation": "none", "export": False, "partitioner_min_bytes": 256, **settings}
    program = Program(make, batches)
    fit = saved(testing.train(program, steps=12, ps=2, directory=tmp_path / "fit", api="fit", **common))
    testing.train(program, steps=6, ps=2, directory=tmp_path / "loop", **common)
    loop = saved(testing.train(program, steps=12, ps=1, directory=tmp_path / "loop", **common))
    for values, parts in ((fit, [12]), (loop, [6, 6])):
        table, bias = trained_alone(make, batches[:1], parts)
        assert not np.array_equal(table, START)
        np.testing.assert_allclose(values["model/table/.ATTRIBUTES/VARIABLE_VALUE"], table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values["model/bias/.ATTRIBUTES/VARIABLE_VALUE"], bias, rtol=1e-5, atol=1e-6)
    assert fit.keys() == loop.keys()
    for name, value in fit.items() if not make().use_ema else ():  # averages count where a part ends
        np.testing.assert_allclose(loop[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
