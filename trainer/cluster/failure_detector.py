"""Ends a coordinator that can't get on and will not find out: TensorFlow waits for ever for a member that is silent.

Its thread watches while the main one waits inside TensorFlow. The next process, which systemd starts, forms the
cluster of the members that answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trainer.cluster.deadlines import Phases

if TYPE_CHECKING:
    from trainer.cluster.heartbeat import Heartbeat

# TensorFlow reports a ps whose socket closes at once, except in the middle of a long step, or when no step needs it.
REPORT_SECONDS = 10.0
STEADY_SECONDS = 3.0  # a member that is back has answered for so long
# A worker that was quiet for longer, more than a question's time, and then ends has perhaps lost its host.
QUIET_SECONDS = 4.0


class FailureDetector:
    """Compares what the heartbeat hears with the members of the present formation."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        phases: Phases,
        give_up: Callable[[str, str, list[str]], None],
        tell: Callable[[str, str, str], None] = lambda event, task, message: None,
    ) -> None:
        """Take whom to tell: `tell` gets event, task and message; `give_up` event, message and the members at fault.

        `give_up` ends the process.
        """
        self._heartbeat = heartbeat
        self._phases = phases
        self._give_up = give_up
        self._tell = tell
        self._formation: dict[str, str] = {}
        self._unfit: dict[str, str] = {}
        self._gone: dict[str, float] = {}
        self.hurt = False  # whether a process of this formation has ended, also if another has taken its place
        heartbeat.on_beat = self.look

    def formed(self, members: Mapping[str, str], unfit: Mapping[str, str] | None = None) -> None:
        """Watch these members (task name to identity) from now on; none of them: nobody.

        `unfit` are processes of absent members that shall not come back as they are.
        """
        self._formation = {}
        self._gone = {}
        self.hurt = False
        self._unfit = dict(unfit or {})
        self._formation = dict(members)

    def look(self) -> None:
        """Compare once; the heartbeat calls this after each round."""
        if late := self._phases.overdue():
            self._give_up("phase-overdue", late, [])
        formation, gone_since = self._formation, self._gone
        for task, seconds in self._heartbeat.silent().items():
            if task in formation:
                self._give_up("member-silent", f"{task} has not answered for {seconds:.0f} s: cut off", [task])
        # Reset and soon up again, a host has told nobody of its connections, and TensorFlow waits on them for ever.
        for task, (identity, seconds) in self._heartbeat.ended().items():
            if task.startswith("worker-") and identity == formation.get(task) and seconds > QUIET_SECONDS:
                message = f"{task} had not answered for {seconds:.0f} s when its process was found to have ended"
                self._give_up("member-silent", message, [task])
        here = self._heartbeat.identities()
        closed = self._heartbeat.closed()
        now = time.monotonic()
        for task in formation:
            gone = task in closed or here.get(task, formation[task]) != formation[task]
            if gone and task not in gone_since:
                gone_since[task] = now
                self.hurt = True
                self._tell("ps-lost" if task.startswith("ps-") else "member-lost", task, "its process has ended")
            if task in gone_since and task.startswith("worker-") and task in here:
                del gone_since[task]
                formation[task] = here[task]
                self._tell("member-back", task, "its server answers again")
        lost = [task for task, since in gone_since.items() if task[:3] == "ps-" and now - since > REPORT_SECONDS]
        if lost and self._formation is formation:
            message = f"{', '.join(lost)} has ended, and TensorFlow waits for it all the same"
            self._give_up("recovering", message, lost)

    def lost_servers(self) -> list[str]:
        """Return the ps of the formation whose processes have ended."""
        return sorted(task for task in list(self._gone) if task.startswith("ps-"))

    def formation(self) -> dict[str, str]:
        """Return the members that are watched, with their present processes."""
        return dict(self._formation)

    def workers_alive(self) -> bool:
        """Return whether a worker of the formation may still do something."""
        here = self._heartbeat.identities()
        return any(task in here for task in self._formation if task.startswith("worker-"))

    def returned(self) -> list[str]:
        """Return the members that the training goes on without and that answer again."""
        if not self._formation:
            return []
        here = self._heartbeat.identities()
        back = self._heartbeat.steady(STEADY_SECONDS) - set(self._formation)
        return sorted(task for task in back if task in here and here[task] != self._unfit.get(task))
