"""What can be exported is exported whole, and what can't be is known before the first step."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from processes import run_check

from trainer.core.failures import Infrastructure, UserError
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.training.exports import export, trial
from trainer.training.exports.export_shards import LargeVariables
from trainer.training.exports.trial import is_new
from trainer.training.tables.dynamic.served import ServedTables

pytestmark = pytest.mark.timeout(500)
BEFORE = "the model could not be exported at the end of the run: "


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What export_check.py found on servers in its process."""
    checked: dict[str, Any] = run_check("export_check.py", deadline=450)
    return checked


@pytest.mark.parametrize("kind", ["Colours", "StaticColours", "Colours3"])
def test_a_table_that_the_program_keeps_is_exported_with_the_signature(found: dict[str, Any], kind: str) -> None:
    assert found["scores"][kind] < 1e-6


def test_a_table_that_only_the_models_call_knows_is_exported(found: dict[str, Any]) -> None:
    assert found["closed"] == 0.0


def test_a_sequential_without_input_shape_that_is_fed_a_dict_is_exported(found: dict[str, Any]) -> None:
    assert found["named"] == 0.0


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_a_model_with_such_an_input_is_exported_with_it(kind: str, tmp_path: Path) -> None:
    import tensorflow as tf

    from trainer.training.keras.keras2 import Keras2Model

    ids = tf.keras.Input([None], dtype="int64", name="ids", **{kind: True})
    rows = tf.keras.layers.Embedding(5, 2)(ids)
    model = tf.keras.Model({"ids": ids}, tf.reduce_sum(rows, 1))
    with contextlib.redirect_stdout(io.StringIO()):
        Keras2Model(model).export(str(tmp_path / "export"), None)
    given = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    asked = {"ids": given if kind == "ragged" else given.to_sparse()}
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    assert tf.reduce_all(loaded.serve(asked) == model(asked))


@pytest.mark.parametrize("library", ["tf_keras", "keras"])
def test_inputs_are_exported_whatever_their_names(library: str, tmp_path: Path) -> None:
    import tensorflow as tf

    keras = importlib.import_module(library)
    inputs = {name: keras.Input((2,), name=name) for name in ("class", "fixed acidity", "pH")}
    model = keras.Model(inputs, keras.layers.Concatenate()(list(inputs.values())))
    export.save_model(SimpleNamespace(), model, str(tmp_path / "export"), None)
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    given = {"class_": tf.ones((1, 2)), "fixed_acidity": tf.zeros((1, 2)), "pH": 2 * tf.ones((1, 2))}
    [answer] = loaded.signatures["serving_default"](**given).values()
    assert answer.numpy().tolist() == [[1.0, 1.0, 0.0, 0.0, 2.0, 2.0]]


@pytest.mark.parametrize("library", ["tf_keras", "keras"])
def test_the_keys_of_data_name_the_inputs_of_a_model_that_only_its_call_knows(library: str, tmp_path: Path) -> None:
    import tensorflow as tf

    class Difference(importlib.import_module(library).Model):
        def call(self, data: Any) -> Any:
            return data["price"] - data["_cost"]

    spec = {name: tf.TensorSpec((None, 1)) for name in ("price", "_cost")}
    export.save_model(SimpleNamespace(), Difference(), str(tmp_path / "export"), (spec, tf.TensorSpec((None, 1))))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    [answer] = loaded.signatures["serving_default"](price=tf.constant([[3.0]]), arg_cost=tf.constant([[1.0]])).values()
    assert answer.numpy().item() == 2.0


@pytest.mark.parametrize("library", ["tf_keras", "keras"])
def test_two_inputs_that_become_one_name_are_refused(library: str, tmp_path: Path) -> None:
    keras = importlib.import_module(library)
    inputs = [keras.Input((2,), name=name) for name in ("fixed acidity", "fixed_acidity")]
    model = keras.Model(inputs, keras.layers.Concatenate()(inputs))
    with pytest.raises(UserError, match="one name for the inputs 'fixed acidity', 'fixed_acidity': rename one of them"):
        export.save_model(SimpleNamespace(), model, str(tmp_path / "export"), None)


@pytest.mark.parametrize("kind", ["Broken", "Broken3"])
def test_a_signature_that_fails_is_refused_before_the_first_step(found: dict[str, Any], kind: str) -> None:
    message, checkpoints = found["refused"][kind]
    assert message.startswith(BEFORE)
    assert "RuntimeError: the signature is broken. Correct that, or set export: false" in message
    assert checkpoints == []


def test_a_variable_that_no_checkpoint_has_is_refused(found: dict[str, Any]) -> None:
    message, checkpoints = found["refused"]["Shifted"]
    assert message.startswith(f"{BEFORE}Shifted.serving_signature uses a Variable that is no part of the model")
    assert checkpoints == []


def test_a_summary_in_what_is_exported_is_refused_with_its_place(found: dict[str, Any]) -> None:
    message, checkpoints = found["refused"]["Summing"]
    assert "Summing.serving_signature writes with tf.summary" in message
    assert "write it in train_step" in message
    assert checkpoints == []


def test_what_may_be_there_at_the_end_is_not_refused(found: dict[str, Any]) -> None:
    assert found["missing"] is True


def test_the_trial_changes_no_number_of_the_training(found: dict[str, Any]) -> None:
    assert found["same_numbers"] == {"weights": 0.0, "drawn": True}


