"""What is done to a model of Keras 3, in this process: names, optimizers, averages, and what a step adds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from trainer.core.failures import UserError
from trainer.core.program import build_model
from trainer.core.settings.config import Config
from trainer.run.saves.checkpoint_reader import check_fit
from trainer.training.evaluation import make_evaluation
from trainer.training.exports.export import lacks_evaluation, lacks_export, save_model
from trainer.training.keras.keras3.building import build, prepare
from trainer.training.keras.keras3.checkpoint import CheckpointedModel, read_whole_slots, slots
from trainer.training.keras.keras3.checks import (
    TABLE_BYTES,
    reject_hidden_optimizers,
    reject_model,
    warn_of_whole_tables,
)
from trainer.training.keras.keras3.model import Keras3Model
from trainer.training.keras.keras3.names import named
from trainer.training.keras.keras3.optimizers import begin_averages, optimizers_of
from trainer.training.keras.keras3.seeds import drawing, forget_seeds
from trainer.training.keras.keras3.shards import LOOKS_UP_ROWS, shards_of, train_shards
from trainer.training.keras.keras3.steps import Step, added, changes_added
from trainer.training.loop import callbacks
from trainer.training.tables.whole_weights import see_whole_weights
from trainer.training.updates.atomic_updates import AtomicUpdates

# isort: split
import keras
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

TABLE = TABLE_BYTES // 256  # rows of 64 floats


class Unnamed(keras.layers.Layer):
    """Has weights without names, and one that is named after the layer."""

    def build(self, shape: Any) -> None:
        self.rate = self.add_weight(shape=())
        self.state = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name=f"{self.name}_state")
        self.known = self.add_weight(shape=(), initializer="zeros", dtype="bool", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.state.assign(self.state + 1.0)
        self.known.assign(True)
        return inputs * self.rate


def model(**more: Any) -> Any:
    made = keras.Sequential([keras.Input((4,)), Unnamed(), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1, **more), "mse")
    return made


def test_the_next_model_has_the_same_names() -> None:
    first, second = (sorted(CheckpointedModel(model()).weights) for _ in range(2))
    own = ["unnamed/unnamed_state", "unnamed/variable", "unnamed/variable:1"]
    assert first == second == ["dense/bias", "dense/kernel", *own]


class Towers(keras.Model):
    """Has layers of one shape, made in another order than they are called in."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, keras.layers.Dense(4))
        self.rest = {name: keras.layers.Dense(4) for name in order}

    def call(self, inputs: Any) -> Any:
        return self.a(inputs) + self.b(inputs) + self.rest["a"](inputs) + self.rest["b"](inputs)


def test_weights_are_found_by_name_whatever_order_they_are_made_in() -> None:
    kept = {}
    for order in ("ab", "ba"):
        made = Towers(order)
        made.compile(keras.optimizers.Adam())
        build(made, tf.TensorSpec([None, 4]))
        found = CheckpointedModel(made)
        slots = found.optimizer["optimizer"]
        kernels = {"a": made.a.kernel, "b": made.b.kernel, "rest_a": made.rest["a"].kernel}
        for name, kernel in kernels.items():
            assert found.weights[f"{name}/kernel"] is kernel._value
            place = [id(one) for one in made.optimizer._trainable_variables].index(id(kernel))
            assert slots[f"_momentums/{name}/kernel"] is made.optimizer._momentums[place]._value
        kept[order] = sorted(found.weights), sorted(slots)
    assert kept["ab"] == kept["ba"]


class Annealed(keras.layers.Layer):
    """Keeps what Keras does not know: variables, also in a list and in a module, and a generator of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._beta = tf.Variable(1.0, trainable=False)
        self.levels = [tf.Variable(number) for number in range(2)]
        self.drawn = tf.random.Generator.from_seed(1)
        self.module = tf.Module()
        self.module.rate = tf.Variable(1.0)


def test_variables_that_keras_does_not_know_are_restored(tmp_path: Path) -> None:
    saved, restored = (keras.Sequential([keras.Input((4,)), Annealed()]) for _ in range(2))
    before, after = (one.layers[0] for one in (saved, restored))
    before._beta.assign(7.0)
    before.levels[1].assign(5)
    before.drawn.normal([3])
    before.module.rate.assign(3.0)
    prefix = tf.train.Checkpoint(model=CheckpointedModel(saved)).write(str(tmp_path / "saved"))
    tf.train.Checkpoint(model=CheckpointedModel(restored)).read(prefix).assert_consumed()
    assert (after._beta.numpy(), after.levels[1].numpy(), after.module.rate.numpy()) == (7.0, 5, 3.0)
    assert after.drawn.state.numpy().tolist() == before.drawn.state.numpy().tolist()
    counted = keras.layers.TextVectorization(vocabulary=["a"], idf_weights=[1.0], output_mode="tf_idf")
    assert not CheckpointedModel(keras.Sequential([keras.Input((1,), dtype="string"), counted])).beside


def test_a_checkpoint_that_lacks_them_all_is_restored_as_one_of_an_earlier_release(tmp_path: Path) -> None:
    saved, restored = (keras.Sequential([Annealed(), keras.layers.Dense(2)]) for _ in range(2))
    for one in (saved, restored):
        one.layers[1].build((None, 4))
    earlier, model = CheckpointedModel(saved), CheckpointedModel(restored)
    del earlier.beside
    prefix = tf.train.Checkpoint(model=earlier).write(str(tmp_path / "saved"))
    restored.layers[0].levels[1].assign(5)
    check_fit(tf.train.Checkpoint(model=model).read(prefix))
    np.testing.assert_array_equal(restored.layers[1].kernel, saved.layers[1].kernel)
    assert restored.layers[0].levels[1].numpy() == 5
    new = CheckpointedModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    prefix = tf.train.Checkpoint(model=new).write(str(tmp_path / "new"))
    with pytest.raises(AssertionError, match="not bound to checkpointed values"):
        check_fit(tf.train.Checkpoint(model=model).read(prefix))


def test_layers_of_one_class_are_found_in_the_order_in_which_they_were_made() -> None:
    keras.layers.Dense(1)  # which Keras counts
    inputs, (first, second) = keras.Input((4,)), [keras.layers.Dense(4) for _ in range(2)]
    found = named(keras.Model(inputs, first(second(inputs))))
    assert found["dense/kernel"] is first.kernel
    assert found["dense:1/kernel"] is second.kernel


class Generator(keras.Model):
    """Its call takes noise, which is wider than the data."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])

    def call(self, noise: Any) -> Any:
        return self.makes(noise)


