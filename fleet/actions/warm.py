"""What a start begins before it may be refused, and ends where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fleet.errors import FleetError
from fleet.hosts.cluster import Cluster
from fleet.signals import undisturbed
from fleet.site.topology import Task


@contextmanager
def cooled(cluster: Cluster, tasks: Sequence[Task], start: str) -> Iterator[list[Task]]:
    """Give the tasks that may import TensorFlow for a start, and end on leaving those that are still listed."""
    warm = list(tasks)
    try:
        yield warm
    finally:
        cool(cluster, warm, start)


def cool(cluster: Cluster, tasks: Sequence[Task], start: str) -> None:
    """Have tasks end that import TensorFlow and wait; what stays on a host that is lost ends by itself."""
    with undisturbed(), suppress(FleetError):
        if tasks:
            cluster.cool(tasks, start)
