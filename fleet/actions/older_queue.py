"""Whether a release that the hosts have kept can read the queue as it is now."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CURRENT, RELEASES, TRAINER
from fleet.hosts.observation import Observation, last_line
from fleet.hosts.run import AS_TRAINER, SETTINGS


def reject_unread_queue(cluster: Cluster, seen: Observation, release: str, settings: Mapping[str, Any] | None) -> None:
    """Raise OperatorMistake where the tasks follow a queue that a release can't read: none would train.

    `settings` are the run settings that come with it, None for those that the hosts have.
    """
    if "queue" not in seen.selection:
        return
    script = TRAINER.format(verb="queue list").replace(CURRENT, f"{RELEASES}/{release}", 1)
    if settings is not None:
        change, _, words = script.partition(AS_TRAINER)
        own = shlex.quote(f"cat |{words.replace(SETTINGS, '/dev/stdin')}")  # the pipe is the tasks' user's to open
        script = f"{change}{AS_TRAINER} sh -c {own} <<'EOF'\n{json.dumps(settings)}\nEOF"
    chief = cluster.inventory.chief.host
    answer = cluster.hosts.run({chief: script})[chief]
    if answer.unreachable:
        raise HostsUnreachable({chief: answer.unreachable})
    if answer.code:
        raise OperatorMistake(
            f"release {release} can't read the queue, and so would train nothing: {last_line(answer)}. Nothing was "
            "changed. Have one run trained beside the queue, and type this again: fab start-cluster --run NAME --detach"
        )