class Scaled(Generator):
    """It makes a variable of its own when it is built."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=())


def test_a_model_whose_layers_are_built_may_be_called_with_other_than_the_data() -> None:
    made = Generator()
    made.compile("adam")
    build(made, tf.TensorSpec([None, 2]))
    assert [tuple(weight.shape) for weight in made.trainable_variables] == [(5, 2), (2,)]
    with pytest.raises(ValueError, match="expected axis -1"):
        build(Scaled(), tf.TensorSpec([None, 2]))


def test_no_variable_is_left_out() -> None:
    layers = keras.layers
    inner = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.1)])
    rows = layers.Bidirectional(layers.LSTM(2, recurrent_dropout=0.1))
    made = keras.Sequential([keras.Input((3, 4)), inner, rows])
    found = named(made)
    assert {id(one) for one in found.values()} == {id(one) for one in made.variables}
    assert len(found) == len(made.variables) > 12
    assert "bidirectional/forward_lstm/cell/kernel" in found


class Derived(keras.layers.Layer):
    """Names a layer after itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(4, name=f"{self.name}_dense")

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def test_the_next_model_has_the_same_names_where_they_are_made_of_others() -> None:
    found = []
    for _ in range(2):
        rows = keras.layers.Bidirectional(keras.layers.LSTM(2))
        made = keras.Sequential([keras.Input((3, 4)), Derived(), keras.layers.GRU(2, name="gru_of_mine_1"), Derived()])
        found.append((sorted(named(made)), sorted(named(keras.Sequential([keras.Input((3, 4)), rows])))))
    assert found[0] == found[1]
    first, second = found[0]
    assert {"derived/derived_dense/kernel", "derived:1/derived_dense/kernel", "gru_of_mine_1/cell/bias"} < set(first)
    assert "bidirectional/backward_lstm/cell/kernel" in second


class Spaces:
    """A program whose preprocessing names its layers by Keras's counts, and which has made a layer before."""

    def __init__(self) -> None:
        self.flat = keras.layers.Flatten()

    def build_model(self) -> keras.Model:
        space = keras.utils.FeatureSpace({"age": keras.utils.FeatureSpace.float_normalized()}, output_mode="concat")
        space.adapt(tf.data.Dataset.from_tensors({"age": [[1.0], [3.0]]}))
        flat = keras.layers.Flatten()(self.flat(space.get_encoded_features()))
        made = keras.Model(space.get_inputs(), keras.layers.Dense(1)(flat))
        made.compile("sgd", "mse")
        return made


def test_the_next_model_has_the_same_names_where_the_program_counts_as_keras_does() -> None:
    program = Spaces()
    first, second = (sorted(named(build_model(program))) for _ in range(2))
    assert first == second
    assert any(name.startswith("float_normalized") for name in first)


def test_a_class_that_is_defined_again_has_the_same_names_where_keras_counts_what_is_no_layer() -> None:
    found = []
    for _ in range(2):
        features = {name: keras.utils.FeatureSpace.float_normalized() for name in ("age", "size")}
        space = keras.utils.FeatureSpace(features, output_mode="concat")
        space.adapt(tf.data.Dataset.from_tensors({name: [[1.0], [3.0]] for name in features}))
        encoded = space.get_encoded_features()
        line = keras.layers.Dense(1, name=f"{keras.KerasTensor((1,)).name}_line")
        found.append(sorted(named(keras.Model(space.get_inputs(), line(encoded)))))
    assert found[0] == found[1]
    assert {"float_normalized_preprocessor/mean", "float_normalized_preprocessor:1/mean"} < set(found[0])
    assert "keras_tensor_line/kernel" in found[0]


def test_a_layers_own_name_is_kept_with_its_number() -> None:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="block_2")])
    assert sorted(named(made)) == ["block_2/bias", "block_2/kernel"]


def test_optimizers_in_lists_and_dicts_are_found_once() -> None:
    made = model()
    made.others = [keras.optimizers.Adam(), made.optimizer]
    made.named = {"judge": keras.optimizers.Adam()}
    found = dict(optimizers_of(made))
    assert sorted(found) == ["named_judge", "optimizer", "others_0"]
    assert found["optimizer"] is made.optimizer


