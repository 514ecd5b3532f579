"""A run's page: one HTML file with all that it needs, which fetches nothing.

What a run says is text wherever it stands: escaped in the markup, and in the data, a JSON block, without a `<`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from trainer.report import sections
from trainer.report.comparison import compare
from trainer.report.elements import escape
from trainer.report.summary import read_summary
from trainer.run.directory import RunDirectory
from trainer.run.records import in_words, write_text

log = logging.getLogger(__name__)
ASSETS = Path(__file__).with_name("assets")
LIBRARY = "echarts-6.1.0.min.js"
FIRST_SECONDS, EVERY_SECONDS = 30.0, 60.0
SECTIONS = (
    sections.time_section, sections.members_section, sections.ways_section, sections.saves_section,
    sections.placement_section, sections.tables_section, sections.lookups_section, sections.tasks_section,
    sections.marks_table, sections.settings_section,
)  # fmt: skip
PATIENCE = 100.0  # times as long as it took to write the page, the next one waits: 1 % of a processor


class PageWriter:
    """Writes a run's page into its directory, at its end and now and then before."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._due = time.monotonic() + FIRST_SECONDS

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Write it now; what can't be written is lost, with a warning: no training ends for it."""
        began = time.monotonic()
        try:
            write_text(self._directory.report, render([read_summary(self._directory)]))
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.report, error.strerror)
        except Exception:
            log.exception("cannot write %s", self._directory.report)
        now = time.monotonic()
        self._due = now + max(EVERY_SECONDS, PATIENCE * (now - began))


def render(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of one run, or of several side by side."""
    several = len(summaries) > 1
    scripts = [asset(LIBRARY), asset("page.js")]
    style = asset("page.css")
    title = " and ".join(str(summary["run"]) for summary in summaries)
    body = compare(summaries) if several else lay_out_run(summaries[0])
    policy = "; ".join(
        [
            "default-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "img-src data:",
            f"style-src 'sha256-{digest(style)}'",
            "script-src " + " ".join(f"'sha256-{each}'" for each in script_digests()),
        ]
    )
    return Template(asset("page.html")).substitute(
        title=escape(title),
        policy=policy,
        style=style,
        body=body,
        data=to_data({"runs": [drawn(summary, several) for summary in summaries]}),
        library=scripts[0],
        script=scripts[1],
    )


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def digest(source: str) -> str:
    """Return what a policy calls a script or style that it permits."""
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def script_digests() -> list[str]:
    """Return the digests of the page's scripts, for a server whose own policy must permit them."""
    return [digest(asset(LIBRARY)), digest(asset("page.js"))]


def to_data(value: object) -> str:
    """Return JSON that no text in it can end: a `<` is written as an escape."""
    data = json.dumps(in_words(value), separators=(",", ":"), allow_nan=False)
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def drawn(summary: Mapping[str, Any], several: bool) -> dict[str, Any]:
    """Return what the page's script draws of a run."""
    names = ("run", "began", "until", "series", "evaluations", "marks")
    return {name: summary[name] for name in names if name in summary} | (
        {} if several else {name: summary[name] for name in ("time", "lanes", "saves", "tasks")}
    )


def lay_out_run(summary: Mapping[str, Any]) -> str:
    return "".join(
        [
            *(make(summary) for make in (sections.header, sections.advice, sections.tiles, sections.controls)),
            sections.curves([summary]),
            *(make(summary) for make in SECTIONS),
        ]
    )
