"""The members of a parameter-server run, from one generation of its training to the next.

A generation is {form the cluster of the members that are here, make strategy and model, restore, train}. What the next
process must know lies in the run's state record: which processes served this one, and which members the
training goes on without.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from trainer.cluster import call_errors
from trainer.cluster.commands import Messenger, shut_down_servers
from trainer.cluster.deadlines import Phases
from trainer.cluster.fence import Fence, shut
from trainer.cluster.formation import describe_missing, form, names
from trainer.cluster.heartbeat import Heartbeat
from trainer.cluster.last_words import LEAVE_SECONDS, say_last
from trainer.cluster.leaving import is_leaving, leaving_ps
from trainer.cluster.member import HERE, Event, Member, State
from trainer.cluster.missing_ways import MissingWays
from trainer.cluster.releases import Releases
from trainer.cluster.restart_requests import RestartRequests
from trainer.cluster.spec import Cluster
from trainer.cluster.way_reader import WayReader
from trainer.cluster.ways import CHIEF, named_in, status_of
from trainer.core.config import Config
from trainer.core.failures import TRY_AGAIN, UserError
from trainer.core.signals import on_sigterm, raise_stopped
from trainer.core.states import Phase, RunState
from trainer.core.task_id import TaskId
from trainer.run.directory import RunDirectory
from trainer.run.release import MEND
from trainer.run.restart_budget import end_attempt
from trainer.telemetry.progress import Progress
from trainer.telemetry.tally import Seen

log = logging.getLogger(__name__)
REMIND_SECONDS = 30.0
# TensorFlow reports a ps whose socket closes at once, except in the middle of a long step, or when no step needs it.
REPORT_SECONDS = 10.0
# A worker that was quiet for longer, more than a question's time, and then ends has perhaps lost its host.
QUIET_SECONDS = 4.0
# TensorFlow lets go of a worker within moments of losing its connections, and takes one in as fast.
DROP_SECONDS = 5.0
TAKE_SECONDS = 20.0
PROVE_SECONDS = 0.02  # between two looks at whether a ps still lives
LIVE_SECONDS = 2.0
NEWS_SECONDS = 3.0
CALL_FAILED = "(its call failed)"


class Handler(Protocol):
    """What TensorFlow does with this generation's workers (trainer/training/tf_internals/workers.py)."""

    busy: dict[str, float]
    updating_since: float | None