class Outer(keras.Model):
    """Trains a model with the optimizer that this one was compiled with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def train_step(self, data: Any) -> Any:
        return self.inner.train_step(data)


def test_an_optimizer_that_no_checkpoint_would_have_is_refused() -> None:
    outer = Outer()
    build(outer.inner, None)
    specs = (tf.TensorSpec([2, 4]), tf.TensorSpec([2, 1]))
    step = tf.function(Step(outer)).get_concrete_function(specs)
    with pytest.raises(UserError, match="Make it an attribute of Outer"):
        reject_hidden_optimizers(outer, step)
    outer.inner_optimizer = outer.inner.optimizer
    reject_hidden_optimizers(outer, step)


def test_a_split_table_is_left_out_of_weight_decay() -> None:
    train_shards()
    made = model(weight_decay=0.1)
    kernel = made.layers[1].kernel
    parts = [tf.Variable(tf.zeros([2, 1]), name=f"kernel/part_{number}") for number in range(2)]
    kernel._value = ShardedVariable(parts, name="kernel")
    made.optimizer.exclude_from_weight_decay(var_list=[kernel])
    build(made, None)
    assert [made.optimizer._use_weight_decay(part) for part in parts] == [False, False]


@pytest.mark.parametrize("look_up", [tf.nn.embedding_lookup_sparse, tf.nn.safe_embedding_lookup_sparse])
@pytest.mark.parametrize("more", [{}, {"allow_fast_lookup": True}, {"max_norm": 1.0}])
@pytest.mark.parametrize("is_split", [False, True])
def test_sparse_ids_are_looked_up_in_a_variable(look_up: Any, more: dict[str, Any], is_split: bool) -> None:
    train_shards()
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    parts = [tf.Variable(rows[:2]), tf.Variable(rows[2:])] if is_split else [tf.Variable(rows)]
    table = keras.Variable(rows, dtype="float32")
    table._value = ShardedVariable(parts) if is_split else parts[0]
    ids = tf.SparseTensor([[0, 0], [1, 0], [1, 1]], [0, 1, 2], [2, 2])
    weights = ids.with_values(tf.constant([1.0, 2.0, 3.0]))

    @tf.function
    def looked_up(given: Any) -> Any:
        with tf.GradientTape() as tape:
            found = [look_up(given(), ids, one, combiner="sum", **more) for one in (None, weights)]
            loss = tf.add_n([tf.reduce_sum(one**2) for one in found])
        return found, [tf.convert_to_tensor(one) for one in tape.gradient(loss, parts)]

    for expected, found in zip(*map(tf.nest.flatten, map(looked_up, (lambda: parts, lambda: table))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_split_variable_of_no_layer_has_its_slots_in_one() -> None:
    variable = keras.Variable(np.zeros([4, 1]), dtype="float32")
    variable._value = ShardedVariable([tf.Variable(tf.zeros([2, 1])) for _ in range(2)])
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(shards_of(variable))
    found = slots(optimizer, {})
    assert isinstance(found["momentums/0000"], ShardedVariable)
    assert "momentums/0001" not in found


def test_the_slots_of_a_file_become_those_of_shards() -> None:
    read_whole_slots()
    whole, split = (keras.Variable(np.zeros([4, 1]), dtype="float32") for _ in range(2))
    split._value = ShardedVariable([tf.Variable(tf.zeros([2, 1])) for _ in range(2)])
    saved, loaded, store = keras.optimizers.Adam(), keras.optimizers.Adam(), {}
    saved.build([whole])
    saved.apply([tf.constant([[1.0], [2.0], [3.0], [4.0]])])
    saved.save_own_variables(store)
    loaded.build(shards_of(split))
    loaded.load_own_variables(store)
    assert int(loaded.iterations.numpy()) == 1
    for name in ("_momentums", "_velocities"):
        [slot] = getattr(saved, name)
        assert np.array_equal(np.concatenate([np.array(part) for part in getattr(loaded, name)]), np.array(slot))


def test_a_file_in_the_older_format_is_read_into_shards(tmp_path: Path) -> None:
    train_shards()
    saved, made = model(), model()
    saved.save(tmp_path / "saved.h5")
    kernel = made.layers[1].kernel
    kernel._value = ShardedVariable([tf.Variable(tf.zeros([2, 1])) for _ in range(2)])
    made.load_weights(tmp_path / "saved.h5")
    assert np.array_equal(np.array(kernel), np.array(saved.layers[1].kernel))


def test_averages_begin_with_the_weights() -> None:
    made = model(use_ema=True)
    build(made, None)
    begin_averages(made)
    for weight, average in zip(made.trainable_variables, made.optimizer._model_variables_moving_average, strict=True):
        assert np.array_equal(weight, average)


def test_a_step_overwrites_a_flag() -> None:
    made = model()
    build(made, None)
    step = tf.function(Step(made))
    for _ in range(2):
        step((tf.ones([2, 4]), tf.ones([2, 1])))
    assert np.array(made.layers[0].known)
    assert np.array(made.layers[0].state).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("change", "left"),
    [
        pytest.param(lambda own: own * 2, [13, 15, 17], id="computed"),
        pytest.param(lambda own: tf.constant([5.0, 6.0, 7.0]), [6, 7, 8], id="set"),
    ],
)
def test_a_change_is_added_to_what_another_has_written_and_what_is_set_is_none(
    split: bool, change: Callable[[Any], Any], left: list[float]
) -> None:
    variable = keras.Variable([1.0, 2.0, 3.0], trainable=False)
    if split:
        variable._value = ShardedVariable([tf.Variable([1.0, 2.0]), tf.Variable([3.0])])
    own = variable._value

    @tf.function
    def step() -> None:
        with changes_added(variable):
            for part in getattr(own, "variables", [own]):
                part.assign_add(tf.fill(part.shape, 10.0))  # by another worker
            variable.assign(change(variable))
            variable.assign(variable + 1)

    step()
    assert tf.convert_to_tensor(own).numpy().tolist() == left
    assert variable._value is own


def test_no_gradient_goes_through_what_was_assigned() -> None:
    kept = keras.Variable([0.0], trainable=False)

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with changes_added(kept):
                kept.assign(0.5 * kept + 0.5 * x)
                loss = x - kept
        return tape.gradient(loss, x)

    assert gradient(tf.constant([2.0])).numpy().tolist() == [1.0], "as of a variable that is read again"
    assert kept.numpy().tolist() == [1.0]


COMPUTED: dict[str, tuple[Any, bool]] = {
    "a moving average": (lambda own: own * 0.9 + 0.1 * tf.cast(tf.argmin(own), tf.float32), True),
    "a difference": (lambda own: own - (own - 5.0) * 0.1, True),
    "a choice": (lambda own: tf.where(own > 1.0, own + 1.0, own), True),
    "a choice of something else": (lambda own: tf.where(tf.ones([], tf.bool), own + 1.0, own), True),
    "an average without a gradient": (lambda own: tf.stop_gradient(0.9 * own + 1.0), True),
    "rows that are set": (lambda own: tf.tensor_scatter_nd_update(own, [[1]], own[1:2] * 0.9), True),
    "a queue": (lambda own: tf.concat([[9.0], own[:-1]], axis=0), False),
    "a pointer that turns": (lambda own: (own + 1.0) % 4.0, False),
    "what is on and off": (lambda own: 1.0 - own, False),
    "a maximum": (lambda own: tf.maximum(own, 9.0), False),
    "a maximum by where": (lambda own: tf.where(own > 2.0, own, 2.0), False),
    "a place in a ring": (lambda own: tf.where(own + 1.0 >= 3.0, 0.0, own + 1.0), False),
    "a norm": (lambda own: own * tf.math.rsqrt(tf.reduce_sum(own * own)), False),
    "what belongs to the nearest": (lambda own: tf.one_hot(tf.argmin(own), 3) * 4.0, False),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_is_computed_otherwise_than_as_a_sum_is_set(what: str) -> None:
    compute, is_change = COMPUTED[what]
    variable = keras.Variable([1.0, 2.0, 3.0], trainable=False)
    own = variable._value

    @tf.function(autograph=False)
    def step() -> None:
        with changes_added(variable):
            own.assign_add([10.0] * 3)  # by another worker
            variable.assign(compute(tf.convert_to_tensor(variable)))

    step()
    expected = compute(tf.constant([1.0, 2.0, 3.0])) + 10.0 * is_change
    assert own.numpy() == pytest.approx(expected.numpy())


class Halves(keras.metrics.Metric):
    """Has two results, and notes the partitioner that its state is made with."""

    made_with: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__(name="halves")
        self.total = self.add_weight(shape=(2,), initializer=self.zeros)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self.made_with.append(getattr(tf.distribute.get_strategy().extended, "_variable_partitioner", None))
        return tf.zeros(shape, dtype)

    def update_state(self, truth: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(truth, axis=0))

    def result(self) -> Any:
        return {"left": self.total[0], "right": self.total[1]}


def test_a_metrics_results_have_names_of_their_own() -> None:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse", metrics=[Halves(), "mae"])
    for _ in range(2):  # once more when its layers are built
        prepare(made)
    found = tf.function(made.test_step)((tf.zeros((3, 4)), tf.constant([[1.0, 2.0]] * 3)))
    assert sorted(found) == ["left", "loss", "mae", "right"]
    assert (float(found["left"]), float(found["right"])) == (3, 6)


def test_a_metrics_state_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.distribute.get_strategy().extended, "_variable_partitioner", "in two", raising=False)
    train_shards()
    Halves.made_with.clear()
    Halves()
    assert Halves.made_with == [None]


def test_a_split_variable_is_read_as_another_one() -> None:
    see_whole_weights()
    split = ShardedVariable([tf.Variable([1.0, 2.0]), tf.Variable([3.0])])
    assert split.value().numpy().tolist() == split.read_value().numpy().tolist() == [1, 2, 3]


def test_a_layer_that_replaces_weights_is_refused() -> None:
    made = keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(keras.layers.Dense(1))])
    made.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UserError, match="is a SpectralNormalization, which replaces weights"):
        reject_model(made)


def test_a_fix_is_one_for_keras3() -> None:
    config = Config(program="p:P", evaluation="sidecar")
    why = callbacks.problem(config, keras.callbacks.EarlyStopping("val_loss"), model())
    assert str(why).endswith("set evaluation to distributed or inline")


def test_random_numbers_begin_again_with_a_cluster() -> None:
    from keras.src.random.seed_generator import global_seed_generator

    before = global_seed_generator()
    forget_seeds()
    assert global_seed_generator() is not before


def test_a_step_draws_without_a_seed_and_without_a_variable() -> None:
    step = tf.function(drawing(lambda: keras.random.normal([2]))).get_concrete_function()
    assert step().numpy().tolist() != step().numpy().tolist()
    assert not step.graph.variables


# Models without call


def own_test_step(self: Any, data: Any) -> Any:
    return {}


@pytest.mark.parametrize("library", [keras, tf.keras])
def test_a_model_without_call_is_told_what_it_needs_to_be_exported_and_evaluated(library: Any) -> None:
    bare, whole = type("Bare", (library.Model,), {})(), library.Sequential()
    tested = type("Tested", (library.Model,), {"test_step": own_test_step})()
    program, served = SimpleNamespace(), SimpleNamespace(serving_signature=print)
    assert lacks_export(program, bare).startswith("Bare has no call, so that there is nothing to export: give")
    assert not lacks_export(served, bare)
    assert not lacks_export(program, whole)
    assert lacks_evaluation(bare).endswith("give it a test_step, or set evaluation: none")
    assert not lacks_evaluation(tested)
    assert not lacks_evaluation(whole)


def test_a_model_of_sparse_inputs_is_told_what_its_export_needs() -> None:
    with pytest.raises(UserError, match="give the program a serving_signature"):
        Keras3Model(keras.Model()).export("/nowhere", (tf.SparseTensorSpec([None, 4]), tf.TensorSpec([None])))


class Summing(keras.Model):
    def call(self, rows: Any) -> Any:
        return tf.sparse.sparse_dense_matmul(rows, tf.ones([4, 1]))


def test_a_model_of_sparse_inputs_is_exported_with_a_signature(tmp_path: Path) -> None:
    spec, rows = tf.SparseTensorSpec([None, 4]), tf.sparse.from_dense([[1.0, 2.0, 0.0, 0.0]])
    program = SimpleNamespace(
        serving_signature=lambda model: tf.function(lambda rows: {"sum": model(rows)}, input_signature=[spec])
    )
    made = Summing()
    made(rows)
    save_model(program, made, str(tmp_path / "export"), (spec, None))
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    found = served(rows=rows.indices, rows_1=rows.values, rows_2=rows.dense_shape)
    assert found["sum"].numpy().tolist() == [[3]]


class FromNoise(tf.keras.Model):
    """Is built with its noise, which is wider than the data."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(2)])

    def call(self, noise: Any) -> Any:
        return self.makes(noise)

    def train_step(self, data: Any) -> Any:
        return {}


