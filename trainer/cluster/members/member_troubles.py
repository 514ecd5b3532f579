"""When this process can't go on for a member: what TensorFlow does not notice, or does not let go of."""

from __future__ import annotations

import logging
from typing import Protocol

from trainer.cluster.member import Member, MemberState
from trainer.cluster.members.fence import shut

log = logging.getLogger(__name__)
# TensorFlow reports a ps whose socket closes at once, except in the middle of a long step, or when no step needs it.
REPORT_SECONDS = 10.0
# A worker that was quiet for longer, more than a question's time, and then ends has perhaps lost its host.
QUIET_SECONDS = 4.0
# TensorFlow lets go of a worker within moments of losing its connections.
DROP_SECONDS = 5.0


class WorkersHandler(Protocol):
    """What TensorFlow does with this generation's workers (trainer/training/tf_internals/workers.py)."""

    busy: dict[str, float]
    updating_since: float | None


class MemberTroubles:
    """Finds the members for which another process must form the cluster, and fixes what can be fixed."""

    def __init__(self) -> None:
        self._reset: dict[str, str] = {}  # the processes whose connections were looked after when they had ended

    def find_for(
        self, member: Member, handler: WorkersHandler | None, lost_at: float, now: float
    ) -> tuple[str, str] | None:
        """Return the event and message where this process can't go on for this member; fix what can be fixed.

        `handler` takes workers in and out while a generation trains; `lost_at` is when its process was reported to have
        ended.
        """
        task = member.task
        silent = f"{task} has not answered for {member.quiet:.0f} s: cut off"
        if member.is_ps:
            if member.state is MemberState.SILENT:
                return "member-silent", silent
            if member.is_lost and now - lost_at > REPORT_SECONDS:
                return "recovering", f"{task} has ended, and TensorFlow waits for it all the same"
            return None
        if member.state is MemberState.SILENT:
            if handler is None:
                return "member-silent", silent
            if task in handler.busy and now - max(handler.busy[task], member.since) > DROP_SECONDS:
                return "recovering", f"{silent}, and TensorFlow does not let go of it"
        # A host that was reset and is soon up again has closed no connection, and TensorFlow waits on them for ever.
        if member.ended and member.ended[0] == member.taken_in != self._reset.get(task):
            self._reset[task] = member.ended[0]
            if member.ended[1] > QUIET_SECONDS:
                log.warning("%s had not answered for %.0f s when its process ended", task, member.ended[1])
                if handler is None:
                    return "member-silent", silent
                shut(member.address)
        return None
