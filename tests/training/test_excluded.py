"""Weight decay leaves the parts of a split weight out where a program leaves out the weight by its name."""

from __future__ import annotations

import pytest
from processes import run_check

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["tf_keras", "keras3"])
def test_a_weight_that_is_left_out_by_the_end_of_its_name_is_left_out_in_parts(kind: str) -> None:
    found = run_check("excluded_check.py", kind, deadline=280)
    kernel, bias = found["whole"]
    assert found["split"] == [kernel, bias]
    assert bias < kernel < 1
