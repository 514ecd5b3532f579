"""Members that wait for one another before they train in step."""

import json
import socket
import threading
import time

import pytest

from tests.waiting import until
from trainer.cluster.rendezvous import gather
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import Infrastructure

SETTINGS = {"run": "a", "steps": 10}


class Member(threading.Thread):
    """A member in a thread; `result` is what `gather` returned or raised."""

    def __init__(self, jobs, job, index=0, settings=SETTINGS):
        super().__init__(daemon=True)
        self.missing = []
        self.result = "waiting"
        self._arguments = ClusterConfig(jobs, job, index), settings, self.missing.append
        self.start()

    def run(self):
        try:
            gather(*self._arguments)
            self.result = "gathered"
        except Infrastructure as error:
            self.result = str(error)


@pytest.fixture
def jobs():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    return {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:3", "127.0.0.1:2"]}


def test_all_go_on_together_once_the_last_is_there(jobs):
    members = [Member(jobs, "chief"), Member(jobs, "worker", 1)]
    until(lambda: {"worker-0": "127.0.0.1:3"} in members[0].missing)
    assert {member.result for member in members} == {"waiting"}
    members.append(Member(jobs, "worker", 0))
    for member in members:
        member.join(20)
    assert {member.result for member in members} == {"gathered"}


def test_the_members_are_not_listed_again_for_each_that_waits(jobs, monkeypatch):
    """Of three hundred workers that would take half of the chief's time."""
    lists = []
    servers = ClusterConfig.servers.fget
    monkeypatch.setattr(ClusterConfig, "servers", property(lambda self: lists.append(self.job) or servers(self)))
    members = [Member(jobs, "chief"), Member(jobs, "worker", 1)]
    until(lambda: {"worker-0": "127.0.0.1:3"} in members[0].missing)
    time.sleep(1.0)
    assert lists.count("chief") == 1
    members.append(Member(jobs, "worker", 0))
    for member in members:
        member.join(20)


def test_the_port_is_free_again_at_once(jobs):
    members = [Member(jobs, "chief"), Member(jobs, "worker", 0), Member(jobs, "worker", 1)]
    for member in members:
        member.join(20)
    socket.create_server(("127.0.0.1", int(jobs["chief"][0].split(":")[1]))).close()


def test_a_worker_names_the_chief_that_is_missing(jobs):
    worker = Member(jobs, "worker", 0)
    until(lambda: worker.missing)
    assert worker.missing[-1] == {"chief-0": jobs["chief"][0]}
    Member(jobs, "chief")
    Member(jobs, "worker", 1)
    worker.join(20)
    assert worker.result == "gathered"


def test_a_worker_that_left_again_is_not_counted(jobs):
    chief = Member(jobs, "chief")
    address = ("127.0.0.1", int(jobs["chief"][0].split(":")[1]))
    until(lambda: chief.missing)
    with socket.create_connection(address) as left:
        left.sendall(json.dumps(["worker-0", json.dumps([jobs, SETTINGS], sort_keys=True)]).encode() + b"\n")
        until(lambda: chief.missing[-1] == {"worker-1": "127.0.0.1:2"})
    until(lambda: len(chief.missing[-1]) == 2)
    assert chief.result == "waiting"


def test_a_worker_with_other_settings_is_refused(jobs):
    chief = Member(jobs, "chief")
    worker = Member(jobs, "worker", 0, {"run": "b", "steps": 10})
    worker.join(20)
    assert "worker-0 has other run settings, or another cluster, than the chief" in worker.result
    assert chief.result == "waiting"


@pytest.mark.parametrize(
    "first_bytes", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"[[1], 2]\n", b'{"a": 1}\n', b"\xff\n"]
)
def test_a_stranger_is_no_member(jobs, first_bytes):
    chief = Member(jobs, "chief")
    until(lambda: chief.missing)
    with socket.create_connection(("127.0.0.1", int(jobs["chief"][0].split(":")[1]))) as stranger:
        stranger.sendall(first_bytes)
        workers = [Member(jobs, "worker", 0), Member(jobs, "worker", 1)]
        for member in (chief, *workers):
            member.join(20)
    assert chief.result == "gathered"


def test_a_chief_whose_port_is_taken_says_so(jobs):
    port = int(jobs["chief"][0].split(":")[1])
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        chief = Member(jobs, "chief")
        chief.join(20)
    assert f"chief-0 can't listen on port {port}" in chief.result
