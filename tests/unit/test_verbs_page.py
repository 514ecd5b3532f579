"""docs/verbs.md is what fabfile.py says."""

from __future__ import annotations

import importlib
import runpy

from invoke import Task

from fleet.command_line.page import PAGE, ROOT, page


def test_page_is_made_from_the_verbs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m fleet.command_line.page"


def test_each_verb_with_a_command_line_is_one_of_fab() -> None:
    modules = (path.stem for path in (ROOT / "fleet" / "command_line").glob("[!_]*.py"))
    found = [importlib.import_module(f"fleet.command_line.{name}") for name in modules]
    written = {each.name for module in found for each in vars(module).values() if isinstance(each, Task)}
    shown = {each.name for each in runpy.run_path(str(ROOT / "fabfile.py")).values() if isinstance(each, Task)}
    assert shown == written
