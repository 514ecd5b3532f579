"""What alerts and dashboard ask for is what a process tells."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import jsonschema
import pytest
import yaml

from tests.monitoring.promql import NODE, OWN, complaints, process_metrics, selectors, trainer_metrics
from tests.monitoring.tools import ROOT, rendered

DASHBOARD = ROOT / "docs" / "grafana" / "psfleet.json"
GPU_SCRIPT = ROOT / "roles" / "node_exporter" / "files" / "psfleet-gpu-metrics"


def gpu_metrics() -> dict[str, set[str]]:
    """Return what the script tells of a host with a GPU."""
    answer = "0, GPU-1, NVIDIA H100, 99, 1000, 81559, 40, 300.5, 0x0000000000000040\n"
    text = runpy.run_path(str(GPU_SCRIPT))["metrics"](answer, 1)
    labels: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            labels[re.match(r"\w+", line)[0]] = set(re.findall(r'(\w+)="', line))
    return labels


def known() -> dict[str, set[str]]:
    recorded = {rule["record"]: set() for rule in rules() if "record" in rule}
    return {**trainer_metrics(), **process_metrics(), **gpu_metrics(), **NODE, **OWN, **recorded}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(rendered("prometheus", "alerts.yml.j2", {}))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_told(rule: dict[str, Any]) -> None:
    assert list(selectors(rule["expr"]))
    assert complaints(rule["expr"], known()) == []


def test_an_alert_names_labels_that_it_has() -> None:
    own = {"host", "task", "job", "instance", "run", "member", "worker", "gpu", "reason"}
    for rule in rules():
        for text in rule.get("annotations", {}).values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= own, rule["alert"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_told(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert complaints(target["expr"], known()) == []
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {
            label for name, _ in selectors(target["expr"]) for label in known()[name]
        } | {"job", "task", "host"}


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(psfleet_step_total[1m])", ["nobody tells psfleet_step_total"]),
        ('psfleet_member_state{role="ps"}', ["psfleet_member_state has no label role"]),
        ('psfleet_member_state{state=~"training|idle"}', ["psfleet_member_state has no state idle"]),
        ("psfleet_step_seconds > 1", ["nobody tells psfleet_step_seconds"]),
        ("node_load1 offset 5m > 1e3", ["nobody tells node_load1"]),
    ],
)
def test_what_nobody_tells_is_found(expression: str, complaint: list[str]) -> None:
    assert complaints(expression, known()) == complaint


def test_each_metric_of_a_run_is_on_the_dashboard() -> None:
    asked = {name for panel in panels() for target in panel["targets"] for name, _ in selectors(target["expr"])}
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in trainer_metrics()}
    assert exported - {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == set()


# What Grafana needs of a dashboard that is imported. It was compared once with Grafana's own models of its schema
# (grafana-foundation-sdk 10.1: read, written, and the same again).
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "templating", "panels", "time"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "id": False,
        "panels": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos"],
                "properties": {
                    "id": {"type": "integer", "minimum": 1},
                    "type": {"enum": ["row", "stat", "timeseries", "state-timeline", "table"]},
                    "title": {"type": "string", "minLength": 1},
                    "gridPos": {
                        "type": "object",
                        "required": ["x", "y", "w", "h"],
                        "properties": {
                            "x": {"type": "integer", "minimum": 0, "maximum": 23},
                            "y": {"type": "integer", "minimum": 0},
                            "w": {"type": "integer", "minimum": 1, "maximum": 24},
                            "h": {"type": "integer", "minimum": 1},
                        },
                        "additionalProperties": False,
                    },
                },
                "if": {"properties": {"type": {"not": {"const": "row"}}}},
                "then": {
                    "required": ["description", "datasource", "targets", "fieldConfig", "options"],
                    "properties": {
                        "description": {"type": "string", "minLength": 1},
                        "datasource": {"const": {"type": "prometheus", "uid": "${datasource}"}},
                        "targets": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "required": ["refId", "datasource", "expr", "legendFormat"],
                                "properties": {
                                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                                    "datasource": {"const": {"type": "prometheus", "uid": "${datasource}"}},
                                    "expr": {"type": "string", "minLength": 1},
                                },
                            },
                        },
                        "fieldConfig": {
                            "type": "object",
                            "required": ["defaults", "overrides"],
                            "properties": {"defaults": {"type": "object", "required": ["unit"]}},
                        },
                    },
                },
            },
        },
    },
}


def test_the_dashboard_is_what_grafana_reads() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(dashboard(), SCHEMA, cls=jsonschema.Draft202012Validator)
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))
    assert {variable["name"] for variable in dashboard()["templating"]["list"]} == {"datasource", "run"}


def test_panels_do_not_cover_one_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
