"""What Prometheus asks, and whom it tells: pure functions of the cluster spec, used by the role prometheus."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cluster_spec import metrics_targets


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


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"listen_address": listen_address, "scrape_targets": scrape_targets}
