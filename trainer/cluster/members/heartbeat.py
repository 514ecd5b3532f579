"""Ask every member of the cluster, again and again, whether it lives, and keep a record of each.

TensorFlow reports a member whose socket closes and waits for ever, in silence, for one that froze, lost its network or
its power. The question is trainer/cluster/probe.py's. It fills several packets, since a way that loses large ones is of
no use. A member that has one open is not asked another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc

from trainer.cluster.member import HERE, Event, Member, MemberState
from trainer.cluster.probe import DEADLINE_SECONDS, METHOD, PADDING, REFUSED, digest

log = logging.getLogger(__name__)
PERIOD_SECONDS = 1.0
TICK_SECONDS = 0.2  # how often a member is asked that is missing, or that is waited for
HURRY_SECONDS = 5.0
# A round that comes later than this was kept from the processor: what passed then tells nothing of the members.
LATE_SECONDS = 0.2
# A member that doesn't answer gets a new channel so often: a channel was seen that never reconnected.
RENEW_SECONDS = 20.0
LOST_SECONDS = 10.0
# Marks the heartbeat's own sockets (milliseconds, of TCP_USER_TIMEOUT) for trainer/cluster/members/fence.py.
MARK = 4321
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel would share the old one's connection
    # Left alone, a channel would look for a server that was away ever more rarely.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Nor would it give up an attempt that was lost on the way, for 20 s.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 600_000),  # without which there is no TCP_USER_TIMEOUT
    ("grpc.keepalive_timeout_ms", MARK),
]


class QuietTimes:
    """For how long members have not answered, less the time in which this process could not hear; time is an argument.

    Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._missed = 0.0
        self._unheard: dict[str, tuple[float, float]] = {}  # since when none was answered, and what was missed by then

    def miss(self, seconds: float) -> None:
        """This process was kept from the processor for so long."""
        self._missed += seconds

    def asked(self, task: str, now: float) -> None:
        """A member was asked: it is quiet from now on, unless it has been before."""
        self._unheard.setdefault(task, (now, self._missed))

    def answered(self, task: str, now: float) -> None:
        """A member has answered."""
        self._unheard[task] = (now, self._missed)

    def refused(self, task: str) -> None:
        """A member's host has answered for it: that is no silence."""
        self._unheard.pop(task, None)

    def seconds(self, task: str, now: float) -> float:
        """Return for how long a member has been quiet."""
        unheard = self._unheard.get(task)
        return 0.0 if unheard is None else max(0.0, now - unheard[0] - (self._missed - unheard[1]))


class Line:
    """A channel to a member, and the open question there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.asked_at: float | None = None
        """When the open question was asked; None without one."""
        self.open()

    def open(self) -> None:
        """Make a new channel; an open question stays open."""
        self._channel = grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        self._call: Any = self._channel.unary_unary(METHOD)
        self.opened_at = time.monotonic()

    def close(self) -> None:
        """Close the channel, which ends the open question, unless that is lost."""
        self._channel.close()

    def ask(self, heard: Callable[[Any], None]) -> None:
        """Ask the member; `heard` is called with the future, from a thread of gRPC's."""
        with contextlib.suppress(ValueError):  # the channel is closed: the heartbeat has ended
            self._call.future(PADDING, timeout=DEADLINE_SECONDS).add_done_callback(heard)


class Hurry:
    """How often members are asked: more often for a while, and at once where a caller waits for an answer."""

    def __init__(self, now: float) -> None:
        self._until = now + HURRY_SECONDS
        self._wanted = 0.0  # answers are waited for, to questions that were asked after that

    def begin(self, now: float, since: float) -> bool:
        """Ask often for a while; returns whether members must be asked at once that were not since `since`."""
        self._until = now + HURRY_SECONDS
        is_new = since > self._wanted
        self._wanted = max(since, self._wanted)
        return is_new

    def wants(self, member: Member) -> bool:
        """Return whether an answer of this member is waited for."""
        return member.judged_at < self._wanted

    def is_due(self, member: Member, now: float) -> bool:
        """Return whether to ask this member now."""
        often = member.state not in HERE or now < self._until
        return now - member.judged_at >= (TICK_SECONDS if often else PERIOD_SECONDS) or self.wants(member)


OtherRelease = Callable[[str, str, str], "str | None"]
Unfit = Callable[[str, str, float], "str | None"]


def prove(
    other_release: OtherRelease | None, unfit: Unfit | None, member: Member, now: float, asked_at: float, process: str
) -> Member:
    """Return the record of a member whose process has answered, by what it must prove before it may take part."""
    if other_release is not None:
        other = other_release(member.task, member.address, process)
        if other is None:
            return member.held_back(Event.UNPROVEN, now, asked_at, process)
        if other:
            return member.held_back(Event.OTHER_RELEASE, now, asked_at, process, other)
    if unfit is not None and not (member.state is MemberState.TRAINING and process == member.taken_in):
        why = unfit(member.task, process, now)
        if why is None:
            return member.held_back(Event.UNPROVEN, now, asked_at, process)
        if why:
            return member.held_back(Event.PARTED, now, asked_at, process, why)
    return member.answered(now, asked_at, process)


