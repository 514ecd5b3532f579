"""Every drill of the catalogue, on the lab's hosts."""

import pytest

from fleet.drills.catalogue import CATALOGUE, DOZEN

DRILLS = [pytest.param(each.name, marks=pytest.mark.dozen if each.name in DOZEN else ()) for each in CATALOGUE]


@pytest.mark.parametrize("name", DRILLS)
def test_drill_passes(verdicts: dict[str, str], name: str) -> None:
    verdict = verdicts.get(name) or verdicts[""]
    print(verdict)
    assert verdict.startswith("pass"), verdict
