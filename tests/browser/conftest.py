"""Fixtures: one chromium for all tests, and the pages that they look at."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.large_page import write_large_run
from trainer.report.html import render
from trainer.report.summary import read_summary
from trainer.run.directory import RunDirectory

if TYPE_CHECKING:
    from bench.chromium import Browser

if importlib.util.find_spec("selenium") is None:  # it is in .cache/browser alone: make test-browser
    collect_ignore_glob = ["test_*.py"]
RECORDED = Path(__file__).with_name("recorded")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    from bench.chromium import Browser

    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.size(1280, 900)
    return chromium


@pytest.fixture(scope="session")
def night() -> RunDirectory:
    """A recorded run that lost a worker, a ps and its coordinator, and of which two members were silent."""
    return RunDirectory(RECORDED, "night")


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, night: RunDirectory) -> dict[str, Path]:
    """The pages: of a run, of two, and of 100,000 points and 1,000 events."""
    place = tmp_path_factory.mktemp("pages")
    large = write_large_run(place / "shared")
    made = {"night": [night], "two": [night, RunDirectory(RECORDED, "fast")], "large": [large]}
    paths = {}
    for name, directories in made.items():
        paths[name] = place / f"{name}.html"
        paths[name].write_text(render([read_summary(directory) for directory in directories]), encoding="utf-8")
    return paths
