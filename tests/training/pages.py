"""The code of the documentation's pages, as files that a reader would make of it."""

from __future__ import annotations

import re
from pathlib import Path

from processes import ROOT

NAMED = re.compile(r"```\w+\n# (?P<name>[\w./]+\.\w+)\n(?P<text>.*?)```", re.DOTALL)


def write_files(page: str, directory: Path) -> list[Path]:
    """Write each block that begins with a file's name to that file; returns them in the page's order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = []
    for block in NAMED.finditer(text):
        path = directory / block["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block["text"], encoding="utf-8")
        paths.append(path)
    return paths
