"""Hosts of group tensorboard."""

import json
import urllib.request

import pytest

from tests.hosts import name_of, wait_until

from .conftest import LONG_RUN

testinfra_hosts = ["ansible://tensorboard"]
pytestmark = pytest.mark.usefixtures("long_run", "_as_root")


def test_service_runs_and_comes_back_at_boot(host):
    service = host.service("tensorboard")
    assert service.is_running
    assert service.is_enabled


@pytest.fixture
def address(host, truth):
    return truth["_meta"]["hostvars"][name_of(host)]["ansible_host"]


def test_it_listens_on_the_cluster_address_alone(host, address):
    assert host.socket(f"tcp://{address}:6006").is_listening
    assert not host.socket("tcp://127.0.0.1:6006").is_listening


def test_it_serves_the_run(address):
    url = f"http://{address}:6006/data/runs"

    def runs():
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return [run for run in json.load(answer) if run.startswith(f"{LONG_RUN}/")]
        except OSError:  # it is slow while it reads its first run
            return []

    assert wait_until(runs, 60, f"TensorBoard shows {LONG_RUN}")
