"""The members of a parameter-server run, from one turn of its coordinator to the next.

What the next process must know lies in the run's state record: whose processes hold variables of this one, and which
members the training goes on without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from trainer.cluster.commands import Messenger, dismiss
from trainer.cluster.deadlines import Phases
from trainer.cluster.failure_detector import FailureDetector
from trainer.cluster.formation import POLL_SECONDS, form, names, stale
from trainer.cluster.heartbeat import Heartbeat
from trainer.cluster.spec import Cluster
from trainer.config import Config
from trainer.failures import TRY_AGAIN
from trainer.reporting.progress import Progress
from trainer.run.directory import RunDirectory
from trainer.run.restart_budget import end_attempt
from trainer.signals import on_sigterm, raise_stopped

log = logging.getLogger(__name__)
REMIND_SECONDS = 30.0
EARLY_SECONDS = 1.0
LEAVE_SECONDS = 3.0


def say_last(words: Callable[[], None]) -> None:
    """Leave the last words of a process on the shared path, in a few seconds even if that hangs."""
    thread = threading.Thread(target=words, name="last words", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
    if thread.is_alive():
        log.warning("the shared path does not take the last words of this process: they are lost")


class Membership:
    """Who trains, who is watched, and who is done without."""

    def __init__(
        self, config: Config, cluster: Cluster, directory: RunDirectory, progress: Progress, phases: Phases
    ) -> None:
        self._phases = phases
        self.began = time.monotonic()
        """When the time without training began that the present turn ends."""
        self._config = config
        self._cluster = cluster
        self._directory = directory
        self._progress = progress
        record = directory.read_state()
        # By task, the processes that served earlier coordinators; those of them that shall not be used as they are.
        self._known = {**record["members"], **record["restart"]}
        servers = {task: identity for task, identity in self._known.items() if task[:3] == "ps-"}
        self._unfit = {**record["restart"], **servers}
        self._without = set(record["without"])
        self._members: dict[str, str] = {}
        self._asked: dict[str, str] = {}
        self._told_lost: set[str] = set()
        self._named: dict[str, str] = {}
        self._told = 0.0
        self._messenger = Messenger(cluster.servers) if config.local_run_dir else None
        self._heartbeat = Heartbeat(cluster.servers, config.heartbeat_timeout_seconds)
        self.guard = FailureDetector(self._heartbeat, phases, self._give_up, self._tell)
        self._heartbeat.start()

    def restart_stale(self) -> None:
        """Ask early for what takes time: new processes in place of those that shall not be used as they are."""
        deadline = time.monotonic() + EARLY_SECONDS
        while not self._heartbeat.heard(self.began) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        unfit = stale(self._heartbeat.identities(), self._unfit)
        if unfit:
            self._restart(unfit)

    def leave(self, workers_too: bool = False) -> None:
        """Watch nobody any more, and tell the ps that this process ends: they start anew while the next one does.

        `workers_too`: a worker's process may be past using.
        """
        self._send({})
        self._heartbeat.stop()
        servers = {task: identity for task, identity in self._members.items() if workers_too or task[:3] == "ps-"}
        try:
            if servers and not self._directory.finished(self._config.steps):
                self._directory.set_members(restart={**self._unfit, **servers})
        except (OSError, ValueError) as error:
            log.warning("cannot ask the ps to start anew: %s", error)

    def dismiss(self) -> None:
        """End the servers that don't see the state record: the run is finished."""
        if self._messenger is not None:
            self.guard.formed({})
            dismiss(self._cluster.servers)

    def form(self) -> Cluster:
        """Wait for the members and return the cluster of those that this turn trains on; raises Stopped."""
        on_sigterm(raise_stopped)
        self._phases.enter("waiting")
        members = form(
            self._config,
            self._cluster,
            self._heartbeat,
            self._unfit,
            self._without,
            self._restart,
            self._name_missing,
            self._asked,
        )
        self._asked = {}
        self._tell_lost({task for task, identity in self._members.items() if members.get(task) != identity})
        # While a strategy's constructor waits, no Python handler could run.
        on_sigterm(signal.SIG_DFL)
        absent = {task: address for task, address in self._cluster.servers.items() if task not in members}
        # One that is away is asked too: should it thaw, it shall come back without what it holds and waits for.
        self._unfit = {task: self._known[task] for task in absent if task in self._known}
        self._known.update(members)
        self._members, self._told_lost = members, set()
        self._without, self._named = set(absent), {}
        try:
            self._directory.set_members(members=members, without=sorted(absent), restart=self._unfit)
        except OSError as error:  # only the next process would read it
            log.warning("cannot write down the members: %s", error)
        self._send(self._unfit)
        if absent:
            log.warning("going on without %s", names(absent))
        else:
            log.info("all %d other members are there", len(members))
        message = f"without {names(absent)}" if absent else "all members"
        self._progress.events.write("formed", seconds=time.monotonic() - self.began, message=message)
        self.guard.formed(members, unfit=self._unfit)
        return self._cluster.only(members)

    def lost(self, message: str) -> None:
        """Say that this turn is over and the next begins; nobody is watched until it has its members."""
        self._told_lost = set(self.guard.lost_servers())
        self.guard.formed({})
        self.began = time.monotonic()
        log.warning("forming the cluster anew in this process: %s", message)
        self._progress.enter("waiting", message)
        self._progress.events.write("recovering", message=message)

    def _restart(self, processes: dict[str, str]) -> None:
        self._asked = dict(processes)
        log.info("%s: restarting, without what an earlier coordinator left there", ", ".join(processes))
        self._directory.set_members(restart={**self._unfit, **processes})
        self._send({**self._unfit, **processes})

    def _send(self, restart: dict[str, str]) -> None:
        """Have those restart that don't see the state record."""
        if self._messenger is not None:
            self._messenger.send(restart)

    def _name_missing(self, missing: dict[str, str]) -> None:
        if missing == self._named and time.monotonic() - self._told < REMIND_SECONDS:
            return
        self._tell_lost(self._members.keys() & missing.keys())
        message = f"no answer from {names(missing)}"
        log.info("waiting for members: %s", message)
        self._progress.enter("waiting", message)
        self._progress.events.write("waiting", message=message)
        self._named, self._told = dict(missing), time.monotonic()

    def _tell_lost(self, tasks: set[str]) -> None:
        """Tell of ps that the turn before had, unless the guard has: TensorFlow was faster than the heartbeat."""
        for task in sorted(tasks - self._told_lost):
            if task.startswith("ps-"):
                self._tell("ps-lost", task, "its process has ended")
        self._told_lost |= tasks

    def _tell(self, event: str, task: str, message: str) -> None:
        address = self._cluster.servers[task]
        log.warning("%s (%s): %s", task, address, message)
        self._progress.events.write(event, task=task, host=address, message=message)

    def _give_up(self, event: str, message: str, tasks: list[str]) -> None:
        """End this process, whatever its main thread waits for: the next one forms the cluster of who answers."""
        log.error("%s; starting anew", message)
        say_last(partial(self._leave_word, event, message, tasks))
        os._exit(TRY_AGAIN)

    def _leave_word(self, event: str, message: str, tasks: list[str]) -> None:
        for task in tasks:
            self._progress.events.write(event, task=task, host=self._cluster.servers[task], message=message)
        if not tasks:
            self._progress.events.write(event, message=message)
        now = self.guard.formation()
        self._unfit.update({task: now[task] for task in tasks if task in now})
        self.leave()
        # A phase that hung counts as a crash, a member that is gone does not.
        end_attempt(self._directory, counted=not tasks, trouble=bool(tasks), message=message)
        workers = [task for task in tasks if task.startswith("worker-")]
        if self._config.elastic and workers:
            with contextlib.suppress(OSError, ValueError):  # the next process will wait for them in vain
                self._directory.set_members(without=sorted({*self._without, *workers}))
        self._progress.enter("waiting", message)
        self._progress.close(LEAVE_SECONDS)
