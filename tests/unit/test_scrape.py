"""What a task tells Prometheus, read with the client library's own parser."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import until
from trainer.cluster.member import MemberState
from trainer.core.settings.config import Config
from trainer.core.states import Phase, RunState
from trainer.run.directory import RunDirectory
from trainer.telemetry import metrics
from trainer.telemetry import progress as reporting
from trainer.telemetry.counters import Counters, Histogram, MemberHealth, NewestCheckpoint
from trainer.telemetry.events import FAULTS
from trainer.telemetry.goodput import KINDS, Ledger
from trainer.telemetry.gpu_use import GpuUse
from trainer.telemetry.metrics import MAX_METRICS, METRICS, STATES, MetricsCollector
from trainer.telemetry.outlets import prometheus as scrape
from trainer.telemetry.outlets.prometheus import ADDRESS, LISTENER, answer, inherit_listener, listen
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/observing.md"
MEMBER_STATES = tuple(state.value for state in MemberState)


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    """A run's, without TensorBoard's files: they need TensorFlow."""
    monkeypatch.setattr(reporting, "EventWriter", MagicMock())
    config = Config.from_dict({"program": "mine:One", "run": "a", "steps": 900, "shared_dir": str(tmp_path)})
    progress = Progress(config, RunDirectory(tmp_path, "a"), Notifier())
    yield progress
    progress.close()


@pytest.fixture
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for what nvidia-smi says: there is no GPU."""
    monkeypatch.setattr(metrics, "gpu_use", lambda: GpuUse(0.5, 2**30))


def full(progress: Progress) -> MetricsCollector:
    """Return what is reported of a run of which everything is known."""
    counters = progress.counters
    progress.enter(RunState.TRAINING)
    progress.phase(Phase.TRAINING)
    progress.trained(120, 50.0, {"loss": 0.5, "accuracy": 0.75})
    counters.workers, counters.step_examples = ["worker-0", "worker-3"], 32
    counters.returned(0, 100, 0.4, (90, 3), 0.3)
    counters.returned(1, 20, 0.9, (40, 5), 0.1)
    counters.update_wait_seconds = 0.25
    counters.tables = {"items": {"rows": 90, "new": 100, "evicted": 10, "refused": 3, "bytes": 9000}}
    progress.status.lookups = {
        "items": {"by_ps": {"ps-0": 0.9, "ps-1": 0.1}, "hot": [[7, 0.4, "ps-0"], [8, 0.02, "ps-1"]]}
    }
    counters.files = {"pass": 2, "done": 17, "under_way": 3, "found": 40}
    counters.save_seconds.add(0.7)
    counters.restore_seconds = 1.5
    counters.checkpoint = NewestCheckpoint(100, 1_700_000_000.0, 4096)
    progress.evaluated(100, {"loss": 0.4})
    counters.ways = {"worker-0": {"ps-0": "broken (no answer in 4 s)", "ps-1": "ok"}}
    counters.members = lambda: {"worker-0": MemberHealth("training", 0.3), "ps-0": MemberHealth("given up", 40.0)}
    counters.drained = lambda: ["ps-0"]
    progress.events.write("member-lost", task="worker-0")
    progress.events.write("save-failed")
    collector = MetricsCollector(MEMBER_STATES, restarts=2, release="abc")
    collector.report_on("a", counters, progress)
    until(lambda: (progress.events.counts or {}).get("save-failed") and counters.room, "the path is looked at")
    return collector


def families(collector: MetricsCollector) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(collector)
    return {found.name: found for found in text_string_to_metric_families(generate_latest(registry).decode())}