def test_the_trial_takes_no_memory_for_tables_and_leaves_the_program_alone(found: dict[str, Any]) -> None:
    memory = found["memory"]
    assert memory["variables"] > 3
    assert memory["grown"] < 0.2
    assert memory["kept"] is False


@pytest.mark.parametrize(
    ("program", "way"),
    [
        (SimpleNamespace(), "Correct that, give the program a serving_signature(model), or set export: false"),
        (SimpleNamespace(serving_signature=print), "Correct that, or set export: false"),
    ],
)
def test_a_call_that_takes_other_than_the_data_is_shown_a_way_out(
    program: Any, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = ValueError("The model provided has never called. It must be called at least once before export.")
    monkeypatch.setattr(trial, "build_model", Mock(side_effect=error))
    with pytest.raises(UserError) as raised:
        trial.try_export(program, RunDirectory(tmp_path, "new"), None, ServedTables([]))
    assert str(raised.value).endswith(f"before export. {way}")


@pytest.mark.parametrize(("newest", "begun", "expected"), [(None, "", True), (0, "", True), (5, "", False)])
def test_only_a_run_that_has_not_trained_is_tried(tmp_path: Path, newest: Any, begun: str, expected: bool) -> None:
    assert is_new(with_checkpoint(tmp_path, newest, begun)) is expected


@pytest.mark.parametrize(("newest", "expected"), [(5, True), (6, False)])
def test_a_run_that_begins_from_anothers_checkpoint_is_tried_there(tmp_path: Path, newest: int, expected: bool) -> None:
    assert is_new(with_checkpoint(tmp_path, newest, "other@5")) is expected


def with_checkpoint(shared: Path, newest: int | None, begun: str) -> RunDirectory:
    directory = RunDirectory(shared, "test")
    directory.claim(Config(program="p:P", run="test", shared_dir=str(shared)))
    directory.catalogue.newest = lambda: newest  # type: ignore[method-assign]
    if begun:
        write_record(directory.settings, {"program": "p:P", "from": begun})
    return directory


@pytest.mark.parametrize("kind", ["Wide3", "Rounded", "dynamic"])
def test_a_model_that_no_memory_holds_is_exported_by_shard_with_the_same_numbers(
    found: dict[str, Any], kind: str
) -> None:
    exported = found["by_shard"][kind]
    assert exported["differing"] == []
    assert exported["same_names"]
    assert set(exported["served"].values()) == {0.0}
    assert 60_000 in exported["tables"]
    assert exported["slices"]  # as the two ps have it
    assert {tuple(rows) for rows in exported["slices"]} == {(30_000, 30_000)}
    assert 0.1 < exported["least"] < 0.4  # of what an export as a whole takes
    assert exported["left"] == []


def test_a_signature_that_reads_a_whole_table_which_no_memory_holds_is_refused(found: dict[str, Any]) -> None:
    refused = found["by_shard"]["dynamic"]["refused"]
    assert refused.startswith("the export reads the values of table/embeddings")
    assert "read it within a tf.function, or export on a larger host with fab export --run NAME" in refused


def refuse(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("begun", ["", "12"])
def test_an_export_that_finds_no_room_leaves_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """What is left would keep export.json from being written, and so the run from ending."""

    def write(*arguments: Any) -> None:
        path = arguments[4]
        path.mkdir()
        (path / "saved_model.pb").write_text("half")
        refuse()

    directory = RunDirectory(tmp_path, "test")
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(export, "write_model", write)
    target = directory.path / begun if begun else None
    with pytest.raises(OSError, match="No space left on device"):
        export.export_model(None, directory, 12, "spec", target)  # type: ignore[arg-type]
    assert list(directory.path.iterdir()) == []


def test_a_file_of_rows_that_finds_no_room_is_told_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    large = LargeVariables(tmp_path / "rows")
    with pytest.raises(OSError, match="No space left on device"):
        large.put_rows(None, (1000, 8), [])  # type: ignore[arg-type]


def test_two_processes_do_not_write_one_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has half written would come to its place, and count."""
    tried = []

    def write(*arguments: Any) -> None:
        path = arguments[4]
        path.mkdir()
        (path / "saved_model.pb").write_text("whole")
        for target in (None, tmp_path / "exports" / "12"):
            with pytest.raises(Infrastructure, match="another process is at work") if not target else free():
                export.export_model(None, directory, 12, "spec", target)  # type: ignore[arg-type]
            tried.append(target)
            monkeypatch.setattr(export, "write_model", lambda *given: given[4].mkdir())

    free = contextlib.nullcontext
    directory = RunDirectory(tmp_path, "test")
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(export, "write_model", write)
    export.export_model(None, directory, 12, "spec")  # type: ignore[arg-type]
    assert len(tried) == 2
    assert [path.name for path in directory.path.iterdir()] == ["export"]
    assert (directory.export / "saved_model.pb").read_text() == "whole"


def test_an_export_is_made_where_the_file_system_knows_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def know_none(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    directory = RunDirectory(tmp_path, "test")
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", know_none)
    monkeypatch.setattr(export, "write_model", lambda *given: given[4].mkdir())
    export.export_model(None, directory, 12, "spec")  # type: ignore[arg-type]
    assert directory.export.is_dir()
