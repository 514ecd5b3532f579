"""Members that come later: a task's TF_CONFIG is a file on its host, which may name more than when the task started."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shlex
from pathlib import Path

from trainer.cluster.spec import ClusterConfig
from trainer.core.proxies import bypass_proxies
from trainer.core.settings.config import ConfigError

log = logging.getLogger(__name__)
JOBS = ("worker", "ps")
MEMBERS_POLL_SECONDS = 0.9  # both servers and the coordinator look about once a second
NAME = "TF_CONFIG="


class Growing:
    """A cluster that may grow while its task runs."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        """As it was found last."""
        self._looked_at = -math.inf

    def poll(self, now: float) -> dict[str, str]:
        """Look at the cluster's source now and then (`now` of time.monotonic).

        Returns the members that were added since the last time (task name to address).
        """
        if now - self._looked_at < MEMBERS_POLL_SECONDS:
            return {}
        self._looked_at = now
        before, after = self.cluster, present(self.cluster)
        added = {task: address for task, address in after.servers.items() if task not in before.servers}
        if added:
            log.info("the cluster has got %s", ", ".join(f"{task} ({at})" for task, at in added.items()))
            bypass_proxies(added.values())
            self.cluster = after
        return added


def present(cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster as its source has it now; as it was where that can't be read, or is another cluster."""
    if cluster.source is not None:
        with contextlib.suppress(OSError, ConfigError, ValueError):
            return grown(cluster, read_cluster(cluster.source))
    return cluster


def read_cluster(path: Path) -> ClusterConfig:
    """Read the TF_CONFIG of an environment file of systemd's; raises ConfigError, OSError and ValueError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = next((line for line in lines if line.startswith(NAME)), None)
    if found is None:
        raise ConfigError(f"{path} has no TF_CONFIG")
    return ClusterConfig.from_tf_config(shlex.split(found.removeprefix(NAME))[0])


def grown(cluster: ClusterConfig, other: ClusterConfig) -> ClusterConfig:
    """Return the cluster with the workers and ps that `other` has behind the same ones.

    Where anything else differs it is as it was: then the task restarts, as the role trainer finds
    (roles/trainer/library/stale_tasks.py).
    """
    if not is_growth(cluster, other):
        return cluster
    return dataclasses.replace(cluster, jobs={**cluster.jobs, **{job: other.jobs.get(job, []) for job in JOBS}})


def is_growth(cluster: ClusterConfig, other: ClusterConfig) -> bool:
    """Return whether `other` is the same cluster with more workers or ps at its end."""
    if (cluster.job, cluster.index, cluster.service) != (other.job, other.index, other.service):
        return False
    if cluster.jobs.get("chief") != other.jobs.get("chief") or not cluster.jobs.get("ps"):
        return False
    return all(other.jobs.get(job, [])[: len(had)] == had for job in JOBS if (had := cluster.jobs.get(job, [])))
