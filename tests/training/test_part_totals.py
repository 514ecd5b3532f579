"""What a step or an optimizer of one's own computes of a whole weight is no sum of what it computes of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer import testing  # noqa: F401 - before TensorFlow: it chooses its Keras
from trainer.core.failures import UserError
from trainer.training.keras.keras3.shards import shards_of, train_shards
from trainer.training.tables.whole_weights import see_whole_weights
from trainer.training.tf_internals.variables import whole_of
from trainer.training.updates.one_update import gather, gather_keras3
from trainer.training.updates.part_totals import rejecting_numbers_of_parts
from trainer.training.updates.split_gradients import noting_asked
from trainer.training.updates.unequal_parts import listed, reject_places

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)
ShardedVariable = tf.__internal__.distribute.ShardedVariable
Pairs = list[tuple[Any, Any]]


class Centralized(tf.keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(gradient - tf.reduce_mean(gradient, axis=0, keepdims=True), variable)


class Trusting(tf.keras.optimizers.SGD):
    """As LARS, with a condition."""

    def update_step(self, gradient: Any, variable: Any) -> None:
        ratio = tf.cond(tf.norm(variable) > 0.0, lambda: tf.norm(variable) / tf.norm(gradient), lambda: 1.0)
        super().update_step(gradient * ratio, variable)


class Conditional(tf.keras.optimizers.SGD):
    """Writes in a branch what it computes there."""

    def update_step(self, gradient: Any, variable: Any) -> None:
        def scaled() -> Any:
            return variable.assign_sub(gradient / tf.norm(gradient))

        tf.cond(gradient[0, 0] > 0.0, scaled, lambda: variable.assign_sub(gradient))


class InAFunction(tf.keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(tf.function(lambda one: one / tf.norm(one))(gradient), variable)


class ByRows(tf.keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(gradient - tf.reduce_mean(gradient, axis=1, keepdims=True), variable)


class Orthogonal(tf.keras.optimizers.SGD):
    """As Muon, without its norm."""

    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(1.5 * gradient - 0.5 * gradient @ tf.transpose(gradient) @ gradient, variable)


class OrthogonalOfKeras3(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        product = keras.ops.matmul(keras.ops.matmul(gradient, keras.ops.transpose(gradient)), gradient)
        super().update_step(1.5 * gradient - 0.5 * product, variable, learning_rate)


class Checking(tf.keras.optimizers.SGD):
    """Looks at a number of its gradient, and writes nothing of it."""

    def update_step(self, gradient: Any, variable: Any) -> None:
        tf.debugging.assert_less(tf.reduce_max(tf.abs(tf.convert_to_tensor(gradient))), 1e30)
        super().update_step(gradient, variable)


class CentralizedOfKeras3(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient - keras.ops.mean(gradient), variable, learning_rate)


class Clipping(tf.keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any, **named: Any) -> Any:
        return super().apply_gradients([(tf.clip_by_norm(one, 1.0), weight) for one, weight in grads_and_vars], **named)


def plain(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return gradients


def zeros_for_none(gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Add a decay of the weights."""
    known = [tf.zeros(weight.shape) if one is None else one for one, weight in zip(gradients, weights, strict=True)]
    return [one + 0.1 * tf.convert_to_tensor(weight) for one, weight in zip(known, weights, strict=True)]


def clipped(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.clip_by_norm(one, 1.0) for one in gradients]


def clipped_rows(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.clip_by_norm(one, 1.0, axes=[1]) for one in gradients]


