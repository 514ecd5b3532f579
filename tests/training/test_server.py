"""A server needs nothing but TF_CONFIG, and tells systemd that it listens and lives."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from forks import RUN_POLL_SECONDS
from processes import MINUTE, Process, Runs, until

from trainer.cluster.probe import answers, incarnation, silent
from trainer.cluster.reach.way_reader import read_ways
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.tasks.local import local_cluster
from trainer.tasks.server import LOOKS

pytestmark = pytest.mark.timeout(120)


def test_server_is_ready_when_it_listens_and_pings_while_it_answers(runs: Runs, tmp_path: Path) -> None:
    cluster = local_cluster(1, 1)
    [address] = cluster["worker"]
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(MINUTE)
        notify = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        server = runs.task(TF_CONFIG=config, **notify)
        assert systemd.recv(1000).decode() == f"READY=1\nSTATUS=worker-0 serves at {address}"
        until(lambda: answers(address), "an answer")
        assert systemd.recv(1000) == b"WATCHDOG=1"
        server.send(signal.SIGSTOP)
        until(lambda: not answers(address, deadline=0.5), "no answer")
        server.send(signal.SIGCONT)
        until(lambda: answers(address), "an answer")
    assert silent({"worker-0": address, "ps-0": cluster["ps"][0]}) == {"ps-0": cluster["ps"][0]}
    server.send(signal.SIGTERM)
    assert server.wait(MINUTE) == -signal.SIGTERM


@pytest.mark.parametrize("job", ["ps", "chief"])
def test_a_port_that_another_process_has_is_named(runs: Runs, tmp_path: Path, job: str) -> None:
    cluster = local_cluster(1, 1)
    [address] = cluster[job]
    port = int(address.rpartition(":")[2])
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"program": "many:Many", "run": "held", "steps": 10, "shared_dir": str(tmp_path)}))
    with socket.create_server(("127.0.0.1", port)), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        for other in {"ps", "worker", "chief"} - ({"chief"} if job == "ps" else set()):
            config = json.dumps({"cluster": cluster, "task": {"type": other, "index": 0}})
            notify = {"NOTIFY_SOCKET": str(tmp_path / "notify")} if other == job == "ps" else {}
            task = runs.task(TF_CONFIG=config, TRAINER_SETTINGS=str(settings), **notify)
            if other == job:
                held = task
        assert held.wait(MINUTE) == 75
        heard = systemd.recv(1000).decode() if job == "ps" else ""
    said = f"another process has {job}-0's port {port}: ss -ltnp 'sport = :{port}' names it"
    assert said in held.output
    assert "UnknownError" not in held.output
    assert heard.startswith(f"STATUS=ps-0 cannot serve: {said}" if job == "ps" else "")


def test_a_server_that_follows_one_whose_memory_ran_out_tells_the_coordinator(runs: Runs) -> None:
    cluster = local_cluster(2, 1)
    lack = "out of memory, limit 2.0 GiB: take smaller batches"
    for job, index, expected in (("worker", 1, lack), ("ps", 0, lack), ("worker", 0, "")):
        address = cluster[job][index]
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        runs.task(TF_CONFIG=config, TRAINER_LACK=expected)
        process = until(lambda address=address: incarnation(address), "an answer")
        task = f"{job}-{index}"
        _, heard = until(lambda found=(task, address, process): read_ways(*found), "its ways")
        assert heard == expected


class Serving:
    """A ps with the settings of a run of 10 steps."""

    def __init__(self, runs: Runs, tmp_path: Path) -> None:
        self.state = RunDirectory(tmp_path, "a").state
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self._runs = runs
        self._settings = tmp_path / "settings.json"
        self._settings.write_text(
            json.dumps({"program": "a:B", "run": "a", "steps": 10, "shared_dir": str(tmp_path)}), encoding="utf-8"
        )
        cluster = local_cluster(1, 1)
        [self.address] = cluster["ps"]
        self._config = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}})

    def start(self) -> Process:
        return self._runs.task(TF_CONFIG=self._config, TRAINER_SETTINGS=str(self._settings))

    def own(self) -> str:
        return until(lambda: incarnation(self.address), "an answer of the ps")

    def say(self, **record: Any) -> None:
        write_record(self.state, {"state": "training", "step": 3, **record})

    def goes_on(self, process: Process) -> bool:
        time.sleep((LOOKS + 1) * RUN_POLL_SECONDS)
        return answers(self.address, MINUTE / 2) and "Traceback" not in process.output


def test_server_starts_again_when_its_own_process_is_asked_for(runs: Runs, tmp_path: Path) -> None:
    serving = Serving(runs, tmp_path)
    server = serving.start()
    first = serving.own()
    assert serving.own() == first
    serving.say(restart={"ps-0": "another process", "ps-1": first})
    assert serving.goes_on(server)
    serving.say(restart={"ps-0": first})
    assert server.wait(MINUTE) == 75
    again = serving.start()
    assert serving.own() != first
    assert serving.goes_on(again)


def test_server_ends_with_its_finished_run_whatever_the_record_was_before(runs: Runs, tmp_path: Path) -> None:
    serving = Serving(runs, tmp_path)
    server = serving.start()
    serving.own()
    serving.state.write_text("half a rec")
    assert serving.goes_on(server)
    serving.state.unlink()
    os.mkfifo(serving.state)  # a path that hangs
    assert serving.goes_on(server)
    with serving.state.open("w") as healed:
        healed.write("[]")
    serving.say(state="finished", step=5, asked=5)  # of a run that has more to train by now
    assert serving.goes_on(server)
    serving.say(state="finished", step=10)
    assert server.wait(MINUTE) == 0
    assert "run a finished at step 10" in server.output
    later = serving.start()
    assert later.wait(MINUTE) == 0
    assert "ps-0 serves at" in later.output  # systemd has to hear that it started, or it takes the end for a failure
