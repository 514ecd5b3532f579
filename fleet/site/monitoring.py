"""What Prometheus asks, and whom it tells: pure functions of the cluster spec, used by the role prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.site.topology import metrics_targets


def scrape_targets(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what Prometheus scrapes.

    Returns:
        `[{"scrape", "target", "labels"}]`: the name of the scrape configuration, `address:port`, and the labels that
        tell the target's series apart. A task's `job` is TensorFlow's, not the scrape configuration's.
    """
    tasks = [
        {
            "scrape": "trainer",
            "target": listen_address(each),
            "labels": {"job": each["job"], "task": each["task"], "host": each["host"]},
        }
        for each in metrics_targets(spec)
    ]
    services = [
        {"scrape": name, "target": listen_address(each), "labels": {"host": host}}
        for name, key in (("node", "node_exporter"), ("prometheus", "prometheus"), ("alertmanager", "alertmanager"))
        for host, each in spec[key].items()
    ]
    return tasks + services


def listen_address(endpoint: Mapping[str, Any]) -> str:
    """Return `address:port`, with brackets around an IPv6 address."""
    address = endpoint["address"]
    return f"{f'[{address}]' if ':' in address else address}:{endpoint['port']}"
