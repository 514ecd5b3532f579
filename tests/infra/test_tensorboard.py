"""Hosts of group tensorboard."""

import json
import signal
import socket
import subprocess
import urllib.request

import pytest

from tests.hosts import ROOT, name_of, wait_until

from .conftest import LONG_RUN

PORT = 16006
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


@pytest.fixture
def tunnel(long_run):
    """TensorBoard's address on this machine, which is no member, while the operator looks at it."""
    # Where the tests run in the background, what they start heeds no Ctrl-C.
    command = ["env", "--default-signal=INT", "fab", "tensorboard", "--port", str(PORT), "--inventory", str(long_run)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line == f"TensorBoard is at http://localhost:{PORT} until Ctrl-C\n"
        try:
            yield f"http://localhost:{PORT}"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()  # else `with` waits for it


def test_it_serves_the_run_through_a_tunnel(tunnel):
    def runs():
        try:
            with urllib.request.urlopen(f"{tunnel}/data/runs", timeout=60) as answer:
                return [run for run in json.load(answer) if run.startswith(f"{LONG_RUN}/")]
        except OSError:  # it is slow while it reads its first run
            return []

    assert wait_until(runs, 120, f"TensorBoard shows {LONG_RUN}")


def test_strangers_do_not_reach_it(address):
    with pytest.raises(TimeoutError):
        socket.create_connection((address, 6006), timeout=3)


def test_it_serves_the_runs_page_through_a_tunnel(tunnel):
    def page():
        try:
            with urllib.request.urlopen(f"{tunnel}/data/plugin/psfleet/page?run={LONG_RUN}", timeout=60) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    assert f"<h1>{LONG_RUN} " in wait_until(page, 120, f"TensorBoard serves the page of {LONG_RUN}")
