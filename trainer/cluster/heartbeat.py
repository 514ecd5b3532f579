"""Ask every member of the cluster, again and again, whether it lives, and keep a record of each.

TensorFlow reports a member whose socket closes and waits for ever, in silence, for one that froze, lost its network or
its power. The question is trainer/cluster/probe.py's. It fills several packets, since a way that loses large ones is of
no use. A member that has one open is not asked another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from trainer.cluster.member import HERE, Event, Member, State
from trainer.cluster.probe import DEADLINE_SECONDS, METHOD, PADDING, digest

log = logging.getLogger(__name__)
PERIOD_SECONDS = 1.0
TICK_SECONDS = 0.2  # how often a member is asked that is missing, or that is waited for
HURRY_SECONDS = 5.0
# A round that comes later than this was kept from the processor: what passed then tells nothing of the members.
LATE_SECONDS = 0.2
# A member that doesn't answer gets a new channel so often: one was seen that never found a server that was back.
RENEW_SECONDS = 20.0
LOST_SECONDS = 10.0
# Marks the heartbeat's own sockets (milliseconds, of TCP_USER_TIMEOUT) for trainer/cluster/fence.py.
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


class Heartbeat:
    """Keeps the members' records by what they answer; a thread asks."""

    def __init__(
        self,
        members: Mapping[str, Member],
        timeout_seconds: float,
        other_release: Callable[[str, str, str], str | None] | None = None,
        unfit: Callable[[str, str, float], str | None] | None = None,
    ) -> None:
        """Take the records to begin with (by task), and after how many seconds without an answer one is silent.

        `other_release` is asked of each process that answers (task, address, incarnation). It says what that runs
        instead of the coordinator's release, nothing where it is the same, None while that is not known. Likewise
        `unfit` (task, incarnation, now) says which way a process lacks that takes no part yet.
        """
        self._members = dict(members)
        self._other_release = other_release
        self._unfit = unfit
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._ended = False
        self._news = threading.Event()  # the thread that asks has something to do before its next round
        self._calls: dict[str, Any] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._opened: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # when the open question was asked
        self._began = time.monotonic()
        self._missed = 0.0  # seconds for which this process was kept from the processor
        self._unheard: dict[str, tuple[float, float]] = {}  # since when none was answered, and what was missed by then
        self._hurry_until = time.monotonic() + HURRY_SECONDS
        self._wanted = 0.0  # answers are waited for, to questions that were asked after that
        self.on_beat: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Ask from now on, and call `on_beat` after each round."""
        for task in self._members:
            self._open(task)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._ended = True
        self._news.set()
        for channel in list(self._channels.values()):
            channel.close()

    def hurry(self, since: float = 0.0) -> None:
        """Ask more often for a while: a caller waits to hear of the members.

        Who was not asked after `since` (of time.monotonic) is asked now.
        """
        self._hurry_until = time.monotonic() + HURRY_SECONDS
        if since > self._wanted:
            self._wanted = since
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
            self._missed += max(0.0, now - last - pause - LATE_SECONDS)
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
            quiet = self._quiet(task, member, now)
            if quiet > DEADLINE_SECONDS:
                member = member.unanswered(now, quiet, self._timeout)
            self._members[task] = member
        here = member.state in HERE
        if not here and now - max(self._opened[task], member.answered_at or 0.0) > RENEW_SECONDS:
            self._channels[task].close()  # which ends the open question, unless that is lost
            self._open(task)
        asked_at = self._asked.get(task)
        if asked_at is not None and now - asked_at > LOST_SECONDS:  # nobody says how it ended
            self._heard(task, asked_at, None)
        period = TICK_SECONDS if not here or now < self._hurry_until else PERIOD_SECONDS
        is_due = now - member.judged_at >= period or member.judged_at < self._wanted
        if task not in self._asked and is_due:
            self._ask(task, now)

    def _quiet(self, task: str, member: Member, now: float) -> float:
        """Return for how long a member has not answered, less what this process missed itself meanwhile."""
        unheard = self._unheard.get(task)
        return 0.0 if unheard is None else max(0.0, now - unheard[0] - (self._missed - unheard[1]))

    def _open(self, task: str) -> None:
        channel = grpc.insecure_channel(self._members[task].address, options=CHANNEL_OPTIONS)
        self._channels[task], self._calls[task] = channel, channel.unary_unary(METHOD)
        self._opened[task] = time.monotonic()

    def _ask(self, task: str, now: float) -> None:
        self._asked[task] = now
        self._unheard.setdefault(task, (now, self._missed))
        try:
            future = self._calls[task].future(PADDING, timeout=DEADLINE_SECONDS)
            future.add_done_callback(lambda done: self._heard(task, now, done))
        except ValueError:  # the channel is closed: the heartbeat has ended
            return

    def _heard(self, task: str, asked_at: float, done: Any) -> None:
        now = time.monotonic()
        error = done.exception() if done is not None and not done.cancelled() else None
        with self._lock:
            if self._asked.get(task) == asked_at:
                del self._asked[task]
            member = self._members[task]
            if done is not None and done.cancelled():
                return
            if done is not None and error is None:
                self._unheard[task] = (now, self._missed)
                member = self._answered(member, now, asked_at, digest(done.result()))
            elif error is not None and error.code() is grpc.StatusCode.UNAVAILABLE and is_refusal(error):
                self._unheard.pop(task, None)
                member = member.refused(now, asked_at)
            else:
                member = member.unanswered(now, self._quiet(task, member, now), self._timeout, asked_at)
            self._members[task] = member
        if member.judged_at < self._wanted:  # what was asked meanwhile could not be asked of it
            self._news.set()

    def _answered(self, member: Member, now: float, asked_at: float, incarnation: str) -> Member:
        if self._other_release is not None:
            other = self._other_release(member.task, member.address, incarnation)
            if other is None:
                return member.held_back(Event.UNPROVEN, now, asked_at, incarnation)
            if other:
                return member.held_back(Event.OTHER_RELEASE, now, asked_at, incarnation, other)
        if self._unfit is not None and not (member.state is State.TRAINING and incarnation == member.taken_in):
            why = self._unfit(member.task, incarnation, now)
            if why is None:
                return member.held_back(Event.UNPROVEN, now, asked_at, incarnation)
            if why:
                return member.held_back(Event.PARTED, now, asked_at, incarnation, why)
        return member.answered(now, asked_at, incarnation)


def is_refusal(error: Any) -> bool:
    """Return whether the member's host says that nothing listens there."""
    return "refused" in (error.details() or "")
