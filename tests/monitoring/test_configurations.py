"""What the roles write is what Prometheus, Alertmanager and the node exporter take."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from fleet.site.monitoring import listen_address, scrape_targets
from fleet.site.topology import cluster_spec
from tests.monitoring.promql import NODE
from tests.monitoring.tools import ROOT, defaults, rendered, run, tool

GROUPS = {
    "chief": ["head"], "ps": ["ps-0"], "worker": ["worker-0"], "prometheus": ["head"], "alertmanager": ["head"],
}  # fmt: skip


def spec(address: str) -> dict[str, Any]:
    """Return a cluster whose addresses begin so."""
    hosts = {host for group in GROUPS.values() for host in group}
    hostvars = {
        host: {"ansible_host": f"{address}{number}", "cluster_shared_dir": "/srv/trainer", "trainer_run": {}}
        for number, host in enumerate(sorted(hosts), 1)
    }
    return cluster_spec(GROUPS, hostvars)


@pytest.mark.parametrize("address", ["192.0.2.", "2001:db8::"])
def test_prometheus_takes_its_configuration(tmp_path: Path, address: str) -> None:
    cluster = spec(address)
    addresses = [listen_address(each) for each in cluster["alertmanager"].values()]
    (tmp_path / "alerts.yml").write_text(rendered("prometheus", "alerts.yml.j2", {}))
    text = rendered(
        "prometheus",
        "prometheus.yml.j2",
        {
            "prometheus_targets": scrape_targets(cluster),
            "prometheus_alertmanagers": addresses,
            "__prometheus_alerts": str(tmp_path / "alerts.yml"),
        },
    )
    (tmp_path / "prometheus.yml").write_text(text)
    checked = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    written = yaml.safe_load(text)
    asked = {
        (job["job_name"], target, static["labels"]["host"])
        for job in written["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert asked == {(each["scrape"], each["target"], each["labels"]["host"]) for each in scrape_targets(cluster)}
    assert len(asked) == 3 + 3 + 2  # tasks, hosts, the two services
    assert written["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == addresses


def alertmanager(path: Path, **settings: Any) -> dict[str, Any]:
    """Return Alertmanager's configuration, written as the role has it and taken by amtool."""
    loader = DataLoader()
    variables = defaults("alertmanager") | settings
    variables |= loader.load_from_file(
        str(ROOT / "roles" / "alertmanager" / "vars" / "main.yml"), trusted_as_template=True
    )
    task = (ROOT / "roles" / "alertmanager" / "tasks" / "main.yml").read_text()
    (content,) = re.findall(r"\{\{ __alertmanager_config.*?\}\}", task)
    path.write_text(Templar(loader=loader, variables=variables).template(trust_as_template(content)))
    checked = run("amtool", "check-config", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    written: dict[str, Any] = yaml.safe_load(path.read_text())
    return written


def test_alertmanager_takes_its_configuration_without_anybody_to_tell(tmp_path: Path) -> None:
    assert alertmanager(tmp_path / "config.yml")["receivers"] == [{"name": "none"}]


def test_alertmanager_takes_receivers_and_routes(tmp_path: Path) -> None:
    receivers = [
        {"name": "team", "email_configs": [{"to": "team@example.org"}]},
        {"name": "pager", "webhook_configs": [{"url": "https://pager.example.org/{{ not a template }}"}]},
    ]
    config = alertmanager(
        tmp_path / "config.yml",
        alertmanager_receivers=receivers,
        alertmanager_routes=[{"receiver": "pager", "matchers": ["severity = critical"], "continue": True}],
        alertmanager_global={"smtp_smarthost": "mail.example.org:587", "smtp_from": "psfleet@example.org"},
    )
    assert config["receivers"] == receivers
    assert config["route"]["receiver"] == "team"


@pytest.mark.parametrize(
    ("labels", "receiver"), [({"severity": "critical"}, "pager"), ({"severity": "warning"}, "team")]
)
def test_what_is_critical_goes_where_its_route_says(tmp_path: Path, labels: dict[str, str], receiver: str) -> None:
    alertmanager(
        tmp_path / "config.yml",
        alertmanager_receivers=[{"name": "team"}, {"name": "pager"}],
        alertmanager_routes=[{"receiver": "pager", "matchers": ["severity = critical"]}],
    )
    arguments = [f"{name}={value}" for name, value in labels.items()]
    done = run("amtool", "config", "routes", "test", f"--config.file={tmp_path / 'config.yml'}", *arguments)
    assert done.stdout.strip() == receiver


def test_the_node_exporter_tells_what_is_asked(tmp_path: Path) -> None:
    """All but what systemd says of units, which needs systemd: the lab has it (tests/infra/test_monitoring.py)."""
    (tmp_path / "psfleet-gpus.prom").write_text("psfleet_gpus 1\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [tool("prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--collector.textfile.directory={tmp_path}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as exporter:
        try:
            text = answered(f"http://127.0.0.1:{port}/metrics")
        finally:
            exporter.kill()
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert set(NODE) - names == {"node_systemd_unit_state"}
    assert "psfleet_gpus" in names


def answered(url: str) -> str:
    end = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.1)