def clipped_together(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return tf.clip_by_global_norm(gradients, 1.0)[0]


def adapted(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one * tf.norm(weight) for one, weight in zip(gradients, weights, strict=True)]


def by_number(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.reduce_sum(tf.constant([3.0, 1.0])) for one in gradients]


def by_one_norm(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.linalg.global_norm(gradients) for one in gradients]


def by_size(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.cast(tf.reduce_prod(tf.shape(one)), tf.float32) for one in gradients]


def by_products(gradients: list[Any], weights: list[Any]) -> list[Any]:
    """As of Shampoo: multiplied by what its columns have in common."""
    return [tf.matmul(one, tf.matmul(one, one, transpose_a=True)) for one in gradients]


def by_einsum(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one @ tf.einsum("ij,ik->jk", one, one) for one in gradients]


def summed_up(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.cumsum(one, axis=0) for one in gradients]


def largest_kept(gradients: list[Any], weights: list[Any]) -> list[Any]:
    least = [tf.math.top_k(tf.reshape(tf.abs(one), [-1]), 2).values[-1] for one in gradients]
    return [tf.where(tf.abs(one) >= each, one, 0.0) for one, each in zip(gradients, least, strict=True)]


def by_dot(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.sqrt(tf.tensordot(one, one, 2)) for one in gradients]


def by_flat_norm(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.reduce_sum(tf.abs(tf.reshape(one, [1, -1])), axis=1) for one in gradients]


def by_transposed(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.reduce_max(tf.transpose(one), axis=1) for one in gradients]


def in_groups(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [one / tf.reduce_sum(tf.reshape(one, [-1, 1, 3]), axis=[1, 2], keepdims=True)[:, 0] for one in gradients]


def if_finite(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.where(tf.reduce_all(tf.math.is_finite(one)), one, 0.0) for one in gradients]


def if_all_finite(gradients: list[Any], weights: list[Any]) -> list[Any]:
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in gradients])
    return [tf.where(finite, one, tf.zeros_like(one)) for one in gradients]


def turned(gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Each row by a matrix, along its columns and by its own largest number."""
    matrix = tf.constant([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    rows = [tf.cumsum(tf.einsum("ij,jk->ik", tf.matmul(one, matrix), matrix), axis=1) for one in gradients]
    return [tf.where(one >= tf.math.top_k(tf.abs(one), 1).values, one, 0.0) for one in rows]


clip = tf.function(lambda one: tf.clip_by_norm(one, 1.0))
clip_compiled = tf.function(lambda one: tf.clip_by_norm(one, 1.0), jit_compile=True)
turn = tf.function(lambda one: one / tf.reduce_max(tf.transpose(one), axis=1))


def in_a_function(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [clip(one) for one in gradients]


def compiled(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [clip_compiled(one) for one in gradients]


def turned_in_a_function(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [turn(one) for one in gradients]


def in_a_loop(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [
        tf.while_loop(lambda i, _: i < 2, lambda i, each: (i + 1, each / tf.norm(each)), (0, one))[1]
        for one in gradients
    ]


def while_large(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.while_loop(lambda each: tf.norm(each) > 1.0, lambda each: (each / 2,), (one,))[0] for one in gradients]


def in_a_branch(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.cond(one[0, 0] > 0.0, lambda one=one: one / tf.norm(one), lambda one=one: one) for one in gradients]


def if_large(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.cond(tf.norm(one) > 1.0, lambda one=one: one / 2, lambda one=one: one) for one in gradients]


def by_columns(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.transpose(tf.map_fn(lambda each: each / tf.norm(each), tf.transpose(one))) for one in gradients]


def row_by_row(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return [tf.map_fn(lambda each: each / tf.norm(each), one) for one in gradients]


def together_in_a_function(gradients: list[Any], weights: list[Any]) -> list[Any]:
    return list(tf.function(lambda given: tf.clip_by_global_norm(given, 1.0)[0])(gradients))


def if_all_large(gradients: list[Any], weights: list[Any]) -> list[Any]:
    norm = tf.linalg.global_norm(gradients)
    return [tf.cond(norm > 1.0, lambda one=one: one / norm, lambda one=one: one) for one in gradients]


def by_norm_of_norms(gradients: list[Any], weights: list[Any]) -> list[Any]:
    """As of the SAM of Keras's examples."""
    return [one / tf.norm(tf.stack([tf.norm(each) for each in gradients])) for one in gradients]


def norms(weights: list[Any]) -> Any:
    return tf.add_n([tf.norm(one) for one in weights])


def means(weights: list[Any]) -> Any:
    return sum(tf.reduce_mean(tf.convert_to_tensor(one) ** 2) for one in weights)


def products(weights: list[Any]) -> Any:
    return sum(tf.reduce_sum(tf.matmul(one, one, transpose_a=True) ** 2) for one in weights)


def squares(weights: list[Any]) -> Any:
    return sum(0.1 * tf.nn.l2_loss(one) + tf.reduce_sum(tf.abs(one)) / 3 for one in weights)


def largest_of_each(weights: Any) -> Any:
    return tf.reduce_sum([tf.reduce_max(one) for one in weights])


def largest_of_all(weights: Any) -> Any:
    largest = tf.reduce_max([tf.reduce_max(tf.abs(one)) for one in weights])
    return tf.reduce_min(tf.stack([tf.reduce_min(one) for one in weights])) + largest


def norm_of_all(weights: list[Any]) -> Any:
    return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(one)) for one in weights]) + 1e-6) + tf.linalg.global_norm(weights)


