"""Every worker reads its own part of the data (test_stopping: also when it comes back from the dead, with its tables).

What needs a look inside is done by `input_check.py`, once for all tests here and in test_partitioners.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting import counts, own_parts
from processes import Runs

pytestmark = pytest.mark.timeout(600)
EXAMPLES = 320
PASS = 80  # steps: 320 examples in batches of 4


def test_each_worker_goes_through_its_own_part_again_and_again(runs: Runs) -> None:
    process = runs.local("ids:Ids", "ids", PASS, "--steps-per-execution", str(PASS // 2), "--no-evaluator")
    assert process.wait() == 0, process.output
    seen = counts(runs, "ids")
    assert own_parts(seen)
    assert seen.sum() == EXAMPLES
    for worker in range(2):
        part = seen[worker, worker::2]
        assert np.ptp(part) <= 1


@pytest.mark.parametrize("kind", ["from_generator", "py_function", "numpy_function", "stateless"])
def test_python_in_a_workers_pipeline_is_refused(input_check: dict[str, Any], kind: str) -> None:
    message = input_check["refused"][kind]
    assert message.startswith("Making.train_dataset has Python in its pipeline")
    assert "TFRecordDataset" in message
    assert "multi_worker_mirrored" in message


@pytest.mark.parametrize("kind", ["outside", "outside_whole"])
def test_a_dataset_made_before_is_refused(input_check: dict[str, Any], kind: str) -> None:
    assert input_check["refused"][kind].startswith("Making.train_dataset uses a tf.data.Dataset that was made before")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("loop", "a loop over a dataset never ends"),
        ("slice", "slice indices must be integers"),
        ("length", "only supports `len` in eager mode"),
        ("numpy", "has no attribute 'numpy'"),
        ("adapt", "adapt"),
    ],
)
def test_what_needs_numbers_while_it_is_traced_is_refused(input_check: dict[str, Any], kind: str, words: str) -> None:
    message = input_check["refused"][kind]
    assert "input_check.py:" in message
    assert words in message
    assert "is traced, once for all workers" in message


def test_one_element_of_a_dataset_may_be_used_while_it_is_traced(input_check: dict[str, Any]) -> None:
    assert input_check["refused"]["one_of_them"] == ""


def test_a_table_made_outside_the_scope_is_refused(input_check: dict[str, Any]) -> None:
    message = input_check["refused"]["table"]
    assert message.startswith("Making.train_dataset uses a lookup table")
    assert "build_model" in message


def test_a_table_that_the_scope_leaves_in_the_coordinator_is_named(input_check: dict[str, Any]) -> None:
    assert "StaticVocabularyTable stays in the coordinator" in input_check["refused"]["vocabulary"]


def test_tensorflows_own_operations_are_not_refused(input_check: dict[str, Any]) -> None:
    assert input_check["refused"]["own_operations"] == ""


def test_a_table_made_in_the_scope_works_on_workers(input_check: dict[str, Any]) -> None:
    assert input_check["tables"] == [[1, 2, 3, 0]] * 4


def test_each_of_a_workers_replicas_gets_a_batch_of_its_own(input_check: dict[str, Any]) -> None:
    """Two CPU devices that the strategy is told to be GPUs: a stand-in, see input_check.py."""
    parts = [[[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]]
    got = input_check["two_replicas"]
    assert got["own"] in parts
    assert got["fit"] in parts
    assert got["element"] == [None]


def test_a_workers_replicas_take_one_step_together(input_check: dict[str, Any]) -> None:
    """As above; the step is that of a batch of 8, whichever worker took it."""
    got = input_check["two_replicas"]
    assert (got["steps"], got["iterations"]) == (1, 1)
    steps = [1 + 0.1 * 2 * 2 * np.mean((np.arange(part, 16, 2) / 16) ** 2) for part in (0, 1)]
    assert any(np.isclose(got["w"], step) for step in steps)


def test_each_row_of_a_table_is_asked_for_once_unless_gradients_are_clipped(input_check: dict[str, Any]) -> None:
    once = {"once": True, "again": False}
    assert input_check["asks_once"] == {"plain": once, "clipped": {"once": False, "again": True}, "whole": once}


@pytest.mark.parametrize("kind", ["constant", "decayed_weights", "schedule"])
def test_a_learning_rate_that_comes_with_the_call_trains_the_same(input_check: dict[str, Any], kind: str) -> None:
    rates = input_check["rates"][kind]
    assert rates["trained"] == pytest.approx(rates["alone"], rel=1e-5)
    assert rates["trained"] != [1.0]


@pytest.mark.parametrize("kind", ["constant", "decayed_weights", "schedule"])
def test_no_step_asks_a_ps_for_the_learning_rate(input_check: dict[str, Any], kind: str) -> None:
    """Keras's own step uses one resource more than ours: the rate."""
    rates = input_check["rates"][kind]
    assert (rates["used_by_keras_alone"], rates["used_in_addition"]) == (1, 0)


