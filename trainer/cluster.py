"""Who is in the cluster and which task this process is, as TF_CONFIG says it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from trainer.config import ConfigError

JOBS = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses (host:port) of each job, and this process's job and index."""

    jobs: dict[str, list[str]]
    job: str
    index: int

    @classmethod
    def from_tf_config(cls, text: str) -> Cluster:
        """Read TF_CONFIG; raises ConfigError that says what is wrong with it."""
        try:
            value = json.loads(text)
            jobs, task = value.get("cluster", {}), value["task"]
            job, index = str(task["type"]), int(task.get("index", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                'TF_CONFIG must be JSON like {"cluster": {"chief": ["host:port"], "worker": [...], "ps": [...]}, '
                f'"task": {{"type": "worker", "index": 0}}}}: {error!r}'
            ) from error
        if job not in JOBS:
            raise ConfigError(f"TF_CONFIG: task type {job!r} is none of {', '.join(JOBS)}")
        # The coordinator would wait for ever for an evaluator in its cluster (tensorflow#46169).
        cluster = cls({name: addresses(name, jobs[name]) for name in jobs if name != "evaluator"}, job, index)
        if job != "evaluator" and not 0 <= index < len(cluster.jobs.get(job, [])):
            raise ConfigError(f"TF_CONFIG: the task is {job} {index}, and the cluster lists no such member")
        return cluster

    @property
    def task(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def address(self) -> str:
        return self.jobs[self.job][self.index]

    @property
    def workers(self) -> int:
        return len(self.jobs.get("worker", []))

    @property
    def servers(self) -> dict[str, str]:
        """Task name to address, for every worker and ps."""
        return {
            f"{job}-{index}": address
            for job in ("worker", "ps")
            for index, address in enumerate(self.jobs.get(job, []))
        }

    def check_strategy(self) -> None:
        """Raise ConfigError unless the members that ParameterServerStrategy needs are there."""
        missing = [job for job in ("chief", "worker", "ps") if not self.jobs.get(job)]
        if missing:
            raise ConfigError(f"parameter_server needs at least one {' and one '.join(missing)} in the cluster")


def addresses(job: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and ":" in item for item in value):
        raise ConfigError(f"TF_CONFIG: job {job!r} must be a list of host:port, not {value!r}")
    return value
