"""Names, types and units are as Prometheus's own linter wants them (`promtool check metrics`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tests.monitoring.tools import ROOT, tool
from trainer.telemetry.metrics import METRICS, Metric

FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
GPU = "0, GPU-aa, NVIDIA H100, 98, 1000, 81559, 61, 412.25, 0x0000000000000048"


class Shown:
    """A sample of each metric, as a task gives them to the client library."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = list(metrics)

    def collect(self) -> Iterable[object]:
        for metric in self.metrics:
            family = FAMILIES[metric.type](metric.name, metric.meaning, labels=["run", *metric.labels])
            values = ["a", *("x" for _ in metric.labels)]
            if metric.type == "histogram":
                family.add_metric(values, [("1.0", 1.0), ("+Inf", 2.0)], 3.0)
            else:
                family.add_metric(values, 1.0)
            yield family


def complaints(text: str) -> str:
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert bool(done.stderr) == bool(done.returncode), done
    return done.stderr


def exposed(metrics: Iterable[Metric]) -> str:
    registry = CollectorRegistry()
    registry.register(Shown(metrics))
    return str(generate_latest(registry).decode())


def test_what_tasks_tell_is_named_as_prometheus_wants_it() -> None:
    assert complaints(exposed(METRICS.values())) == ""


def test_what_a_gpus_host_tells_is_named_as_prometheus_wants_it(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{GPU}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    script = ROOT / "roles" / "node_exporter" / "files" / "psfleet-gpu-metrics"
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    subprocess.run([sys.executable, script, tmp_path / "gpus.prom", "1"], check=True, env=environment, timeout=60)
    text = (tmp_path / "gpus.prom").read_text()
    assert "psfleet_gpu_throttled{" in text
    assert complaints(text) == ""


def test_a_name_that_is_against_the_conventions_is_found() -> None:
    wrong = [Metric("psfleet_restore_milliseconds", "gauge", "x"), Metric("psfleet_saves_total", "gauge", "x")]
    text = complaints(exposed(wrong))
    assert "psfleet_restore_milliseconds" in text
    assert "psfleet_saves_total" in text