def dot_products(weights: list[Any]) -> Any:
    flat = [tf.reshape(one, [-1]) for one in weights]
    squared = sum(tf.einsum("ij,ij->", *[tf.convert_to_tensor(one)] * 2) + tf.tensordot(one, one, 2) for one in weights)
    return tf.sqrt(squared + sum(tf.tensordot(one, one, 1) for one in flat))


def norms_by_dot(weights: list[Any]) -> Any:
    rows = [tf.reshape(one, [1, -1]) for one in weights]
    return tf.add_n([tf.sqrt(tf.matmul(one, tf.reshape(one, [-1, 1]))[0, 0]) for one in rows])


def products_of_sums(weights: list[Any]) -> Any:
    return sum(tf.reduce_sum(one) * tf.reduce_sum(tf.abs(one)) for one in weights)


def largest_of_columns(weights: list[Any]) -> Any:
    return sum(tf.reduce_sum(tf.reduce_max(tf.transpose(one), axis=1)) for one in weights)


def norm_of_norms(weights: list[Any]) -> Any:
    return tf.norm(tf.stack([tf.norm(one) for one in weights]))


def recomputed(weights: list[Any]) -> Any:
    """TensorFlow hands the weights on beside the result."""
    inputs = tf.ones([5, 4])
    return tf.reduce_mean(
        tf.recompute_grad(lambda *given: tf.matmul(inputs, tf.concat(given, 0)))(*map(tf.identity, weights))
    )


def norms_of_rows(weights: list[Any]) -> Any:
    return tf.add_n([tf.reduce_sum(tf.norm(one, axis=1)) for one in weights])


def norm_of_whole(weights: list[Any]) -> Any:
    return tf.norm(tf.concat(weights, axis=0))


scale = tf.function(lambda one: one / tf.norm(one))
scale_rows = tf.function(lambda one: one / tf.norm(one, axis=1, keepdims=True))


def halve_if_large(weight: Any) -> None:
    tf.cond(tf.norm(weight) > 1.0, lambda: weight.assign(weight / 2), lambda: weight.assign(weight))


def take_to_norm(weight: Any) -> None:
    tf.cond(weight[0, 0] > 0.0, lambda: weight.assign(weight / tf.norm(weight)), lambda: weight.assign(weight))


def halve_while_large(weight: Any) -> None:
    for _ in tf.range(3):
        if tf.reduce_max(weight) > 1.0:
            weight.assign(weight / 2)


