"""Metrics of calls that are in flight while the log reads and resets them; input_check.py has the servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.core.program import build_model


def test_each_call_counts_once_whatever_is_reset_meanwhile(input_check: dict[str, Any]) -> None:
    numbers = input_check["metrics"]["said"]
    assert len(numbers) > 3
    assert sum(one["seen"] for one in numbers) == 60 * 10 * 8
    assert {one["share"] for one in numbers} == {1.0}


def test_what_is_no_metrics_result_stays_the_last_steps(input_check: dict[str, Any]) -> None:
    assert {one["own"] for one in input_check["metrics"]["said"]} <= {14.0, 15.0}


def test_metrics_that_do_not_add_up_are_told_all_the_same(input_check: dict[str, Any]) -> None:
    assert all("latest" in one for one in input_check["metrics"]["said"])


def test_no_worker_writes_to_a_ps_for_them(input_check: dict[str, Any]) -> None:
    assert input_check["metrics"]["on_the_ps"] == [0.0] * 3


@pytest.mark.parametrize("given", [{"metrics": ["acuracy"]}, {"weighted_metrics": {"out": ["mae", "acuracy"]}}])
def test_a_name_that_is_no_metrics_is_refused(given: dict[str, Any]) -> None:
    def built(**compiled: Any) -> Any:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
        model.compile("sgd", "mse", **compiled)
        return build_model(SimpleNamespace(build_model=lambda: model))

    with pytest.raises(UserError, match="the metric 'acuracy', which tf_keras does not know: did you mean 'accuracy'"):
        built(**given)
    built(metrics=["Accuracy", "mae", "AUC"], weighted_metrics={"out": ["ce"]})


def test_names_that_keras_counts_are_the_same_in_each_model_of_a_program() -> None:
    class Program:
        def build_model(self) -> Any:
            given = tf.keras.layers.Input((4,))
            outputs = [tf.keras.layers.Dense(1, "sigmoid")(given) for _ in range(2)]
            model = tf.keras.Model(given, [*outputs, tf.reduce_sum(given, axis=1)])
            model.compile("sgd", ["bce", "bce", "mse"], metrics=[["mae"], [tf.keras.metrics.AUC()], []])
            return model

    tf.keras.backend.clear_session()
    data = tf.zeros([2, 4]), [tf.zeros([2, 1]), tf.zeros([2, 1]), tf.zeros([2])]
    for _ in range(2):  # as the training has it, then the export or a recovery
        result = build_model(Program()).evaluate(*data, verbose=0, return_dict=True)
        assert {"dense_loss", "dense_mae", "dense_1_loss", "dense_1_auc", "tf.math.reduce_sum_loss"} < set(result)


def test_a_metrics_name_counts_nothing_when_it_is_looked_up() -> None:
    class Program:
        def build_model(self) -> Any:
            tf.keras.backend.clear_session()
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, "sigmoid")])
            model.compile("sgd", "bce", metrics=["AUC"])
            return model

    metrics = build_model(Program()).compiled_metrics
    metrics.build(tf.zeros([2, 1]), tf.zeros([2, 1]))
    assert [metric.name for metric in metrics.metrics] == ["auc"]
