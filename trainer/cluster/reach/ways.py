"""The ways between the members, and what follows from one that is broken: a member is left out, and the pair is named.

Nothing here has a clock, a thread or a socket. A member tries its ways itself (trainer/cluster/reach/way_probe.py); the
coordinator reads what it found (trainer/cluster/reach/way_reader.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from trainer.core.task_id import TaskId

# TensorFlow names who did not answer: the last one is the worker that the coordinator asked itself.
REMOTE = re.compile(r"remote target /job:(\w+)/replica:0/task:(\d+)")
CHIEF = "chief-0"
MAX_WAYS_LISTED = 2000
BROKEN = "broken"
CONFIRMED = 2  # tries in a row without an answer in time, after which a way counts as broken
# In steps, so that the status is not another one each time.
STEPS = ((0.05, "ok"), (0.2, "ok, 0.2 s"), (1.0, "slow, 1 s"), (float("inf"), "slow, seconds"))


@dataclasses.dataclass(frozen=True)
class Way:
    """A member's way to another one, as it was tried last."""

    address: str
    """The other one's host:port."""
    why: str = ""
    """What is wrong with the way; nothing where it works."""
    source: str = ""
    """The address with which packets leave for it."""
    seconds: float = 0.0
    """How long the answer took."""
    process: str = ""
    """Which process answered (trainer/cluster/probe.py); nothing where none did."""
    refused: bool = False
    """Whether nothing listens there, or what did has just ended: packets came and went."""
    times: int = 1
    """How often in a row the same was found."""
    timed_out: bool = False
    """Whether no answer came in time, as one may from a member that is busy."""

    @property
    def works(self) -> bool:
        return not self.why

    @property
    def is_doubtful(self) -> bool:
        """Whether it may work: an answer that came too late once may be a busy machine's."""
        return self.timed_out and self.times < CONFIRMED

    def as_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Way:
        """Read what `as_record` wrote, also another release's: unknown keys are left."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in record.items() if key in known})


Matrix = Mapping[str, Mapping[str, Way]]
"""Each member's ways, by its task and the other one's."""


def targets(task: str, members: Mapping[str, str]) -> dict[str, str]:
    """Return whom a member exchanges tensors with (task to address): all others, but no worker another worker."""
    of_workers = TaskId.parse(task).job == "worker"
    return {
        other: address
        for other, address in members.items()
        if other != task and not (of_workers and TaskId.parse(other).job == "worker")
    }


def named_in(message: str) -> list[TaskId]:
    """Return the members that TensorFlow names as not having answered, by their numbers in its cluster."""
    return [TaskId(job, int(index)) for job, index in dict.fromkeys(REMOTE.findall(message))]


def checked(way: Way, process: str | None) -> Way:
    """Return the way as it is when the coordinator has long known which process is there: it must be the same one."""
    if not way.works or process is None or process == way.process:
        return way
    who = "nothing listens there" if way.refused else "another server answers there"
    return dataclasses.replace(
        way, why=f"{who}, and not the one that answers the coordinator: have two hosts its address?"
    )


def broken(ways: Matrix, one: str, other: str) -> str:
    """Say what is wrong between two members, in either direction; nothing where all is well, or not known."""
    for source, target in ((one, other), (other, one)):
        way = ways.get(source, {}).get(target)
        if way is not None and not way.works and not way.is_doubtful:
            return describe(source, target, way)
    return ""


def is_doubtful(ways: Matrix, task: str, others: Collection[str]) -> bool:
    """Return whether a way between a member and one of these, in either direction, may work or not."""
    pairs = [pair for other in others for pair in ((task, other), (other, task))]
    return any(way is not None and way.is_doubtful for way in (ways.get(one, {}).get(other) for one, other in pairs))


def describe(source: str, target: str, way: Way) -> str:
    """Say who can't reach whom, and the address with which packets leave."""
    leave = f"; its packets leave from {way.source}" if way.source else ""
    return f"{source} can't reach {target} at {way.address} ({way.why}){leave}"


def lost(ways: Matrix, workers: Collection[str], servers: Collection[str]) -> dict[str, str]:
    """Return the ps that no member can use, each with what is wrong.

    That is one that no worker reaches, one without the way to the coordinator that another member has, and of two ps
    without a way to each other the second. A worker of `workers` that has reported nothing keeps each.
    """
    found: dict[str, str] = {}
    for ps in servers:
        wrong = [broken(ways, worker, ps) for worker in workers]
        if wrong and all(wrong):
            found[ps] = f"no worker has a way to it: {wrong[0]}"
        elif why := to_chief(ways, ps) or next(
            filter(None, (broken(ways, other, ps) for other in servers if other < ps and other not in found)), ""
        ):
            found[ps] = why
    return found


def parted(ways: Matrix, worker: str, servers: Collection[str]) -> str:
    """Say why a worker can't train with these ps and the coordinator; nothing where it can."""
    return to_chief(ways, worker) or next(filter(None, (broken(ways, worker, ps) for ps in servers)), "")


def to_chief(ways: Matrix, task: str) -> str:
    """Say what is wrong with a member's way to the coordinator; one that all lack is the coordinator's own matter."""
    others = (row[CHIEF] for other, row in ways.items() if other != task and CHIEF in row)
    return broken(ways, task, CHIEF) if any(way.works for way in others) else ""


def status_of(ways: Matrix, most: int = MAX_WAYS_LISTED) -> dict[str, dict[str, str]]:
    """Return what the status says of each way, by the members' tasks: the broken ones alone where there are many."""
    many = sum(len(row) for row in ways.values()) > most
    rows = {
        task: {o: cell(row[o]) for o in sorted((o for o in row if not (many and row[o].works)), key=order)}
        for task, row in sorted(ways.items(), key=lambda each: order(each[0]))
    }
    return {task: row for task, row in rows.items() if row}


def cell(way: Way) -> str:
    """Say in a word or two how a way is; what is wrong begins with "broken"."""
    if way.is_doubtful:
        return "late once"
    if not way.works:
        leave = f"; packets leave from {way.source}" if way.source else ""
        return f"{BROKEN} ({way.why}){leave}"
    if way.refused:
        return "closed"
    return next(text for seconds, text in STEPS if way.seconds <= seconds)


def order(task: str) -> tuple[str, int]:
    """Sort worker-2 before worker-10."""
    name = TaskId.parse(task)
    return name.job, name.index
