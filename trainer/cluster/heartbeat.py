"""Ask every member of the cluster, again and again, whether it lives.

TensorFlow reports a member whose socket closes and waits for ever, in silence, for one that froze, lost its network or
its power. The question is trainer/cluster/probe.py's; a member that has one open is not asked another.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from trainer.cluster.probe import DEADLINE_SECONDS, METHOD, digest

log = logging.getLogger(__name__)
PERIOD_SECONDS = 1.0
HURRY_SECONDS = 0.2  # while somebody waits for a member
# A member that doesn't answer gets a new channel so often: one was seen that never found a server that was back.
RENEW_SECONDS = 20.0
LOST_SECONDS = 10.0
# Left alone, a channel would look for a server that was away ever more rarely.
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel would share the old one's connection
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclasses.dataclass
class Member:
    """What is known of a worker or ps: `quiet` is for how many seconds it has left questions unanswered."""

    address: str
    identity: str | None = None  # of its process, while it answers
    answered_at: float | None = None  # since when it answers, without a break
    heard_at: float = 0.0  # when the last question was asked that it answered
    asked_at: float | None = None  # when the open question was asked
    judged_at: float = 0.0  # when the last question was asked that is not open any more
    failed_at: float | None = None  # when the last one failed, unless one was answered since
    quiet: float = 0.0
    process: str | None = None  # the identity that it had last
    ended: tuple[str, float] | None = None  # the last process that turned out to have ended, and how quiet it was then
    state: str = "unknown"  # answers, closed (its host says so), silent


class Heartbeat:
    """Knows of every member whether it answers; a thread asks."""

    def __init__(self, servers: Mapping[str, str], heartbeat_timeout_seconds: float) -> None:
        """Take the members (task name to address) and after how many seconds without an answer one is silent."""
        self._members = {task: Member(address) for task, address in servers.items()}
        self._silent_seconds = heartbeat_timeout_seconds
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._calls: dict[str, Any] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._opened: dict[str, float] = {}
        self.hurry = True
        self.on_beat: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Ask from now on, and call `on_beat` after each round."""
        for task in self._members:
            self._open(task)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._end.set()
        for channel in list(self._channels.values()):
            channel.close()

    def heard(self, since: float) -> bool:
        """Return whether every member was asked after `since` (of time.monotonic), and has answered or failed to."""
        with self._lock:
            return all(member.judged_at >= since for member in self._members.values())

    def identities(self, since: float = 0.0) -> dict[str, str]:
        """Return the members that answer, asked after `since` (of time.monotonic), with their processes' identities."""
        with self._lock:
            return {task: m.identity for task, m in self._members.items() if m.identity and m.heard_at >= since}

    def silent(self) -> dict[str, float]:
        """Return the members that have been silent for too long, and for how long (seconds)."""
        with self._lock:
            return {task: m.quiet for task, m in self._members.items() if m.quiet >= self._silent_seconds}

    def closed(self) -> list[str]:
        """Return the members whose host says that nothing listens there."""
        with self._lock:
            return [task for task, member in self._members.items() if member.state == "closed"]

    def ended(self) -> dict[str, tuple[str, float]]:
        """Return the processes that turned out to have ended, with the seconds for which each had been quiet by then.

        One that was quiet first may have lost its host, which told nobody that its connections are gone.
        """
        with self._lock:
            return {task: member.ended for task, member in self._members.items() if member.ended}

    def steady(self, seconds: float) -> set[str]:
        """Return the members that have answered for so long without a break."""
        since = time.monotonic() - seconds
        with self._lock:
            return {t for t, m in self._members.items() if m.answered_at is not None and m.answered_at <= since}

    def _beat(self) -> None:
        while not self._end.wait(HURRY_SECONDS if self.hurry else PERIOD_SECONDS):
            try:
                for task, member in self._members.items():
                    if member.identity is None and time.monotonic() - self._opened[task] > RENEW_SECONDS:
                        self._channels[task].close()  # which ends the open question, unless that is lost
                        self._open(task)
                    self._ask(task)
                self.on_beat()
            except Exception:
                log.exception("the heartbeat's round failed")

    def _open(self, task: str) -> None:
        channel = grpc.insecure_channel(self._members[task].address, options=CHANNEL_OPTIONS)
        self._channels[task], self._calls[task] = channel, channel.unary_unary(METHOD)
        self._opened[task] = time.monotonic()

    def _ask(self, task: str) -> None:
        member = self._members[task]
        with self._lock:
            now = time.monotonic()
            if member.asked_at is not None and now - member.asked_at <= LOST_SECONDS:
                return
            if member.asked_at is not None:  # nobody says how it ended: it counts as one without an answer
                member.identity = member.answered_at = None
                member.quiet, member.state = member.quiet + DEADLINE_SECONDS + PERIOD_SECONDS, "silent"
            member.asked_at = now
        try:
            future = self._calls[task].future(b"", timeout=DEADLINE_SECONDS)
            future.add_done_callback(lambda done: self._heard(member, done))
        except ValueError:  # the channel is closed: the heartbeat has ended
            return

    def _heard(self, member: Member, done: Any) -> None:
        now = time.monotonic()
        error = done.exception() if not done.cancelled() else None
        with self._lock:
            asked_at, member.asked_at = member.asked_at or now, None
            if done.cancelled():
                return
            member.judged_at = asked_at
            if error is None:
                member.identity = digest(done.result())
                if member.identity != member.process:
                    self._has_ended(member)
                elif member.ended and member.ended[0] == member.process:  # it was only cut off
                    member.ended = None
                member.process, member.quiet, member.state = member.identity, 0.0, "answers"
                member.answered_at, member.heard_at = member.answered_at or now, asked_at
                member.failed_at = None
                return
            member.identity = member.answered_at = None
            # However long this process itself was frozen meanwhile, a question counts for its deadline at most.
            passed = min(now - (member.failed_at or asked_at), DEADLINE_SECONDS + PERIOD_SECONDS)
            member.failed_at = now
            if error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in (error.details() or ""):
                self._has_ended(member)
                member.quiet, member.state = 0.0, "closed"
            else:
                member.quiet, member.state = member.quiet + passed, "silent"

    def _has_ended(self, member: Member) -> None:
        """Remember how quiet a member's last process was by now; only the first time counts."""
        if member.process is not None and (member.ended is None or member.ended[0] != member.process):
            member.ended = member.process, member.quiet
