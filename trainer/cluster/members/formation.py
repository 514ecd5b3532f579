"""Which members a generation begins with: those that are here, once those have been waited for that are worth it.

Strategies' constructors would wait for every member, for ever and without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from trainer.cluster.member import HERE, Event, Member, MemberState
from trainer.cluster.members.draining import away_for_a_reboot, leaving_ps, leaving_tasks
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.task_id import is_worker
from trainer.run.release import FIX

if TYPE_CHECKING:
    from trainer.cluster.members.heartbeat import Heartbeat

POLL_SECONDS = 0.02
HEAR_SECONDS = 3.0  # all have answered by then, or failed to
ANSWER_SECONDS = 2.0  # for the answer, after the time in which a member may be silent


class MembershipChanged(Exception):
    """The cluster is to be formed again in this process, from the newest checkpoint; nothing is in flight."""


def form(
    config: Config,
    heartbeat: Heartbeat,
    first: bool,
    without: Collection[str],
    on_missing: Callable[[dict[str, Member]], None],
    every_ps: bool = False,
) -> dict[str, str]:
    """Wait for the members and return those to train on (task name to incarnation).

    `first` says that the run has never trained: workers are waited for. `without` are members that the training goes on
    without already. A ps that leaves is left out, though it may answer. `on_missing` is called with the missing, again
    and again. With `every_ps` no ps is done without: the model does not fit the checkpoint on fewer.
    Raises UserError when the user's limit to the waiting is over, in which a planned reboot does not count.
    """
    began = counted = time.monotonic()
    while True:
        heartbeat.hurry(since=began)
        members, waited = heartbeat.members(), time.monotonic() - began
        # Only answers to questions after the last generation: it may have ended because of one that has just died.
        unheard = [m for m in members.values() if m.judged_at < began and m.state in (*HERE, MemberState.STARTING)]
        if unheard and waited < HEAR_SECONDS:
            time.sleep(POLL_SECONDS)
            continue
        leaving = leaving_ps()
        apart = {*without, *leaving_tasks()}
        here = {t: str(m.incarnation) for t, m in members.items() if m.is_here(since=began) and t not in leaving}
        missing = {task: member for task, member in members.items() if task not in here}
        if not missing or can_do_without(config, here, missing, first, apart, waited, every_ps):
            return here
        # One that has just answered is about to be known: that is no news.
        if silent := {task: member for task, member in missing.items() if member.why != Event.UNPROVEN.value}:
            on_missing(silent)
        if missing.keys() & set(away_for_a_reboot()):
            counted = time.monotonic()
        check_limit(config, time.monotonic() - counted, missing)
        time.sleep(POLL_SECONDS)


def check_limit(config: Config, seconds: float, missing: Mapping[str, Member]) -> None:
    """Raise UserError where the missing members were waited for beyond the user's limit."""
    if config.member_wait_timeout_seconds and seconds > config.member_wait_timeout_seconds:
        raise UserError(
            f"waited {seconds:.0f} s (member_wait_timeout_seconds), and {describe_missing(missing)}. "
            "Start what is missing, or take it out"
        )


def can_do_without(
    config: Config,
    here: Collection[str],
    missing: Mapping[str, Member],
    first: bool,
    without: Collection[str],
    waited: float,
    every_ps: bool = False,
) -> bool:
    """Return whether the training can go on now with the tasks that are here, without the missing ones."""
    ps = {task for task, member in missing.items() if member.is_ps}
    workers = missing.keys() - ps
    # Which members the cluster has may change meanwhile: those that are here are counted.
    if not config.elastic or (ps and every_ps) or len({is_worker(task) for task in here}) < 2:
        return False
    if any(member.is_expected for member in missing.values()):
        return False
    # One that lacks a way answers: its time does not fix that. Nor does time bring back one that was taken out.
    waited_for = [task for task in workers if missing[task].state is not MemberState.HALF and task not in without]
    if first and waited_for and waited < config.worker_wait_seconds:
        return False
    return ps <= set(without) or waited >= config.ps_grace_seconds


def describe_missing(missing: Mapping[str, Member]) -> str:
    """Say why each of them is missing, and how to fix it where that is no fault of its host's."""
    leaving = leaving_ps()
    left = {task: member.address for task, member in missing.items() if task in leaving}
    others = {t: member for t, member in missing.items() if member.state is MemberState.OTHER_RELEASE and t not in left}
    half = {t: member for t, member in missing.items() if member.state is MemberState.HALF and t not in left}
    quiet = {t: member.address for t, member in missing.items() if t not in {*others, *left, *half}}
    parts = [f"no answer from {names(quiet)}"] if quiet else []
    parts += [f"waiting until {names(left)} is back: its host was taken out in order"] if left else []
    parts += [f"{task} ({member.address}) lacks a way: {member.why}" for task, member in half.items()]
    parts += [f"{task} ({member.address}) {member.why}" for task, member in others.items()]
    return "; ".join(parts) + (f": {FIX}" if others else "")


def names(members: Mapping[str, str]) -> str:
    return ", ".join(f"{task} ({address})" for task, address in members.items())


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
