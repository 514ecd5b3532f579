"""Lazy optimizers do to the rows of a step what is written here in NumPy, and nothing to the others; under both Keras.

All of this file takes about 20 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from trainer.core.failures import UserError
from trainer.training.keras.keras3 import row_updates as rows_of_keras3
from trainer.training.tables.row_updates import LAZY, update_by_rows
from trainer.training.updates.one_update import gather, gather_keras3
from trainer.training.updates.optimizers import exclude_shards

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)
ROWS, WIDTH, RATE = 12, 3, 0.05
START = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
# Row 3 twice in one batch, some rows in none.
BATCHES = [[3, 3, 7], [11, 3, 0], [0, 0, 5], [7, 3, 3]]
two, legacy, three = tf.keras.optimizers, tf.keras.optimizers.legacy, keras.optimizers
libraries = pytest.mark.parametrize("library", [two, three], ids=["tf_keras", "keras3"])
Slots = dict[str, np.ndarray]


class Trained(tf.Module):
    """A table whose gradient names rows, trained by an optimizer as `trainer` has it, or as Keras has it."""

    def __init__(
        self, optimizer: Any, *, lazy: bool | None = True, constraint: Any = None, more: Sequence[tf.Variable] = ()
    ) -> None:
        """Take an optimizer of either Keras; with `lazy` None it is as Keras has it. `more` are trained, too."""
        super().__init__()
        self.optimizer = optimizer
        self.table = tf.Variable(START, name="table", constraint=constraint)
        is_three = isinstance(optimizer, three.Optimizer)
        if lazy is not None:
            for one in [getattr(optimizer, "inner_optimizer", optimizer)]:
                gather_keras3(one) if is_three else gather(one)
            (rows_of_keras3.update_by_rows if is_three else update_by_rows)(self, lazy=lazy)
        if hasattr(optimizer, "build"):
            optimizer.build([self.table, *more])

    def gradient(self, ids: list[int]) -> tf.IndexedSlices:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(self.table, ids) - 1) ** 2)
        return tape.gradient(loss, self.table)

    def train_once(self, ids: list[int]) -> None:
        self.optimizer.apply_gradients([(self.gradient(ids), self.table)])

    def train(self, *batches: list[int]) -> np.ndarray:
        """Train a step for each batch; returns the table."""
        for ids in batches:
            self.train_once(ids)
        return self.table.numpy()


# The algorithms, each of a row's gradient, weights and slots, and the number of the step.


def sgd(g: Any, w: Any, slots: Slots, step: int, momentum: float = 0.0, nesterov: bool = False) -> Any:
    slots["m"] = momentum * slots["m"] - RATE * g
    return w + (momentum * slots["m"] - RATE * g if nesterov else slots["m"])


def adagrad(g: Any, w: Any, slots: Slots, step: int) -> Any:
    slots["accumulator"] = slots["accumulator"] + g**2
    return w - RATE * g / np.sqrt(slots["accumulator"] + 1e-7)


def adadelta(g: Any, w: Any, slots: Slots, step: int) -> Any:
    slots["g"] = 0.95 * slots["g"] + 0.05 * g**2
    change = -np.sqrt(slots["d"] + 1e-7) * g / np.sqrt(slots["g"] + 1e-7)
    slots["d"] = 0.95 * slots["d"] + 0.05 * change**2
    return w + RATE * change


def adam(g: Any, w: Any, slots: Slots, step: int, amsgrad: bool = False) -> Any:
    slots["m"] = 0.9 * slots["m"] + 0.1 * g
    slots["v"] = 0.999 * slots["v"] + 0.001 * g**2
    slots["highest"] = np.maximum(slots["highest"], slots["v"])
    rate = RATE * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return w - rate * slots["m"] / (np.sqrt(slots["highest" if amsgrad else "v"]) + 1e-7)


def adamw(g: Any, w: Any, slots: Slots, step: int) -> Any:
    return adam(g, w * (1 - 0.004 * RATE), slots, step)


def adamax(g: Any, w: Any, slots: Slots, step: int) -> Any:
    slots["m"] = 0.9 * slots["m"] + 0.1 * g
    slots["u"] = np.maximum(0.999 * slots["u"], np.abs(g))
    return w - RATE / (1 - 0.9**step) * slots["m"] / (slots["u"] + 1e-7)


def nadam(g: Any, w: Any, slots: Slots, step: int) -> Any:
    slots["m"] = 0.9 * slots["m"] + 0.1 * g
    slots["v"] = 0.999 * slots["v"] + 0.001 * g**2
    momenta = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1, step + 2))
    product = np.prod(momenta[:-1])
    m = momenta[-1] * slots["m"] / (1 - product * momenta[-1]) + (1 - momenta[-2]) * g / (1 - product)
    return w - RATE * m / (np.sqrt(slots["v"] / (1 - 0.999**step)) + 1e-7)


def ftrl(g: Any, w: Any, slots: Slots, step: int, l1: float = 0.0, l2: float = 0.0) -> Any:
    before, slots["accumulator"] = slots["accumulator"], slots["accumulator"] + g**2
    slots["z"] = slots["z"] + g - (np.sqrt(slots["accumulator"]) - np.sqrt(before)) / RATE * w
    return (np.clip(slots["z"], -l1, l1) - slots["z"]) / (np.sqrt(slots["accumulator"]) / RATE + 2 * l2)


def lion(g: Any, w: Any, slots: Slots, step: int) -> Any:
    changed = w - RATE * np.sign(0.9 * slots["m"] + 0.1 * g)
    slots["m"] = 0.99 * slots["m"] + 0.01 * g
    return changed


def rmsprop(g: Any, w: Any, slots: Slots, step: int, momentum: float = 0.0, centered: bool = False) -> Any:
    slots["v"] = 0.9 * slots["v"] + 0.1 * g**2
    slots["mean"] = 0.9 * slots["mean"] + 0.1 * g
    change = RATE * g / np.sqrt(slots["v"] - (slots["mean"] ** 2 if centered else 0) + 1e-7)
    slots["m"] = momentum * slots["m"] + change
    return w - (slots["m"] if momentum else change)


ALGORITHMS: list[tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any]]] = [
    ("SGD", {}, sgd, {}),
    ("SGD", {"momentum": 0.9}, sgd, {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, sgd, {"momentum": 0.9, "nesterov": True}),
    ("Adadelta", {}, adadelta, {}),
    ("Adam", {}, adam, {}),
    ("Adam", {"amsgrad": True}, adam, {"amsgrad": True}),
    ("AdamW", {}, adamw, {}),
    ("Adamax", {}, adamax, {}),
    ("Ftrl", {}, ftrl, {}),
    ("Ftrl", {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.2}, ftrl, {"l1": 0.1, "l2": 0.2}),
    ("Lion", {}, lion, {}),
    ("Nadam", {}, nadam, {}),
    ("RMSprop", {}, rmsprop, {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}, rmsprop, {"momentum": 0.5, "centered": True}),
]
CASES = [pytest.param(*case, id=", ".join([case[0], *map(str, case[1])])) for case in ALGORITHMS]
FIRST = {"accumulator": 0.1}  # all other slots begin with 0


class Reference:
    """The rows of a table, each with slots of its own, in NumPy and 64 bits."""

    def __init__(self, algorithm: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._algorithm, self._arguments = algorithm, arguments
        self.table = START.astype(np.float64)
        names = ("m", "v", "u", "z", "g", "d", "mean", "highest", "accumulator")
        self._slots = {row: {name: np.full(WIDTH, FIRST.get(name, 0.0)) for name in names} for row in range(ROWS)}
        self.step = 0

    def train(self, *batches: list[int]) -> np.ndarray:
        for ids in batches:
            self.step += 1
            before = self.table.copy()
            for row in sorted(set(ids)):
                gradient = ids.count(row) * 2 * (before[row] - 1)
                self.table[row] = self._algorithm(gradient, before[row], self._slots[row], self.step, **self._arguments)
        return self.table


@libraries
@pytest.mark.parametrize(("name", "arguments", "algorithm", "of_it"), CASES)
def test_rows_are_changed_as_the_algorithm_says(
    library: Any, name: str, arguments: dict[str, Any], algorithm: Any, of_it: dict[str, Any]
) -> None:
    ours = Trained(getattr(library, name)(RATE, **arguments))
    reference = Reference(algorithm, of_it)
    for ids in BATCHES:
        np.testing.assert_allclose(ours.train(ids), reference.train(ids), rtol=2e-5, atol=1e-6)
    assert np.flatnonzero(np.any(ours.table.numpy() != START, axis=1)).tolist() == [0, 3, 5, 7, 11]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("SGD", {"momentum": 0.9, "nesterov": True}), ("Ftrl", {}), ("Adagrad", {}), ("Adamax", {}), ("Adadelta", {})],
)
def test_a_lazy_one_is_what_tensorflows_own_operations_for_rows_do(name: str, arguments: dict[str, Any]) -> None:
    ours = Trained(getattr(two, name)(RATE, **arguments))
    theirs = Trained(getattr(legacy, name)(RATE, **arguments), lazy=None)
    np.testing.assert_allclose(ours.train(*BATCHES), theirs.train(*BATCHES), rtol=2e-5, atol=1e-6)


MORE: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": None},
    {"clipvalue": 0.5},
    {"clipnorm": 0.5},
    {"global_clipnorm": 0.5},
]
ALL = [*range(ROWS)]


@libraries
@pytest.mark.parametrize("arguments", MORE, ids=[next(iter(one)) for one in MORE])
@pytest.mark.parametrize("name", LAZY)
def test_with_all_rows_in_each_step_it_is_keras_own(library: Any, name: str, arguments: dict[str, Any]) -> None:
    """With decay, averages and clipping as well; of rows that are named twice only tf_keras knows the sum."""
    ours, plain = (Trained(getattr(library, name)(RATE, **arguments), lazy=lazy) for lazy in (True, None))
    ids = [*ALL, 3, 3] if library is two else ALL
    for _ in range(3):
        np.testing.assert_allclose(ours.train(ids), plain.train(ids), rtol=1e-5, atol=1e-6)
    for value, expected in zip(variables(ours), variables(plain), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def variables(trained: Trained) -> list[np.ndarray]:
    """Return an optimizer's variables; the momentum that an SGD by rows has not is left out of Keras's own."""
    found = [one for one in trained.optimizer.variables if not one.name.startswith("m/") or "SGD" not in kind(trained)]
    return [one.numpy() for one in found]


def kind(trained: Trained) -> str:
    return type(trained.optimizer).__name__


@pytest.mark.parametrize("clipped", ["clipnorm", "global_clipnorm"])
def test_keras_3_clips_by_a_norm_and_leaves_other_rows_alone(clipped: str) -> None:
    """Keras makes a gradient of the whole table of it. The norm is that of what a batch says, not of the sums."""
    ours, plain = Trained(three.Adam(RATE, **{clipped: 0.5})), Trained(three.SGD(RATE, **{clipped: 0.5}))
    before = plain.gradient([3, 3, 7]).values.numpy()
    step = tf.function(lambda: ours.train_once([3, 3, 7]), autograph=False).get_concrete_function()
    step()
    assert np.flatnonzero(np.any(ours.table.numpy() != START, axis=1)).tolist() == [3, 7]
    shapes = [one.shape for operation in step.graph.get_operations() for one in operation.outputs]
    assert tf.TensorShape(START.shape) not in shapes
    clip = min(1.0, 0.5 / np.linalg.norm(before))
    plain.train_once([3, 3, 7])
    np.testing.assert_allclose(START[7] - RATE * clip * before[2], plain.table[7], rtol=1e-5)


@libraries
def test_decay_and_averages_are_of_the_rows_of_a_step(library: Any) -> None:
    """A row that is looked up in two of three steps decays twice, and its average is of two steps."""
    ours = Trained(library.SGD(0.5, weight_decay=0.1, use_ema=True, ema_momentum=0.75))
    if library is three:  # as training does it, before the first step
        ours.optimizer._model_variables_moving_average[0].assign(START)
        ours.optimizer._iterations.assign(1)
    row = average = START[2].astype(np.float64)
    for ids in ([2], [4], [2]):
        ours.train(ids)
        if ids == [2]:
            row = row * (1 - 0.1 * 0.5) - 0.5 * 2 * (row - 1)
            average = 0.75 * average + 0.25 * row
    averages = ours.optimizer._model_variables_moving_average[0].numpy()
    np.testing.assert_allclose(averages[2], average, rtol=1e-5)
    np.testing.assert_array_equal(averages[0], START[0])
    np.testing.assert_array_equal(ours.table.numpy()[0], START[0])


@libraries
def test_a_table_that_is_left_out_of_decay_does_not_decay(library: Any) -> None:
    tables = []
    for excluded in (False, True):
        optimizer = library.AdamW(RATE, weight_decay=0.5)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=["table"])
            exclude_shards(optimizer)
        tables.append(Trained(optimizer).train(*BATCHES))
    plain = Trained(library.Adam(RATE)).train(*BATCHES)
    np.testing.assert_allclose(tables[1], plain, rtol=1e-6)
    assert np.abs(tables[0] - plain)[3].max() > 0.01


@libraries
def test_a_rate_that_changes_is_that_of_the_step(library: Any) -> None:
    rates = library.schedules.PiecewiseConstantDecay([0, 1, 2], [0.1, 0.2, 0.4, 0.8])
    ours = Trained(library.SGD(rates, momentum=0.5))
    for ids, rate in zip(BATCHES, (0.1, 0.2, 0.4, 0.8), strict=True):
        before = ours.table.numpy()
        momentum = ours.optimizer.momentums[0].numpy()
        change = 0.5 * momentum[ids[-1]] - rate * ids.count(ids[-1]) * 2 * (before[ids[-1]] - 1)
        np.testing.assert_allclose(ours.train(ids)[ids[-1]], before[ids[-1]] + change, rtol=1e-5)


@libraries
def test_two_updates_of_a_table_in_a_step_are_two(library: Any) -> None:
    ours, reference = Trained(library.Adam(RATE)), Reference(adam, {})

    @tf.function(autograph=False)
    def step() -> None:
        for ids in BATCHES[:2]:
            ours.optimizer.apply_gradients([(ours.gradient(ids), ours.table)])

    for _ in range(2):
        step()
        np.testing.assert_allclose(ours.table, reference.train(*BATCHES[:2]), rtol=2e-5, atol=1e-6)


@libraries
def test_a_dense_gradient_and_a_constraint_are_of_all_rows(library: Any) -> None:
    """As of a regularizer: nothing may be left out, and the optimizer does what it does without the setting."""
    ours, plain = (Trained(library.Adam(RATE, weight_decay=0.1), lazy=lazy) for lazy in (True, None))
    for one in (ours, plain):
        for ids in BATCHES:
            one.optimizer.apply_gradients([(tf.convert_to_tensor(one.gradient(ids)), one.table)])
    np.testing.assert_allclose(ours.table, plain.table, rtol=1e-6)


def test_a_table_with_a_constraint_is_keras_own() -> None:
    ours, plain = (Trained(two.Adam(RATE), lazy=lazy, constraint=tf.abs) for lazy in (True, None))
    np.testing.assert_allclose(ours.train(*BATCHES), plain.train(*BATCHES), rtol=1e-6)
    assert ours.table.numpy().min() >= 0


def test_a_scaled_optimizer_is_lazy() -> None:
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(two.Adam(RATE), dynamic=False, initial_scale=8)
    ours = Trained(scaled)
    for ids in BATCHES:
        gradient = ours.gradient(ids)
        scaled.apply_gradients(
            [(tf.IndexedSlices(8 * gradient.values, gradient.indices, gradient.dense_shape), ours.table)]
        )
    np.testing.assert_allclose(ours.table, Reference(adam, {}).train(*BATCHES), rtol=2e-5, atol=1e-6)


def test_a_table_of_a_mixed_policy_is_trained_in_32_bits() -> None:
    layer = tf.keras.layers.Embedding(ROWS, WIDTH, dtype=tf.keras.mixed_precision.Policy("mixed_bfloat16"))
    layer.build(None)
    layer.embeddings.assign(START)
    ours = Trained(two.Adam(RATE))
    ours.optimizer = two.Adam(RATE)
    gather(ours.optimizer)
    update_by_rows(ours, lazy=True)
    for ids in BATCHES:
        with tf.GradientTape() as tape:
            rows = layer(tf.constant(ids))
            loss = tf.reduce_sum((tf.cast(rows, tf.float32) - 1) ** 2)
        assert rows.dtype == tf.bfloat16
        ours.optimizer.apply_gradients([(tape.gradient(loss, layer.embeddings), layer.embeddings)])
    assert layer.embeddings.read_value().dtype == tf.float32
    changed = np.any(layer.embeddings.numpy() != START, axis=1)
    assert np.flatnonzero(changed).tolist() == [0, 3, 5, 7, 11]
    np.testing.assert_allclose(layer.embeddings, Reference(adam, {}).train(*BATCHES), atol=0.03)


@libraries
def test_ftrl_keeps_what_keras_sets_to_0(library: Any) -> None:
    """As docs/large-tables.md says: its first step takes the first values of all rows away."""
    ours, plain = (Trained(library.Ftrl(RATE), lazy=lazy).train([1]) for lazy in (True, None))
    np.testing.assert_array_equal(ours[2], START[2])
    np.testing.assert_array_equal(plain[2], 0)


@libraries
def test_without_the_setting_they_are_keras_own(library: Any) -> None:
    for name in set(LAZY) - {"SGD", "Adagrad"}:
        ours, plain = (Trained(getattr(library, name)(RATE), lazy=lazy) for lazy in (False, None))
        np.testing.assert_array_equal(ours.train(*BATCHES), plain.train(*BATCHES), err_msg=name)


@pytest.mark.parametrize(("name", "same"), [("SGD", True), ("Adagrad", True), ("Adam", False)])
def test_of_keras_3_two_optimizers_are_by_rows_without_the_setting(name: str, same: bool) -> None:
    """With rows that are named twice: Keras 3 adds up their gradients nowhere, and the results stay Keras's."""
    ours, plain = (Trained(getattr(three, name)(RATE), lazy=lazy) for lazy in (False, None))
    np.testing.assert_array_equal(ours.train(*BATCHES), plain.train(*BATCHES))
    step = tf.function(lambda: ours.train_once(BATCHES[0]), autograph=False).get_concrete_function()
    read = [one for one in step.graph.get_operations() if one.type == "ReadVariableOp"]
    assert (START.shape not in [tuple(one.outputs[0].shape) for one in read]) == same


