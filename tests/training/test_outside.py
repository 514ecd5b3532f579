"""What a program makes before the strategy is named before the first step; and calls that all workers fail."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, Runs, run_check, until

from trainer import testing
from trainer.core.failures import UserError, explain
from trainer.core.program import build_model
from trainer.core.settings.config import Config
from trainer.run.records import read_record

# isort: split
import keras
import tensorflow as tf

from trainer.training.evaluation import make_evaluation
from trainer.training.keras.adapters import keras_of

pytestmark = pytest.mark.timeout(400)
EARLY = "It was made before build_model was called"
NAMED = {
    "InClass": "Extra.train_step uses InClass.temperature",
    "AtImport": "Extra.train_step uses outside.COUNT",
    "InConstructor": "Extra.train_step uses InConstructor.generator",
    "Table": "Extra.train_step uses Table.table",
    "Metric": "Extra.train_step uses Metric.mean",
    "Layer": "Extra.train_step uses Layer.layer",
    "OfKeras3": "Scaled.train_step uses OfKeras3.scale",
    "Optimizer": "Optimizer.build_model returned an optimizer",
    "WholeModel": "WholeModel.build_model returned a model",
}
OTHERS = {
    "LargeStep": "Extra.train_step has arrays of 0.00 GiB in its graph",
    "LargeData": "LargeData.train_dataset has arrays of 0.00 GiB in its graph",
    "OfV1": "compile got AdamOptimizer, which is none of Keras's optimizers",
    "OwnTrainFunction": "Accumulating has its own make_train_function, which the trainer does not call",
    "SetTrainFunction": "put what it does into train_step",
    "OwnFunctionOfKeras3": "Own has its own make_train_function",
    "AppliesBeside": "InApply.apply_gradients writes variables beside its updates",
    "CountsIterations": "ByIterations does something at each so many steps (iterations)",
    "CountsOfLegacy": "LegacyByIterations does something at each so many steps (iterations)",
    "CountsOfKeras3": "OfKeras3ByIterations does something at each so many steps (iterations)",
    "CountsRest": "ByRest does something at each so many steps (iterations)",
    "CountsByCast": "ByCast does something at each so many steps (iterations)",
    "MadeTwice": "tf.function only supports singleton tf.Variables",
    "PythonLoss": "Extra.train_step trains through py_function, whose gradient is Python",
    "Changing": "Extra.train_step uses the variable 'rest' of shape (None,), which workers can't have: give it",
    "Eager": "Eager.build_model has called tf.config.run_functions_eagerly(True)",
}
WHILE_BUILT = {
    "FitWhileBuilt": "build_model and callbacks may not train, evaluate or predict",
    "PredictWhileBuilt": "build_model and callbacks may not train, evaluate or predict",
    "OwnStrategy": "leave the program's own out",
}
LOST = {
    "HiddenVariable": "Extra.train_step changes HiddenVariable.count (tensorflow's Variable), which is no part",
    "HiddenOptimizer": "Extra.train_step changes 'iteration' and 2 more, which are no part",
    "HiddenAverage": "Extra.train_step changes ",
    "HiddenTable": "Extra.train_step changes HiddenTable.seen (tensorflow's MutableHashTable), which is no part",
    "HiddenOfKeras3": "Scaled.train_step changes ",
}
COPIED = {
    "CopiedStep": "Extra.train_step has NumPy arrays of ",
    "CopiedData": "CopiedData.train_dataset has NumPy arrays of ",
}
JITTED = {
    "Jitted": "Extra is compiled with jit_compile=True, which has no effect here",
    "JittedOfKeras3": "Sequential is compiled with jit_compile=True, which has no effect here",
}
PYTHON = {"PythonMetric": "Extra.train_step calls Python (py_function or numpy_function), as in a metric"}
CLEARED = ["Cleared", "ClearedOfKeras3"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answered: dict[str, Any] = run_check(
        "outside_check.py",
        *(
            *NAMED,
            *OTHERS,
            *WHILE_BUILT,
            *LOST,
            *CLEARED,
            *COPIED,
            *PYTHON,
            *JITTED,
            "CopiedNot",
            "Called",
            "Kept",
            "CountsItself",
            "CountsGood",
            "WarmsUp",
            "SecondWithSchedule",
        ),
        deadline=5 * MINUTE,
    )
    return answered


@pytest.mark.parametrize("name", NAMED)
def test_what_is_made_before_the_strategy_is_named(found: dict[str, Any], name: str) -> None:
    assert str(found[name]).startswith(NAMED[name])
    assert EARLY in found[name]


@pytest.mark.parametrize("name", OTHERS)
def test_what_workers_cannot_do_is_named(found: dict[str, Any], name: str) -> None:
    assert OTHERS[name] in str(found[name])


@pytest.mark.parametrize("name", WHILE_BUILT)
def test_what_build_model_may_not_do_is_named(found: dict[str, Any], name: str) -> None:
    assert WHILE_BUILT[name] in str(found[name])


@pytest.mark.parametrize("name", LOST)
def test_what_a_step_changes_and_no_checkpoint_has_is_named(found: dict[str, Any], name: str) -> None:
    warned = found[f"warned of {name}"]
    assert warned.startswith(LOST[name])
    assert "no checkpoint has that" in warned
    assert len(found[name]) == 4  # it trains nevertheless


@pytest.mark.parametrize("name", COPIED)
def test_arrays_that_a_worker_copies_are_warned_of(found: dict[str, Any], name: str) -> None:
    assert found[f"warned of {name}"].startswith(COPIED[name])
    assert len(found[name]) == 4  # it trains nevertheless


def test_python_in_a_metric_is_warned_of_and_counts(found: dict[str, Any]) -> None:
    assert found["warned of PythonMetric"].startswith(PYTHON["PythonMetric"])
    assert [step["by_python"] for step in found["PythonMetric"]] == [7.0] * 4


@pytest.mark.parametrize("name", JITTED)
def test_a_step_that_xla_does_not_compile_is_warned_of(found: dict[str, Any], name: str) -> None:
    assert found[f"warned of {name}"].startswith(JITTED[name])
    assert len(found[name]) == 4  # it trains nevertheless


class Own:
    """A program whose model calls Keras's method in its own one."""

    def __init__(self, library: Any, method: str) -> None:
        class Model(library.Sequential):  # type: ignore[name-defined,misc]
            pass

        def own(model: Any, *others: Any, **named: Any) -> Any:
            self.calls += 1
            return getattr(library.Model, method)(model, *others, **named)

        setattr(Model, method, own)
        self.library, self.kind, self.calls = library, Model, 0

    def build_model(self) -> Any:
        model = self.kind([self.library.Input((1,)), self.library.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat()

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(1)


OF_BOTH = pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])


