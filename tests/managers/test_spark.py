"""What `fab render spark` prints, run by Spark with an executor for each task: to its end, and over lost executors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.render import RenderedCluster, spark

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
SPARK = ROOT / ".cache" / "managers" / "bin"  # make test-managers
TASKS = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
EXECUTOR = "CoarseGrainedExecutorBackend"


class Application:
    """A cluster under `spark-submit`, with a master and executors on this machine."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.shared = directory / "shared"
        self.shared.mkdir()
        given = {"program": "trainer.examples.digits:Digits", "run": "batch", "checkpoint_steps": 100, **settings}
        script = directory / "first.py"
        wanted = RenderedCluster("psfleet", TASKS, {}, {**given, "shared_dir": str(self.shared)})
        script.write_text(spark.render(wanted, sys.executable))
        command = [SPARK / "spark-submit", "--master", f"local-cluster[{sum(TASKS.values())},1,1024]"]
        command += ["--conf", f"spark.executorEnv.PSFLEET_PYTHONPATH={ROOT}", script]
        environment = {**os.environ, "PYSPARK_PYTHON": str(SPARK / "python"), "SPARK_LOCAL_IP": "127.0.0.1"}
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log)

    def end(self, seconds: float = 400) -> int:
        return self.process.wait(seconds)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.shared / "runs/batch/status.json").read_text())
        return found

    def until_step(self, step: int, seconds: float = 400) -> None:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, ValueError):
                found = self.status()
                if found["state"] == "training" and (found["step"] or 0) >= step:
                    return
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.5)

    def executors(self) -> list[int]:
        """Return the executors: its workers run within `spark-submit`, and start them."""
        found = [number for number, command in processes() if "java" in command and EXECUTOR in command]
        mine = str(self.process.pid)
        return [each for each in found if Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1] == mine]

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@pytest.fixture
def application(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Application]:
    started = Application(tmp_path, **request.param)
    yield started
    if started.process.poll() is None:
        started.process.terminate()
        started.process.wait(60)
    assert trainers_of(started) == []


def processes() -> Iterator[tuple[int, str]]:
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit():
                yield int(each.name), (each / "cmdline").read_text().replace("\0", " ")


def trainers_of(started: Application) -> list[int]:
    """Return the trainers that are left of this application, after those that are ending have had their time."""
    until = time.monotonic() + 60
    while True:
        left = []
        for number, _ in processes():
            with contextlib.suppress(OSError):
                if str(started.shared).encode() in Path(f"/proc/{number}/environ").read_bytes():
                    left.append(number)
        if not left or time.monotonic() > until:
            return left
        time.sleep(1)


@pytest.mark.parametrize("application", [{"steps": 300}], indirect=True)
def test_a_run_is_trained_to_its_end(application: Application) -> None:
    assert application.end() == 0, application.output()
    found = application.status()
    assert (found["state"], found["step"]) == ("finished", 300)
    assert set(found["workers"]) == {"worker-0", "worker-1"}


@pytest.mark.parametrize("application", [{"steps": 3000}], indirect=True)
def test_a_lost_executor_costs_the_steps_since_the_checkpoint(application: Application) -> None:
    application.until_step(200)
    os.kill(application.executors()[-1], signal.SIGKILL)
    assert application.end() == 0, application.output()
    found = application.status()
    assert (found["state"], found["step"]) == ("finished", 3000)
    lines = (application.shared / "runs/batch/events.jsonl").read_text().splitlines()
    restored = [event["message"] for event in map(json.loads, lines) if event["event"] == "restored"]
    assert max(int(message.split()[1]) for message in restored) >= 100, restored


@pytest.mark.parametrize("application", [{"steps": 300, "program_args": {"no_such": 1}}], indirect=True)
def test_a_wrong_program_is_tried_once(application: Application) -> None:
    assert application.end() == 78, application.output()
    assert "no_such" in application.status()["message"]