def test_a_model_that_is_built_with_other_than_the_data_is_exported_with_a_signature(tmp_path: Path) -> None:
    spec = tf.TensorSpec([None, 5])
    program = SimpleNamespace(
        serving_signature=lambda model: tf.function(lambda noise: {"made": model.makes(noise)}, input_signature=[spec])
    )
    made = FromNoise()
    made.build((None, 5))
    save_model(program, made, str(tmp_path / "export"), (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])))
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    assert served(noise=tf.ones([3, 5]))["made"].shape == (3, 2)


def test_the_lack_is_told_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    bare = type("Bare", (keras.Model,), {})()
    assert make_evaluation(Config(program="p:P"), None, bare, None, 1) is None
    assert "Bare has no call, so that Keras can't evaluate it" in caplog.text
    with pytest.raises(UserError, match="give it a test_step"):
        make_evaluation(Config(program="p:P", evaluation="inline"), None, bare, None, 1)


class Guided(keras.Model):
    """Has the steps of Keras 3's guide: what it was compiled with is one metric among the model's."""

    def call(self, inputs: Any) -> Any:
        return self.line(inputs)

    def build(self, shape: Any) -> None:
        self.line = keras.layers.Dense(1)
        self.line.build(shape)

    def train_step(self, data: Any) -> Any:
        loss = self.compute_loss(data[0], data[1], predicted := self(data[0]))
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [data[1], predicted]))
        return {metric.name: metric.result() for metric in self.metrics}

    test_step = train_step