OF_A_PART: dict[str, Callable[[Any], Any]] = {
    "norm": lambda one: one.assign(one / tf.norm(one)),
    "clipped": lambda one: one.assign(tf.clip_by_norm(one, 1.0)),
    "clipped columns": lambda one: one.assign(tf.clip_by_norm(one, 1.0, axes=[0])),
    "centred": lambda one: one.assign(one - tf.reduce_mean(one)),
    "by the sum": lambda one: one.assign(one / tf.reduce_sum(one)),
    "less the sum": lambda one: one.assign(one - 0.01 * tf.reduce_sum(one)),
    "times the sum": lambda one: one.assign_sub(one * tf.reduce_sum(one)),
    "spectral": lambda one: one.assign(one / tf.linalg.svd(one, compute_uv=False)[0]),
    "in a function": lambda one: one.assign(scale(one)),
    "of the variable": lambda one: one.assign(scale(tf.convert_to_tensor(one))),
    "a condition": halve_if_large,
    "within a condition": take_to_norm,
    "a loop": tf.autograph.to_graph(halve_while_large),
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda one: one.assign(one / tf.norm(one, axis=1, keepdims=True)),
    "clipped": lambda one: one.assign(tf.clip_by_norm(one, 1.0, axes=[1])),
    "values": lambda one: one.assign(tf.clip_by_value(one, -1.0, 1.0)),
    "decayed": lambda one: one.assign_sub(0.01 * one),
    "in a function": lambda one: one.assign(scale_rows(one)),
    "mapped": lambda one: one.assign(tf.map_fn(lambda row: row / tf.norm(row), one)),
    "noise": lambda one: one.assign_add(tf.random.normal(one.shape) * tf.math.reduce_std(tf.ones([3]))),
    "its size": lambda one: one.assign(one / tf.cast(tf.size(one), tf.float32)),
}


def train(
    optimizer: Any,
    change: Callable[..., Any],
    is_split: bool = True,
    is_sparse: bool = False,
    penalty: Callable[[list[Any]], Any] = lambda weights: 0.0,
    then: Callable[[list[Any]], Any] = lambda weights: None,
    is_read: bool = True,
) -> None:
    """Trace two applications of the gradients of a weight, split or not."""
    parts = [tf.Variable(tf.ones([2, 3]), name=f"table/part_{number}") for number in range(2)]
    whole = ShardedVariable(parts) if is_split else None
    if isinstance(optimizer, keras.optimizers.Optimizer):
        split = keras.Variable(tf.zeros([4, 3]), dtype="float32", name="table")
        split._value = whole
        weights = shards_of(split)
        optimizer.build(weights)
        gather_keras3(optimizer)
    else:
        weights = parts
        (optimizer._create_all_weights if hasattr(optimizer, "get_slot") else optimizer.build)(parts)
        gather(optimizer)

    @tf.function
    def step() -> None:
        with rejecting_numbers_of_parts(lambda: parts):
            steps()

    def steps() -> None:
        for _ in range(2):
            with tf.GradientTape() as tape:
                every = parts if is_read else []
                read = [tf.gather(one, [1, 0]) if is_sparse else tf.convert_to_tensor(one) for one in every]
                loss = (tf.reduce_mean(tf.concat(read, 0) ** 2) if is_read else 0.0) + penalty(parts)
            gradients = change(tape.gradient(loss, parts), parts)
            optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))
            then(parts)

    step.get_concrete_function()


@pytest.mark.parametrize(
    "change",
    [
        *(by_products, by_einsum, summed_up, largest_kept, if_finite, by_dot, by_flat_norm, by_transposed),
        *(in_a_function, compiled, turned_in_a_function, in_a_loop, while_large, in_a_branch, if_large, by_columns),
    ],
)
def test_a_step_that_mixes_the_rows_of_each_part_is_refused(change: Any) -> None:
    with pytest.raises(UserError, match="the step computes"):
        train(tf.keras.optimizers.SGD(0.1), change)
    train(tf.keras.optimizers.SGD(0.1), change, is_split=False)


@pytest.mark.parametrize(("change", "is_sparse"), [(clipped, False), (clipped, True), (adapted, False)])
def test_a_step_that_computes_a_number_of_each_part_is_refused(change: Any, is_sparse: bool) -> None:
    with pytest.raises(UserError, match=r"the step computes a norm, .* or the like of each part of table"):
        train(tf.keras.optimizers.SGD(0.1), change, is_sparse=is_sparse)
    train(tf.keras.optimizers.SGD(0.1), change, is_split=False, is_sparse=is_sparse)


