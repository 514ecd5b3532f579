"""A training behind the tables: each task in a network of its own, and all its connections counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.networks import Networks
from fleet.site.topology import cluster_spec, host_tasks
from tests.hosts import ROOT
from tests.rendered_firewall import table

pytest.importorskip("tensorflow")
MINUTES = 6
ATTACK_SECONDS = 60  # importing TensorFlow takes some of them
# Beside the tables: who sent a first packet to which port, whatever becomes of it.
SEEN = """
table inet seen {
  set calls { type ipv4_addr . inet_service; flags dynamic; size 65536; }
  chain input {
    type filter hook input priority -20;
    iif != lo tcp flags & (syn | ack) == syn add @calls { ip saddr . tcp dport }
  }
}
"""
# Runs a graph on another cluster's server, as any program may that reaches it.
ATTACK = """
import sys
import tensorflow as tf
target, secret, planted = sys.argv[1:]
tf.config.experimental_connect_to_host(target, job_name="worker")
with tf.device("/job:worker/task:0"):
    tf.io.write_file(planted, "planted")
    print("read", tf.io.read_file(secret).numpy().decode(), flush=True)
"""
PS = {"chief": ["c"], "ps": ["p0", "p1"], "worker": ["w0", "w1"]}
CALLS_OF_PS = {
    *(("chief", "ps"), ("chief", "worker")),
    *(("ps", "chief"), ("ps", "ps"), ("ps", "worker")),
    *(("worker", "chief"), ("worker", "ps")),
}
SETUPS: dict[str, tuple[dict[str, list[str]], dict[str, Any], set[tuple[str, str]]]] = {
    "parameter servers": (PS, {}, CALLS_OF_PS),
    "data service": (
        PS | {"data": ["d0", "d1"]},
        {"input": "service", "input_sharding": "dynamic"},
        # The dispatcher runs on the chief's host.
        CALLS_OF_PS | {("worker", "dispatcher"), ("data", "dispatcher"), ("chief", "data"), ("worker", "data")},
    ),
    "in step": (
        {"chief": ["c"], "worker": ["w0", "w1"]},
        {"strategy": "multi_worker_mirrored"},
        {("worker", "chief"), ("chief", "worker"), ("worker", "worker")},
    ),
}


class Training:
    """The tasks of a cluster, a host each, with the hosts' tables."""

    def __init__(
        self, groups: dict[str, list[str]], settings: dict[str, Any], directory: Path, family: int = 4
    ) -> None:
        self.groups, self._directory = groups, directory
        self.hosts = {host: job for job, hosts in groups.items() for host in hosts}
        self.networks = Networks(["switch", *self.hosts, "stranger"])
        run = {
            "program": "trainer.examples.digits:Digits",
            "run": "walled",
            "steps": 200,
            "checkpoint_steps": 100,
            "evaluation": "inline",
            "shared_dir": str(directory),
            **settings,
        }
        (directory / "run.json").write_text(json.dumps(run))
        self.address = self.networks.address if family == 4 else self.networks.address6
        hostvars = {host: {"ansible_host": self.address(host), "trainer_run": run} for host in self.hosts}
        spec = cluster_spec(groups, hostvars)
        self.tasks = {task["name"]: task for host in self.hosts for task in host_tasks(spec, host)}
        for host in self.hosts:
            self._nft(host, SEEN)
            self._nft(host, table(groups, hostvars, host))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name, task in self.tasks.items():
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("TF_", "TRAINER_"))}
            environment |= {
                "TF_CONFIG": task["tf_config"],
                "TRAINER_SETTINGS": str(self._directory / "run.json"),
                "TF_USE_LEGACY_KERAS": "1",
                "GRPC_FAIL_FAST": "use_caller",
            }
            command = [*self.networks.under(task["host"]), sys.executable, "-m", "trainer"]
            with self._log(name).open("wb") as log:
                self._processes[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def until_trains(self) -> None:
        deadline = time.monotonic() + 60 * MINUTES
        while "steps/s" not in self._log("chief-0").read_text():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def wait(self, name: str) -> int:
        deadline = time.monotonic() + 60 * MINUTES
        while (code := self._processes[name].poll()) is None:
            if time.monotonic() > deadline:
                return -1
            time.sleep(0.5)
        return code

    def end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.networks.end()

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{self._log(name).read_text()[-1500:]}" for name in self._processes)

    def calls(self) -> set[tuple[str, str]]:
        """Who called whom: the caller's host is a job's, and the port is."""
        jobs = {self.networks.address(host): job for host, job in self.hosts.items()}
        endpoints = {(task["host"], task["port"]): task["job"] for task in self.tasks.values()}
        found = set()
        for host in self.hosts:
            listing = self._list(host, "set", "inet", "seen", "calls")
            [elements] = [each["set"].get("elem", []) for each in listing if "set" in each]
            found |= {(jobs[address], endpoints[host, port]) for address, port in (each["concat"] for each in elements)}
        return found

    def refused(self) -> dict[str, int]:
        """How many packets each host's table dropped or refused."""
        found = {}
        for host in self.hosts:
            listed = self._list(host, "table", "inet", "psfleet")
            rules = [each["rule"]["expr"] for each in listed if "rule" in each]
            counters = [part["counter"]["packets"] for rule in rules for part in rule if "counter" in part]
            found[host] = sum(counters)
        return found

    def open(self, host: str) -> None:
        self._nft(host, "delete table inet psfleet")

    def _nft(self, host: str, text: str) -> None:
        command = [*self.networks.under(host), "nft", "-f", "-"]
        subprocess.run(command, input=text, capture_output=True, text=True, check=True)

    def _list(self, host: str, *what: str) -> list[dict[str, Any]]:
        command = [*self.networks.under(host), "nft", "--json", "list", *what]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found: list[dict[str, Any]] = json.loads(output)["nftables"]
        return found

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Training, set[tuple[str, str]]]]:
    groups, settings, calls = SETUPS[request.param]
    training = Training(groups, settings, tmp_path)
    try:
        yield training, calls
    finally:
        training.end()


def test_a_training_needs_the_ports_that_are_open_and_no_other(setup: tuple[Training, set[tuple[str, str]]]) -> None:
    training, calls = setup
    training.start()
    assert training.wait("chief-0") == 0, training.logs()
    assert training.calls() == calls
    assert sum(training.refused().values()) == 0, training.refused()


def attack(training: Training, source: str, task: str, directory: Path) -> tuple[bool, bool]:
    """Say whether a graph that a host sends to a task read a file there, and wrote one."""
    secret, planted = directory / "secret", directory / "planted"
    secret.write_text("a secret")
    target = f"{training.networks.address(training.tasks[task]['host'])}:{training.tasks[task]['port']}"
    command = [*training.networks.under(source), sys.executable, "-c", ATTACK, target, str(secret), str(planted)]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=ATTACK_SECONDS).stdout
    except subprocess.TimeoutExpired:
        output = ""
    return "read a secret" in output, planted.exists()


def test_a_stranger_runs_no_graph_on_a_worker(tmp_path: Path) -> None:
    shared, files = tmp_path / "shared", tmp_path / "files"
    shared.mkdir()
    files.mkdir()
    training = Training(PS, {"steps": 10_000_000, "checkpoint_steps": 0}, shared)
    try:
        training.start()
        training.until_trains()
        assert attack(training, "stranger", "worker-0", files) == (False, False)
        training.open("w0")
        assert attack(training, "stranger", "worker-0", files) == (True, True)
    finally:
        training.end()