def test_what_the_guides_step_returns_has_its_metrics_names() -> None:
    made = Guided()
    made.compile("sgd", "mse", metrics=["mae"])
    build(made, (tf.TensorSpec([2, 4]), tf.TensorSpec([2, 1])))
    batch = (tf.ones([2, 4]), tf.ones([2, 1]))
    assert sorted(tf.function(Step(made))(batch)) == ["loss", "mae"]
    assert sorted(tf.function(Keras3Model(made).test_step())(batch)) == ["loss", "mae"]


# Weights that a step replaces


class Follows(keras.Model):
    """Trains one layer, and has another one of the same shape follow it."""

    def __init__(self, trainable: bool = False) -> None:
        super().__init__()
        self.line = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.target = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", trainable=trainable)
        self.by_another = False

    def call(self, inputs: Any) -> Any:
        return self.line(inputs) + 0 * self.target(inputs)

    def train_step(self, data: Any) -> Any:
        if self.by_another:
            HIDDEN[0].assign_add([[10.0]])  # another worker's step, between this one's read and write
        self.target.kernel.assign(self.target.kernel * 0.5 + 1.0)
        return {"loss": super().train_step(data)["loss"]}


# TensorFlow's variables, which Keras's would be in the way of.
HIDDEN: list[Any] = []


