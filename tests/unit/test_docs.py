"""The pages: every link leads somewhere, and no page drifts back into a notebook."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
HEADS = {"fleet/site/schema/page.md"}  # text of a page that is made from it, with the links of that page
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [page for page in listed if page not in HEADS and (ROOT / page).exists()]


@cache
def prose(page: str) -> str:
    """Return a page's text without its blocks of code."""
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


@cache
def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for target in LINK.findall(CODE.sub("", prose(page))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(str(file.resolve().relative_to(ROOT))):
            wrong.append(f"{target}: no such heading")
    assert wrong == []


@pytest.mark.parametrize("page", pages())
def test_each_table_has_a_head(page: str) -> None:
    """Rows behind a blank line are no table: a page shows them as text with bars."""
    tables = re.findall(r"(?:^\|.*\n?)+", prose(page), re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|(?: *:?-+:? *\|)+ *(?:\n|\Z)", table)] == []


def records() -> list[Path]:
    return sorted((ROOT / "docs/decisions").glob("0*.md"))


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name[:4])
def test_a_record_is_short_and_in_the_index(record: Path) -> None:
    lines = record.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40, "move what ran to docs/evidence"
    index = (record.parent / "README.md").read_text(encoding="utf-8")
    assert f"- [{lines[0].removeprefix('# ')}]({record.name})" in index


def test_every_page_of_docs_is_in_the_sites_navigation() -> None:
    """Zensical says nothing of a page that is missing there, or that is not there any more."""

    class Loader(yaml.SafeLoader):
        """Reads the tag that names a function, as the builder does."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    groups = yaml.load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    listed = [page.replace("index.md", "README.md") for group in groups for each in group.values() for page in each]
    assert [page for page in listed if page not in pages()] == []
    assert [page for page in pages() if re.fullmatch(r"docs/[^/]+\.md", page) and page not in listed] == []


def test_the_changelog_is_short_until_a_version_is_tagged() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" not in text or len(text.splitlines()) <= 30, "say it in thirty lines"


def test_pages_that_code_and_messages_name_are_there() -> None:
    listed = subprocess.run(
        ["git", "grep", "-IlE", r"docs/[a-z/-]+\.md", "--", ":!*.md", ":!tests/", ":!docs/mkdocs.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wrong = []
    for source in listed:
        for page, anchor in re.findall(
            r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", (ROOT / source).read_text(encoding="utf-8")
        ):
            if not (ROOT / page).exists() or (anchor and anchor not in anchors(page)):
                wrong.append(f"{source}: {page}#{anchor}")
    assert wrong == []


def test_no_file_holds_two_versions_of_a_merge() -> None:
    command = ["git", "grep", "-InE", "^(<{7}|>{7}) "]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr  # 1: git grep finds nothing