@pytest.mark.parametrize("kind", ["constant", "decayed_weights", "schedule"])
def test_checkpoints_keep_the_learning_rate_under_its_name(input_check: dict[str, Any], kind: str) -> None:
    rates = input_check["rates"][kind]
    assert rates["kept"] == rates["kept_alone"]


def test_the_optimizer_still_tells_its_learning_rate(input_check: dict[str, Any]) -> None:
    assert input_check["rates"]["constant"]["rate"] == pytest.approx(0.02)
    # Of a schedule it is the next step's, as of the last call.
    schedule = input_check["rates"]["schedule"]
    assert schedule["rate"] == pytest.approx(0.1 * 0.5 ** (schedule["steps"] / 2))


def test_a_train_step_that_sets_the_learning_rate_is_refused(input_check: dict[str, Any]) -> None:
    message = input_check["assigned"]["rate"]
    assert "input_check.py:" in message
    assert "LearningRateSchedule" in message


def test_a_train_step_that_assigns_a_part_of_a_variable_reads_what_to_do(input_check: dict[str, Any]) -> None:
    message = input_check["assigned"]["part"]
    assert "input_check.py:" in message
    assert "scatter_update(" in message
    assert "learning rate" not in message


@pytest.mark.parametrize("sharding", ["auto", "file"])
def test_processes_in_step_read_files_of_their_own(input_check: dict[str, Any], sharding: str) -> None:
    assert input_check["divided"][f"{sharding}, 2 files"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("kind", ["data, 2 files", "data, no file", "auto, no file"])
def test_processes_in_step_share_the_batches(input_check: dict[str, Any], kind: str) -> None:
    assert input_check["divided"][kind] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("kind", ["off, 2 files", "off, no file"])
def test_processes_in_step_read_the_same_with_sharding_off(input_check: dict[str, Any], kind: str) -> None:
    assert input_check["divided"][kind] == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize("sharding", ["auto", "file"])
def test_too_few_files_are_refused_in_every_process(input_check: dict[str, Any], sharding: str) -> None:
    first, second = input_check["divided"][f"{sharding}, 1 file"]
    assert first.startswith(f"input_sharding: {sharding}: train_dataset reads fewer files (1) than there are workers")
    assert second.startswith(f"input_sharding: {sharding}: there is no file for this worker")
    assert all("set input_sharding to data" in message for message in (first, second))


def test_file_sharding_of_data_without_files_is_refused(input_check: dict[str, Any]) -> None:
    for message in input_check["divided"]["file, no file"]:
        assert message.startswith("input_sharding: file: train_dataset reads no files")


@pytest.mark.parametrize("sharding", ["program", "auto", "off"])
def test_a_global_batch_is_divided_over_the_replicas_either_way(input_check: dict[str, Any], sharding: str) -> None:
    assert input_check["mirrored"][sharding] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_the_size_of_a_batch_is_known_where_there_is_one(input_check: dict[str, Any]) -> None:
    assert input_check["batch_sizes"] == {
        "batch": 4,
        "remainder dropped": 4,
        "padded": 4,
        "batches of batches": None,
        "batches of one size twice": None,
        "none": None,
    }
