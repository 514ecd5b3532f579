"""docs/verbs.md is what fabfile.py says."""

from __future__ import annotations

from fleet.command_line.page import PAGE, page


def test_page_is_made_from_the_verbs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m fleet.command_line.page"