def samples(collector: MetricsCollector) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels besides the run."""
    found = {}
    for family in families(collector).values():
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "run"}
            found[(sample.name, *labels.values())] = sample.value
    return found


@pytest.mark.usefixtures("_gpus")
def test_each_metric_has_the_type_the_meaning_and_the_labels_of_the_table(progress: Progress) -> None:
    found = families(full(progress))
    for metric in METRICS.values():
        family = found[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.type, metric.meaning)
        for sample in family.samples:
            expected = {
                *metric.labels,
                *(("run",) if metric.of_run else ()),
                *(("le",) if "le" in sample.labels else ()),
            }
            assert set(sample.labels) == expected, sample
            assert sample.labels.get("run", "a") == "a"
    assert len(found) == len(METRICS)


def test_names_are_as_prometheus_wants_them() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"psfleet(_[a-z]+)+", name)
        assert name.endswith("_total") == (metric.type == "counter"), name
        assert not re.search(r"_(ms|kb|mib|percent|count|sum|bucket)$", name), name
        assert not {"job", "instance", "task"} & set(metric.labels), "the scraper's own"
        assert not metric.meaning[0].islower()
        assert not metric.meaning.endswith(".")


def test_numbers_are_those_of_the_run(progress: Progress) -> None:
    found = samples(full(progress))
    assert found["psfleet_step",] == 120
    assert found["psfleet_run_steps",] == 900
    assert {
        state: found["psfleet_run_state", state.value] for state in STATES if found["psfleet_run_state", state]
    } == {RunState.TRAINING: 1.0}
    assert found["psfleet_steps_total",] == 120
    assert found["psfleet_examples_total",] == 120 * 32
    assert (found["psfleet_worker_steps_total", "worker-0"], found["psfleet_worker_steps_total", "worker-3"]) == (
        100,
        20,
    )
    assert found["psfleet_training_metric", "loss"] == 0.5
    assert found["psfleet_evaluation_metric", "loss"] == 0.4
    assert found["psfleet_faults_total", "member-lost"] == 1
    assert found["psfleet_faults_total", "ps-lost"] == 0
    assert {kind for name, *rest in found if name == "psfleet_faults_total" for kind in rest} == set(FAULTS)
    assert found["psfleet_checkpoint_failures_total",] == 1
    assert found["psfleet_member_state", "ps-0", "given up"] == 1
    assert sum(found["psfleet_member_state", "ps-0", state] for state in MEMBER_STATES) == 1
    assert found["psfleet_member_silence_seconds", "ps-0"] == 40
    assert (found["psfleet_member_drained", "ps-0"], found["psfleet_member_drained", "worker-0"]) == (1, 0)
    assert found["psfleet_way_works", "worker-0", "ps-0"] == 0
    assert found["psfleet_way_works", "worker-0", "ps-1"] == 1
    assert found["psfleet_table_ps_rows_ratio", "ps-0", "items"] == 0.9
    assert found["psfleet_table_hot_key_ratio", "items"] == 0.4
    assert found["psfleet_task_restarts_total",] == 2
    assert 0 < found["psfleet_shared_path_free_bytes",] < found["psfleet_shared_path_size_bytes",]
    ledger = progress.ledger.as_dict()
    for kind in KINDS:
        assert found["psfleet_time_seconds_total", kind] == pytest.approx(ledger[kind], abs=1)


def test_a_call_counts_as_its_steps(progress: Progress) -> None:
    found = samples(full(progress))
    assert found["psfleet_step_seconds_count",] == found["psfleet_steps_total",]
    assert found["psfleet_step_seconds_sum",] == pytest.approx(0.4 + 0.9)
    assert found["psfleet_step_seconds_bucket", "0.0025"] == 0
    assert found["psfleet_step_seconds_bucket", "0.005"] == 100
    assert found["psfleet_step_seconds_bucket", "0.05"] == 120


def test_a_histogram_keeps_what_is_above_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]


def test_a_server_tells_only_of_itself() -> None:
    assert set(families(MetricsCollector(restarts=1))) == {"psfleet_build_info", "psfleet_task_restarts"}


@pytest.mark.parametrize("wheel", ["tensorflow", "tensorflow_cpu"])
def test_tensorflows_version_is_that_of_either_wheel(
    wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{wheel}-2.21.9.dist-info").mkdir()
    (tmp_path / f"{wheel}-2.21.9.dist-info/METADATA").write_text(f"Name: {wheel}\nVersion: 2.21.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert metrics.tensorflow_version() == "2.21.9"


def test_what_is_not_known_is_not_told(tmp_path: Path) -> None:
    collector = MetricsCollector()
    collector.report_on("a", Counters())
    assert not [name for name in families(collector) if name.startswith(("psfleet_evaluation", "psfleet_checkpoint"))]


def test_faults_of_earlier_processes_are_counted_before_any_are_told(tmp_path: Path, progress: Progress) -> None:
    full(progress)
    progress.close()
    config = Config.from_dict({"program": "mine:One", "run": "a", "steps": 900, "shared_dir": str(tmp_path)})
    later = Progress(config, RunDirectory(tmp_path, "a"), Notifier(), waits=True)
    collector = MetricsCollector()
    collector.report_on("a", later.counters, later)
    assert "psfleet_faults" not in families(collector)  # a number that begins at 0 would look like new faults
    later.begin()
    until(lambda: later.events.counts, "the events are counted")
    assert samples(collector)["psfleet_faults_total", "save-failed"] == 1
    later.close()


def test_time_is_counted_from_what_the_process_before_wrote(tmp_path: Path, progress: Progress) -> None:
    """What was scraped last is more than what was written: a counter that falls by a little counts in full again."""
    record = {"productive": 36_000.0, "elapsed": 36_000.0, "step": 9, "highest_step": 9, "until": time.time() - 20}
    progress.ledger = Ledger({**record, "ended": False})
    collector = MetricsCollector()
    collector.report_on("a", progress.counters, progress)
    found = samples(collector)
    assert found["psfleet_time_seconds_total", "productive"] == 0
    assert found["psfleet_time_seconds_total", "down"] == pytest.approx(20, abs=5)


def test_a_program_with_a_thousand_metrics_has_some_of_them_told(progress: Progress) -> None:
    progress.trained(1, 1.0, {f"class_{number}": 0.5 for number in range(1000)})
    collector = MetricsCollector()
    collector.report_on("a", progress.counters, progress)
    assert len([key for key in samples(collector) if key[0] == "psfleet_training_metric"]) == MAX_METRICS


def test_the_page_lists_what_is_told() -> None:
    rows = re.findall(r"^\| `(psfleet_\w+)` \| (\w+) \|(.*?)\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}
    assert listed == {name: (each.type, each.labels, each.meaning) for name, each in METRICS.items()}


def get(address: str, timeout: float = 5) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout) as answered:
        return str(answered.read().decode())


def serving(listener: socket.socket, **labels: Any) -> subprocess.Popen[bytes]:
    """Have a process of its own answer, as a supervisor's child does."""
    code = "import os, threading; from trainer.telemetry.metrics import MetricsCollector\n"
    code += "from trainer.telemetry.outlets.prometheus import *\n"
    code += "serve(listen(os.environ), MetricsCollector(restarts=3)); threading.Event().wait()"
    environment = {"PYTHONPATH": str(ROOT), **inherit_listener(listener)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[listener.fileno()])


