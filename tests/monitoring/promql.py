"""Which metrics an expression of Prometheus asks for, and with which labels: a reader, not a judge of its grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trainer.cluster.member import MemberState
from trainer.telemetry.events import FAULTS
from trainer.telemetry.goodput import KINDS
from trainer.telemetry.metrics import METRICS, STATES

# Labels that the scrape configuration gives, and those of every metric of a run.
TARGET_LABELS = {"job", "task", "host", "instance", "run"}
# Of the node exporter, as Debian has it; tests/monitoring/test_configurations.py asks a real one.
NODE = {
    "node_cpu_seconds_total": {"cpu", "mode"},
    "node_memory_MemAvailable_bytes": set(),
    "node_network_receive_bytes_total": {"device"},
    "node_network_transmit_bytes_total": {"device"},
    "node_systemd_unit_state": {"name", "state", "type"},
    "node_textfile_mtime_seconds": {"file"},
    "node_time_seconds": set(),
    "node_timex_maxerror_seconds": set(),
    "node_timex_offset_seconds": set(),
    "node_timex_sync_status": set(),
}
# Prometheus's own.
OWN: dict[str, set[str]] = {"up": set(), "ALERTS": {"alertname", "alertstate"}}
VALUES = {
    ("psfleet_member_state", "state"): {state.value for state in MemberState},
    ("psfleet_run_state", "state"): {state.value for state in STATES},
    ("psfleet_time_seconds_total", "kind"): set(KINDS),
    ("psfleet_faults_total", "kind"): set(FAULTS),
}
WORDS = {"and", "or", "unless", "by", "on", "ignoring", "without", "group_left", "group_right", "offset", "bool"}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


def trainer_metrics() -> dict[str, set[str]]:
    """Return the series of psfleet's own metrics, with their labels; a histogram has three."""
    series = {}
    for metric in METRICS.values():
        if metric.type == "histogram":
            series[f"{metric.name}_bucket"] = {*metric.labels, "le"}
            series[f"{metric.name}_sum"] = series[f"{metric.name}_count"] = set(metric.labels)
        else:
            series[metric.name] = set(metric.labels)
    return series


def process_metrics() -> dict[str, set[str]]:
    """Return what the client library tells of the process."""
    found = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        sample.name: set(sample.labels)
        for family in found
        if family.name.startswith(("process_", "python_"))
        for sample in family.samples
    }


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each metric that is asked for, with its matchers: label, operator, value."""
    text = re.sub(r"\b(by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)", " ", expression)
    parts = re.split(r"(\{[^}]*\})", text)
    text = "".join(part if part.startswith("{") else re.sub(r'"[^"]*"', '""', part) for part in parts)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    text = re.sub(r"\boffset\s+\w+", " ", text)
    for found in SELECTOR.finditer(text):
        name, matchers = found[1], found[2]
        before, after = text[: found.start()], text[found.end() :].lstrip()
        if name in WORDS or after.startswith("(") or re.search(r"[\d.]$", before):
            continue
        yield name, MATCHER.findall(matchers or "")


def complaints(expression: str, known: Mapping[str, set[str]]) -> list[str]:
    """Return what an expression asks for that nobody tells."""
    found: list[str] = []
    for name, matchers in selectors(expression):
        if name not in known:
            found.append(f"nobody tells {name}")
            continue
        for label, operator, value in matchers:
            if label not in known[name] | TARGET_LABELS:
                found.append(f"{name} has no label {label}")
            values = VALUES.get((name, label))
            asked: Any = value.split("|") if operator in ("=~", "!~") else [value]
            if values is not None and not value.startswith("$"):
                found += [f"{name} has no {label} {each}" for each in asked if each not in values]
    return found