@pytest.mark.parametrize(
    "penalty", [norms, norms_by_dot, means, products, largest_of_each, products_of_sums, largest_of_columns]
)
@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD, keras.optimizers.SGD])
def test_a_loss_of_what_is_no_sum_of_the_parts_is_refused(make: Any, penalty: Any) -> None:
    with pytest.raises(UserError, match=r"the step computes a norm, .* each part of table .* as layer\.kernel"):
        train(make(0.1), plain, penalty=penalty)
    if make is not keras.optimizers.SGD:
        train(make(0.1), plain, is_split=False, penalty=penalty)


@pytest.mark.parametrize(
    "penalty",
    [squares, norm_of_all, dot_products, norms_of_rows, norm_of_whole, largest_of_all, norm_of_norms, recomputed],
)
@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, keras.optimizers.Adam])
def test_a_loss_of_sums_of_the_parts_works(make: Any, penalty: Any) -> None:
    train(make(0.1), plain, penalty=penalty)


@pytest.mark.parametrize("change", OF_A_PART.values(), ids=OF_A_PART)
def test_what_a_step_makes_of_each_part_after_its_update_is_refused(change: Any) -> None:
    def then(weights: list[Any]) -> None:
        for one in weights:
            change(one)

    with pytest.raises(UserError, match=r"the step computes .* each part of table .* \(as operation \w+"):
        train(tf.keras.optimizers.SGD(0.1), plain, then=then)
    train(tf.keras.optimizers.SGD(0.1), plain, then=then, is_split=False)


@pytest.mark.parametrize("change", OF_ROWS.values(), ids=OF_ROWS)
def test_what_a_step_makes_of_rows_after_its_update_works(change: Any) -> None:
    def then(weights: list[Any]) -> None:
        for one in weights:
            change(one)

    train(tf.keras.optimizers.SGD(0.1), plain, then=then)


def test_what_a_step_makes_of_all_parts_after_its_update_works() -> None:
    def then(weights: list[Any]) -> None:
        norm = tf.linalg.global_norm(weights)
        mean = tf.add_n([tf.reduce_sum(one) for one in weights]) / 12
        for one in weights:
            one.assign(one / norm - mean)

    train(tf.keras.optimizers.Adam(0.1), plain, then=then)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda weights: tf.reduce_sum(tf.square(weights[0])),
        lambda weights: sum(tf.nn.l2_loss(one) for one in weights if one.name.endswith("part_0:0")),
        lambda weights: tf.cond(tf.constant(True), lambda: tf.nn.l2_loss(weights[1]), lambda: 0.0),
    ],
)
@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, keras.optimizers.SGD])
def test_a_step_that_reads_one_part_alone_is_refused(make: Any, penalty: Any) -> None:
    with pytest.raises(UserError, match=r"the step reads table/part_[01]:0 otherwise .* as layer\.kernel"):
        train(make(0.1), plain, penalty=penalty)


OF_SOME_PARTS: dict[str, Callable[..., list[Any]]] = {
    "zeros": lambda gradients, weights: [tf.zeros_like(gradients[0]), gradients[1]],
    "factors": lambda gradients, weights: [0.1 * gradients[0], 1.0 * gradients[1]],
    "factors in a function": lambda gradients, weights: [
        tf.function(lambda one, factor=factor: one * factor)(each)
        for each, factor in zip(gradients, (0.1, 1.0), strict=True)
    ],
    "one only": lambda gradients, weights: [None, gradients[1]],
    "clipped": lambda gradients, weights: [tf.clip_by_value(gradients[0], -1.0, 1.0), gradients[1]],
}
OF_EACH_PART: dict[str, Callable[..., list[Any]]] = {
    "factors": lambda gradients, weights: [0.1 * one for one in gradients],
    "noise": lambda gradients, weights: [
        one + 0.1 * tf.random.stateless_normal(one.shape, [number, 1]) for number, one in enumerate(gradients)
    ],
    "masked": lambda gradients, weights: [
        one * tf.constant([[1.0, 0.0, float(number)]] * 2) for number, one in enumerate(gradients)
    ],
}


