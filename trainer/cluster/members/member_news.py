"""What is reported of a run's members: each change once, in the log and the run's events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from trainer.cluster.member import HERE, Event, Member, MemberState
from trainer.cluster.members.draining import is_leaving
from trainer.cluster.members.formation import describe_missing
from trainer.core.states import RunState
from trainer.core.task_id import TaskId
from trainer.run.release import FIX
from trainer.telemetry.progress import Progress

log = logging.getLogger(__name__)
REMIND_SECONDS = 30.0
NEWS_SECONDS = 3.0
CALL_FAILED = "(its call failed)"


class MemberNews:
    """Tells of members that are lost, silent, half connected, left out or back."""

    def __init__(self, progress: Progress, addresses: Mapping[str, str]) -> None:
        """Take the members' addresses, by task."""
        self._progress = progress
        self._addresses = addresses
        self.hurt = False
        """Whether a process of this generation has ended, also if another has taken its place."""
        self._named = ""
        self._named_at = 0.0
        self._lost: dict[str, tuple[float, str]] = {}  # the processes whose end was reported, and when
        self._absent: set[str] = set()  # reported lost or silent, and not back
        self._given_up: dict[str, float] = {}
        self._other_release: dict[str, str | None] = {}  # the processes that were reported to run another one
        self._half: dict[str, str] = {}  # why each member that is half connected is so

    def formed(self) -> None:
        """A generation has its members: none of them is absent."""
        self._absent, self._named, self.hurt = set(), "", False

    def lost_at(self, member: Member, now: float) -> float:
        """Return when the end of a member's process was reported; `now` where it was not."""
        at, process = self._lost.get(member.task, (now, ""))
        return at if process == member.taken_in else now  # an earlier one's end is no news of this one

    def is_half(self, task: str) -> bool:
        """Return whether a member was reported half connected, and not back."""
        return task in self._half

    def missing(self, missing: dict[str, Member], members: Mapping[str, str]) -> None:
        """Name the missing, again now and then; `members` are the processes of the generation before, by task."""
        message = describe_missing(missing)
        if message == self._named and time.monotonic() - self._named_at < REMIND_SECONDS:
            return
        for task in members.keys() & missing.keys():
            self.lost(task, members[task])
        log.info("waiting for members: %s", message)
        self._progress.without({task: member.state.value for task, member in missing.items()})
        self._progress.enter(RunState.WAITING, message)
        self._progress.events.write("waiting", message=message)
        self._named, self._named_at = message, time.monotonic()

    def other_release(self, member: Member) -> None:
        """Tell of one that runs another release."""
        if member.state is MemberState.OTHER_RELEASE and self._other_release.get(member.task) != member.incarnation:
            self._other_release[member.task] = member.incarnation
            self._report("member-other-release", member.task, f"{member.why}: left out. {FIX}")

    def half(self, member: Member) -> None:
        """Tell of one that is half connected, and once more when it has tried its ways: where its packets leave."""
        task = member.task
        if member.state is MemberState.HALF:
            before = self._half.get(task)
            # One that is back may be tried by the others only in a moment.
            is_new = member.taken_in is not None or time.monotonic() - member.since >= NEWS_SECONDS
            is_known_better = before is not None and CALL_FAILED in before and CALL_FAILED not in member.why
            if (is_new and before is None) or is_known_better:
                self._half[task] = member.why
                self._absent.add(task)
                if not member.is_ps:
                    self._lost[task] = time.monotonic(), str(member.taken_in)  # its end is no news
                self._report("ps-lost" if member.is_ps else "member-half-connected", task, f"{member.why}: left out")
        elif task in self._half and member.state in HERE:
            self._half.pop(task)
            self._absent.discard(task)
            self._report("member-back", task, "its ways work again")

    def changed(self, member: Member) -> None:
        """Tell of a member of this generation that is lost, silent or back."""
        task = member.task
        if task in self._half:
            return
        if member.is_lost:
            self.lost(task, str(member.taken_in))
        elif member.state is MemberState.SILENT and task not in self._absent:
            self._absent.add(task)
            self.hurt = True
            self._report("member-silent", task, f"has not answered for {member.quiet:.0f} s: cut off")
        if task in self._absent and member.state in HERE and not member.is_ps:
            self._absent.discard(task)
            self._report("member-back", task, "its server answers again")
        if member.state is MemberState.GIVEN_UP and self._given_up.get(task) != member.until:
            self._given_up[task] = member.until
            pause = member.until - time.monotonic()
            why = "it ended again and again" if member.why == Event.SHORT_LIVED.value else member.why
            self._report("member-given-up", task, f"{why}: left out for {pause:.0f} s")

    def lost(self, task: str, process: str) -> None:
        """Tell once that a process of a generation has ended, by whichever thread that notices it first."""
        if self._lost.get(task, (0.0, ""))[1] == process:
            return
        self.hurt = True
        self._lost[task] = time.monotonic(), process
        if task in self._absent:  # reported silent
            return
        self._absent.add(task)
        if is_leaving(task):
            self._report("member-left", task, "it leaves in order, and is to be back")
            return
        self._report("ps-lost" if TaskId.parse(task).job == "ps" else "member-lost", task, "its process has ended")

    def out_of_memory(self, known: Mapping[str, str], task: str, process: str, lack: str) -> None:
        """Tell of a process that follows one whose memory ran out, unless an earlier coordinator has `known` it."""
        if known.get(task) != process:
            self._report("out-of-memory", task, lack)

    def _report(self, event: str, task: str, message: str) -> None:
        address = self._addresses[task]
        log.warning("%s (%s): %s", task, address, message)
        self._progress.events.write(event, task=task, host=address, message=message)
