"""The docs site's pages lie where their links lead, whatever a link leads to in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import stage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage the real pages in a folder of the test's own; returns that of the pages."""
    stage.SITE = tmp_path_factory.mktemp("site")
    stage.STAGE = stage.SITE / "pages"
    stage.stage()
    return stage.STAGE


def _prose(page: Path) -> str:
    """Return a page's text without its blocks of code."""
    blocks = r"^ *(```+|~~~+).*?^ *\1 *$"
    return re.sub(blocks, "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_every_link_of_a_staged_page_leads_to_a_staged_file(staged: Path) -> None:
    wrong = []
    for page in staged.rglob("*.md"):
        for target in re.findall(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)", re.sub(r"`[^`\n]*`", "", _prose(page))):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).is_file():
                wrong.append(f"{page.relative_to(staged)}: {target}")
    assert wrong == []


def test_a_source_file_is_a_page_and_blocks_of_code_stay(staged: Path) -> None:
    digits = (ROOT / "trainer/examples/digits.py").read_text(encoding="utf-8")
    assert digits in (staged / "source/trainer/examples/digits.py.md").read_text(encoding="utf-8")
    page, origin = (place.read_text(encoding="utf-8") for place in (staged / "index.md", ROOT / "README.md"))
    assert page.count("```") == origin.count("```")


def test_a_page_is_named_by_its_title_and_a_recorded_run_is_its_page(staged: Path) -> None:
    observing = (staged / "docs/observing.md").read_text(encoding="utf-8")
    assert "[JSON](json.md)" in (staged / "docs/verbs.md").read_text(encoding="utf-8")
    assert "(../examples/night.html)" in observing
    assert "<!doctype html>" in (staged / "examples/night.html").read_text(encoding="utf-8")[:20]


def test_a_list_below_a_sentence_begins_after_an_empty_line(staged: Path) -> None:
    """GitHub needs none; without it the site shows the list within the sentence."""
    upkeep = (staged / "docs/upkeep.md").read_text(encoding="utf-8")
    assert "It looks at\n\n- the control machine" in upkeep
    glued = r"(?m)^(?![-*|#>]|\d+\. )\S.*\n(?:[-*]|\d+\.) "
    assert not [path for path in (staged / "docs").rglob("*.md") if re.search(glued, _prose(path))]


def test_the_site_has_its_style(staged: Path) -> None:
    assert (staged / "site.css").is_file()
    assert "extra_css: [site.css]" in (staged.parent / "mkdocs.yml").read_text(encoding="utf-8")