@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.SGD, keras.optimizers.SGD])
@pytest.mark.parametrize("change", OF_SOME_PARTS.values(), ids=OF_SOME_PARTS)
def test_a_step_that_trains_some_parts_otherwise_is_refused(make: Any, change: Any) -> None:
    with pytest.raises(UserError, match=r"the step does not train all parts of table alike.* as model\.get_layer"):
        train(make(0.1), change)
    train(tf.keras.optimizers.SGD(0.1), change, is_split=False)


FIRST_THREE: dict[str, Callable[[Any, list[Any], list[Any]], Any]] = {
    "factors": lambda optimizer, gradients, weights: optimizer.apply_gradients(
        [(one * factor, weight) for one, weight, factor in zip(gradients, weights, (0.1, 0.1, 0.1), strict=False)]
    ),
    "clipped": lambda optimizer, gradients, weights: optimizer.apply_gradients(
        list(zip(tf.clip_by_global_norm(gradients, 1.0)[0][:3], weights, strict=False))
    ),
    "assigned": lambda optimizer, gradients, weights: [
        weight.assign_sub(one) for one, weight in list(zip(gradients, weights, strict=True))[:3]
    ],
}


@pytest.mark.parametrize("apply", FIRST_THREE.values(), ids=FIRST_THREE)
def test_a_list_for_each_weight_that_ends_before_the_last_part_is_refused(apply: Any) -> None:
    see_whole_weights()
    table = [tf.Variable(tf.ones([2, 3]), name=f"table/part_{number}") for number in range(2)]
    split, weights = ShardedVariable(table), [*table, *(tf.Variable(tf.ones([3]), name=name) for name in "ab")]
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build(weights)
    gather(optimizer)

    def trace(trained: list[Any]) -> None:
        with rejecting_numbers_of_parts(lambda: weights):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.square(one)) for one in weights])
            apply(optimizer, tape.gradient(loss, trained), trained)

    assert len(split.variables) == 2
    with pytest.raises(UserError, match=r"trains the first 3 of the 4 variables .* short for table, which is split"):
        tf.function(lambda: trace(weights)).get_concrete_function()
    tf.function(lambda: trace(weights[:3])).get_concrete_function()  # all for which it asks


def take(weights: list[Any], *places: Any) -> list[Any]:
    """Take places of what a step lists, as one does that is traced."""
    with noting_asked() as asked:
        found = [listed(weights)[place] for place in places]
    reject_places(asked)
    return found


def split_of_zeros(name: str) -> Any:
    return ShardedVariable([tf.Variable(tf.zeros([2, 3]), name=f"{name}/part_{number}") for number in range(2)])


@pytest.mark.parametrize("place", [0, -1, 1, slice(-2, None), slice(1), slice(None, None, 2), slice(1, 3)])
def test_a_place_at_which_whole_weights_have_another_is_refused_in_a_step(place: Any) -> None:
    table, kernel, bias = split_of_zeros("table"), tf.Variable([1.0]), split_of_zeros("bias")
    weights = [*table.variables, kernel, *bias.variables]
    with pytest.raises(UserError, match=r"the step takes \[.*\] of trainable_variables.* is table, "):
        take(weights, place)
    assert type(listed(weights)) is list  # which no step takes


def test_a_place_at_which_whole_weights_have_the_same_is_none() -> None:
    table, head = split_of_zeros("table"), [tf.Variable([1.0]), tf.Variable([2.0])]
    with noting_asked():
        weights = listed([*table.variables, *head])
        assert [*map(id, weights[-2:])] == [*map(id, head)]
        assert weights[-1] is head[1]
        assert len(weights[:]) == len([*weights]) == 4


def test_a_step_may_go_through_all_places_and_not_through_some() -> None:
    table = split_of_zeros("table")
    weights = [*table.variables, tf.Variable([1.0])]
    assert [*map(id, take(weights, 0, 1, -1))] == [*map(id, weights)]
    with pytest.raises(
        UserError, match=r"takes \[0\] of .* in place of trainable_variables; or go through all of them"
    ):
        take(weights, 0, 1)


