"""The members of a parameter-server run, from one generation of its training to the next.

A generation is {form the cluster of the members that are here, make strategy and model, restore, train}. What the next
process must know lies in the run's state record: which processes served this one, and which members the
training goes on without.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from trainer.cluster.deadlines import Phases
from trainer.cluster.final_write import LEAVE_SECONDS, make_final_write
from trainer.cluster.member import Member, MemberState
from trainer.cluster.members.draining import drained, is_leaving, leaving_ps
from trainer.cluster.members.fence import Fence
from trainer.cluster.members.formation import form, live, names
from trainer.cluster.members.growth import Growing
from trainer.cluster.members.heartbeat import Heartbeat
from trainer.cluster.members.member_news import CALL_FAILED, MemberNews
from trainer.cluster.members.member_troubles import MemberTroubles, WorkersHandler
from trainer.cluster.reach.missing_ways import MissingWays
from trainer.cluster.reach.way_reader import WayReader
from trainer.cluster.reach.ways import CHIEF, named_in, status_of
from trainer.cluster.remote_commands import Messenger, shut_down_servers
from trainer.cluster.restart_requests import RestartRequests
from trainer.cluster.server_releases import ServerReleases
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import TRY_AGAIN, UserError
from trainer.core.settings.config import Config
from trainer.core.signals import end_when_asked, leave_when_asked
from trainer.core.states import Phase, RunState
from trainer.core.task_id import TaskId, is_worker
from trainer.run.directory import RunDirectory
from trainer.run.restart_budget import end_attempt
from trainer.telemetry.counters import MemberHealth
from trainer.telemetry.progress import Progress

log = logging.getLogger(__name__)
TAKE_SECONDS = 20.0  # TensorFlow takes a worker in within moments


class Membership:
    """Which members train, which are watched, and which are done without."""

    def __init__(
        self,
        config: Config,
        cluster: ClusterConfig,
        directory: RunDirectory,
        progress: Progress,
        phases: Phases,
        release: str | None = None,
    ) -> None:
        """Begin to ask the members. `release` is the coordinator's own, where it comes from one."""
        self.began = self._asked_since = time.monotonic()
        """When the time without training began that the present generation ends."""
        self._config, self._cluster, self._growing = config, cluster, Growing(cluster)
        self._addresses = dict(cluster.servers)
        self._directory, self._progress, self._phases = directory, progress, phases
        record = directory.read_state()
        known = {**record["members"], **record["restart"]}
        self._first, self._every_ps = not record["members"], False
        self._without = set(record["without"])
        self._members: dict[str, str] = {}  # the process of each that this generation trains on
        self._workers: list[str] = []
        self._news, self._troubles = MemberNews(progress, self._addresses), MemberTroubles()
        self._watching = False
        self._missing_ways = MissingWays()
        self.handler: WorkersHandler | None = None
        """What takes workers in and out while this generation trains."""
        messenger = Messenger(self._addresses) if config.local_run_dir else None
        self._restarts = RestartRequests(directory, record["restart"], progress.post, messenger)
        self.heartbeat = Heartbeat(
            known_members(cluster, known, record["restart"], self.began),
            config.heartbeat_timeout_seconds,
            ServerReleases(release).other if release and config.local_run_dir else None,
            lambda task, process, now: self._ways.unfit(task, process, now),
        )
        self._ways = WayReader(self.heartbeat.members, lacked=partial(self._news.out_of_memory, known))
        self.heartbeat.on_beat = self.poll
        progress.counters.members, progress.counters.drained = self.seen, drained
        self._fence = Fence(self._silent_addresses)
        self.heartbeat.start()
        self._fence.start()

    def form(self) -> ClusterConfig:
        """Wait for the members and return the cluster of those that this generation trains on; raises Stopped."""
        leave_when_asked()
        self._phases.enter(Phase.WAITING)
        self._ways.start()
        tell = partial(self._news.missing, members=self._members)
        members = form(self._config, self.heartbeat, self._first, self._without, tell, self._every_ps)
        end_when_asked()
        for task, process in self._members.items():
            if members.get(task) != process:
                self._news.lost(task, process)
        now = time.monotonic()
        absent = {task: address for task, address in self._cluster.servers.items() if task not in members}
        self.heartbeat.change(lambda member: member.taken(now), *members)
        # One that is away is asked too: should it thaw, it must come back without what it holds and waits for.
        self.heartbeat.change(Member.left_out, *absent)
        self._members = members
        self._workers = [task for task in self._cluster.servers if task in members and is_worker(task)]
        self._news.formed()
        self._first, self._without = False, set(absent)
        try:
            self._directory.set_members(members=members, without=sorted(absent))
        except OSError as error:  # only the next process would read it
            log.warning("cannot write down the members: %s", error)
        if absent:
            log.warning("going on without %s", names(absent))
        else:
            log.info("all %d other members are present", len(members))
        message = f"without {names(absent)}" if absent else "all members"
        self._progress.events.write("formed", seconds=now - self.began, message=message)
        self._watching = True
        return self._cluster.only(members)

    def needs_every_ps(self) -> list[str]:
        """Form no cluster without a ps from now on; returns the ps that this generation goes on without."""
        self._every_ps = True
        servers = (task for task in self._cluster.servers if TaskId.parse(task).job == "ps")
        return [task for task in servers if task not in self._members]

    def generation_over(self, message: str) -> None:
        """Say that the next generation begins; no member is watched until it has all of its own."""
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

    def leave(self, unusable: bool = False) -> None:
        """Stop monitoring. `unusable`: also ask the members' processes to restart."""
        self._leave(lambda member: unusable)

    @property
    def hurt(self) -> bool:
        """Whether a process of this generation has ended, also if another has taken its place."""
        return self._news.hurt

    @property
    def processes(self) -> dict[str, str]:
        """The incarnations of this generation's members as it began, by address."""
        return {self._cluster.servers[task]: process for task, process in self._members.items()}

    @property
    def workers(self) -> list[str]:
        """The workers of this generation, in TensorFlow's order."""
        return list(self._workers)

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

    def drained_workers(self) -> list[str]:
        """Return the workers of this generation that are drained; none where all are."""
        names = set(drained())
        found = [task for task in self.workers if task in names]
        return found if len(found) < len(self.workers) else []

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
        return sorted(task for task in back if task not in leaving and task not in self._workers)

    def newcomers(self) -> dict[str, str]:
        """Return the workers that are present and take no part in this generation (task name to address)."""
        members = self.heartbeat.members() if self._watching else {}
        new = [m for m in members.values() if not m.is_ps and m.taken_in is None and m.is_here()]
        return {m.task: m.address for m in new if m.task not in self._workers and not is_leaving(m.task)}

    def join(self, task: str) -> None:
        """Count a worker to this generation, behind the others: TensorFlow is about to take it in."""
        self._workers.append(task)

    def joined(self, task: str) -> None:
        """Tell of a worker that has what it needs to train."""
        self._without.discard(task)
        self._progress.events.write("member-joined", task=task, host=self._addresses[task])

    def worker_lost(self, task: str) -> None:
        """TensorFlow has lost a worker, and waits to take it in again."""
        log.info("TensorFlow has let go of %s", task)
        self.heartbeat.hurry()

    def way_lost(self, task: str, message: str) -> str:
        """Say which way a worker's call lacked, by what TensorFlow says of it, and leave the worker out.

        Nothing where TensorFlow names no other, or one that has ended: then it is not the way that is lost. Waits
        until that is known, which is the heartbeat's time-out at most; only this worker's calls wait for it.
        """
        others = [name for name in map(self._name_of, named_in(message)) if name not in (None, task)]
        others = [name for name in others if name and not is_worker(name)]
        servers = [name for name in others if name != CHIEF]
        seconds = self._config.heartbeat_timeout_seconds
        if not others or not live(self.heartbeat, servers, seconds, lambda: self._watching):
            return ""
        addresses = self._cluster.servers | {CHIEF: self._cluster.jobs["chief"][0]}
        called = " or ".join(f"{name} at {addresses[name]}" for name in others)
        why = self._ways.verdict.parted.get(task) or f"{task} can't reach {called} {CALL_FAILED}"
        self._cut_off(task, why)
        return why

    def _name_of(self, named: TaskId) -> str | None:
        """Return the task that TensorFlow calls so: in its cluster those that are left move up."""
        if named.job == "chief":
            return CHIEF
        tasks = {"worker": self.workers, "ps": self.servers}.get(named.job, [])
        return tasks[named.index] if named.index < len(tasks) else None

    def _cut_off(self, task: str, why: str) -> None:
        """Leave out one that takes part and lacks a way; what it waits for goes with its process."""
        now = time.monotonic()
        self.heartbeat.change(lambda member: member.cut_off(now, why), task)
        self._news.hurt = True
        self._news.half(self.heartbeat.members()[task])

    def unreachable_ps(self) -> dict[str, str]:
        """Return the ps of this generation that live, and that no member can use, each with what is wrong."""
        members = self.heartbeat.members() if self._watching else {}
        return {task: m.why for task, m in members.items() if m.is_ps and m.taken_in and m.state is MemberState.HALF}

    def workers_taken_in(self, tasks: Collection[str]) -> None:
        """TensorFlow has taken these workers in again."""
        now = time.monotonic()
        log.info("TensorFlow has taken in %s", ", ".join(sorted(tasks)))
        self.heartbeat.change(lambda member: member.taken(now), *tasks)
        # The next generation compares with these. An earlier process of theirs was reported lost before.
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
        return UserError(
            f"the same call of {steps} steps, after step {self._progress.status.step}, ended the processes of "
            f"{', '.join(tasks)} one after the other. Their journals say why (fab logs --task {tasks[-1]}): too little "
            "memory for a batch, or an operation that fails a check"
        )

    def seen(self) -> dict[str, MemberHealth]:
        """Return each member as it was seen last."""
        now = time.monotonic()
        return {
            task: MemberHealth(member.state.value, now - max(member.answered_at or 0.0, self._asked_since))
            for task, member in self.heartbeat.members().items()
        }

    def poll(self) -> None:
        """Compare the records with what this generation needs; the heartbeat calls this after each round."""
        now = time.monotonic()
        self._look_for_added(now)
        self._ask_to_restart(now)
        if late := self._phases.overdue():
            self._give_up("phase-overdue", late, [])
        for task, member in self.heartbeat.members().items():
            self._news.other_release(member)
            if self._watching and member.taken_in is not None:
                now = time.monotonic()
                if trouble := self._troubles.find_for(member, self.handler, self._news.lost_at(member, now), now):
                    self._give_up(*trouble, [task])
                self._news.changed(member)
        self._look_at_ways(time.monotonic())
        self._progress.history.members({task: m.state.value for task, m in self.heartbeat.members().items()})
        if self._watching:
            # One that starts again for a broken way is still away for that.
            states = {
                t: MemberState.HALF if self._news.is_half(t) else m.state for t, m in self.heartbeat.members().items()
            }
            self._progress.without({task: s.value for task, s in states.items() if s is not MemberState.TRAINING})
        if (handler := self.handler) is not None and handler.updating_since is not None:
            seconds = time.monotonic() - handler.updating_since
            if seconds > TAKE_SECONDS:
                self._give_up("recovering", f"TensorFlow has been taking in a worker for {seconds:.0f} s", [])

    def _look_for_added(self, now: float) -> None:
        """Ask members from now on that the cluster has got; the training does not wait for them."""
        if added := self._growing.poll(now):
            self._addresses |= added
            self._without |= added.keys()
            self.heartbeat.add(*(Member(task, address, since=now) for task, address in added.items()))
            self._cluster = self._growing.cluster  # those that form a cluster find all of it in the heartbeat

    def _look_at_ways(self, now: float) -> None:
        """Leave out those of this generation that lack a way, and tell of it."""
        members = self.heartbeat.members()
        self._progress.ways(status_of(self._ways.verdict.matrix))
        for member in members.values():
            self._news.half(member)
        training = [m.task for m in members.values() if not m.is_ps and m.state is MemberState.TRAINING]
        if not self._watching or self.handler is None:
            self._missing_ways.forget()
            return
        ways, busy = self._ways.verdict, self.handler.busy
        for task, why in self._missing_ways.find_lasting(training, ways.parted, ways.lost, busy, now):
            if members[task].state is MemberState.TRAINING:
                self._cut_off(task, why)

    def _ask_to_restart(self, now: float) -> None:
        """Have those processes restart that must not be used as they are, also those that answer only later."""
        wanted = {task: m.must_restart for task, m in self.heartbeat.members().items() if m.must_restart}
        self._restarts.ask(wanted, now)

    def _silent_addresses(self) -> list[str]:
        """Return the workers that TensorFlow must not wait for."""
        members = self.heartbeat.members() if self._watching and self.handler else {}
        return [m.address for m in members.values() if m.taken_in and not m.is_ps and m.state is MemberState.SILENT]

    def release(self) -> None:
        """Watch no member any more, and let go of this generation's members."""
        self._watching, self.handler = False, None
        now = time.monotonic()
        self.heartbeat.change(lambda member: member.released(now), *self._cluster.servers)

    def _leave(self, unusable: Callable[[Member], bool]) -> None:
        self._watching = False
        members = self.heartbeat.members()
        self.heartbeat.stop()
        self._ways.stop()
        self._fence.stop()
        restart = {task: m.taken_in for task, m in members.items() if m.taken_in and unusable(m)}
        restart |= {task: m.must_restart for task, m in members.items() if m.must_restart}
        self._restarts.end(restart, self._config.steps)

    def _give_up(self, event: str, message: str, tasks: list[str]) -> None:
        """End this process, whatever its main thread waits for: the next one takes the members that answer."""
        if tasks and not self._watching:  # the generation has just ended
            return
        log.error("%s; restarting", message)
        make_final_write(partial(self._leave_word, event, message, tasks))
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


def known_members(
    cluster: ClusterConfig, known: Mapping[str, str], restart: Mapping[str, str], now: float
) -> dict[str, Member]:
    """Return the members' records to begin with, with the processes that an earlier coordinator knew."""
    return {
        task: Member(task, address, since=now, incarnation=known.get(task), must_restart=restart.get(task))
        for task, address in cluster.servers.items()
    }