def evaluation_of(program: Any) -> None:
    config = Config(program="a:B", evaluation="inline")
    make_evaluation(config, program, build_model(program), tf.distribute.get_strategy(), 2)


@OF_BOTH
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_method_of_the_models_own_that_nobody_would_call_is_refused(library: Any, method: str) -> None:
    with pytest.raises(UserError, match=f"Model has its own {method}, which the trainer does not call"):
        evaluation_of(Own(library, method))


@OF_BOTH
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_method_of_a_librarys_model_is_warned_of(library: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """KerasHub's do nothing but Keras's where they are given no preprocessor."""
    program = Own(library, method)
    program.kind.__module__ = getattr(program.kind, method).__module__ = pytest.__name__
    evaluation_of(program)
    assert f"Model has a {method} of the library pytest, which the trainer does not call" in caplog.text
    assert "return keras.Model(model.inputs, model.outputs)" in caplog.text


@OF_BOTH
def test_an_own_reset_of_metrics_is_called_in_one_process_and_refused_on_ps(library: Any, tmp_path: Path) -> None:
    program = Own(library, "reset_metrics")
    if library is tf.keras:  # Keras 3 is for ps alone
        testing.train(program, 4, directory=tmp_path / "one", strategy="one_device", export=False)
        assert program.calls > 0
    with pytest.raises(
        UserError, match=r"Model has its own reset_metrics, which .*: have `metrics` list what it resets"
    ):
        testing.train(program, 4, directory=tmp_path / "two", evaluation="none", export=False)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_step_of_one_device_is_compiled_as_keras_does(is_known: bool) -> None:
    compute = tf.tanh if is_known else lambda features: tf.strings.to_number(tf.strings.as_string(features))
    model = tf.keras.Sequential([tf.keras.layers.Lambda(compute), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    step, batch = keras_of(model).step(), (tf.ones([8, 4]), tf.ones([8, 1]))
    if is_known:
        assert list(step(batch)) == ["loss"]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="XLA") as caught:
            step(batch)
        assert "leave jit_compile=True out of compile" in explain(caught.value)


def test_what_the_model_has_may_be_changed(found: dict[str, Any]) -> None:
    assert sorted(step["t"] for step in found["Kept"]) == [2.0, 4.0, 6.0, 8.0]
    assert [key for key in found if key.startswith("warned of")] == [
        f"warned of {name}" for name in (*LOST, *COPIED, *PYTHON, *JITTED)
    ]
    assert [step["t"] for step in found["CopiedNot"]] == [4000.0] * 4


@pytest.mark.parametrize("name", CLEARED)
def test_a_session_cleared_in_build_model_keeps_the_variables_on_the_ps(found: dict[str, Any], name: str) -> None:
    assert len(found[name]) == 4
    assert {place.split("/task")[0] for place in found[f"places of {name}"]} == {"/job:ps/replica:0"}


def test_an_optimizer_that_changes_gradients_and_counts_within_updates_trains_as_in_one_process(
    found: dict[str, Any],
) -> None:
    steps, rate = 4, 2 * 0.0625
    assert found["weights of CountsItself"] == [-rate * (0.5 * 3 + steps - 3)] * 4


def test_a_second_optimizer_with_a_schedule_may_change_gradients(found: dict[str, Any]) -> None:
    assert found["counted of SecondWithSchedule"] == 1 - 4 * 0.0625


def test_an_optimizer_may_ask_for_a_stretch_of_iterations(found: dict[str, Any]) -> None:
    assert found["weights of WarmsUp"] == [-4 * 0.5 * 0.0625] * 4


def test_an_apply_gradients_may_add_to_a_counter(found: dict[str, Any]) -> None:
    assert found["counted of CountsGood"] == 4


def test_tensors_and_functions_from_outside_work(found: dict[str, Any]) -> None:
    assert [step["t"] for step in found["Called"]] == [406.0] * 4


def test_several_numbers_are_shown_by_their_mean(found: dict[str, Any]) -> None:
    assert [step["each"] for step in found["Called"]] == [3.0] * 4


def test_a_call_that_every_worker_fails_is_the_programs(runs: Runs) -> None:
    process = runs.local("outside:FailsAlike", "alike", 20, "--workers", "2", "--evaluation", "none")
    assert process.wait(3 * MINUTE) == 78, process.output
    status = runs.status("alike")
    assert status["state"] == "failed"
    assert status["message"].startswith("every worker fails in the same way, again and again")
    assert "unknown device in the data" in status["message"]
    assert "ended with" not in "".join(line for line in process.output.splitlines() if line.startswith("worker"))


@pytest.mark.matrix
def test_a_model_that_is_built_for_long_is_left_when_asked_to_stop(runs: Runs) -> None:
    process = runs.local("stuck:Stuck", "builds", 20, "--workers", "2", "--evaluation", "none")

    def message() -> object:
        return (read_record(runs.directory("builds") / "status.json") or {}).get("message")

    until(lambda: message() == "building the model", "the model is built", say=lambda: process.output)
    process.send(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(MINUTE) == 143, process.output
    assert time.monotonic() - began < 40
    assert runs.status("builds")["state"] == "stopped"