def test_what_a_step_has_for_each_weight_has_its_places_as_gradients_of_which_some_are_none() -> None:
    table, heads = split_of_zeros("table"), [tf.Variable([1.0]) for _ in range(4)]

    @tf.function
    def step() -> None:
        with noting_asked():
            weights = listed([*table.variables, *heads])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights[-1])
            gradients = tape.gradient(loss, weights)
            assert gradients[-2] is None
            assert gradients[1:3] == [None, None]
            assert gradients[-1].shape == [1]

    see_whole_weights()
    step.get_concrete_function()


def test_a_layer_of_either_keras_lists_parts_so() -> None:
    see_whole_weights()
    train_shards()
    one, other = tf.keras.layers.Dense(3), keras.layers.Dense(3)
    one.build((None, 4))
    other.build((None, 4))
    table, other._kernel._value = split_of_zeros("kernel"), split_of_zeros("kernel")
    one._trainable_weights = [*table.variables, one.bias]
    for layer in (one, other):
        with noting_asked() as asked:
            layer.trainable_variables[0]
        with pytest.raises(UserError, match=r"the step takes \[0\] of trainable_variables"):
            reject_places(asked)


@pytest.mark.parametrize("change", OF_EACH_PART.values(), ids=OF_EACH_PART)
def test_a_step_that_trains_each_part_alike_works(change: Any) -> None:
    train(tf.keras.optimizers.SGD(0.1), change)


def test_rows_of_the_whole_may_lie_in_one_part() -> None:
    see_whole_weights()

    def penalty(weights: list[Any]) -> Any:
        whole = whole_of(weights[0])
        joined = tf.reduce_sum(tf.square(whole[0])) + tf.reduce_sum(tf.gather(whole, [0])) + tf.norm(whole[:3])
        return joined + tf.norm(whole[:2]) + tf.reduce_mean(whole[1])

    train(tf.keras.optimizers.SGD(0.1), plain, penalty=penalty)


@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.SGD, keras.optimizers.SGD])
@pytest.mark.parametrize("change", [plain, zeros_for_none], ids=["without", "zeros"])
def test_a_step_may_read_rows_of_one_part_alone(make: Any, change: Any) -> None:
    """As the first rows of a table of positions: the other part has no gradient."""
    see_whole_weights()
    train(make(0.1), change, penalty=lambda weights: tf.reduce_sum(whole_of(weights[0])[:1] ** 2), is_read=False)


LARGEST = tf.Variable(0.0)
OF_A_GRADIENT: dict[str, Callable[[list[Any]], Any]] = {
    "largest norm": lambda all: LARGEST.assign(tf.reduce_max([tf.norm(one) for one in all])),
    "mean": lambda all: LARGEST.assign_add(tf.add_n([tf.reduce_mean(one) for one in all])),
    "printed": lambda all: [tf.print(tf.norm(one)) for one in all],
    "count": lambda all: LARGEST.assign_add(tf.add_n([tf.cast(tf.norm(one) > 1.0, tf.float32) for one in all])),
}
OF_ALL_GRADIENTS: dict[str, Callable[[list[Any]], Any]] = {
    "norm": lambda all: LARGEST.assign(tf.linalg.global_norm(all)),
    "norm of norms": lambda all: LARGEST.assign(tf.norm(tf.stack([tf.norm(one) for one in all]))),
    "largest": lambda all: LARGEST.assign(tf.reduce_max([tf.reduce_max(tf.abs(one)) for one in all])),
    "sum": lambda all: LARGEST.assign(tf.add_n([tf.reduce_sum(tf.abs(one)) for one in all])),
    "not a number": lambda all: LARGEST.assign_add(
        tf.add_n([tf.reduce_sum(tf.cast(tf.math.is_nan(one), tf.float32)) for one in all])
    ),
    "of rows": lambda all: LARGEST.assign(tf.add_n([tf.reduce_sum(tf.norm(one, axis=1)) for one in all])),
    "asserted": lambda all: [tf.debugging.assert_less(tf.reduce_max(tf.abs(one)), 1e30) for one in all],
    "checked": lambda all: [tf.debugging.check_numerics(one, "a gradient") for one in all],
}


