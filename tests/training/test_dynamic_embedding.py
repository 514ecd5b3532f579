"""The layer DynamicEmbedding: a fixed table anywhere else, a dynamic one on parameter servers, without a setting."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS

from trainer import testing
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.examples import dynamic_embedding as module
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.telemetry.status import read_status

# isort: split
import keras
import tensorflow as tf

from trainer.tasks.generation import with_declared_tables
from trainer.training.tables.dynamic.pieces import pieces_of

pytestmark = pytest.mark.timeout(600)
BOTH = pytest.mark.parametrize("library", [tf.keras, keras], ids=["tf_keras", "keras3"])
THREE_LATER = pytest.mark.parametrize(
    "library", [tf.keras, pytest.param(keras, marks=pytest.mark.matrix)], ids=["tf_keras", "keras3"]
)
ITEMS = {key * 1_000_003 for key in range(2_000)}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import keys

    return keys


def test_it_needs_nothing_of_psfleet(tmp_path: Path) -> None:
    """A copy of the file works where TensorFlow chooses its own Keras, whose `tf.keras` lacks some modules."""
    shutil.copy(str(module.__file__), tmp_path)
    alone = "import dynamic_embedding as own; print(own.DynamicEmbedding(4, {}, rows=9)(own.tf.range(2)).shape)"
    user = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_USE_LEGACY_KERAS")}
    ran = subprocess.run([sys.executable, "-c", alone], cwd=tmp_path, env=user, capture_output=True, text=True)
    assert ran.stdout == "(2, 4)\n", ran.stderr


@BOTH
def test_outside_it_trains_a_fixed_table_of_any_ids(library: Any, tmp_path: Path) -> None:
    """Ids of the same hash share a row; a saved model has the layer again."""
    layer = module.dynamic_embedding(library)(4, {"capacity": 100}, rows=50, name="items")
    inputs = library.Input([None], dtype="string")
    model = library.Model(inputs, library.layers.GlobalAveragePooling1D()(layer(inputs)))
    model.compile(optimizer=library.optimizers.SGD(1.0), loss="mse")
    before = layer.get_weights()[0]
    model.fit(tf.constant([["a", "b"]]), tf.ones([1, 4]), verbose=0)
    assert 0 < np.any(layer.get_weights()[0] != before, 1).sum() <= 2
    model.save(tmp_path / "model.keras")
    loaded = library.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(tf.constant([["a", "c"]])), model(tf.constant([["a", "c"]])))
    assert loaded.get_layer("items").dynamic_table == {"capacity": 100}
    assert loaded.get_layer("items").get_config() == layer.get_config()


@BOTH
def test_outside_ids_may_be_whole_numbers_texts_ragged_and_sparse(library: Any) -> None:
    layer = module.dynamic_embedding(library)(4, {"capacity": 100}, rows=50)
    numbers = tf.constant([[-(2**62), 2**62, 7]], tf.int64)
    rows = layer(numbers)
    np.testing.assert_array_equal(layer(tf.strings.as_string(numbers)), rows)  # a number and its text are one id
    np.testing.assert_array_equal(layer(tf.RaggedTensor.from_tensor(numbers)).to_tensor(), rows)
    np.testing.assert_array_equal(layer(tf.sparse.from_dense(numbers)), rows)


def declaring(programs: Any, library: Any) -> Any:
    """Return a program whose layer asks for a table."""
    import declared

    return (programs.of_keras3(declared.Declared) if library is keras else declared.Declared)()


@THREE_LATER
def test_on_parameter_servers_it_trains_a_dynamic_table_without_a_setting(
    programs: Any, library: Any, tmp_path: Path
) -> None:
    """The side-car and the export know it, too, and so does a run that goes on."""
    is_three = library is keras
    settings = {"evaluation": "distributed" if is_three else "sidecar", "export": not is_three}
    for steps, more in ((150, {"evaluation": "none", "export": False}), (200, settings)):
        result = testing.train(declaring(programs, library), steps, ps=2, directory=tmp_path, **more)
    readers = [tf.train.load_checkpoint(path) for *_, path in pieces_of(prefix_of(result), "items")]
    assert {int(key) for reader in readers for key in reader.get_tensor("keys")} == ITEMS
    assert result.evaluation["loss"] < 0.68  # chance has 0.693
    assert read_status(RunDirectory(tmp_path, "test")).tables["items"]["rows"] == len(ITEMS)
    if not is_three:
        loaded = tf.saved_model.load(str(result.directory / "export"))
        served = loaded.serve(tf.constant([[1_000_003 * key] * programs.IDS for key in range(100)], tf.int64))
        assert len(np.unique(served, axis=0)) == 100


def prefix_of(result: testing.Result) -> str:
    return str(result.directory / "checkpoints" / f"ckpt-{result.step}")


def test_without_parameter_servers_it_trains_a_fixed_table(programs: Any, tmp_path: Path) -> None:
    settings = {"strategy": "one_device", "evaluation": "none", "export": False}
    result = testing.train(declaring(programs, tf.keras), 20, directory=tmp_path, **settings)
    assert [100, 8] in tf.train.load_checkpoint(prefix_of(result)).get_variable_to_shape_map().values()


def test_settings_that_no_dynamic_table_can_be_with_are_refused(programs: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation is 'exact'.*the program's layers items ask for dynamic tables"):
        testing.train(declaring(programs, tf.keras), 20, directory=tmp_path, evaluation="exact", export=False)


class Given:
    """A program that keeps its layer from before, or has a function make it when the model is first called."""

    def __init__(self, library: Any, *, late: bool) -> None:
        self.library, self.late = library, late
        self.layer = None if late else self.make()

    def make(self) -> Any:
        return module.dynamic_embedding(self.library)(4, {"capacity": 100}, rows=50, name="items")

    def build_model(self) -> Any:
        library, make = self.library, (lambda: self.layer) if self.layer else self.make

        class Model(library.Model):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.line = library.layers.Dense(1)

            def build(self, shape: Any) -> None:
                self.items = make()

            def call(self, ids: Any) -> Any:
                return self.line(self.items(ids)[:, 0])

        model = Model()
        if not self.late:
            model(tf.zeros([1, 1], tf.int64))
        model.compile(library.optimizers.SGD(0.1), "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        return tf.data.Dataset.from_tensors((tf.ones([2, 1], tf.int64), tf.ones([2, 1]))).repeat()

    eval_dataset = train_dataset


@BOTH
def test_a_layer_that_nobody_sees_before_the_training_is_refused(library: Any, tmp_path: Path) -> None:
    """It would train a fixed table without a word."""
    expected = "the layer 'items' asks for a dynamic table.*not known before.*make it in build_model; or name it in dy"
    with pytest.raises(UserError, match=expected):
        testing.train(Given(library, late=True), 20, directory=tmp_path, evaluation="none", export=False)


@BOTH
def test_a_layer_that_is_made_before_build_model_is_refused(library: Any, tmp_path: Path) -> None:
    expected = r"Given\.layer: this layer asks for a dynamic table, and was made before build_model.*make it in build_m"
    with pytest.raises(UserError, match=expected):
        testing.train(Given(library, late=False), 20, directory=tmp_path, evaluation="none", export=False)


KEPT: Any = None


class Found(Given):
    """A program that makes its layer in build_model, keeps it as a global or of its class, or never calls it."""

    def __init__(self, library: Any, *, called: bool = True, name: str | None = "items") -> None:
        self.library, self.called, self.name = library, called, name

    def build_model(self) -> Any:
        global KEPT
        library, inputs = self.library, self.library.Input([1], dtype="int64")
        more = {"name": self.name} if self.name else {}
        KEPT = type(self).kept = items = module.dynamic_embedding(library)(4, {"capacity": 100}, rows=50, **more)
        found = items(inputs)[:, 0] if self.called else library.layers.Rescaling(1.0)(inputs)
        model = library.Model(inputs, library.layers.Dense(1)(found))
        model.unused = items
        model.compile(library.optimizers.SGD(0.1), "mse")
        return model


@THREE_LATER
def test_a_program_may_keep_its_layer_as_a_global_or_of_its_class(library: Any, tmp_path: Path) -> None:
    for steps in (4, 8):  # the second time it is there before
        result = testing.train(Found(library), steps, directory=tmp_path, evaluation="none", export=False)
    assert read_status(RunDirectory(tmp_path, "test")).tables["items"]["rows"] == 1
    assert result.step == 8


@BOTH
def test_a_layer_that_no_step_calls_is_refused_for_that(library: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the layer 'items' asks for a dynamic table, and the step does not build it"):
        testing.train(Found(library, called=False), 4, directory=tmp_path, evaluation="none", export=False)


@BOTH
def test_a_layer_may_have_a_name_that_keras_counts(library: Any, tmp_path: Path) -> None:
    """Keras counts again with each model, as the trainer has it."""
    testing.train(Found(library, name=None), 4, directory=tmp_path, evaluation="none", export=False)
    [(name, seen)] = read_status(RunDirectory(tmp_path, "test")).tables.items()
    assert "dynamic" in name
    assert seen["rows"] == 1


class Numbered(Found):
    """A program that gives its layer another name in each model."""

    made = 0

    def build_model(self) -> Any:
        type(self).made += 1
        self.name = f"items_{self.made}"
        return super().build_model()


@BOTH
def test_a_layer_that_has_another_name_in_each_model_is_refused(library: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another name when the model was built before: give it the same each time"):
        testing.train(Numbered(library), 4, directory=tmp_path, evaluation="none", export=False)


def test_the_settings_may_say_something_else_of_its_table(programs: Any, tmp_path: Path) -> None:
    settings = {"dynamic_tables": {"items": {"capacity": 500}}, "evaluation": "none", "export": False}
    testing.train(declaring(programs, tf.keras), 40, directory=tmp_path, **settings)
    assert 0 < read_status(RunDirectory(tmp_path, "test")).tables["items"]["rows"] <= 500


def test_the_next_coordinator_does_not_forget_which_layers_have_tables(programs: Any, tmp_path: Path) -> None:
    """The side-car's evaluation may read of them at any moment."""
    testing.train(declaring(programs, tf.keras), 20, directory=tmp_path, evaluation="none", export=False)
    directory = RunDirectory(tmp_path, "test")
    assert directory.dynamic_tables == ["items"]
    program = testing.name_of(declaring(programs, tf.keras))
    directory.claim(testing.config_of(program, 40, tmp_path, {}))
    assert directory.dynamic_tables == ["items"]


@pytest.mark.parametrize(("leads", "known"), [(True, []), (False, ["id", "items"])])
def test_a_coordinator_that_finds_no_table_takes_it_back(tmp_path: Path, leads: bool, known: list[str]) -> None:
    config = Config(program="a:A", run="test", shared_dir=str(tmp_path), strategy="one_device")
    directory = RunDirectory(tmp_path, "test")
    directory.claim(config)
    before = read_record(directory.settings)
    directory.declare_tables({"items", "id"})
    progress = SimpleNamespace(leads=leads)
    context: Any = SimpleNamespace(config=config, program=None, directory=directory, progress=progress)
    assert with_declared_tables(context) is context
    assert directory.dynamic_tables == known
    assert (read_record(directory.settings) == before) is leads