def test_a_scrape_between_two_processes_waits_for_the_next() -> None:
    listener = listen({ADDRESS: "127.0.0.1:0"})
    assert listener is not None
    address = "{}:{}".format(*listener.getsockname())
    first = serving(listener)
    assert "psfleet_task_restarts_total 3.0" in get(address, timeout=30)
    first.kill()
    first.wait()
    waits = socket.create_connection(listener.getsockname(), timeout=30)
    waits.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    second = serving(listener)
    assert b"200 OK" in waits.recv(100)
    assert "process_resident_memory_bytes" in get(address)
    second.kill()
    second.wait()
    listener.close()
    again = listen({ADDRESS: address})  # at once, with connections that linger
    assert again is not None
    again.close()


def test_a_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(scrape, "PATIENCE_SECONDS", 0.2)
    listener = listen({ADDRESS: "[::1]:0"})
    assert listener is not None
    app = lambda environ, start: (start("200 OK", []), [b"here"])[1]  # noqa: E731
    threading.Thread(target=answer, args=(listener, app), daemon=True).start()
    where = listener.getsockname()[:2]
    silent = socket.create_connection(where, timeout=5)
    assert silent.recv(10) == b""
    assert get(f"[::1]:{where[1]}") == "here"


def test_a_task_goes_on_without_what_it_needs_to_be_scraped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert listen({}) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = "{}:{}".format(*taken.getsockname())
        assert listen({ADDRESS: where}) is None
    assert f"this task can not be scraped at {where}: " in caplog.text
    assert listen({ADDRESS: "192.0.2.1:2700"}) is None  # no address of this machine
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert listen({ADDRESS: "127.0.0.1:0"}) is None
    assert "prometheus_client" in caplog.text


def test_the_environment_names_the_socket_that_is_inherited() -> None:
    assert inherit_listener(None) == {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert inherit_listener(listener) == {LISTENER: str(listener.fileno())}
        assert listener.get_inheritable()
