"""The queue is worked off by itself: past a failure, a limit and a coordinator that dies, to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, Process, Runs, kill, last_json, until

from trainer.cluster.spec import free_addresses
from trainer.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(500)
LONG = 10_000_000  # steps that are not waited for


class Site:
    """A cluster of two workers, and those who add to its queue."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.shared = runs.shared / "queued"
        self.shared.mkdir()
        addresses = free_addresses(4)
        self.jobs = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
        self.settings = runs.shared / "queue-settings.json"
        own = {"program": "rated:Rated", "steps": 30, "shared_dir": str(self.shared), "log_seconds": 1}
        self.settings.write_text(json.dumps({**own, "checkpoint_seconds": 2, "export": False}))

    def environment(self, job: str, index: int = 0) -> dict[str, str]:
        cluster = {"cluster": self.jobs, "task": {"type": job, "index": index}}
        return {"TF_CONFIG": json.dumps(cluster), "TRAINER_SETTINGS": str(self.settings)}

    def ask(self, *words: str) -> Any:
        asked = Process(["-m", "trainer", "queue", *words, "--json", "--settings", str(self.settings)])
        assert asked.wait() == 0, asked.output
        return last_json(asked.output)

    def add(self, name: str, **more: Any) -> Any:
        return self.ask("add", "--entry", json.dumps({"name": name, "owner": "anna", **more}))

    def states(self) -> dict[str, str]:
        return {entry["name"]: entry["state"] for entry in self.ask("list")["entries"]}


def steps_of(shared: Path, run: str) -> int:
    try:
        return int(json.loads((shared / "runs" / run / "status.json").read_text())["step"] or 0)
    except (OSError, ValueError, KeyError):
        return 0


def test_a_queue_is_worked_off_without_anybody(runs: Runs) -> None:
    site = Site(runs)
    for name, more in {
        "first": {"program_args": {"rate": 0.1}},
        "bad": {"program_args": {"rate": -1}},
        "endless": {"program_args": {"rate": 0.1}, "settings": {"steps": LONG}, "seconds": 18},
        "unwanted": {"program_args": {"rate": 0.1}, "settings": {"steps": LONG}},
        "found": {"search": {"trials": 2, "metric": "loss", "parameters": {"rate": {"low": 0.1, "high": 0.3}}}},
        "killed": {"program_args": {"rate": 0.2}, "settings": {"steps": 40}},
    }.items():
        site.add(name, **more)
    servers = [runs.task(**site.environment("ps"))]
    servers += [runs.task(**site.environment("worker", index)) for index in range(2)]
    evaluator = runs.script("-m", "trainer", **site.environment("evaluator"))
    chief = runs.script("-m", "trainer", **site.environment("chief"))
    chief.search("run first finished: rated:Rated trained to step 30", 3 * MINUTE)
    until(lambda: steps_of(site.shared, "endless") > 0, "steps of the endless one", 3 * MINUTE, lambda: chief.output)
    # It goes before all that wait, and not before what has begun.
    assert site.add("urgent", priority=5, program="rated:Rated", program_args={"rate": 0.3})["ahead"] == ["endless"]
    until(lambda: steps_of(site.shared, "unwanted") > 0, "steps of the unwanted one", 3 * MINUTE, lambda: chief.output)
    assert site.states()["urgent"] == "finished"
    site.ask("remove", "--name", "unwanted", "--stop", "--who", "bob")
    chief.search("the queue goes on with killed", 2 * MINUTE)
    until(lambda: chief.children, "the process of the last run")
    kill(chief.children[-1])
    assert chief.wait() == 0, chief.output
    for process in (*servers, evaluator):
        assert process.wait(MINUTE) == 0, process.output

    answer = site.ask("list")
    assert (answer["over"], answer["evaluated"]) == (True, True)
    found = {entry["name"]: entry for entry in answer["entries"]}
    assert list(found) == ["first", "bad", "endless", "urgent", "unwanted", "found", "killed"]
    states = [entry["state"] for entry in found.values()]
    assert states == ["finished", "failed", "stopped", "finished", "stopped", "finished", "finished"]
    points = [(point["run"], point["step"], point["evaluated_step"]) for point in found["found"]["points"]]
    assert points == [("found-1", 30, 30), ("found-2", 30, 30)]  # the second one was chosen by the result of the first
    assert "a rate of -1.0 leads away from the minimum" in found["bad"]["message"]
    assert found["endless"]["message"] == "its limit of 0.3 min is used up"
    assert found["unwanted"]["message"] == "taken out of the queue by bob"
    assert 18 <= found["endless"]["used"] < 60
    for name, steps in (("first", 30), ("urgent", 30), ("killed", 40)):
        (point,) = found[name]["points"]
        assert (point["step"], point["steps"], point["evaluated_step"]) == (steps, steps, steps)
    # What was stopped was saved, and is where it was.
    for name in ("endless", "unwanted"):
        (point,) = found[name]["points"]
        assert point["step"] > 0
        assert RunDirectory(site.shared, name).catalogue.newest() == point["step"]
    # There is no wait for the evaluation of what was taken out.
    assert found["endless"]["points"][0]["evaluated_step"] == found["endless"]["points"][0]["step"]
