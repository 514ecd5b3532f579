"""What each task takes of its machine: its own lines, and those of workers that may write nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from trainer.run.directory import RunDirectory
from trainer.telemetry import resources
from trainer.telemetry.resources import Workers, record_resources


@pytest.fixture
def scraped() -> Iterator[str]:
    """Where this process is scraped, with what the client library knows of it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def test_a_worker_tells_its_memory_and_then_its_processor_too(scraped: str) -> None:
    workers = Workers({"worker-0": scraped, "worker-1": "127.0.0.1:1"})
    first = workers.ask()
    assert list(first) == ["worker-0"]  # nobody is at the other's
    assert list(first["worker-0"]) == ["memory"]
    assert first["worker-0"]["memory"] > 2**20
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert 0 < workers.ask()["worker-0"]["processor"] < 64


def test_another_process_of_a_worker_begins_again(scraped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers({"worker-0": scraped})
    workers.ask()
    monkeypatch.setattr(resources, "read_process", lambda _: [5.0, 0.1, 1.0, None, None])
    assert workers.ask() == {"worker-0": {"memory": 5}}


def test_nobody_is_asked_where_nobody_is_scraped() -> None:
    assert Workers({}).ask() == {}


@pytest.mark.parametrize("may_write", [True, False])
def test_the_coordinator_writes_of_itself_and_of_workers(
    tmp_path: Path, scraped: str, monkeypatch: pytest.MonkeyPatch, may_write: bool
) -> None:
    directory = RunDirectory(tmp_path, "a")
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(resources, "FIRST_SECONDS", 0.01)
    monkeypatch.setenv("TRAINER_METRICS_OF_WORKERS", json.dumps({"worker-0": scraped}))
    if not may_write:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    record_resources("chief-0", lambda: directory)
    wanted = directory.tasks / "worker-0.jsonl"
    end = time.monotonic() + (20 if may_write else 0.3)
    while not (wanted.exists() and wanted.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert wanted.exists() == (directory.tasks / "chief-0.jsonl").exists() == may_write
    if may_write:
        assert json.loads(wanted.read_text().splitlines()[0])["memory"] > 2**20
        assert json.loads((directory.tasks / "chief-0.jsonl").read_text().splitlines()[0])["cores"] == os.cpu_count()
