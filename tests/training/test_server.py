"""A server needs nothing but TF_CONFIG, and tells systemd that it listens and lives."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from processes import MINUTE, Runs

from trainer.local import local_cluster
from trainer.members import answers, silent

pytestmark = pytest.mark.timeout(120)


def test_server_is_ready_when_it_listens_and_pings_while_it_answers(runs: Runs, tmp_path: Path) -> None:
    cluster = local_cluster(1, 1)
    [address] = cluster["worker"]
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(MINUTE)
        notify = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        server = runs.start(["-m", "trainer"], TF_CONFIG=config, **notify)
        assert systemd.recv(1000).decode() == f"READY=1\nSTATUS=worker-0 serves at {address}"
        assert answers(address)
        assert systemd.recv(1000) == b"WATCHDOG=1"
        server.send(signal.SIGSTOP)
        assert not answers(address, deadline=0.5)
        server.send(signal.SIGCONT)
        assert answers(address)
    assert silent({"worker-0": address, "ps-0": cluster["ps"][0]}) == {"ps-0": cluster["ps"][0]}
    server.send(signal.SIGTERM)
    assert server.wait(MINUTE) == -signal.SIGTERM
