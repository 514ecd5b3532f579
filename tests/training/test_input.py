"""Every worker reads its own part of the data (test_stopping: also when it comes back from the dead)."""

from __future__ import annotations

import numpy as np
import pytest
from counting import counts, own_parts
from processes import Runs

pytestmark = pytest.mark.timeout(300)
EXAMPLES = 320
PASS = 80  # steps: 320 examples in batches of 4


def test_one_pass_sees_each_example_about_once(runs: Runs) -> None:
    process = runs.local("ids:Ids", "ids", PASS, "--steps-per-call", str(PASS // 2), "--no-evaluator")
    assert process.wait() == 0, process.output
    seen = counts(runs, "ids")
    assert own_parts(seen)
    assert seen.sum() == EXAMPLES
    assert np.mean(seen.sum(axis=0) == 1) > 0.9