class Membership:
    """Who trains, who is watched, and who is done without."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        directory: RunDirectory,
        progress: Progress,
        phases: Phases,
        release: str | None = None,
    ) -> None:
        """Begin to ask the members. `release` is the coordinator's own, where it comes from one."""
        self._phases = phases
        self.began = self._asked_since = time.monotonic()
        """When the time without training began that the present generation ends."""
        self.hurt = False
        """Whether a process of this generation has ended, also if another has taken its place."""
        self._config = config
        self._cluster = cluster
        self._directory = directory
        self._progress = progress
        record = directory.read_state()
        stale = record["restart"]
        known = {**record["members"], **stale}
        self._first = not record["members"]
        self._every_ps = False
        self._without = set(record["without"])
        self._named = ""
        self._told = 0.0
        self._members: dict[str, str] = {}  # the process of each that this generation trains on
        self._lost: dict[str, tuple[float, str]] = {}  # the processes that were told to have ended, and when
        self._absent: set[str] = set()  # told to be lost or silent, and not back
        self._reset: dict[str, str] = {}  # the processes whose connections were looked after when they had ended
        self._given_up: dict[str, float] = {}
        self._other_release: dict[str, str | None] = {}  # the processes that were told to run another one
        self._watching = False
        self._half: dict[str, str] = {}  # why each member that is half connected is so
        self._missing_ways = MissingWays()
        self.handler: Handler | None = None
        """What takes workers in and out while this generation trains."""
        messenger = Messenger(cluster.servers) if config.local_run_dir else None
        self._restarts = RestartRequests(directory, record["restart"], progress.post, messenger)
        self.heartbeat = Heartbeat(
            {
                task: Member(task, address, since=self.began, incarnation=known.get(task), must_restart=stale.get(task))
                for task, address in cluster.servers.items()
            },
            config.heartbeat_timeout_seconds,
            Releases(release).other if release and config.local_run_dir else None,
            lambda task, process, now: self._ways.unfit(task, process, now),
        )
        self._ways = WayReader(self.heartbeat.members)
        self.heartbeat.on_beat = self.look
        progress.tally.members = self.seen
        self._fence = Fence(self._silent_addresses)
        self.heartbeat.start()
        self._fence.start()

    def form(self) -> Cluster:
        """Wait for the members and return the cluster of those that this generation trains on; raises Stopped."""
        on_sigterm(raise_stopped)
        self._phases.enter(Phase.WAITING)
        self._ways.start()
        members = form(
            self._config, self._cluster, self.heartbeat, self._first, self._without, self._name_missing, self._every_ps
        )
        # While a strategy's constructor waits, no Python handler could run.
        on_sigterm(signal.SIG_DFL)
        for task, process in self._members.items():
            if members.get(task) != process:
                self._tell_lost(task, process)
        now = time.monotonic()
        absent = {task: address for task, address in self._cluster.servers.items() if task not in members}
        self.heartbeat.change(lambda member: member.taken(now), *members)
        # One that is away is asked too: should it thaw, it must come back without what it holds and waits for.
        self.heartbeat.change(Member.left_out, *absent)
        self._members, self._absent = members, set()
        self._first, self._without, self._named = False, set(absent), ""
        try:
            self._directory.set_members(members=members, without=sorted(absent))
        except OSError as error:  # only the next process would read it
            log.warning("cannot write down the members: %s", error)
        if absent:
            log.warning("going on without %s", names(absent))
        else:
            log.info("all %d other members are there", len(members))
        message = f"without {names(absent)}" if absent else "all members"
        self._progress.events.write("formed", seconds=now - self.began, message=message)
        self.hurt, self._watching = False, True
        return self._cluster.only(members)

    def needs_every_ps(self) -> list[str]:
        """Form no cluster without a ps from now on; returns the ps that this generation goes on without."""
        self._every_ps = True
        servers = (task for task in self._cluster.servers if TaskId.parse(task).job == "ps")
        return [task for task in servers if task not in self._members]

    def generation_over(self, message: str) -> None:
        """Say that the next generation begins; nobody is watched until it has its members."""
        self.release()
        self.began = time.monotonic()
        log.warning("forming the cluster again in this process: %s", message)
        self._progress.enter(RunState.WAITING, message)
        self._progress.events.write("recovering", message=message)

    def shut_down_servers(self) -> None:
        """End the servers that don't see the state record: the run is finished."""
        if self._config.local_run_dir:
            self.release()
            shut_down_servers(self._cluster.servers)

    def leave(self, past_using: bool = False) -> None:
        """Stop monitoring. `past_using`: also ask the members' processes to restart."""
        self._leave(lambda member: past_using)

    @property
    def processes(self) -> dict[str, str]:
        """The incarnations of this generation's members as it began, by address."""
        return {self._cluster.servers[task]: process for task, process in self._members.items()}

    @property
    def workers(self) -> list[str]:
        """The workers of this generation, in TensorFlow's order."""
        return [task for task in self._cluster.servers if task in self._members and TaskId.parse(task).job == "worker"]

    @property
    def servers(self) -> list[str]:
        """The ps of this generation, in TensorFlow's order."""
        return [task for task in self._cluster.servers if task in self._members and TaskId.parse(task).job == "ps"]

    def lost_ps(self) -> list[str]:
        """Return the ps of this generation whose processes have ended: it can't go on."""
        return sorted(task for task, member in self.heartbeat.members().items() if member.is_ps and member.is_lost)

    def leaving_ps(self) -> list[str]:
        """Return the ps of this generation that leave in order."""
        return sorted(task for task in leaving_ps() if task in self._members)

    def leaving_workers(self) -> list[str]:
        """Return the workers of this generation that leave in order."""
        return [task for task in self.workers if is_leaving(task)]

    def leaves(self, task: str) -> bool:
        """Return whether a member leaves in order, so that its end is no fault."""
        return is_leaving(task)

    def workers_serving(self, since: float = 0.0) -> set[str]:
        """Return the workers of this generation that answered a question asked after `since` (of time.monotonic)."""
        members = self.heartbeat.members()
        if since:
            self.heartbeat.hurry(since)
        return {task for task in self.workers if members[task].is_here(since)}

    def returned(self) -> list[str]:
        """Return the members that this generation goes on without and that are back."""
        now, leaving = time.monotonic(), leaving_ps()
        members = self.heartbeat.members().items() if self._watching else ()
        back = (task for task, member in members if member.taken_in is None and member.is_steady(now))
        return sorted(task for task in back if task not in leaving)

    def worker_lost(self, task: str) -> None:
        """TensorFlow has lost a worker, and waits to take it in again."""
        log.info("TensorFlow has let go of %s", task)
        self.heartbeat.hurry()

    def way_lost(self, task: str, message: str) -> str:
        """Say which way a worker's call lacked, by what TensorFlow says of it, and leave the worker out.

        Nothing where TensorFlow names nobody else, or one that has ended: then it is not the way that is lost. Waits
        until that is known, which is the heartbeat's time-out at most; only this worker's calls wait for it.
        """
        others = [name for name in map(self._name_of, named_in(message)) if name not in (None, task)]
        others = [name for name in others if name and TaskId.parse(name).job != "worker"]
        if not others or not self._live([name for name in others if name != CHIEF]):
            return ""
        addresses = self._cluster.servers | {CHIEF: self._cluster.jobs["chief"][0]}
        called = " or ".join(f"{name} at {addresses[name]}" for name in others)
        why = self._ways.parted.get(task) or f"{task} can't reach {called} {CALL_FAILED}"
        self._cut_off(task, why)
        return why

    def _name_of(self, named: TaskId) -> str | None:
        """Return the task that TensorFlow calls so: in its cluster those that are left move up."""
        if named.job == "chief":
            return CHIEF
        tasks = {"worker": self.workers, "ps": self.servers}.get(named.job, [])
        return tasks[named.index] if named.index < len(tasks) else None

    def _live(self, servers: Collection[str]) -> bool:
        """Return whether the processes of these ps that take part answer a question that is asked from now on.

        A generation that is over meanwhile, as after a ps that was lost, says nothing of its processes any longer.
        """
        since = time.monotonic()
        processes = {task: self.heartbeat.members()[task].taken_in for task in servers}
        while self._watching and time.monotonic() < since + self._config.heartbeat_timeout_seconds + LIVE_SECONDS:
            self.heartbeat.hurry(since)
            members = [self.heartbeat.members()[task] for task in servers]
            if any(member.taken_in is None or member.taken_in != processes[member.task] for member in members):
                return False
            if any(member.is_lost or member.state is State.SILENT for member in members):
                return False
            if all(member.is_here(since) for member in members):
                return True
            time.sleep(PROVE_SECONDS)
        return False

    def _cut_off(self, task: str, why: str) -> None:
        """Leave out one that takes part and lacks a way; what it waits for goes with its process."""
        now = time.monotonic()
        self.heartbeat.change(lambda member: member.cut_off(now, why), task)
        self.hurt = True
        self._tell_half(self.heartbeat.members()[task])

    def unreachable_ps(self) -> dict[str, str]:
        """Return the ps of this generation that live, and that nobody can use, each with what is wrong."""
        members = self.heartbeat.members() if self._watching else {}
        return {task: m.why for task, m in members.items() if m.is_ps and m.taken_in and m.state is State.HALF}

    def workers_taken_in(self, tasks: Collection[str]) -> None:
        """TensorFlow has taken these workers in again."""
        now = time.monotonic()
        log.info("TensorFlow has taken in %s", ", ".join(sorted(tasks)))
        self.heartbeat.change(lambda member: member.taken(now), *tasks)
        # The next generation compares with these. An earlier process of theirs was told to be lost before.
        self._members |= {task: process for task in tasks if (process := self.process(task))}

    def process(self, task: str) -> str | None:
        """Return the process of a worker that takes part."""
        return self.heartbeat.members()[task].taken_in

    def has_ended(self, task: str, process: str | None) -> bool:
        """Return whether a process that took part is known to have ended; one that is only silent is not."""
        self.heartbeat.hurry()
        member = self.heartbeat.members()[task]
        return member.incarnation != process or (member.ended is not None and member.ended[0] == process)

    def killed_by_call(self, tasks: list[str], steps: int) -> UserError:
        """Return the error that a call is which killed worker after worker."""
        return call_errors.killed_by_call(tasks, steps, self._progress.status.step)

    def failed_alike(self, error: Exception) -> UserError:
        """Return the error that the program has, where every worker reports it and none has ended."""
        return call_errors.failed_alike(error)

    def seen(self) -> dict[str, Seen]:
        """Return each member as it was seen last."""
        now = time.monotonic()
        return {
            task: Seen(member.state.value, now - max(member.answered_at or 0.0, self._asked_since))
            for task, member in self.heartbeat.members().items()
        }

    def look(self) -> None:
        """Compare the records with what this generation needs; the heartbeat calls this after each round."""
        self._ask_to_restart()
        if late := self._phases.overdue():
            self._give_up("phase-overdue", late, [])
        for task, member in self.heartbeat.members().items():
            if member.state is State.OTHER_RELEASE and self._other_release.get(task) != member.incarnation:
                self._other_release[task] = member.incarnation
                self._tell("member-other-release", task, f"{member.why}: left out. {MEND}")
            if self._watching and member.taken_in is not None:
                if trouble := self._trouble(member, time.monotonic()):
                    event, message = trouble
                    self._give_up(event, message, [task])
                self._tell_change(member)
        self._look_at_ways(time.monotonic())
        self._progress.history.members({task: m.state.value for task, m in self.heartbeat.members().items()})
        if self._watching:
            # One that starts again for a broken way is still away for that.
            states = {t: State.HALF if t in self._half else m.state for t, m in self.heartbeat.members().items()}
            self._progress.without({task: s.value for task, s in states.items() if s is not State.TRAINING})
        handler = self.handler
        if handler is not None and handler.updating_since is not None:
            seconds = time.monotonic() - handler.updating_since
            if seconds > TAKE_SECONDS:
                self._give_up("recovering", f"TensorFlow has been taking in a worker for {seconds:.0f} s", [])

    def _look_at_ways(self, now: float) -> None:
        """Leave out those of this generation that lack a way, and tell of it."""
        members = self.heartbeat.members()
        self._progress.ways(status_of(self._ways.matrix))
        for member in members.values():
            self._tell_half(member)
        training = [m.task for m in members.values() if not m.is_ps and m.state is State.TRAINING]
        if not self._watching or self.handler is None:
            self._missing_ways.forget()
            return
        ways, busy = self._ways, self.handler.busy
        for task, why in self._missing_ways.look(training, ways.parted, ways.lost, busy, now):
            if members[task].state is State.TRAINING:
                self._cut_off(task, why)

    def _tell_half(self, member: Member) -> None:
        """Tell of one that is half connected, and once more when it has tried its ways: where its packets leave."""
        task = member.task
        if member.state is State.HALF:
            before = self._half.get(task)
            # One that is back may be tried by the others only in a moment.
            is_new = member.taken_in is not None or time.monotonic() - member.since >= NEWS_SECONDS
            is_known_better = before is not None and CALL_FAILED in before and CALL_FAILED not in member.why
            if (is_new and before is None) or is_known_better:
                self._half[task] = member.why
                self._absent.add(task)
                if not member.is_ps:
                    self._lost[task] = time.monotonic(), str(member.taken_in)  # its end is no news
                self._tell("ps-lost" if member.is_ps else "member-half-connected", task, f"{member.why}: left out")
        elif task in self._half and member.state in HERE:
            self._half.pop(task)
            self._absent.discard(task)
            self._tell("member-back", task, "its ways work again")

    def _tell_change(self, member: Member) -> None:
        """Tell of a member of this generation that is lost, silent or back."""
        task = member.task
        if task in self._half:
            return
        if member.is_lost:
            self._tell_lost(task, str(member.taken_in))
        elif member.state is State.SILENT and task not in self._absent:
            self._absent.add(task)
            self.hurt = True
            self._tell("member-silent", task, f"has not answered for {member.quiet:.0f} s: cut off")
        if task in self._absent and member.state in HERE and not member.is_ps:
            self._absent.discard(task)
            self._tell("member-back", task, "its server answers again")
        if member.state is State.GIVEN_UP and self._given_up.get(task) != member.until:
            self._given_up[task] = member.until
            pause = member.until - time.monotonic()
            why = "it ended again and again" if member.why == Event.SHORT_LIVED.value else member.why
            self._tell("member-given-up", task, f"{why}: left out for {pause:.0f} s")

    def _trouble(self, member: Member, now: float) -> tuple[str, str] | None:
        """Return the event and message where this process can't go on for this member; mend what can be mended."""
        task, handler = member.task, self.handler
        silent = f"{task} has not answered for {member.quiet:.0f} s: cut off"
        if member.is_ps:
            if member.state is State.SILENT:
                return "member-silent", silent
            if member.is_lost and now - self._lost.get(task, (now, ""))[0] > REPORT_SECONDS:
                return "recovering", f"{task} has ended, and TensorFlow waits for it all the same"
            return None
        if member.state is State.SILENT:
            if handler is None:
                return "member-silent", silent
            if task in handler.busy and now - max(handler.busy[task], member.since) > DROP_SECONDS:
                return "recovering", f"{silent}, and TensorFlow does not let go of it"
        # Reset and soon up again, a host has told nobody of its connections, and TensorFlow waits on them for ever.
        if member.ended and member.ended[0] == member.taken_in != self._reset.get(task):
            self._reset[task] = member.ended[0]
            if member.ended[1] > QUIET_SECONDS:
                log.warning("%s had not answered for %.0f s when its process ended", task, member.ended[1])
                if handler is None:
                    return "member-silent", silent
                shut(member.address)
        return None

    def _tell_lost(self, task: str, process: str) -> None:
        """Tell once that a process of a generation has ended, by whichever thread that notices it first."""
        if self._lost.get(task, (0.0, ""))[1] == process:
            return
        self.hurt = True
        self._lost[task] = time.monotonic(), process
        if task in self._absent:  # told to be silent
            return
        self._absent.add(task)
        if is_leaving(task):
            self._tell("member-left", task, "it leaves in order, and is to be back")
            return
        self._tell("ps-lost" if TaskId.parse(task).job == "ps" else "member-lost", task, "its process has ended")

    def _ask_to_restart(self) -> None:
        """Have those processes restart that must not be used as they are, also those that answer only later."""
        wanted = {task: m.must_restart for task, m in self.heartbeat.members().items() if m.must_restart}
        self._restarts.ask(wanted)

    def _silent_addresses(self) -> list[str]:
        """Return the workers that TensorFlow must not wait for."""
        members = self.heartbeat.members() if self._watching and self.handler else {}
        return [m.address for m in members.values() if m.taken_in and not m.is_ps and m.state is State.SILENT]

    def _name_missing(self, missing: dict[str, Member]) -> None:
        message = describe_missing(missing)
        if message == self._named and time.monotonic() - self._told < REMIND_SECONDS:
            return
        for task in self._members.keys() & missing.keys():
            self._tell_lost(task, self._members[task])
        log.info("waiting for members: %s", message)
        self._progress.without({task: member.state.value for task, member in missing.items()})
        self._progress.enter(RunState.WAITING, message)
        self._progress.events.write("waiting", message=message)
        self._named, self._told = message, time.monotonic()

    def _tell(self, event: str, task: str, message: str) -> None:
        address = self._cluster.servers[task]
        log.warning("%s (%s): %s", task, address, message)
        self._progress.events.write(event, task=task, host=address, message=message)

    def release(self) -> None:
        """Watch nobody, and let go of this generation's members."""
        self._watching, self.handler = False, None
        now = time.monotonic()
        self.heartbeat.change(lambda member: member.released(now), *self._cluster.servers)

    def _leave(self, past_using: Callable[[Member], bool]) -> None:
        self._watching = False
        members = self.heartbeat.members()
        self.heartbeat.stop()
        self._ways.stop()
        self._fence.stop()
        restart = {task: m.taken_in for task, m in members.items() if m.taken_in and past_using(m)}
        restart |= {task: m.must_restart for task, m in members.items() if m.must_restart}
        self._restarts.end(restart, self._config.steps)

    def _give_up(self, event: str, message: str, tasks: list[str]) -> None:
        """End this process, whatever its main thread waits for: the next one forms the cluster of who answers."""
        if tasks and not self._watching:  # the generation has just ended
            return
        log.error("%s; restarting", message)
        say_last(partial(self._leave_word, event, message, tasks))
        os._exit(TRY_AGAIN)

    def _leave_word(self, event: str, message: str, tasks: list[str]) -> None:
        for task in tasks:
            self._progress.events.write(event, task=task, host=self._cluster.servers[task], message=message)
        if not tasks:
            self._progress.events.write(event, message=message)
        self._leave(lambda member: member.task in tasks)
        # A phase that hung counts as a crash, a member that is gone does not.
        end_attempt(self._directory, counted=not tasks, trouble=bool(tasks), message=message)
        self._progress.enter(RunState.WAITING, message)
        self._progress.close(LEAVE_SECONDS)
