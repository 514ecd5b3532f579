"""How the states of metrics are merged, as what a step does to them says: both Keras, in this process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import testing
from trainer.core.failures import UserError
from trainer.training.measures.metrics import LAST, MAXIMUM, MINIMUM, SUM, CallMetrics, MetricStates, merges
from trainer.training.metric_uses import reject_uses

# isort: split
import keras
import tensorflow as tf

WAYS: dict[str, tuple[str | None, Any]] = {
    "sum": (SUM, lambda old, new: old + tf.reduce_sum(new)),
    "sum of some": (SUM, lambda old, new: tf.reduce_sum(new) + old - 1.0),
    "highest": (MAXIMUM, lambda old, new: tf.maximum(old, tf.reduce_max(new))),
    "lowest": (MINIMUM, lambda old, new: tf.minimum(tf.reduce_min(new), old)),
    "last": (LAST, lambda old, new: tf.reduce_mean(new)),
    "moving average": (None, lambda old, new: 0.9 * old + tf.reduce_mean(new)),
    "distance": (None, lambda old, new: tf.reduce_mean(new) - old),
    "conditional": (None, lambda old, new: tf.cond(new[0] > 1.0, lambda: old, lambda: old + 1.0)),
    "sum, then highest": (None, lambda old, new: tf.maximum(old + 1.0, tf.reduce_max(new))),
}


def metric_of(library: Any, change: Any, first: float = 0.0) -> Any:
    class Changed(library.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="changed")
            initial = library.initializers.Constant(first)
            self.state = self.add_weight(name="state", initializer=initial, shape=())

        def update_state(self, truth: Any, predicted: Any, sample_weight: Any = None) -> None:
            self.state.assign(change(tf.convert_to_tensor(self.state), truth))

        def result(self) -> Any:
            return tf.convert_to_tensor(self.state)

    return Changed()


def traced(metric: Any) -> Any:
    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> None:
        metric.update_state(values, values)

    return step.get_concrete_function(tf.TensorSpec([None]))


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_says_how_a_state_is_merged(library: Any, way: str) -> None:
    expected, change = WAYS[way]
    metric = metric_of(library, change)
    assert merges(metric, traced(metric)) == [expected]


def in_function(state: Any, new: Any) -> None:
    @tf.function(autograph=False)
    def add(values: tf.Tensor) -> None:
        state.assign(tf.convert_to_tensor(state) + tf.reduce_sum(values))

    add(new)


def in_condition(state: Any, new: Any) -> None:
    tf.cond(new[0] > 0.0, lambda: state.assign(tf.convert_to_tensor(state) + new[0]), lambda: new[0])


def read_in_condition(state: Any, new: Any) -> None:
    state.assign(tf.cond(new[0] > 0.0, lambda: tf.convert_to_tensor(state) * 2.0, lambda: new[0]))


def given_to_function(state: Any, new: Any) -> None:
    @tf.function(autograph=False)
    def twice(old: tf.Tensor) -> None:
        state.assign(old * 2.0 + new[0])

    twice(tf.convert_to_tensor(state))


def last_in_condition(state: Any, new: Any) -> None:
    tf.cond(new[0] > 0.0, lambda: state.assign(new[0]), lambda: new[0])


def in_loop(state: Any, new: Any) -> None:
    def add(number: tf.Tensor) -> tf.Tensor:
        state.assign(tf.convert_to_tensor(state) + new[number])
        return number + 1

    tf.while_loop(lambda number: number < 3, add, [0])


def carried_by_loop(state: Any, new: Any) -> None:
    def add(number: tf.Tensor, seen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        state.assign(tf.convert_to_tensor(state) + seen)
        return number + 1, tf.convert_to_tensor(state) * 2.0

    tf.while_loop(lambda number, _: number < 3, add, [0, new[0]])


NESTED = {
    in_function: SUM,
    in_condition: SUM,
    read_in_condition: None,
    given_to_function: None,
    last_in_condition: None,
    in_loop: SUM,
    carried_by_loop: None,
}


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
@pytest.mark.parametrize("change", NESTED)
def test_functions_and_conditions_of_a_step_are_looked_at(library: Any, change: Any) -> None:
    metric = metric_of(library, WAYS["sum"][1])
    metric.update_state = lambda truth, predicted: change(metric.state, truth)
    assert merges(metric, traced(metric)) == [NESTED[change]]


class Mean(keras.metrics.Mean):
    """Keeps the mean, and how far the last value was from it, as states of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.add_weight(name="mean", initializer="zeros", shape=())
        self.far = self.add_weight(name="far", initializer="zeros", shape=())

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        super().update_state(values)
        self.mean.assign(self.total / self.count)
        self.far.assign(self.far + tf.abs(values[-1] - self.mean))


