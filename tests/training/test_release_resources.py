"""What a turn leaves on the servers does not keep the next one from making its strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_check

pytestmark = pytest.mark.timeout(120)


def test_an_iterator_that_does_not_end_does_not_keep_the_next_turn_waiting(tmp_path: Path) -> None:
    facts = run_check("release_resources_check.py", str(tmp_path / "pipe"), deadline=60)
    assert facts == {"steps": 4, "freed": True, "next steps": 2, "still waits": True}


def test_a_turn_of_other_members_has_their_calls_told_to_its_own_server(tmp_path: Path) -> None:
    facts = run_check("release_resources_check.py", str(tmp_path / "pipe"), "other members", deadline=60)
    assert facts == {"steps": 4, "freed": True, "next steps": 2, "still waits": True}


@pytest.mark.parametrize("elements", ["ragged", "sparse"])
def test_an_iterator_of_variants_does_not_keep_the_next_strategy_waiting(tmp_path: Path, elements: str) -> None:
    """There is no iterator of nothing to put in its place: its worker may be busy with it for a while."""
    facts = run_check("release_resources_check.py", str(tmp_path / "pipe"), elements, deadline=60)
    assert facts == {"steps": 4, "freed": True, "still waits": True}


def test_what_is_not_freed_is_told(tmp_path: Path) -> None:
    facts = run_check("release_resources_check.py", str(tmp_path / "pipe"), "by its handle", deadline=60)
    assert facts == {"steps": 4, "freed": False}
