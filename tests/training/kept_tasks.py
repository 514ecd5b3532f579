"""A cluster of processes that only the test starts again, and what is known of their run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import MINUTE, Process, Runs, until

from trainer.cluster.spec import free_addresses
from trainer.run.records import read_record

SETTINGS = {
    "program": "many:Many",
    "steps": 10_000_000,
    "steps_per_execution": 10,
    "evaluation": "none",
    "export": False,
    "log_seconds": 0.2,
    "checkpoint_seconds": 1000.0,
    "worker_wait_seconds": 1000.0,
}


class KeptTasks:
    """The tasks of a run, each a process."""

    def __init__(self, runs: Runs, run: str, workers: int = 2, ps: int = 1, **settings: Any) -> None:
        self._runs, self.run = runs, run
        addresses = free_addresses(1 + workers + ps)
        self._jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
        self._settings = runs.shared / f"{run}.json"
        self._settings.write_text(json.dumps({**SETTINGS, "run": run, "shared_dir": str(runs.shared), **settings}))
        self.processes: dict[str, Process] = {}
        for task in [f"{job}-{i}" for job in ("ps", "worker", "chief") for i in range(len(self._jobs[job]))]:
            self.start(task)

    def config(self, task: str) -> str:
        job, _, index = task.rpartition("-")
        return json.dumps({"cluster": self._jobs, "task": {"type": job, "index": int(index)}})

    def start(self, task: str, **more: str) -> None:
        """Start a task; `more` is added to its environment."""
        self.processes[task] = self._runs.task(
            TF_CONFIG=self.config(task), TRAINER_SETTINGS=str(self._settings), **more
        )

    def end(self) -> None:
        for process in self.processes.values():
            process.end()

    @property
    def chief(self) -> Process:
        return self.processes["chief-0"]

    @property
    def directory(self) -> Path:
        return self._runs.directory(self.run)

    @property
    def status(self) -> dict[str, Any]:
        return read_record(self.directory / "status.json") or {}

    @property
    def step(self) -> int:
        return self.status.get("step") or 0

    def given(self) -> dict[str, int]:
        """Return the steps of each worker."""
        return {task: record["steps"] for task, record in (self.status.get("workers") or {}).items()}

    def trains_on(self, steps: int = 20) -> None:
        """Wait until it has trained more than it had when this was called."""
        step = self.step
        until(lambda: self.step > step + steps, f"a step after {step}", MINUTE, lambda: self.chief.output[-6000:])