def test_a_state_that_others_make_is_not_merged() -> None:
    metric = Mean()
    step = tf.function(metric.update_state, autograph=False).get_concrete_function(tf.TensorSpec([4]))
    ways = dict(zip([one.name for one in metric.variables], merges(metric, step), strict=True))
    assert ways == {"total": SUM, "count": SUM, "mean": None, "far": None}


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_a_sum_that_does_not_begin_at_zero_is_none(library: Any) -> None:
    metric = metric_of(library, WAYS["sum"][1], 1.0)
    assert merges(metric, traced(metric)) == [None]
    highest = metric_of(library, WAYS["highest"][1], -math.inf)
    assert merges(highest, traced(highest)) == [MAXIMUM]


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_metrics_of_the_library_add_up(library: Any) -> None:
    for name in ("MeanSquaredError", "AUC", "BinaryAccuracy", "Precision", "RootMeanSquaredError", "Sum", "MeanIoU"):
        kind = getattr(library.metrics, name)
        metric = kind(num_classes=2) if name == "MeanIoU" else kind()

        @tf.function(autograph=False)
        def step(values: tf.Tensor, metric: Any = metric, name: str = name) -> None:
            metric.update_state(values, *([] if name == "Sum" else [values]))

        assert set(merges(metric, step.get_concrete_function(tf.TensorSpec([4])))) == {SUM}, name


class Histogram(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="histogram")
        self.counts = self.add_weight(name="counts", initializer="zeros", shape=(3,))

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        places, ones = tf.cast(values, tf.int32)[:, tf.newaxis], tf.ones_like(values)
        self.counts.assign(tf.tensor_scatter_nd_add(tf.convert_to_tensor(self.counts), places, ones))


def test_a_histogram_adds_up() -> None:
    metric = Histogram()
    step = tf.function(metric.update_state, autograph=False).get_concrete_function(tf.TensorSpec([4]))
    assert merges(metric, step) == [SUM]


def test_states_are_merged_each_in_its_way() -> None:
    metrics = [metric_of(keras, WAYS[way][1]) for way in ("sum", "highest", "last")]

    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> None:
        for metric in metrics:
            metric.update_state(values, values)

    states = MetricStates(metrics, step.get_concrete_function(tf.TensorSpec([None])))
    found = states.merge([np.float32(3), np.float32(5), np.float32(7)], [np.float32(1), np.float32(2), np.float32(4)])
    assert found == [4, 5, 4]


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
def test_what_a_step_returns_of_metrics_is_over_all_calls_whatever_its_name(library: Any) -> None:
    """Of two workers' calls: a metric under another name, and one number of two metrics."""

    class Named(library.Model):
        def __init__(self) -> None:
            super().__init__()
            self.line = library.layers.Dense(1, kernel_initializer="ones")
            self.right, self.wrong = library.metrics.Mean(name="a"), library.metrics.Sum(name="b")

        @property
        def metrics(self) -> list[Any]:
            return [self.right, self.wrong]

        def call(self, values: Any) -> Any:
            return self.line(values)

        def train_step(self, values: Any) -> Any:
            self.right.update_state(self(values))
            self.wrong.update_state(values)
            share = self.right.result() / tf.sqrt(self.wrong.result())
            own = self.right.result() + tf.reduce_max(values)
            return {"mean": self.right.result(), "share": share, "a": self.wrong.result(), "own": own}

    model = Named()
    model(tf.ones([1, 1]))
    model.compile("sgd", "mse", jit_compile=False)
    step = tf.function(model.train_step).get_concrete_function(tf.TensorSpec([None, 1]))
    metrics, outputs = CallMetrics(model, step), {}
    for values in ([[1.0], [2.0]], [[6.0]]):
        kept = metrics.states.in_call()
        metrics.states.exchange(step, kept)
        outputs = step(tf.constant(values))
        metrics.add([one.read_value() for one in kept])
    found = {name: float(value) for name, value in metrics.aggregate_outputs(outputs).items()}
    assert found == {"mean": 3.0, "share": 1.0, "a": 9.0, "own": 12.0}


@pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
@pytest.mark.parametrize("by_metric", [True, False])
def test_a_step_that_trains_by_what_a_metric_says_is_refused(library: Any, by_metric: bool) -> None:
    """Its weight would follow the metric of a call, which begins at zero with it."""
    model = library.Sequential([library.Input((1,)), library.layers.Dense(1, use_bias=False, name="line")])
    model.compile("sgd", "mse", jit_compile=False)
    mean = library.metrics.Mean(name="mean")
    mean.update_state(0.0)

    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(values))
            mean.update_state(loss)
            loss = loss / mean.result() if by_metric else loss
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": mean.result(), "share": loss / mean.result()}

    step(tf.ones([2, 1]))
    traced = step.get_concrete_function(tf.TensorSpec([2, 1]))
    states = [getattr(one, "_value", one) for one in mean.variables]
    if not by_metric:
        reject_uses(traced, states, states, "Model.train_step")
        return
    with pytest.raises(UserError, match=r"^Model\.train_step changes '.*' by what a metric says"):
        reject_uses(traced, states, states, "Model.train_step")


class Moved(tf.keras.metrics.Metric):  # type: ignore[misc]
    """A moving average, which stays on the ps."""

    def __init__(self) -> None:
        super().__init__(name="moved")
        self.average = self.add_weight(name="average", initializer="zeros")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.average.assign(0.5 * self.average + 0.5 * value)

    def result(self) -> Any:
        return tf.convert_to_tensor(self.average)


class Uses:
    """A program of two weights, of which a step may train the second one by what a metric says."""

    def __init__(self, *, by_metric: bool) -> None:
        class Model(tf.keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weights_of = [self.add_weight(name=name, shape=[2]) for name in ("first", "second")]
                self.mean, self.moved = tf.keras.metrics.Mean(name="mean"), Moved()

            def call(self, values: Any) -> Any:
                return values * self.weights_of[0] + self.weights_of[1]

            def train_step(self, data: Any) -> Any:
                self.mean.update_state(tf.reduce_mean(data[0]))
                self.moved.update_state(self.mean.result())
                gradients = [data[0][0], data[1][0] * (self.mean.result() if by_metric else 2.0)]
                self.optimizer.apply_gradients(zip(gradients, self.weights_of, strict=True))
                return {"loss": self.mean.result(), "moved": self.moved.result()}

        self.kind = Model

    def build_model(self) -> Any:
        model = self.kind()
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.build([None, 2])
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 2]))).repeat()

    eval_dataset = train_dataset


def test_the_variable_that_follows_a_metric_is_named(tmp_path: Path) -> None:
    """Another gradient, and what a metric on the ps is fed, go there in the same message."""
    with pytest.raises(UserError, match=r"Model\.train_step changes '[^']*second' by what a metric says"):
        testing.train(Uses(by_metric=True), 4, directory=tmp_path, evaluation="none", export=False)


def test_a_metric_may_be_fed_by_another(tmp_path: Path) -> None:
    result = testing.train(Uses(by_metric=False), 4, directory=tmp_path, evaluation="none", export=False)
    assert result.step == 4


def test_what_cannot_be_merged_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", metrics=[metric_of(keras, WAYS["moving average"][1])], jit_compile=False)
    step = tf.function(made.train_step).get_concrete_function((tf.TensorSpec([4, 1]), tf.TensorSpec([4, 1])))
    CallMetrics(made, step)
    assert "the metrics changed keep a state that is no sum, maximum, minimum or last value" in caplog.text
