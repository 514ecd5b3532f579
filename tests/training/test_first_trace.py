"""A trace that TensorFlow drops has no updates; the one that trains has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from trainer.training.keras.adapters import keras_of
from trainer.training.steps.call_accounts import CallAccounts
from trainer.training.steps.traced_step import trace_step
from trainer.training.tables.asked_rows import some_of
from trainer.training.updates.one_update import gather


class LateAdam(tf.keras.optimizers.Adam):
    """One of a program, which makes a variable when it first updates."""

    late: Any = None

    def update_step(self, gradient: Any, variable: Any) -> None:
        if self.late is None:
            self.late = tf.Variable(0.0)
        self.late.assign_add(1.0)
        super().update_step(gradient, variable)


@pytest.mark.parametrize(
    ("kind", "method", "traces"),
    [
        (tf.keras.optimizers.Adam, "update_step", 1),
        (tf.keras.optimizers.legacy.Adam, "_resource_apply_dense", 1),
        (LateAdam, "update_step", 2),
    ],
)
def test_a_dropped_trace_has_no_updates_of_kerass_own(kind: Any, method: str, traces: int) -> None:
    updated: list[str] = []
    optimizer = kind(0.1)
    plain = getattr(optimizer, method)

    def counted(gradient: Any, variable: Any, *more: Any, **named: Any) -> Any:
        updated.append(variable.name)
        return plain(gradient, variable, *more, **named)

    object.__setattr__(optimizer, method, counted)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse", metrics=["mae"])
    gather(optimizer)
    iterator = iter(tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.fill([4, 1], 5.0))).repeat())
    strategy = tf.distribute.get_strategy()
    accounts = CallAccounts(model, strategy, None)
    traced = trace_step(strategy, model, iterator, accounts)
    assert len(updated) == traces
    before = model.trainable_variables[0].numpy()
    losses = [float(traced(iterator, accounts.rate.value)["loss"]) for _ in range(5)]
    assert (model.trainable_variables[0].numpy() != before).all()
    assert losses[-1] < losses[0]
    assert int(optimizer.iterations) == 5
    assert any(one.type == "MutexLock" for one in traced.graph.get_operations())
    assert float(getattr(optimizer, "late", 5.0)) == 5.0


@pytest.mark.parametrize("kind", ["functional", "sequential", "Keras 3"])
def test_keras_s_own_step_is_traced_once(kind: str) -> None:
    library: Any = tf.keras if kind != "Keras 3" else pytest.importorskip("keras")
    calls: list[str] = []

    class Counted(library.layers.Dense):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any) -> Any:
            calls.append(self.name)
            return super().call(inputs)

    given = library.Input([2])
    layer = Counted(3, activation="softmax")
    model = library.Sequential([given, layer]) if kind == "sequential" else library.Model(given, layer(given))
    model.compile(library.optimizers.Adam(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1], tf.int64))).repeat()
    keras_of(model).build(dataset.element_spec)
    calls.clear()
    traced = trace_step(tf.distribute.get_strategy(), model, iter(dataset))
    assert len(calls) == 1
    accuracies = [float(traced(iter(dataset))["accuracy"]) for _ in range(20)]
    assert accuracies[-1] > accuracies[0] or accuracies[0] == 1.0
    assert int(model.optimizer.iterations) == 20


def test_a_model_that_its_first_input_builds_has_no_tables_to_tell_of() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Embedding(8, 2), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    accounts = CallAccounts(model, tf.distribute.get_strategy(), None)
    assert accounts.asked.lookups.summary() == {}
    assert accounts.asked.states == []


def test_ids_of_any_type_and_none_at_all_are_sampled() -> None:
    places = tf.constant([0, 7, 2**40], tf.int64)
    parts = [[tf.zeros([0], tf.int32)], [tf.constant([[5], [6]]), tf.constant([7], tf.int64)], [], [tf.constant(8)], []]
    nothing = [0, 0, 0, 0]
    assert some_of(parts, places).numpy().tolist() == [nothing, [3, 5, 6, 6], nothing, [1, 8, 8, 8], nothing]
    assert some_of([[], []], places).numpy().tolist() == [nothing, nothing]


def test_one_operation_samples_the_ids_of_all_tables() -> None:
    ids = [[tf.TensorSpec([None], tf.int64)]] * 26
    graph = tf.function(some_of).get_concrete_function(ids, tf.TensorSpec([4], tf.int64)).graph
    assert [one.type for one in graph.get_operations()].count("GatherV2") == 1


@pytest.mark.parametrize("name", ["train_step", "compute_metrics"])
def test_what_a_program_sets_on_its_model_is_not_keras_s_own(name: str) -> None:
    given = tf.keras.Input([2])
    model = tf.keras.Model(given, tf.keras.layers.Dense(1)(given))
    model.compile("adam", "mse", metrics=["mae"])
    plain = getattr(model, name)
    object.__setattr__(model, name, lambda *arguments: plain(*arguments))
    dataset = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
    keras_of(model).build(dataset.element_spec)
    assert not model.compiled_metrics.built
    assert (len(model.optimizer.variables) > 2) == (name == "compute_metrics")  # beside its count and its rate
