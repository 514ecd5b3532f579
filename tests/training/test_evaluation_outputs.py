"""What test_step may return, and that a run of the side-car's hears of the rest before its first step."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.run.directory import RunDirectory
from trainer.training.evaluation import Inline
from trainer.training.exports.trial import try_new_run
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.evaluation_outputs import checked_outputs, weighed

BOTH = pytest.mark.parametrize("library", [keras, tf.keras])
DATA = (tf.ones([4, 2]), tf.ones([4, 1]))


def program_of(library: Any, returned: Any) -> Any:
    """Return a program whose model has a test_step that updates a metric `seen`, and returns what this makes of it."""

    class Own(library.Model):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.seen = library.metrics.Mean(name="seen")
            self.line = library.layers.Dense(1)

        def call(self, rows: Any) -> Any:
            return self.line(rows)

        def test_step(self, data: Any) -> Any:
            self.seen.update_state(data[1])
            return returned(self.seen.result(), tf.reduce_mean(self(data[0])), data[1])

    def build() -> Any:
        model = Own()
        model.compile("sgd")
        return model

    return SimpleNamespace(build_model=build, eval_dataset=lambda context: tf.data.Dataset.from_tensors(DATA))


def outputs_of(program: Any) -> tuple[list[str], list[str]]:
    model = program.build_model()
    model(DATA[0])
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, DATA)
    step = tf.function(keras_of(model).test_step()).get_concrete_function(spec)
    return checked_outputs("P's model", model, step)[:2]


@BOTH
def test_numbers_of_the_steps_own_are_known_from_results_of_metrics(library: Any) -> None:
    program = program_of(library, lambda seen, own, labels: {"seen": seen, "loss": own, "rows": tf.size(labels)})
    assert outputs_of(program) == (["loss", "rows", "seen"], ["loss", "rows"])


@BOTH
def test_a_number_of_the_steps_own_may_have_a_metrics_name(library: Any) -> None:
    assert outputs_of(program_of(library, lambda seen, own, labels: {"seen": own})) == (["seen"], ["seen"])


@BOTH
def test_what_is_made_of_metrics_is_made_of_all_examples(library: Any) -> None:
    """As a score of several metrics is: of two batches it is no mean of theirs."""
    program = program_of(library, lambda seen, own, labels: {"seen": seen, "squared": seen * seen})
    labels = tf.constant([[1.0], [1.0], [3.0], [3.0]])
    program.eval_dataset = lambda context: tf.data.Dataset.from_tensor_slices((tf.ones([4, 2]), labels)).batch(2)
    model = program.build_model()
    model(DATA[0])
    evaluate = Inline(program, model, tf.distribute.get_strategy(), 1)
    assert evaluate() == evaluate() == {"seen": 2.0, "squared": 4.0}


WRONG = {
    "labels": (lambda seen, own, labels: {"seen": seen, "labels": labels}, r"labels, .* no number \(float32 of shape"),
    "text": (lambda seen, own, labels: {"text": tf.constant("good")}, r"text, .* no number \(string of shape \(\)\)"),
    "none": (lambda seen, own, labels: {"seen": None}, "returns None for 'seen'"),
    "mixed": (lambda seen, own, labels: {"sum": seen + own}, "returns sum, computed from metrics and something"),
    "tensor": (lambda seen, own, labels: own, "returns no dict: have it return a dict of numbers"),
}


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_averaged_is_refused_before_the_first_step(library: Any, name: str, tmp_path: Path) -> None:
    returned, reason = WRONG[name]
    program = program_of(library, returned)
    with pytest.raises(UserError, match=reason):
        try_new_run(program, RunDirectory(tmp_path, "mine"), None, exports=False, evaluates=True)


def test_data_that_are_not_here_keep_no_run_from_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(tf.keras, WRONG["labels"][0])

    def lacking(context: Any) -> Any:
        raise UserError("no files match /data/evaluation-*")

    program.eval_dataset = lacking
    with caplog.at_level(logging.WARNING):
        try_new_run(program, RunDirectory(tmp_path, "mine"), None, exports=False, evaluates=True)
    assert "it is not known yet whether the model can be evaluated: " in caplog.text
    assert "no files match /data/evaluation-*" in caplog.text


@BOTH
def test_one_model_is_built_for_both_trials(library: Any, tmp_path: Path) -> None:
    program, built = program_of(library, WRONG["labels"][0]), list[Any]()
    build, spec = program.build_model, tf.TensorSpec([4, 2], tf.float32)

    def count() -> Any:
        built.append(build())
        return built[-1]

    program.build_model = count
    with pytest.raises(UserError, match=WRONG["labels"][1]):
        try_new_run(program, RunDirectory(tmp_path, "mine"), (spec, None), exports=True, evaluates=True)
    assert len(built) == 1


def test_a_batch_without_examples_adds_nothing() -> None:
    assert weighed({"loss": tf.constant(float("nan"))}, ["loss"], tf.constant(0, tf.int64))["loss"].numpy() == 0
    assert weighed({"loss": tf.constant(2.0)}, ["loss"], tf.constant(3, tf.int64))["loss"].numpy() == 6