class Heartbeat:
    """Keeps the members' records by what they answer; a thread asks."""

    def __init__(
        self,
        members: Mapping[str, Member],
        timeout_seconds: float,
        other_release: OtherRelease | None = None,
        unfit: Unfit | None = None,
    ) -> None:
        """Take the records to begin with (by task), and after how many seconds without an answer one is silent.

        `other_release` is asked of each process that answers (task, address, incarnation). It says what that runs
        instead of the coordinator's release, nothing where it is the same, None while that is not known. Likewise
        `unfit` (task, incarnation, now) says which way a process lacks that takes no part yet.
        """
        self._members = dict(members)
        self._prove = partial(prove, other_release, unfit)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._ended = False
        self._news = threading.Event()  # the thread that asks has something to do before its next round
        self._lines: dict[str, Line] = {}
        self._quiet = QuietTimes()
        self._hurry = Hurry(time.monotonic())
        self.on_beat: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Ask from now on, and call `on_beat` after each round."""
        self._lines = {task: Line(member.address) for task, member in self._members.items()}
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def add(self, *members: Member) -> None:
        """Ask these as well from now on; call it in `on_beat`."""
        self._lines |= {member.task: Line(member.address) for member in members}
        with self._lock:
            self._members |= {member.task: member for member in members}

    def stop(self) -> None:
        self._ended = True
        self._news.set()
        for line in list(self._lines.values()):
            line.close()

    def hurry(self, since: float = 0.0) -> None:
        """Ask more often for a while: a caller waits to hear of the members.

        A member that was not asked after `since` (of time.monotonic) is asked now.
        """
        if self._hurry.begin(time.monotonic(), since):
            self._news.set()

    def members(self) -> dict[str, Member]:
        """Return the records by task."""
        with self._lock:
            return dict(self._members)

    def change(self, change: Callable[[Member], Member], *tasks: str) -> None:
        """Change records by one of Member's methods."""
        with self._lock:
            self._members.update({task: change(self._members[task]) for task in tasks})

    def _beat(self) -> None:
        last, pause = time.monotonic(), 0.0
        while not self._pause(pause):
            now = time.monotonic()
            self._quiet.miss(max(0.0, now - last - pause - LATE_SECONDS))
            last, pause = now, TICK_SECONDS
            try:
                for task in self._members:
                    self._look_at(task, now)
                self.on_beat()
            except Exception:
                log.exception("the heartbeat's round failed")

    def _pause(self, seconds: float) -> bool:
        """Wait for the next round, or until it is wanted now; returns whether none follows."""
        self._news.wait(seconds)
        self._news.clear()
        return self._ended

    def _look_at(self, task: str, now: float) -> None:
        with self._lock:
            member = self._members[task].looked_at(now)
            quiet = self._quiet.seconds(task, now)
            if quiet > DEADLINE_SECONDS:
                member = member.unanswered(now, quiet, self._timeout)
            self._members[task] = member
        line = self._lines[task]
        if member.state not in HERE and now - max(line.opened_at, member.answered_at or 0.0) > RENEW_SECONDS:
            line.close()
            line.open()
        if line.asked_at is not None and now - line.asked_at > LOST_SECONDS:  # how it ended is never known
            self._heard(task, line.asked_at, None)
        if line.asked_at is None and self._hurry.is_due(member, now):
            line.asked_at = now
            self._quiet.asked(task, now)
            line.ask(lambda done: self._heard(task, now, done))

    def _heard(self, task: str, asked_at: float, done: Any) -> None:
        now = time.monotonic()
        error = done.exception() if done is not None and not done.cancelled() else None
        with self._lock:
            line = self._lines[task]
            if line.asked_at == asked_at:
                line.asked_at = None
            member = self._members[task]
            if done is not None and done.cancelled():
                return
            if done is not None and error is None:
                self._quiet.answered(task, now)
                member = self._prove(member, now, asked_at, digest(done.result()))
            elif error is not None and error.code() is grpc.StatusCode.UNAVAILABLE and is_refusal(error):
                self._quiet.refused(task)
                member = member.refused(now, asked_at)
            else:
                member = member.unanswered(now, self._quiet.seconds(task, now), self._timeout, asked_at)
            self._members[task] = member
        if self._hurry.wants(member):  # what was asked meanwhile could not be asked of it
            self._news.set()


def is_refusal(error: Any) -> bool:
    """Return whether the member's host says that nothing listens there."""
    return REFUSED in (error.details() or "")
