"""What docs/training.md says of each optimizer: saved on 2 ps, it goes on with 1, 2 or 3 as if nothing had been.

A few are tried in every run of the tests, in some layouts; all of them in all layouts by `make matrix`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run_check

pytestmark = pytest.mark.timeout(500)
CHECK = "matrix_check.py"
PAGE = ROOT / "docs" / "training.md"
ROW = re.compile(
    r"^\| (?P<names>`(?:legacy\.)?[A-Z][^|]*`) \| (?P<options>[^|]*) \| (?P<outcome>equal|refused)[^|]* \|$", re.M
)
SHARDS = {"2 ps": 2, "1 ps": 1, "3 ps": 3, "none": 1}
# With the layout that tells most of each.
QUICK = {"Nadam, EMA": ("3 ps",), "legacy.Adam": ("1 ps",), "Adafactor": ("2 ps",)}


def outcomes(page: Path) -> dict[str, str]:
    """Return what the page says becomes of each case."""
    found = {}
    for row in ROW.finditer(page.read_text(encoding="utf-8")):
        for name in re.findall("`([^`]+)`", row["names"]):
            cases = [name, *(f"{name}, {case}" for case in row["options"].split("; ") if case.strip("- "))]
            found.update(dict.fromkeys(cases, row["outcome"]))
    return found


OUTCOMES = outcomes(PAGE)


def examine(case: str, outcome: str, layouts: Iterable[str] = SHARDS) -> None:
    found: dict[str, Any] = run_check(CHECK, case, *layouts, deadline=450)
    of_keras3 = case.startswith("keras3 ")
    tables = ("table/embeddings", "/table/embeddings") if of_keras3 else ("table/embeddings:0", "table/embeddings")
    assert tables[0] in found["moved"]
    slots = [name for name in found["moved"] if tables[1] in name and name != tables[0]]
    # Without momentum psfleet's update writes none, and the legacy one has none.
    assert slots or ("SGD" in case and "momentum" not in case), "no slot was trained"
    for layout in layouts:
        shards = SHARDS[layout]
        refused = outcome == "refused" and shards > 1
        if refused:
            assert found[layout].startswith("refused: ")
            assert "Set partitioner to none" in found[layout]
        else:
            assert found[layout] == {"where": shards, "restored": {}, "after": {}}, layout


def test_the_page_has_every_case() -> None:
    assert sorted(OUTCOMES) == sorted(run_check(CHECK, "--names"))
    assert set(QUICK) <= OUTCOMES.keys()


@pytest.mark.parametrize("case", QUICK)
def test_an_optimizer_goes_on_with_another_number_of_ps(case: str) -> None:
    examine(case, OUTCOMES[case], QUICK[case])


@pytest.mark.matrix
@pytest.mark.parametrize("case", sorted(OUTCOMES))
def test_every_optimizer_does_in_every_layout(case: str) -> None:
    examine(case, OUTCOMES[case])
