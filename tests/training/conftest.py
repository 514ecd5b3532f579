"""One shared path for all the tests, and one training of the example that several of them look at."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from forks import trains_in_rounds_of
from processes import DIGITS, MINUTE, STEPS_OF_A_ROUND, Process, Runs, run_check

from trainer.core.runtime import prepare_tensorflow
from trainer.telemetry.logs import DRIVER

# Before any test imports TensorFlow, in whatever order they are collected: what failed comes first when it runs again.
prepare_tensorflow()
importlib.import_module("trainer.training.steps.remote")  # it imports TensorFlow
trains_in_rounds_of(int(STEPS_OF_A_ROUND))
if DRIVER.exists():  # with a GPU: what these tests compute in their own process stands for a ps
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: says with another optimizer or API what others say: `make matrix`")


@pytest.fixture
def rounds_of_two() -> Iterator[None]:
    """Copy the operations of steps that this process traces, as those of most programs are (forks.py)."""
    trains_in_rounds_of(2)
    yield
    trains_in_rounds_of(int(STEPS_OF_A_ROUND))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("shared"))
    with runs.ended():
        yield runs


@pytest.fixture(scope="module", autouse=True)
def _none_outlives_its_module(runs: Runs) -> Iterator[None]:
    with runs.ended():
        yield


@pytest.fixture(scope="session")
def digits(runs: Runs) -> Process:
    """The demo's training, once, to its end."""
    checkpoints = ["--checkpoint-steps", "500", "--checkpoints-kept", "3", "--seed", "1"]
    process = runs.local(DIGITS, "digits", 1500, *checkpoints, "--set", "learning_rate=0.002", "--set", "dropout=0.4")
    assert process.wait(4 * MINUTE) == 0, process.output
    return process


@pytest.fixture(scope="session")
def input_check() -> dict[str, Any]:
    """What input_check.py found on servers in its process: the input, the variables' places, rates, metrics."""
    found: dict[str, Any] = run_check("input_check.py", deadline=550, STEPS_OF_A_ROUND="2")
    return found