class Own(two.Adam):
    """A program's own."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: two.Adafactor(0.1), "Adafactor can't change the rows of a step alone: compile with one of tf.keras"),
        (lambda: Own(0.1), "Own can't change"),
        (lambda: legacy.Adam(0.1), "legacy.Adam can't change"),
        (lambda: legacy.RMSprop(0.1), "legacy.RMSprop can't change"),
        (
            lambda: three.Lamb(0.1),
            r"Lamb can't change .* one of keras.optimizers itself \(SGD, Adagrad, .*or leave lazy_",
        ),
    ],
)
def test_what_can_not_be_lazy_is_refused(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(UserError, match=f"lazy_optimizers: {expected}"):
        Trained(make())


@pytest.mark.parametrize(
    "make", [lambda: legacy.SGD(0.1), lambda: legacy.Ftrl(0.1), lambda: legacy.RMSprop(0.1, momentum=0.5)]
)
def test_legacy_optimizers_that_change_rows_alone_are_taken(make: Callable[[], Any]) -> None:
    ours = Trained(make())
    ours.train(*BATCHES)
    assert np.flatnonzero(np.any(ours.table.numpy() != START, axis=1)).tolist() == [0, 3, 5, 7, 11]


@libraries
def test_nadam_multiplies_its_momenta_once_a_step_whatever_the_number_of_variables(library: Any) -> None:
    """As two shards of a table are; in a graph tf_keras multiplies for each variable that is traced."""
    optimizer, reference = library.Nadam(RATE), Reference(nadam, {})
    shard = tf.Variable(START, name="shard")
    ours = Trained(optimizer, more=[shard])

    @tf.function(autograph=False)
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum((tf.gather(one, ids) - 1) ** 2) for one in (ours.table, shard)])
        gradients = tape.gradient(loss, [ours.table, shard])
        optimizer.apply_gradients(list(zip(gradients, [ours.table, shard], strict=True)))

    for ids in BATCHES:
        step(tf.constant(ids))
        expected = reference.train(ids)
        for one in (ours.table, shard):
            np.testing.assert_allclose(one, expected, rtol=2e-5, atol=1e-6)
