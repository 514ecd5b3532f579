"""What the coordinator knows of one worker or ps, and how that changes: a state, since when, and why.

Nothing here has a clock, a thread or a socket: time is an argument (seconds of time.monotonic).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Collection
from typing import Any

from trainer.core.task_id import TaskId

AWAY_SECONDS = 5.0  # no generation waits longer for one that is closed or starting
RETURN_SECONDS = 60.0  # but for a ps that was asked to restart, which must do so
STEADY_SECONDS = 3.0  # one that is back has answered for so long
# One that was asked to restart and still answers then runs where no process heeds that: it is used as it is.
HEED_SECONDS = 15.0
SHORT_SECONDS = 10.0  # a worker that ends so soon after it was taken in may do so again
SHORT_LIVES = 5  # so often in a row
# One port that is closed and open in turn, for one process: two hosts have its address, or something refuses for it.
FLIPS = 3
TWO_HOSTS = "its port is closed and open in turn, for one process: have two hosts its address?"
PARTED_SECONDS = 60.0  # a worker that is cut off from a ps so soon after it was taken in is likely to be so again
PAUSE_SECONDS = 15.0  # for which it is given up then, twice as long each time
MAX_PAUSE_SECONDS = 600.0


class MemberState(enum.Enum):
    """What a member is to the coordinator."""

    STARTING = "starting"  # nothing was heard of it yet, or it was asked to restart
    SERVING = "serving"  # it answers and takes no part
    TRAINING = "training"  # it answers and takes part
    CLOSED = "closed"  # its host says that nothing listens there
    SILENT = "silent"  # it leaves questions unanswered
    AWAY = "away"  # closed or starting for so long that the others do not wait for it
    GIVEN_UP = "given up"  # it ended again and again soon after it was taken in
    OTHER_RELEASE = "on another release"  # its process runs other code than the coordinator
    HALF = "half connected"  # it answers the coordinator, and lacks a way to a member that it needs


class Event(enum.Enum):
    """What happens to a member."""

    ANSWERED = "answers"
    REPLACED = "answers as another process"
    RESUMED = "answers again, and still takes part"
    UNPROVEN = "answers, and its release or its ways are not known yet"
    OTHER_RELEASE = "answers, and runs another release"
    PARTED = "answers, and lacks a way to another member"
    REFUSED = "its port is closed"
    UNANSWERED = "does not answer for the heartbeat's time-out"
    LATE = "is not back in time"
    TAKEN_IN = "is taken in"
    RELEASED = "the generation ends"
    RESTART = "is asked to restart"
    SHORT_LIVED = "ended too often"
    PAUSE_OVER = "the pause is over"


S, E = MemberState, Event
HERE = {S.SERVING, S.TRAINING}
# What an event makes of a state; a pair that is not listed changes nothing. docs/design.md shows it as a table.
TRANSITIONS: dict[tuple[MemberState, Event], MemberState] = {
    **{(state, E.ANSWERED): S.SERVING for state in (S.STARTING, S.CLOSED, S.SILENT, S.AWAY, S.OTHER_RELEASE, S.HALF)},
    **{(state, E.REPLACED): S.SERVING for state in set(S) - {S.SERVING, S.GIVEN_UP}},
    **{(state, E.UNPROVEN): S.STARTING for state in set(S) - {S.STARTING, S.GIVEN_UP}},
    **{(state, E.OTHER_RELEASE): S.OTHER_RELEASE for state in set(S) - {S.GIVEN_UP, S.OTHER_RELEASE}},
    **{(state, E.PARTED): S.HALF for state in set(S) - {S.GIVEN_UP, S.HALF}},
    **{(state, E.RESUMED): S.TRAINING for state in (S.STARTING, S.SERVING, S.CLOSED, S.SILENT, S.AWAY, S.HALF)},
    **{(state, E.REFUSED): S.CLOSED for state in set(S) - {S.CLOSED, S.AWAY, S.GIVEN_UP}},
    **{(state, E.UNANSWERED): S.SILENT for state in set(S) - {S.SILENT, S.AWAY, S.GIVEN_UP}},
    **{(state, E.LATE): S.AWAY for state in (S.STARTING, S.CLOSED)},
    (S.SERVING, E.TAKEN_IN): S.TRAINING,
    (S.TRAINING, E.RELEASED): S.SERVING,
    **{(state, E.RESTART): S.STARTING for state in (S.SERVING, S.TRAINING, S.CLOSED, S.SILENT, S.AWAY, S.HALF)},
    **{(state, E.SHORT_LIVED): S.GIVEN_UP for state in (S.SERVING, S.CLOSED, S.AWAY, S.HALF)},
    (S.GIVEN_UP, E.PAUSE_OVER): S.STARTING,
}


@dataclasses.dataclass(frozen=True)
class Member:
    """A worker's or ps's record; each change returns a new one."""

    task: str
    address: str
    state: MemberState = MemberState.STARTING
    since: float = 0.0
    why: str = "nothing was heard of it yet"
    incarnation: str | None = None
    """The process that answered last, also an earlier coordinator."""
    taken_in: str | None = None
    """The process that takes part in the present generation."""
    must_restart: str | None = None
    """The process that must not be used as it is."""
    asked_to: float | None = None
    """Since when that process is known to have been asked to restart."""
    answered_at: float | None = None
    """When the last answer came."""
    heard_at: float = 0.0
    """When the last question was asked that was answered."""
    judged_at: float = -math.inf
    """When the last question was asked that was answered or failed."""
    steady_since: float | None = None
    """Since when every question was answered."""
    quiet: float = 0.0
    """For how many seconds it has left questions unanswered."""
    ended: tuple[str, float] | None = None
    """The last process that was found to have ended, and for how many seconds it had been quiet."""
    short_lives: int = 0
    flips: int = 0
    """How often its port was closed and answered again without a new process."""
    until: float = 0.0
    """When a pause ends, of one that is given up."""

    @property
    def is_ps(self) -> bool:
        return TaskId.parse(self.task).job == "ps"

    def is_here(self, since: float = 0.0) -> bool:
        """Return whether it can be used: it answered a question that was asked after `since`."""
        return self.state in HERE and self.heard_at >= since

    def is_steady(self, now: float) -> bool:
        """Return whether it has answered for so long that it is taken to be back."""
        return self.state in HERE and self.steady_since is not None and now - self.steady_since >= STEADY_SECONDS

    @property
    def is_lost(self) -> bool:
        """Whether the process that takes part has ended."""
        if self.taken_in is None:
            return False
        if self.is_ps and self.state is S.HALF:
            return True  # no process can use it
        return self.state in (S.CLOSED, S.AWAY, S.GIVEN_UP) or self.incarnation != self.taken_in

    @property
    def is_expected(self) -> bool:
        """Whether it is worth waiting for, since it may be back in a moment."""
        return self.state in (S.STARTING, S.CLOSED)

    def after(self, event: Event, now: float, **changes: Any) -> Member:
        """Return the record after an event, with what else is known by now."""
        state = TRANSITIONS.get((self.state, event), self.state)
        if state is not self.state:
            changes = {"state": state, "since": now, "why": event.value, **changes}
        return dataclasses.replace(self, **changes)

    def answered(self, now: float, asked_at: float, incarnation: str) -> Member:
        """It has answered a question that was asked at `asked_at`, and said which process it is."""
        replaced, found, heard = self._heard_from(now, asked_at, incarnation)
        heard["heard_at"] = asked_at
        heard["steady_since"] = now if replaced or self.steady_since is None else self.steady_since
        if found.ended and found.ended[0] == incarnation:
            heard["ended"] = None  # it was only cut off
        if self.steady_since is not None and now - self.steady_since > PARTED_SECONDS:
            heard["flips"] = 0
        if self.state in (S.CLOSED, S.AWAY) and self.incarnation == incarnation:
            heard["flips"] = flips = self.flips + 1
            if flips >= FLIPS:
                until = now + min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** min(flips - FLIPS, 10))
                return found.after(E.SHORT_LIVED, now, until=until, why=TWO_HOSTS, **heard)
        if incarnation == self.must_restart and (self.asked_to is None or now - self.asked_to <= HEED_SECONDS):
            heard["asked_to"] = now if self.asked_to is None else self.asked_to
            return found.after(E.RESTART, now, **heard)
        if self.must_restart is not None:
            heard["must_restart"] = heard["asked_to"] = None
        resumed = incarnation == self.taken_in
        event = E.RESUMED if resumed else E.REPLACED if replaced else E.ANSWERED
        return found.after(event, now, **heard)._given_up(self.short_lives, now)

    def held_back(self, event: Event, now: float, asked_at: float, incarnation: str, why: str = "") -> Member:
        """It has answered, as a process that can't be used: UNPROVEN as yet, of OTHER_RELEASE, or PARTED."""
        _, found, heard = self._heard_from(now, asked_at, incarnation)
        heard |= {"steady_since": None, "why": why or event.value}
        if event is E.UNPROVEN:
            heard["since"] = now  # it is about to be known
        if self.must_restart not in (None, incarnation):
            heard["must_restart"] = heard["asked_to"] = None
        return found.after(event, now, **heard)._given_up(self.short_lives, now)

    def cut_off(self, now: float, why: str) -> Member:
        """It takes part, and a way that it needs is broken: its calls wait for no other, and go with its process."""
        steady = now - self.since > PARTED_SECONDS
        lives = self.short_lives if self.state is not S.TRAINING else 0 if steady else self.short_lives + 1
        changes = {"must_restart": self.incarnation, "asked_to": None, "steady_since": None, "why": why}
        return self.after(E.PARTED, now, short_lives=lives, **changes)._given_up(self.short_lives, now)

    def _heard_from(self, now: float, asked_at: float, incarnation: str) -> tuple[bool, Member, dict[str, Any]]:
        """Return whether it is another process, the record as the one before left it, and what any answer tells."""
        replaced = self.incarnation is not None and incarnation != self.incarnation
        found = self._ended(now) if replaced else self
        return replaced, found, {"incarnation": incarnation, "answered_at": now, "judged_at": asked_at, "quiet": 0.0}

    def refused(self, now: float, asked_at: float) -> Member:
        """Its host has said that nothing listens there."""
        found = self._ended(now).after(E.REFUSED, now, judged_at=asked_at, steady_since=None, quiet=0.0)
        return found._given_up(self.short_lives, now)

    def unanswered(self, now: float, quiet: float, timeout: float, asked_at: float | None = None) -> Member:
        """It has left questions unanswered for `quiet` seconds; `asked_at` is of one that has failed by now."""
        changes: dict[str, Any] = {"quiet": quiet}
        if asked_at is not None:
            changes |= {"judged_at": asked_at, "steady_since": None}
        if quiet < timeout:
            return dataclasses.replace(self, **changes)
        if self.state in HERE and self.taken_in and not self.is_ps:
            # What it still holds of this generation, and waits for, goes with its process.
            changes |= {"must_restart": self.taken_in, "asked_to": None}
        return self.after(E.UNANSWERED, now, **changes)

    def taken(self, now: float) -> Member:
        """It takes part from now on, as the process that answered last."""
        return self.after(E.TAKEN_IN, now, taken_in=self.incarnation)

    def released(self, now: float) -> Member:
        """The generation is over: it takes no part."""
        return self.after(E.RELEASED, now, taken_in=None)

    def left_out(self) -> Member:
        """A generation begins without it: what it may still hold of an earlier one goes with its process."""
        if self.state is S.OTHER_RELEASE:  # a new process of that release would not help
            return self
        return dataclasses.replace(self, must_restart=self.incarnation, asked_to=None)

    def looked_at(self, now: float) -> Member:
        """Return what the time that has passed makes of it."""
        if self.state is S.GIVEN_UP and now >= self.until:
            return self.after(E.PAUSE_OVER, now)
        patience = RETURN_SECONDS if self.is_ps and self.asked_to is not None else AWAY_SECONDS
        return self.after(E.LATE, now) if self.is_expected and now - self.since >= patience else self

    def _ended(self, now: float) -> Member:
        """Remember how quiet its last process was by now, and whether its life was short; once a process."""
        if self.incarnation is None or (self.ended and self.ended[0] == self.incarnation):
            return self
        lives = self.short_lives
        if self.state is S.TRAINING and not self.is_ps:
            lives = lives + 1 if now - self.since < SHORT_SECONDS else 0
        return dataclasses.replace(self, ended=(self.incarnation, self.quiet), short_lives=lives)

    def _given_up(self, lives_before: int, now: float) -> Member:
        """Return the record, given up if another short life was one too many."""
        excess = self.short_lives - SHORT_LIVES
        if excess < 0 or self.short_lives == lives_before:
            return self
        pause = min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * 2 ** min(excess, 10))
        return self.after(E.SHORT_LIVED, now, until=now + pause)


def to_take_in(workers: Collection[str], lost: Collection[str], serving: Collection[str]) -> set[str]:
    """Return those of the lost workers that TensorFlow is to be given back now.

    None as long as one more does not answer, which TensorFlow has not missed yet: it would wait for that one.
    """
    return set(lost) & set(serving) if set(workers) - set(lost) <= set(serving) else set()


class LostWorkers:
    """Knows since when each lost worker is lost, and asks all of them again once one is back."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}
        """The lost workers, and since when; other threads add to it."""
        self._asked_again: float | None = None

    def poll(
        self, workers: Collection[str], serving: Callable[[float], Collection[str]], now: float
    ) -> tuple[set[str], set[str]] | None:
        """Return those to be given back now, perhaps none yet, and those that stay lost; None while none is back.

        `serving` returns the workers that have answered since a time.
        """
        lost = dict(self.since)
        if lost.keys().isdisjoint(serving(max(lost.values(), default=0.0))):
            self._asked_again = None
            return None
        # A worker is back: the others must say once more that they are.
        self._asked_again = self._asked_again or now
        back = to_take_in(workers, lost, serving(self._asked_again))
        if back:
            self._asked_again = None
        return back, lost.keys() - back