def noting(note: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def change(gradients: list[Any], weights: list[Any]) -> list[Any]:
        note([tf.convert_to_tensor(one) for one in gradients])
        return gradients

    return change


@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.SGD, keras.optimizers.SGD])
@pytest.mark.parametrize("note", OF_A_GRADIENT.values(), ids=OF_A_GRADIENT)
def test_a_number_of_each_parts_gradient_that_is_only_noted_is_refused(make: Any, note: Any) -> None:
    with pytest.raises(UserError, match=r"the step computes a norm, .* of each part of table or of its gradient"):
        train(make(0.1), noting(note))
    if make is not keras.optimizers.SGD:
        train(make(0.1), noting(note), is_split=False)


@pytest.mark.parametrize("more", [{}, {"global_clipnorm": 1.0}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("note", OF_ALL_GRADIENTS.values(), ids=OF_ALL_GRADIENTS)
def test_numbers_of_all_gradients_that_are_noted_work(note: Any, more: dict[str, Any]) -> None:
    for make in (tf.keras.optimizers.Adam, keras.optimizers.Adam):
        train(make(0.1, **more), noting(note))


def perturbed(scales: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    """Return what changes the weights by their gradients before these are applied, as SAM does."""

    def change(gradients: list[Any], weights: list[Any]) -> list[Any]:
        for weight, one, scale in zip(weights, gradients, scales(gradients), strict=True):
            weight.assign_add(one * scale)
        return gradients

    return change


def test_a_change_of_weights_by_each_gradients_norm_is_refused() -> None:
    change = perturbed(lambda gradients: [1.0 / tf.norm(one) for one in gradients])
    with pytest.raises(UserError, match=r"the step computes .* tf\.linalg\.global_norm"):
        train(tf.keras.optimizers.SGD(0.1), change)
    train(tf.keras.optimizers.SGD(0.1), change, is_split=False)


@pytest.mark.parametrize(
    "scales",
    [
        lambda gradients: [0.1 / tf.linalg.global_norm(gradients) for _ in gradients],
        lambda gradients: [tf.norm(one, axis=1, keepdims=True) for one in gradients],
    ],
)
def test_a_change_of_weights_by_all_gradients_or_by_rows_works(scales: Any) -> None:
    train(tf.keras.optimizers.SGD(0.1), perturbed(scales))


def test_a_step_of_keras3_is_refused_likewise() -> None:
    with pytest.raises(UserError, match=r"the step computes .* Set partitioner to none"):
        train(keras.optimizers.SGD(0.1), clipped)


@pytest.mark.parametrize(
    "change",
    [
        *(plain, clipped_rows, clipped_together, by_number, by_one_norm, by_size, if_all_finite, turned, in_groups),
        *(row_by_row, together_in_a_function, if_all_large, by_norm_of_norms),
    ],
)
@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam, keras.optimizers.Adam])
def test_numbers_of_rows_and_of_all_gradients_are_right_of_parts(make: Any, change: Any) -> None:
    train(make(0.1), change)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_optimizers_own_clipnorm_is_that_of_the_whole(is_sparse: bool) -> None:
    train(tf.keras.optimizers.SGD(0.1, clipnorm=1.0), plain, is_sparse=is_sparse)


@pytest.mark.parametrize(
    "make", [Centralized, CentralizedOfKeras3, Orthogonal, OrthogonalOfKeras3, Trusting, Conditional, InAFunction]
)
def test_an_update_that_computes_a_number_of_each_part_is_refused(make: Any) -> None:
    with pytest.raises(UserError, match=f"{make.__name__}'s update computes"):
        train(make(0.1), plain)


def test_an_apply_gradients_that_does_so_is_refused() -> None:
    with pytest.raises(UserError, match="the step computes"):
        train(Clipping(0.1), plain)


def test_an_update_by_rows_or_of_a_whole_weight_works() -> None:
    train(ByRows(0.1), plain)
    train(Checking(0.1), plain)
    train(Centralized(0.1), plain, is_split=False)
