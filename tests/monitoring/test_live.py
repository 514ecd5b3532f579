"""Real tasks, asked by a real Prometheus that tells a real Alertmanager: faults make alerts fire, and they clear.

All on the loopback interface, and as the roles configure it. One thing is made up: what systemd says of the
coordinator's unit, as there is none (tests/infra/test_monitoring.py has it).
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.networks import free_ports
from tests.monitoring.test_configurations import alertmanager
from tests.monitoring.tools import ROOT, rendered, tool
from tests.receiver import receiver
from tests.waiting import until

TASKS = ("chief-0", "ps-0", "worker-0", "worker-1")  # in the order of their ports
THRESHOLDS = {
    "prometheus_no_step_seconds": 15,
    "prometheus_away_seconds": 10,
    "prometheus_down_seconds": 15,
    "prometheus_save_failure_seconds": 60,
}
UNIT = 'node_systemd_unit_state{name="trainer@chief-0.service",state="active",type="notify"} 1\n'
pytestmark = pytest.mark.timeout(900)


class Cluster:
    """The processes, and what Prometheus and Alertmanager say of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard: list[tuple[str, str]] = []
        self.port = free_ports(len(TASKS) + 3, 21000)
        self.prometheus, self.alertmanager, self.exporter = range(self.port + len(TASKS), self.port + len(TASKS) + 3)

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), receiver(self.heard)))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            self.trainer = stack.enter_context(ended(self._trainer()))
            for command in self._services(server.server_port):
                stack.enter_context(ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)))
            yield self

    def _trainer(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trainer", "local", "--workers", "2", "--ps", "1", "--no-evaluator"]
        command += ["--program", "slow:Slow", "--steps", "1000000", "--checkpoint-seconds", "5", "--run", "one"]
        command += ["--shared-dir", str(self.directory), "--metrics-port", str(self.port)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "infra" / "programs")])
        with (self.directory / "log").open("w") as log:
            environment = os.environ | {"PYTHONPATH": path, "TF_USE_LEGACY_KERAS": "1"}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _services(self, receiver: int) -> list[list[str]]:
        """Write what the roles write; returns the commands."""
        texts = self.directory / "texts"
        texts.mkdir()
        (texts / "systemd.prom").write_text(UNIT)
        (self.directory / "alerts.yml").write_text(rendered("prometheus", "alerts.yml.j2", THRESHOLDS))
        targets = [
            {
                "scrape": "trainer",
                "target": f"127.0.0.1:{self.port + number}",
                "labels": {"job": task.partition("-")[0], "task": task, "host": "here"},
            }
            for number, task in enumerate(TASKS)
        ]
        targets.append({"scrape": "node", "target": f"127.0.0.1:{self.exporter}", "labels": {"host": "here"}})
        values = {
            "prometheus_targets": targets,
            "prometheus_alertmanagers": [f"127.0.0.1:{self.alertmanager}"],
            "__prometheus_alerts": str(self.directory / "alerts.yml"),
        }
        (self.directory / "prometheus.yml").write_text(rendered("prometheus", "prometheus.yml.j2", values))
        receivers = [{"name": "team", "webhook_configs": [{"url": f"http://127.0.0.1:{receiver}/"}]}]
        alertmanager(self.directory / "alertmanager.yml", alertmanager_receivers=receivers)
        return [
            [
                tool("prometheus-node-exporter"),
                *(
                    "--collector.disable-defaults",
                    "--collector.textfile",
                    f"--collector.textfile.directory={texts}",
                ),
                f"--web.listen-address=127.0.0.1:{self.exporter}",
            ],
            [
                # Its templates lie at a place of their own, which a package that is only unpacked has elsewhere.
                *("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"'),
                str(Path(tool("prometheus-alertmanager")).parents[1] / "share"),
                tool("prometheus-alertmanager"),
                f"--config.file={self.directory}/alertmanager.yml",
                f"--storage.path={self.directory}/alertmanager",
                f"--web.listen-address=127.0.0.1:{self.alertmanager}",
                "--cluster.listen-address=",
            ],
            [
                tool("prometheus"),
                f"--config.file={self.directory}/prometheus.yml",
                f"--storage.tsdb.path={self.directory}/prometheus",
                f"--web.listen-address=127.0.0.1:{self.prometheus}",
            ],
        ]

    def ask(self, port: int, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def query(self, expression: str) -> float | None:
        found = self.ask(self.prometheus, f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        result = found["data"]["result"] if found else []
        return float(result[0]["value"][1]) if result else None

    def firing(self) -> set[tuple[str, str]]:
        """Return the alerts that Alertmanager has, each with whom it is of."""
        alerts = self.ask(self.alertmanager, "/api/v2/alerts")
        assert alerts is not None, "Alertmanager does not answer"
        return {
            (alert["labels"]["alertname"], alert["labels"].get("member") or alert["labels"].get("task", ""))
            for alert in alerts
        }

    def fires_and_clears(self, what: str, revert: Callable[[], None], *expected: tuple[str, str]) -> None:
        """Wait for alerts, take the fault back, wait for their end; print a row for each."""
        began, fired, cleared = time.monotonic(), {}, {}

        def there() -> bool:
            for alert in self.firing() & set(expected):
                fired.setdefault(alert, time.monotonic() - began)
            return set(fired) == set(expected)

        def gone() -> bool:
            for alert in set(expected) - self.firing():
                cleared.setdefault(alert, time.monotonic() - ended_at)
            return set(cleared) == set(expected)

        try:
            until(there, f"{expected} after {what}; there are {sorted(fired)}", 240, 0.5)
        finally:
            revert()
        ended_at = time.monotonic()
        until(gone, f"the end of {expected}", 300, 0.5)
        for name, whose in expected:
            print(f"| {what} | `{name}` {whose} | {fired[name, whose]:.0f} | {cleared[name, whose]:.0f} |", flush=True)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("live")
    with Cluster(directory).running() as cluster:
        steps = "rate(psfleet_steps_total[1m]) > 1"
        until(lambda: cluster.query(steps), f"a training: {(directory / 'log').read_text()[-3000:]}", 240, 0.5)
        yield cluster


def processes(port: int) -> list[int]:
    """Return a task's processes: who has the socket where it is scraped."""
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]" for row in listening if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(descriptor.readlink()) in sockets for descriptor in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def test_all_are_up_and_nothing_is_wrong(cluster: Cluster) -> None:
    until(lambda: cluster.query("sum(up)") == len(TASKS) + 1, "all targets are up", 60, 0.5)
    until(lambda: cluster.ask(cluster.alertmanager, "/api/v2/status"), "Alertmanager answers", 60, 0.5)
    assert cluster.query("psfleet:run_wanted") == 1
    until(lambda: not cluster.firing(), "no alert", 120, 0.5)


def test_workers_that_are_frozen(cluster: Cluster) -> None:
    frozen = [pid for task in (2, 3) for pid in processes(cluster.port + task)]
    assert len(frozen) == 2
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)

    def thaw() -> None:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    cluster.fires_and_clears(
        "SIGSTOP of both workers",
        thaw,
        ("PsfleetMemberAway", "worker-0"),
        ("PsfleetMemberAway", "worker-1"),
        ("PsfleetTargetDown", "worker-0"),
        ("PsfleetTargetDown", "worker-1"),
        ("PsfleetNoStep", ""),
    )
    for alert in ("PsfleetMemberAway", "PsfleetNoStep"):
        until(lambda alert=alert: {("firing", alert), ("resolved", alert)} <= set(cluster.heard), "both are heard", 120)


def test_a_checkpoint_that_cannot_be_saved(cluster: Cluster) -> None:
    checkpoints = cluster.directory / "runs" / "one" / "checkpoints"
    aside = checkpoints.with_name("aside")
    checkpoints.rename(aside)
    checkpoints.write_text("a file in the place of the directory")

    def revert() -> None:
        checkpoints.unlink()
        aside.rename(checkpoints)

    cluster.fires_and_clears("a file in the place of `checkpoints/`", revert, ("PsfleetCheckpointSaveFailed", ""))