def test_what_follows_a_weight_is_changed_and_not_overwritten() -> None:
    made = Follows()
    made.compile(keras.optimizers.SGD(0.0), "mse")
    specs = (tf.TensorSpec([2, 1]), tf.TensorSpec([2, 1]))
    build(made, specs)
    HIDDEN[:], made.by_another = [made.target.kernel._value], True
    step = Step(made)
    tf.function(step).get_concrete_function(specs)
    assert step.found_more
    traced = tf.function(step).get_concrete_function(specs)
    assert not step.found_more
    traced(tf.zeros([2, 1]), tf.zeros([2, 1]))
    assert made.target.kernel.numpy().tolist() == [[11.0]]


class Copies(Follows):
    """Has the target take over the trained layer's weights: at once, or in a condition."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def train_step(self, data: Any) -> Any:
        if self.by_another:
            HIDDEN[0].assign([[7.0]])
        kernel = self.line.kernel
        if self.how == "copy":
            self.target.kernel.assign(kernel)
        else:
            keras.ops.cond(data[0][0, 0] < 1.0, lambda: self.target.kernel.assign(kernel), lambda: kernel.value + 0.0)
        return {"loss": keras.Model.train_step(self, data)["loss"]}


@pytest.mark.parametrize("how", ["copy", "copy in a condition"])
def test_a_target_that_takes_over_weights_is_overwritten(how: str) -> None:
    made = Copies(how)
    made.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    specs = (tf.TensorSpec([2, 1]), tf.TensorSpec([2, 1]))
    build(made, specs)
    made.line.kernel.assign([[3.0]])
    HIDDEN[:], made.by_another = [made.target.kernel._value], True
    step = Step(made)
    tf.function(step).get_concrete_function(specs)
    assert step.found_more
    traced = tf.function(step).get_concrete_function(specs)
    traced(tf.zeros([2, 1]), tf.zeros([2, 1]))
    assert made.target.kernel.numpy().tolist() == [[3.0]]
    traced(tf.ones([2, 1]), tf.zeros([2, 1]))
    assert made.target.kernel.numpy().tolist() == [[3.0 if how == "copy" else 7.0]]


def test_what_was_read_before_a_weight_was_written_is_no_sum_with_it() -> None:
    own = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def step() -> None:
        before = own.read_value()
        assert added(before + 1.0, own) is not None
        own.assign(before * 3.0)
        assert added(before + (own.read_value() - before) * 0.5, own) is None
        assert added(own.read_value() + 1.0, own) is not None

    step.get_concrete_function()


def test_one_number_is_added_to_all_of_a_weight() -> None:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    build(made, None)
    kernel = made.layers[0].kernel

    @tf.function(autograph=False)
    def step() -> None:
        with Step(made)._watched(kernel):
            kernel.assign_add(tf.constant(0.5))

    step()
    assert kernel.numpy().tolist() == [[0.5], [0.5]]


def test_a_weight_that_is_frozen_is_not_read_as_a_whole() -> None:
    made = model()
    made.layers[1].trainable = False
    build(made, None)
    step = Step(made)
    tf.function(step).get_concrete_function((tf.TensorSpec([2, 4]), tf.TensorSpec([2, 1])))
    assert not step.found_more


def test_a_step_that_assigns_what_is_trained_is_refused() -> None:
    made = Follows(trainable=True)
    made.compile(keras.optimizers.SGD(0.1), "mse")
    specs = (tf.TensorSpec([2, 1]), tf.TensorSpec([2, 1]))
    build(made, specs)
    with pytest.raises(UserError, match=r"Follows.train_step assigns .*kernel, which optimizer trains"):
        tf.function(Step(made)).get_concrete_function(specs)


class Clones(Follows):
    """Trains one layer alone of those that Keras lists as trainable, as the example of diffusion models does."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
        weights = self.line.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        if self.by_another:
            HIDDEN[0].assign_add([[10.0]])
        self.target.kernel.assign(self.target.kernel * 0.5 + self.line.kernel * 0.5)
        return {"loss": loss}


@pytest.mark.parametrize("average", [False, True])
def test_what_an_optimizer_is_built_with_and_gets_no_gradient_of_may_follow(average: bool) -> None:
    """Unless the optimizer's average of it is to take its place."""
    made = Clones(trainable=True)
    made.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=average), "mse")
    specs = (tf.TensorSpec([2, 1]), tf.TensorSpec([2, 1]))
    build(made, specs)
    assert not made.optimizer.built, "a step of the program's own says what it trains"
    made.optimizer.build(made.trainable_variables)
    HIDDEN[:], made.by_another = [made.target.kernel._value], True
    step = Step(made)
    if average:
        with pytest.raises(UserError, match=r"Clones.train_step assigns .*kernel, which optimizer trains"):
            tf.function(step).get_concrete_function(specs)
        return
    tf.function(step).get_concrete_function(specs)
    assert step.found_more
    tf.function(step).get_concrete_function(specs)(tf.ones([2, 1]), tf.ones([2, 1]))
    assert made.line.kernel.numpy().item() == pytest.approx(0.1, rel=1e-3)
    assert made.target.kernel.numpy().item() == pytest.approx(10.05, rel=1e-3)


