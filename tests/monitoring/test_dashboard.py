"""Prometheus understands the dashboard's queries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.monitoring.tools import ROOT, run

PANELS = [
    panel
    for panel in json.loads((ROOT / "docs" / "grafana" / "psfleet.json").read_text())["panels"]
    if panel["type"] != "row"
]


def as_prometheus_has_it(query: str) -> str:
    """Return a query without Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$run", "digits")


def check(path: Path, *queries: str) -> str:
    """Return what promtool complains of."""
    rules = [{"record": f"panel:{number}", "expr": as_prometheus_has_it(query)} for number, query in enumerate(queries)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = run("promtool", "check", "rules", path)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panels_queries_are_prometheus_own(tmp_path: Path, panel: dict) -> None:
    assert check(tmp_path / "rules.yml", *(target["expr"] for target in panel["targets"])) == ""
    assert "$" not in as_prometheus_has_it(" ".join(target["expr"] for target in panel["targets"]))


def test_a_wrong_query_is_found(tmp_path: Path) -> None:
    assert "parse error" in check(tmp_path / "rules.yml", "sum by (le) (rate(psfleet_step_seconds_bucket)")
