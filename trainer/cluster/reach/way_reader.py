"""Read what the members have found of their ways, and say who can't be used for it.

Each of TensorFlow's servers reads a file for any caller of its port, as trainer/cluster/server_releases.py has it: no
shared path is needed. What a process has found is asked for until it is there, then now and then, and often as long as
a way is broken.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from trainer.cluster.member import HERE, Member, MemberState
from trainer.cluster.reach.way_probe import PERIOD_SECONDS as TRIED_SECONDS
from trainer.cluster.reach.way_probe import record_path
from trainer.cluster.reach.ways import CHIEF, Matrix, Way, checked, is_doubtful, lost, parted
from trainer.cluster.remote_commands import session_on
from trainer.core.failures import first_line
from trainer.core.task_id import TaskId

log = logging.getLogger(__name__)
THREADS = 8  # of which a server that is frozen holds one, for the deadline of its session
TICK_SECONDS = 0.3
PERIOD_SECONDS = 10.0
AGAIN_SECONDS = 1.0
# A process that has reported nothing by then is used: its release may know nothing of this.
PATIENCE_SECONDS = 10.0
KEPT_SECONDS = 60.0  # for which the ways of a process that has ended still count
# A process that has been here for so long was tried by the others.
KNOWN_SECONDS = TRIED_SECONDS + 5.0
Row = tuple[str, float, Mapping[str, Way]]  # what a process has found: the process, when, and its ways
OUT = (MemberState.AWAY, MemberState.GIVEN_UP, MemberState.OTHER_RELEASE, MemberState.SILENT)


def read_ways(task: str, address: str, process: str) -> tuple[dict[str, Way], str] | None:
    """Return what a server's process has found, and whether memory ran out for the one before.

    None where it has reported nothing yet; raises TensorFlow's OpError.
    """
    import tensorflow as tf

    try:
        with session_on(task, address) as session:
            path = str(record_path(process))
            if not session.run(tf.io.matching_files(path)).size:  # a server warns of each file that it can't find
                return None
            record = json.loads(session.run(tf.io.read_file(path)))
        ways = {str(other): Way.read(way) for other, way in record["ways"].items()}
        return (ways, str(record["lack"])) if ways else None
    except (tf.errors.NotFoundError, LookupError, ValueError, TypeError, AttributeError):
        return None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who can't be used, by what is known at a time."""

    matrix: Matrix = dataclasses.field(default_factory=dict)
    """All that is known, by the members' tasks."""
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    """The ps that no member can use, each with what is wrong."""
    parted: dict[str, str] = dataclasses.field(default_factory=dict)
    """The workers without a way to the coordinator, or to one of the other ps, each with what is wrong."""
    doubted: set[str] = dataclasses.field(default_factory=set)
    """The workers with a way that may work or not."""
    judged: dict[str, str] = dataclasses.field(default_factory=dict)
    """The processes whose ways are in this, by task."""


def judge(members: Mapping[str, Member], rows: Mapping[str, Row], now: float) -> Verdict:
    """Return who can't be used, by the members' records and what their processes have found, `now`."""
    counted = {task: row for task, row in rows.items() if counts(members[task], row, now)}
    matrix = {
        task: {other: checked(way, known_process(members.get(other), at)) for other, way in ways.items()}
        for task, (_, at, ways) in counted.items()
    }
    # Also of those that are closed now: one that is back is judged by its first answer.
    servers = [task for task, member in members.items() if member.is_ps]
    # One that is about to be here may have a way: as long as it has reported none, no ps is lost.
    workers = [task for task, member in members.items() if not member.is_ps and member.state not in OUT]
    lost_ps = lost(matrix, workers, servers)
    # As long as a lost one takes part, each call would need it: no worker is of use before it is let go of.
    present = [task for task in servers if answers(members[task])]
    left = [task for task in present if task not in lost_ps or members[task].state is MemberState.TRAINING]
    found = {task: parted(matrix, task, left) for task in workers}
    return Verdict(
        matrix,
        lost_ps,
        {task: why for task, why in found.items() if why},
        {task for task in workers if is_doubtful(matrix, task, [CHIEF, *left])},
        {task: row[0] for task, row in rows.items()},
    )


class Questions:
    """The questions that wait to be asked: one at a time of each member, once it is due."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, str, str] | None] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}
        self._open: set[str] = set()

    def ask(self, member: Member, ways: Mapping[str, Way] | None, now: float) -> None:
        """Have a member asked if that is due; `ways` are those that its process has found, None as long as none are."""
        if member.task not in self._open and now - self._asked.get(member.task, 0.0) >= pause(member, ways, now):
            self._open.add(member.task)
            self._asked[member.task] = now
            self._queue.put((member.task, member.address, str(member.incarnation)))

    def next(self) -> tuple[str, str, str] | None:
        """Return the task, address and process to ask next, once there is one; None at the end."""
        return self._queue.get()

    def answered(self, task: str) -> None:
        """The member's question is over, whatever came of it."""
        self._open.discard(task)

    def end(self, threads: int) -> None:
        """Have so many threads that wait for `next` end."""
        for _ in range(threads):
            self._queue.put(None)


