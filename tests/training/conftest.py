"""One shared path for all the tests, and one training of the example that several of them look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import DIGITS, MINUTE, Process, Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("shared"))
    yield runs
    runs.end()


@pytest.fixture(scope="session")
def digits(runs: Runs) -> Process:
    """The demo's training, once, to its end."""
    process = runs.local(DIGITS, "digits", 3000, "--checkpoint-steps", "1000", "--checkpoints-kept", "3", "--seed", "1")
    assert process.wait(4 * MINUTE) == 0, process.output
    return process
