"""docs/run-settings.md says of every key and of what must fit together what the code declares."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.site.run_settings_page import FIT, PAGE, SETTINGS, page
from trainer.core.settings.config import DECLARED, Config
from trainer.core.settings.setting import Setting


def test_page_is_as_the_code_has_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "write it with: python -m fleet.site.run_settings_page"


def test_page_takes_up_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.setitem(DECLARED, "steps", Setting("Something else."))
    changed = page(text)
    assert "| `steps` | whole number | `1000` | Something else. |" in changed
    assert changed.replace("Something else.", text.split("| `1000` | ")[1].split(" |")[0]) == text


def test_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tables"):
        page(f"{SETTINGS}\n")
    with pytest.raises(ValueError, match="2 tables"):
        page(f"{SETTINGS}\n\n{FIT}\n\n{FIT}\n")


def test_meanings_are_whole_sentences_and_cells() -> None:
    for field in dataclasses.fields(Config):
        meaning = DECLARED[field.name].meaning
        assert meaning.endswith("."), field.name
        assert "|" not in meaning, field.name
        assert "  " not in meaning, field.name