def pause(member: Member, ways: Mapping[str, Way] | None, now: float) -> float:
    """Return the seconds between two questions to a member, by what its process has found."""
    if ways is None:
        is_new = member.steady_since is None or now - member.steady_since < 2 * PATIENCE_SECONDS
        return TICK_SECONDS if is_new else PERIOD_SECONDS
    is_well = all(way.works for way in ways.values()) and member.state is MemberState.TRAINING
    return PERIOD_SECONDS if is_well else AGAIN_SECONDS


class WayReader:
    """Keeps the members' ways, and who can't train for them; a thread asks, and others wait for the answers."""

    def __init__(
        self,
        members: Callable[[], Mapping[str, Member]],
        read: Callable[[str, str, str], tuple[dict[str, Way], str] | None] = read_ways,
        lacked: Callable[[str, str, str], None] = lambda task, process, lack: None,
    ) -> None:
        """Take what returns the members' records by task.

        `lacked` hears once of each process that follows one whose memory ran out.
        """
        self._members = members
        self._read = read
        self._lacked = lacked
        self._rows: dict[str, Row] = {}
        self._first: dict[str, tuple[str, float]] = {}  # a process, and when it was first asked for; by task
        self._news = threading.Event()
        self._started = self._ended = False
        self._questions = Questions()
        self.verdict = Verdict()

    def start(self) -> None:
        """Ask from now on; call it when TensorFlow is loaded. Again it does nothing."""
        if self._started:
            return
        self._started = True
        threading.Thread(target=self._keep, name="ways", daemon=True).start()
        for _ in range(THREADS):
            threading.Thread(target=self._answer, name="ways", daemon=True).start()

    def stop(self) -> None:
        self._ended = True
        self._news.set()

    def unfit(self, task: str, process: str, now: float) -> str | None:
        """Say why a process that answers can't train, nothing where it can, None while that is not known.

        A ps's own ways are not waited for: one that is back holds up everybody.
        """
        if TaskId.parse(task).job == "ps":
            return self.verdict.lost.get(task, "")
        if not self._started:
            return None
        if self.verdict.judged.get(task) != process:
            before = self._first.get(task)
            if before is None or before[0] != process:
                self._first[task] = before = process, now
            return None if now - before[1] < PATIENCE_SECONDS else ""
        if task in self.verdict.doubted:
            return None  # the way is about to be tried once more
        return self.verdict.parted.get(task, "")

    def judge(self, now: float) -> None:
        """Say again who can't be used, by what is known `now` (of time.monotonic)."""
        self.verdict = judge(self._members(), dict(self._rows), now)

    def _keep(self) -> None:
        while not self._ended:
            try:
                self._ask_who_is_due(time.monotonic())
                self.judge(time.monotonic())
            except Exception:
                log.exception("cannot say how the members reach each other")
            self._news.wait(TICK_SECONDS)
            self._news.clear()
        self._questions.end(THREADS)

    def _ask_who_is_due(self, now: float) -> None:
        for task, member in self._members().items():
            if member.incarnation and answers(member):
                process, _, ways = self._rows.get(task, ("", 0.0, {}))
                self._questions.ask(member, ways if process == member.incarnation else None, now)

    def _answer(self) -> None:
        while (question := self._questions.next()) is not None:
            self._ask(*question)

    def _ask(self, task: str, address: str, process: str) -> None:
        try:
            found = self._read(task, address, process)
            if found is not None:
                ways, lack = found
                is_new = self._rows.get(task, ("",))[0] != process
                self._rows[task] = process, time.monotonic(), ways
                if is_new:
                    self._news.set()
                if is_new and lack:
                    self._lacked(task, process, lack)
        except Exception as error:
            log.info("cannot ask %s (%s) for its ways: %s", task, address, first_line(error))
        finally:
            self._questions.answered(task)


def answers(member: Member) -> bool:
    return member.state in (*HERE, MemberState.STARTING, MemberState.HALF) and member.answered_at is not None


def counts(member: Member, row: Row, now: float) -> bool:
    """Return whether what a process has reported still counts: it is there, or it may be back in a moment."""
    return member.incarnation == row[0] or now - row[1] < KEPT_SECONDS


def known_process(member: Member | None, at: float) -> str | None:
    """Return the process that had been there for so long at that time that a try of the way has found it."""
    if member is None or member.state not in HERE or member.steady_since is None:
        return None
    return member.incarnation if at - member.steady_since > KNOWN_SECONDS else None
