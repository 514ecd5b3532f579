"""Size and time of a run's page with 100,000 points and 1,000 events, in Debian's chromium: `make bench-page`.

Seconds are those of the browser's own clock, from the navigation's start: until the document is there and its script
has drawn what is seen, and until all figures are drawn. Processor time is that of the thread that reads the page, runs
its script and draws: it is what the opening takes on a machine that has nothing else to do. The median of so many
openings, with the slowest beside it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.chromium import DRAWN, Browser
from bench.large_page import write_large_run
from trainer.report.html import render
from trainer.report.summary import read_summary

OPENINGS = 5
SEEN = "return (performance.getEntriesByType('navigation')[0] || {}).loadEventEnd / 1000"
METRICS = "Performance.getMetrics"
CLOCK = "return performance.now() / 1000"


def processor(browser: Browser) -> float:
    """Return the processor time that the page's thread has used since the page was opened, in seconds."""
    metrics = browser.driver.execute_cdp_cmd(METRICS, {})["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        directory = write_large_run(Path(place) / "shared")
        began = time.perf_counter()
        summary = read_summary(directory)
        text = render([summary])
        drawn = time.perf_counter() - began
        page = Path(place) / "page.html"
        page.write_text(text, encoding="utf-8")
        points = sum(map(len, summary["series"]["values"].values()))
        print(f"{points:,} points, {len(summary['marks']):,} marks, {len(summary['lanes'])} members: ", end="")
        print(f"{page.stat().st_size / 1e6:.2f} MB, written in {drawn:.2f} s")
        browser = Browser()
        try:
            seen, whole, busy = [], [], []
            browser.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            for _ in range(OPENINGS):
                browser.open(page, drawn=False)
                browser.wait("return document.readyState === 'complete'")
                busy.append(processor(browser))
                browser.wait(DRAWN)
                whole.append(float(browser.run(CLOCK)))
                seen.append(float(browser.run(SEEN)))
        finally:
            browser.close()
    print(f"open and drawn as far as it is seen: {median(seen):.2f} s (slowest {max(seen):.2f} s)")
    print(f"  processor time of that: {median(busy):.2f} s (most {max(busy):.2f} s)")
    print(f"all figures drawn: {median(whole):.2f} s (slowest {max(whole):.2f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