class Apart(Follows):
    """Has an optimizer for each of its layers; the first one may train both."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.target(self.line(data[0])) - data[1]))
        weights = [*self.line.trainable_weights, *self.target.trainable_weights]
        gradients = tape.gradient(loss, weights)
        first = 2 if self.both else 1
        self.optimizer.apply_gradients(zip(gradients[:first], weights[:first], strict=True))
        self.second.apply_gradients(zip(gradients[1:], weights[1:], strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("both", [False, True])
def test_an_average_of_what_another_optimizer_trains_is_refused(both: bool) -> None:
    made = Apart(trainable=True)
    made.both, made.second = both, keras.optimizers.SGD(0.1)
    made.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    specs = (tf.TensorSpec([2, 1]), tf.TensorSpec([2, 1]))
    build(made, specs)
    made.optimizer.build(made.trainable_variables)
    refused = pytest.raises(UserError, match=r"optimizer of Apart was built with .*kernel and averages it")
    with contextlib.nullcontext() if both else refused:
        tf.function(Step(made)).get_concrete_function(specs)


def test_what_is_added_to_a_trained_weight_is_added_to_what_another_has_written() -> None:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")])
    made.compile(keras.optimizers.Muon(0.5, weight_decay=0.5, adam_weight_decay=0.5), "mse", jit_compile=False)
    build(made, None)
    kernel = made.layers[0].kernel
    own = kernel._value

    @tf.function
    def step() -> None:
        with Step(made)._watched(kernel):
            decayed = kernel - kernel * 0.25
            with tf.control_dependencies([decayed]):  # another worker adds, of which this step knows nothing
                other = tf.numpy_function(lambda: own.assign_add(tf.fill(own.shape, 10.0)).numpy(), [], tf.float32)
            with tf.control_dependencies([other]):
                kernel.assign(tf.identity(decayed))

    step()
    assert kernel.numpy().tolist() == [[10.75, 10.75]] * 2
    # Whose weight decay is written so.
    tf.function(Step(made))((tf.zeros([2, 2]), tf.zeros([2, 2])))
    assert kernel.numpy().max() < 10.75


def test_a_constraint_is_applied_in_the_update() -> None:
    line = keras.layers.Dense(
        1, use_bias=False, kernel_constraint="non_neg", kernel_initializer=lambda *_, **__: [[-1.0], [2.0]]
    )
    made = keras.Sequential([keras.Input((2,)), line])
    made.compile(keras.optimizers.SGD(0.0), "mse")
    build(made, None)
    constraint, updates = line.kernel.constraint, AtomicUpdates(tf.distribute.get_strategy())

    @tf.function
    def step() -> None:
        with updates.active():
            Step(made)((tf.zeros([2, 2]), tf.zeros([2, 1])))

    graph = step.get_concrete_function().graph
    step()
    assert line.kernel.numpy().tolist() == [[0.0], [2.0]]
    assert line.kernel.constraint is constraint
    written = [one for one in graph.capture(line.kernel._value.handle).consumers() if one.type == "AssignVariableOp"]
    assert [any(each.type == "MutexLock" for each in one.control_inputs) for one in written] == [True]


# Lookups


class Looking(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.layers.Embedding(8, 2)

    def call(self, ids: Any) -> Any:
        return keras.ops.sum(self.rows(ids), 1)


@pytest.mark.filterwarnings("error")
def test_a_model_that_looks_rows_up_is_built_without_a_warning() -> None:
    made = Looking()
    made.compile("sgd", "mse")
    train_shards()
    prepare(made)
    build(made, tf.TensorSpec([2, 1], tf.int64))
    assert made.rows.built


@pytest.mark.parametrize("penalty", ["of call", "of call, in training alone", "of the step"])
def test_layers_that_a_call_leaves_out_are_built_where_training_calls_them(penalty: str) -> None:
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.aside = keras.layers.Dense(1), keras.layers.Dense(2)

        def call(self, numbers: Any) -> Any:
            if penalty == "of call":
                self.add_loss(tf.reduce_sum(self.aside(numbers)))
            return self.out(numbers)

    class Training(Plain):
        def call(self, numbers: Any, training: bool = False) -> Any:
            if training:
                self.add_loss(tf.reduce_sum(self.aside(numbers)))
            return self.out(numbers)

    made = (Training if "training" in penalty else Plain)()
    made.compile("sgd", "mse")
    train_shards()
    prepare(made)
    build(made, tf.TensorSpec([2, 3]))
    assert made.aside.built == ("call" in penalty)
    assert len(made.optimizer._trainable_variables) == (4 if "call" in penalty else 2)


class Own(keras.layers.Embedding):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * 2.0


def of_softmax(loss: Any, table: Any, bias: Any, ids: Any) -> Any:
    """Return the loss of sampled classes, which are the same at each call."""
    sampled = tf.constant([1, 6], tf.int64), tf.ones([4, 1]), tf.ones([2])
    return loss(table, bias, ids[:, None], tf.reshape(tf.range(12.0), [4, 3]), 2, 8, sampled_values=sampled)


LOOKUPS: dict[str, Any] = {
    "lookup": lambda table, bias, ids: tf.nn.embedding_lookup(table, ids) + tf.nn.embedding_lookup(bias, ids)[:, None],
    "sampled softmax": partial(of_softmax, tf.nn.sampled_softmax_loss),
    "noise contrast": partial(of_softmax, tf.nn.nce_loss),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_lookups_of_tensorflow_take_a_split_table(library: Any, name: str) -> None:
    """As a loss of sampled classes has them, also of the bias; `embeddings` is such a variable of Keras 3."""
    train_shards()
    wholes = [tf.Variable(tf.random.stateless_normal(shape, (1, 2))) for shape in ([8, 3], [8])]
    splits: list[Any] = [ShardedVariable([tf.Variable(part) for part in tf.split(one, 2)]) for one in wholes]
    given = splits
    if library is keras:
        given = [keras.Variable(one) for one in wholes]
        for variable, value in zip(given, splits, strict=True):
            variable._value = value

    def step(weights: Any, sources: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(LOOKUPS[name](*weights, tf.constant([7, 2, 2, 5])) ** 2)
        return loss, [tf.convert_to_tensor(one) for one in tape.gradient(loss, sources)]

    loss, found = tf.function(lambda: step(given, [part for one in splits for part in one.variables]))()
    same, expected = tf.function(lambda: step(wholes, wholes))()
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    for number, one in enumerate(expected):
        np.testing.assert_allclose(tf.concat(found[2 * number : 2 * number + 2], 0), one, rtol=1e-6)


class Taking(keras.layers.Embedding):
    def call(self, inputs: Any) -> Any:
        return keras.ops.take(self.embeddings, inputs, axis=0)


def operations_of(layer: Any, *, sparse: bool = False) -> list[str]:
    inputs = keras.Input((1,), dtype="int64", sparse=sparse)
    made = keras.Sequential([inputs, layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    train_shards()
    prepare(made)
    build(made, None)
    ids = (tf.SparseTensorSpec if sparse else tf.TensorSpec)([2, 1], tf.int64)
    step = tf.function(Step(made)).get_concrete_function((ids, tf.TensorSpec([2, 1])))
    warn_of_whole_tables(made, step)
    return [one.type for one in step.graph.get_operations()]


def test_a_class_that_derives_from_embedding_asks_for_rows(caplog: pytest.LogCaptureFixture) -> None:
    found = operations_of(Own(TABLE, 64))
    assert "ResourceGather" in found
    assert "GatherV2" not in found
    assert not caplog.records


class Rotating(keras.layers.Embedding):
    """An Embedding whose table is no variable of its own."""

    def build(self, input_shape: Any = None) -> None:
        self.turned = self.add_weight(shape=(8, 2), initializer="ones", name="turned")
        self.built = True

    @property
    def embeddings(self) -> Any:
        return self.turned * 2.0


def test_an_embedding_without_a_table_of_its_own_works_where_it_is_not_prepared() -> None:
    train_shards()
    assert Rotating(8, 2)(tf.constant([3])).numpy().tolist() == [[2.0, 2.0]]


def test_sparse_ids_ask_for_rows(caplog: pytest.LogCaptureFixture) -> None:
    layer, ids = keras.layers.Embedding(TABLE, 64), tf.sparse.from_dense([[3, 0], [3, 5]])
    layer.build()
    expected = layer(ids)
    found = operations_of(layer, sparse=True)
    assert "ResourceGather" in found
    assert not caplog.records
    np.testing.assert_array_equal(layer(ids), expected)


def test_a_lookup_of_ones_own_in_a_large_table_is_told(caplog: pytest.LogCaptureFixture) -> None:
    operations_of(Taking(8, 64))
    assert not caplog.records
    operations_of(Taking(TABLE, 64, name="words"))
    assert "each step reads all of words/embeddings (4 MiB) to look rows up" in caplog.text


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_a_negative_id_is_a_row_from_the_end_as_in_keras(kind: str) -> None:
    """As data has it that is padded with -1."""
    train_shards()
    ids: Any = tf.constant([[2, -1], [0, -4]])
    given = {"dense": ids, "ragged": tf.RaggedTensor.from_tensor(ids), "sparse": tf.sparse.from_dense(ids)}[kind]
    layer = keras.layers.Embedding(4, 3)
    layer.build()
    expected = layer(given)
    parts = [tf.Variable(part) for part in tf.split(tf.convert_to_tensor(layer.embeddings), 2)]
    layer._embeddings._value = ShardedVariable(parts)
    object.__setattr__(layer, LOOKS_UP_ROWS, True)
    for found, one in zip(*(tf.nest.flatten(one, True) for one in (layer(given), expected)), strict=True):
        np.testing.assert_array_equal(found, one)


class ByHand(keras.Model):
    """Lists what it trains by its layers' attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.line(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, target = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(inputs) - target))
        weights = [self.line.kernel, self.line.bias]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_a_step_trains_a_split_kernel_that_it_names_itself() -> None:
    see_whole_weights()
    train_shards()
    kernels = []
    for is_split in (True, False):
        made = ByHand()
        made(tf.zeros([1, 4]))
        kernel = made.line.kernel
        kernel.assign([[1.0], [2.0], [3.0], [4.0]])
        if is_split:
            kernel._value = ShardedVariable([tf.Variable(one) for one in tf.split(kernel._value, 2)])
        made.compile(keras.optimizers.Adam(0.1))
        build(made, None)
        tf.function(Step(made))((tf.ones([2, 4]), tf.zeros([2, 1])))
        kernels.append(np.array(kernel))
    np.testing.assert_allclose(*kernels)
    assert kernels[0][0, 0] < 1.0
