"""No path is shared: checkpoints go through the coordinator to its disk, orders to the servers through TensorFlow."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, PROGRAMS, ROOT, Process, Runs, until

from trainer.core.states import RunState
from trainer.run.catalogue import Manifest
from trainer.run.directory import RunDirectory
from trainer.tasks.local import local_cluster
from trainer.telemetry.events import read_events

pytestmark = pytest.mark.timeout(300)
RUN = "alone"
STEPS = 800
SERVERS = ("ps-0", "ps-1", "worker-0")


class Hosts:
    """A directory for each task, which every process knows by the same path, and systemd's part for the servers."""

    def __init__(self, runs: Runs, path: Path, workers: int = 1, servers: int = 2, **settings: object) -> None:
        self._runs = runs
        self._path = path
        self._jobs = local_cluster(workers, servers)
        self._settings = path / "run.json"
        own = {"program": "ids:Ids", "run": RUN, "shared_dir": "/proc/self/cwd", "local_run_dir": True, "steps": STEPS}
        often = {"checkpoint_steps": 100, "steps_per_execution": 20, "checkpoints_kept": 30, "evaluation": "none"}
        self._settings.write_text(json.dumps(own | often | settings))
        self.processes: dict[str, list[Process]] = {}

    def start(self, task: str) -> Process:
        job, _, index = task.rpartition("-")
        disk = self.disk(task)
        disk.mkdir(exist_ok=True)
        process = self._runs.task(
            directory=disk,
            TF_CONFIG=json.dumps({"cluster": self._jobs, "task": {"type": job, "index": int(index)}}),
            TRAINER_SETTINGS=str(self._settings),
            PYTHONPATH=f"{ROOT}:{PROGRAMS}",
        )
        self.processes.setdefault(task, []).append(process)
        return process

    def ship(self, task: str, release: str) -> None:
        """Have the directory that the task works in be that of a release."""
        (self.disk(task) / "release.json").write_text(json.dumps({"id": release}))

    def disk(self, task: str) -> Path:
        return self._path / task

    def tend(self) -> None:
        """Start those again that want to be."""
        for task in SERVERS:
            if self.processes[task][-1].code == 75:
                self.start(task)

    def until_said(self, chief: Process, text: str) -> None:
        def is_logged() -> bool:
            self.tend()
            found = re.search(text, chief.output) is not None
            assert found or chief.code is None, chief.output
            return found

        until(is_logged, text, 2 * MINUTE, lambda: chief.output)


def test_training_with_no_shared_path_survives_its_coordinator_and_ends_its_servers(runs: Runs, tmp_path: Path) -> None:
    hosts = Hosts(runs, tmp_path)
    for task in SERVERS:
        hosts.start(task)
    chief = hosts.start("chief-0")
    hosts.until_said(chief, r"ckpt-[2-9]\d\d in")
    chief.send(signal.SIGKILL)
    chief.wait()
    directory = RunDirectory(hosts.disk("chief-0"), RUN)
    saved = directory.catalogue.newest()
    assert saved is not None
    assert saved < STEPS
    manifest = Manifest.read(directory.catalogue.manifest(saved))
    assert manifest is not None
    assert len(manifest.files) > 1
    assert directory.catalogue.check(saved) == ""
    assert [list(hosts.disk(task).iterdir()) for task in SERVERS] == [[], [], []]

    again = hosts.start("chief-0")
    hosts.until_said(again, "attached to the variables on the ps, at step")
    assert [len(hosts.processes[task]) for task in SERVERS] == [1, 1, 1]
    hosts.until_said(again, f"{RUN} finished")
    assert again.wait() == 0
    assert [hosts.processes[task][-1].wait(3 * MINUTE) for task in SERVERS] == [0, 0, 0]
    assert [list(hosts.disk(task).iterdir()) for task in SERVERS] == [[], [], []]
    assert (directory.path / "export" / "saved_model.pb").is_file()


# As `fab update-hosts` has it, of a host with the coordinator alone and of one with a ps besides.
@pytest.mark.parametrize("host", [["chief-0", "ps-0"], pytest.param(["chief-0"], marks=pytest.mark.matrix)])
def test_a_coordinator_that_ends_in_order_and_is_back_loses_no_step(
    runs: Runs, tmp_path: Path, host: list[str]
) -> None:
    hosts = Hosts(runs, tmp_path, steps=10**9)
    for task in SERVERS:
        hosts.start(task)
    hosts.until_said(hosts.start("chief-0"), r"ckpt-[2-9]\d\d in")
    for task in host:  # the coordinator first, which saves
        hosts.processes[task][-1].send(signal.SIGTERM)
        hosts.processes[task][-1].wait()
    chief = hosts.processes["chief-0"][-1]
    stopped = re.search(r"stopped at step (\d+) on request", chief.output)
    assert (chief.code, stopped is None) == (143, False), chief.output
    assert stopped is not None
    assert [hosts.processes[task][-1].code for task in SERVERS if task not in host] == [None] * (4 - len(host))
    for task in reversed(host):
        hosts.start(task)
    how = "going on at step" if "ps-0" in host else "attached to the variables on the ps, at step"
    again = hosts.processes["chief-0"][-1]
    hosts.until_said(again, rf"{how} {stopped[1]}\b[\s\S]*step [1-9]")
    directory = RunDirectory(hosts.disk("chief-0"), RUN)
    assert int(stopped[1]) in directory.catalogue.steps()
    again.send(signal.SIGTERM)
    assert again.wait() == 143


def test_servers_that_are_started_for_a_finished_run_end_with_it(runs: Runs, tmp_path: Path) -> None:
    hosts = Hosts(runs, tmp_path, run="over")
    directory = RunDirectory(hosts.disk("chief-0"), "over")
    directory.set_state(RunState.FINISHED, STEPS)
    for task in ("chief-0", *SERVERS):
        hosts.start(task)
    assert [hosts.processes[task][0].wait(3 * MINUTE) for task in ("chief-0", *SERVERS)] == [0, 0, 0, 0]
    assert "the run is finished" in hosts.processes["ps-0"][0].output


def test_a_server_of_another_release_is_left_out_until_it_runs_the_right_one(runs: Runs, tmp_path: Path) -> None:
    """One host missed a release: it has the one before as it comes back."""
    hosts = Hosts(
        runs, tmp_path, workers=2, servers=1, steps=10**9, worker_wait_seconds=1, checkpoint_seconds=1, log_seconds=1
    )
    for task in ("chief-0", "ps-0", "worker-0", "worker-1"):
        hosts.disk(task).mkdir()
        hosts.ship(task, "old" if task == "worker-1" else "new")
    servers = {task: hosts.start(task) for task in ("ps-0", "worker-0", "worker-1")}
    chief = hosts.start("chief-0")
    chief.search(r"worker-1 \(127\S+\): runs release old, and the coordinator new: left out\. .*--limit HOST")
    chief.search("going on without worker-1")
    chief.search("step [1-9]")
    directory = RunDirectory(hosts.disk("chief-0"), RUN)

    def found_events() -> list[Any]:
        return [
            found for found in read_events(directory.event_log, last=99) if found["event"] == "member-other-release"
        ]

    until(found_events, "the event", say=lambda: chief.output)
    [event] = found_events()
    assert (event["task"], "runs release old" in event["message"]) == ("worker-1", True)
    assert [servers[task].code for task in servers] == [None, None, None]

    servers["worker-1"].end()
    hosts.ship("worker-1", "new")
    hosts.start("worker-1")
    chief.search(r"worker-1 \(127\S+\) joins those that train")
