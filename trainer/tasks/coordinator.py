"""What runs the training program: makes the strategy, trains, saves, exports.

It is the coordinator (TensorFlow's job `chief`), and under multi_worker_mirrored every member.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer.cluster.deadlines import Phases
from trainer.cluster.final_write import make_final_write
from trainer.cluster.members.membership import Membership
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, RAISED, STOPPED, Stopped, UserError, is_signal
from trainer.core.own_frames import exception_info
from trainer.core.program import load_program, program_file
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest, leave_when_asked
from trainer.core.states import RunState
from trainer.report.html import PageWriter
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.run.release import own_release
from trainer.run.restart_budget import begin_attempt, end_attempt, end_import
from trainer.tasks.exits import Exit, decide_exit
from trainer.tasks.finished import complete_finished
from trainer.tasks.training import Training
from trainer.telemetry.logs import load_tensorflow
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.outlets.webhook import Notifications
from trainer.telemetry.progress import Progress
from trainer.telemetry.resources import record_resources
from trainer.training.run_context import RunContext

log = logging.getLogger(__name__)
FLUSH_SECONDS = 10.0
STORAGE_PAUSE_SECONDS = 5.0
ENDS = (RunState.FINISHED, RunState.FAILED)


@dataclass
class HeldResources:
    """What a process holds of its run, until it gives that back at its end."""

    directory: RunDirectory
    notifications: Notifications | None
    progress: Progress | None = None
    lease: Lease | None = None
    membership: Membership | None = None
    program_file: Path | None = None
    has_begun: bool = False
    """Whether an attempt has begun, whose budget counts."""
    exit: Exit | None = None
    """How the process ends, where an error ends it."""
    has_failed_to_report: bool = False
    """Whether it could not even say so: that counts as a crash."""

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        """Count it as a crash where what says how the process ends fails."""
        try:
            yield
        except Exception:
            self.has_failed_to_report = True
            raise

    def give_back_with(self, stack: contextlib.ExitStack) -> None:
        """Have the stack give back what is held by then: the last words first, the notifications last."""
        for step in (self._close_notifications, self._release_lease, self._close_progress):
            stack.callback(step)
        stack.callback(make_final_write, self._leave)

    def _leave(self) -> None:
        """Leave word for the next process; this one has ended by itself, and knew why."""
        is_broken = self.exit is not None and self.exit.is_broken
        if self.membership is not None:
            self.membership.leave(unusable=is_broken)
        if self.has_begun:
            is_trouble = self.exit is not None and self.exit.is_trouble
            is_crash = is_broken or self.has_failed_to_report
            end_attempt(self.directory, is_crash, is_trouble, self.exit.message if self.exit and is_crash else "")

    def _close_progress(self) -> None:
        if self.progress is not None:
            self.progress.close(FLUSH_SECONDS)

    def _release_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()

    def _close_notifications(self) -> None:
        if self.notifications is not None and self.progress is not None and self.progress.status.state in ENDS:
            with contextlib.suppress(Stopped):  # a request to stop this process need not wait, either
                self.notifications.close()


def run_coordinator(
    config: Config,
    cluster: ClusterConfig,
    notifier: Notifier,
    in_process: bool = False,
    keeps_servers: Callable[[], bool] = lambda: False,
    stopping: StopRequest | None = None,
    collector: MetricsCollector | None = None,
    notifications: Notifications | None = None,
) -> int:
    """Train the run to its end; returns the exit code.

    Under multi_worker_mirrored the workers run this too; only the chief writes to the run directory. `in_process` says
    that the servers live in this process, where they can't be lost, `keeps_servers` that another run needs them next.
    `stopping` hears of a SIGTERM that came too late for this run to stop. Prometheus gets the numbers of `collector`.
    """
    cluster.check_strategy(config.strategy)
    cluster.check_input(config.input)
    held = HeldResources(RunDirectory(config.shared_dir, config.run), notifications)
    leave_when_asked()
    with contextlib.ExitStack() as stack:
        held.give_back_with(stack)
        try:
            if (step := held.directory.finished(config.steps)) is not None:
                ends_servers = not in_process and not keeps_servers()
                complete_finished(held.directory, config, cluster, step, notifier, ends_servers=ends_servers)
                return FINISHED
            phases = report(held, config, cluster, notifier, collector)
            if cluster.job == "chief":
                begin(held, config, cluster, notifier)
            train_run(held, config, cluster, phases, stopping, in_process)
            if held.membership is not None and not keeps_servers():
                held.membership.shut_down_servers()
            return FINISHED
        except (*RAISED, Stopped) as error:
            if is_signal(error):
                raise
            with held.in_words():
                held.exit = decide_exit(error, held.program_file, leads=cluster.job == "chief", begun=held.has_begun)
                return leave(held, notifier, config.run, error)


def report(
    held: HeldResources, config: Config, cluster: ClusterConfig, notifier: Notifier, collector: MetricsCollector | None
) -> Phases:
    """Begin to report: to systemd, to Prometheus and in the status; returns the phases, which systemd watches."""
    leads = cluster.job == "chief"
    # A coordinator that is refused must not say of the run what it is doing itself.
    page = PageWriter(held.directory)
    held.progress = progress = Progress(config, held.directory, notifier, leads, leads, held.notifications, page)
    if collector is not None and leads:
        collector.report_on(config.run, progress.counters, progress)
    progress.enter(RunState.WAITING, "loading TensorFlow and the program")
    phases = Phases.from_config(config, progress.phase)
    notifier.ready(progress.status.line())
    notifier.watch(phases.in_time)
    return phases


def begin(held: HeldResources, config: Config, cluster: ClusterConfig, notifier: Notifier) -> None:
    """Take the run over as its coordinator, and begin an attempt; waits where attempts came to nothing before."""
    assert held.progress is not None
    progress, directory = held.progress, held.directory
    held.lease = Lease.acquire(directory, config.lease_seconds, partial(progress.enter, RunState.WAITING))
    directory.set_damaged_records_aside()
    directory.claim(config)
    progress.begin({*cluster.servers, cluster.task})
    record_resources(cluster.task, lambda: directory)
    if held.lease.taken_from:
        progress.events.write("lease-taken", message=f"from {held.lease.taken_from}")
    if notifier.lack:
        progress.events.write("out-of-memory", task=cluster.task, host=cluster.address, message=notifier.lack)
    newest = directory.catalogue.newest()
    limit = config.max_restarts_without_step
    pause = begin_attempt(directory, newest, limit, notifier.crash, notifier.lack)
    held.has_begun = True
    if pause:
        message = f"started again and again without a new checkpoint: going on in {pause:.0f} s"
        progress.enter(RunState.WAITING, message)
        time.sleep(pause)


def train_run(
    held: HeldResources,
    config: Config,
    cluster: ClusterConfig,
    phases: Phases,
    stopping: StopRequest | None,
    in_process: bool,
) -> None:
    """Load TensorFlow and the program, and train to the end, on members that are watched where they may be lost."""
    assert held.progress is not None
    if config.strategy == "parameter_server" and not in_process:
        release = own_release(Path.cwd())
        held.membership = Membership(config, cluster, held.directory, held.progress, phases, release)
    load_tensorflow()
    once_imported, evaluates = partial(end_import, held.directory), config.evaluation != "none"
    program = load_program(config.program, config.program_args, once_imported, evaluates=evaluates)
    held.program_file = program_file(program)
    stopping = stopping or StopRequest()
    context = RunContext(config, program, held.directory, held.progress, phases, held.membership, held.lease, stopping)
    Training(context, cluster).run()


def leave(held: HeldResources, notifier: Notifier, run: str, error: BaseException) -> int:
    """Report how the process ends; returns its exit code."""
    ends, progress = held.exit, held.progress
    assert ends is not None
    if ends.state is RunState.WAITING:
        log.error("trouble with the cluster, trying again: %s", ends.message)
    elif ends.state is RunState.FAILED:
        info = None if isinstance(error, UserError) else exception_info(error, held.program_file)
        log.error("run %s failed: %s", run, ends.message, exc_info=info)
    if progress is not None:
        progress.enter(ends.state, ends.message)
    if ends.state is RunState.STOPPED:
        log.info("stopped at step %s on request", progress.status.step if progress else None)
    if ends.restarts_unit:
        notifier.restart_unit()
    return pause_unless_stopped(STORAGE_PAUSE_SECONDS, ends.code) if ends.pauses else ends.code


def pause_unless_stopped(seconds: float, code: int) -> int:
    """Hold the next process back; returns this one's exit code."""
    try:
        time.sleep(seconds)
    except Stopped:
        return STOPPED
    return code
