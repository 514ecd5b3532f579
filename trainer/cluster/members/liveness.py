"""Whether processes that take part in a generation still live."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from trainer.cluster.member import MemberState
from trainer.cluster.members.heartbeat import Heartbeat

POLL_SECONDS = 0.02
ANSWER_SECONDS = 2.0  # for the answer, after the time in which a member may be silent


def live(heartbeat: Heartbeat, tasks: Collection[str], timeout: float, lasts: Callable[[], bool]) -> bool:
    """Return whether the processes of these tasks that take part answer a question that is asked from now on.

    `timeout` (seconds) is the heartbeat's. A generation that no longer `lasts`, as after a ps that was lost, says
    nothing of its processes.
    """
    since = time.monotonic()
    processes = {task: heartbeat.members()[task].taken_in for task in tasks}
    while lasts() and time.monotonic() < since + timeout + ANSWER_SECONDS:
        heartbeat.hurry(since)
        members = [heartbeat.members()[task] for task in tasks]
        if any(member.taken_in is None or member.taken_in != processes[member.task] for member in members):
            return False
        if any(member.is_lost or member.state is MemberState.SILENT for member in members):
            return False
        if all(member.is_here(since) for member in members):
            return True
        time.sleep(POLL_SECONDS)
    return False
