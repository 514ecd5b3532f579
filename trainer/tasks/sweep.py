"""The coordinator in a sweep or in the queue: each process trains one point, and the next process the next one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from trainer.cluster.remote_commands import COMING_SECONDS, shut_down_servers
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, USER_ERROR, Stopped
from trainer.core.settings.config import Config, ConfigError
from trainer.core.signals import MAKE_ROOM, StopRequest, leave_when_asked
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.selections.selection import selected_sweep, sweep_or_none
from trainer.run.selections.sweep import Sweep
from trainer.tasks.coordinator import run_coordinator
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.outlets.webhook import Notifications
from trainer.telemetry.status import read_status

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 5.0  # before the next try to write to a shared path that is full
YIELD_POLL_SECONDS = 2.0  # whether the run must make room for the next


class Limit:
    """Ends the run of this process, as a stop by hand would, where the queue or a search says so."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.reached: str | None = None
        """Why the run had to end."""
        self._over = threading.Event()

    def watch(self) -> None:
        """Look in a thread, which ends with `give_up` or the process."""
        threading.Thread(target=self._poll, name="queue", daemon=True).start()

    def give_up(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        while not self._over.wait(YIELD_POLL_SECONDS):
            why = None
            with contextlib.suppress(ConfigError, OSError):  # what can't be read now ends nothing
                sweep = selected_sweep(self._config)
                why = sweep.why_to_end(self._config.run) if sweep else None
            if why and not self._over.is_set():
                log.info("run %s is stopped: %s", self._config.run, why)
                self.reached = why
                os.kill(os.getpid(), MAKE_ROOM)
                return


def train_point(
    config: Config,
    cluster: ClusterConfig,
    notifier: Notifier,
    collector: MetricsCollector | None = None,
    notifications: Notifications | None = None,
) -> int:
    """Train the run; returns the exit code, which in a sweep with points left asks for another process (75).

    `collector` serves the points' numbers to Prometheus. A point that fails is written down, and the next one begins.
    """
    sweep, stopping, limit = selected_sweep(config), StopRequest(), Limit(config)
    if sweep is not None:
        if sweep.present() is None:
            stopping.listen()
            return go_on(sweep, config, cluster, notifier, lambda: stopping.received)
        if cluster.job == "chief":
            sweep.begin(config.run)
    try:
        if cluster.job == "chief":
            leave_when_asked()
            limit.watch()
        code = run_coordinator(
            config,
            cluster,
            notifier,
            # A queue may have begun meanwhile, with this run as its first.
            keeps_servers=lambda: sweep_or_none(config) is not None,
            stopping=stopping,
            collector=collector,
            notifications=notifications,
        )
    except Stopped:
        code = STOPPED
    limit.give_up()
    stopping.listen()  # what is written here is written to its end
    sweep = sweep_or_none(config) or sweep
    if sweep is None or not (code in (FINISHED, USER_ERROR) or (code == STOPPED and limit.reached is not None)):
        return code
    return leave_point(sweep, config, cluster, notifier, code, lambda: stopping.received, limit.reached)


def leave_point(
    sweep: Sweep,
    config: Config,
    cluster: ClusterConfig,
    notifier: Notifier,
    code: int,
    stopping: Callable[[], bool],
    why: str | None,
) -> int:
    """Write down that the point has ended with this code, and go on; returns the exit code."""
    if cluster.job == "chief" and code == FINISHED and not await_evaluation(sweep, config, notifier, stopping):
        log.info("%s is stopped while it waits for the evaluation of %s", sweep.title, config.run)
        return STOPPED
    try:
        end_point(sweep, config, cluster, code, why)
    except OSError as error:
        log.error("cannot write down what became of %s, trying again: %s", config.run, error)
        if not stopping():
            time.sleep(PATIENCE_SECONDS)
        return STOPPED if stopping() else TRY_AGAIN
    if stopping():  # a run's last save and its export are not broken off
        log.info("%s is stopped after %s", sweep.title, config.run)
        return STOPPED
    return go_on(sweep, config, cluster, notifier, stopping)


def await_evaluation(sweep: Sweep, config: Config, notifier: Notifier, stopping: Callable[[], bool]) -> bool:
    """Wait until the last checkpoint is evaluated, where a search chooses by that; returns False when stopped.

    After `evaluating_timeout_seconds` the newest evaluation counts that there is.
    """
    deadline = time.monotonic() + config.evaluating_timeout_seconds
    if config.evaluation != "sidecar":
        return True
    if sweep.awaits(config.run):
        notifier.watch(lambda: True)
        notifier.status(f"{sweep.title} waits for the evaluation of {config.run}")
    while sweep.awaits(config.run) and time.monotonic() < deadline:
        if stopping():
            return False
        time.sleep(POLL_SECONDS)
    return True


def await_choice(config: Config, notifier: Notifier, stopping: Callable[[], bool]) -> bool:
    """Wait as a member in step until the chief has written this point's end and the next one; False when stopped.

    The chief of a search waits for an evaluation before. A run that is not finished any more needs its members.
    """
    directory, is_announced = RunDirectory(config.shared_dir, config.run), False
    while (sweep := sweep_or_none(config)) is not None and not sweep.is_over():
        point = sweep.present()
        if point is not None and (point.run != config.run or directory.finished(config.steps) is None):
            break
        if stopping():
            return False
        if not is_announced:
            notifier.ready(f"{sweep.title} waits for its next point")
            notifier.watch(lambda: True)
            is_announced = True
        time.sleep(POLL_SECONDS)
    return True


def go_on(
    sweep: Sweep, config: Config, cluster: ClusterConfig, notifier: Notifier, stopping: Callable[[], bool]
) -> int:
    """Ask for the process of the next point, or say that there is none; returns the exit code."""
    if cluster.job != "chief" and not await_choice(config, notifier, stopping):
        return STOPPED
    sweep = sweep_or_none(config) or sweep  # others may have asked for more
    point = sweep.present()
    if point is None and cluster.job == "chief":
        try:
            point = sweep.choose()
        except OSError as error:
            log.error("cannot write down the next point of %s, trying again: %s", sweep.title, error)
            time.sleep(PATIENCE_SECONDS)
            return TRY_AGAIN
    if point is not None:
        log.info("%s goes on with %s", sweep.title, point.run)
        return TRY_AGAIN
    if not sweep.is_over():  # a member could not read what is selected
        time.sleep(POLL_SECONDS)
        return TRY_AGAIN
    log.info("%s is over", sweep.title)
    notifier.ready(f"{sweep.title} is over")
    if config.local_run_dir:
        notifier.watch(lambda: True)
        shut_down_servers(cluster.servers, COMING_SECONDS)
    return FINISHED


def end_point(sweep: Sweep, config: Config, cluster: ClusterConfig, code: int, why: str | None = None) -> None:
    """Write down what became of the point; of one that has finished the chief does so."""
    if code == USER_ERROR:
        message = read_status(RunDirectory(config.shared_dir, config.run)).message
        sweep.end_point(config.run, RunState.FAILED, message)
    elif cluster.job == "chief" and code == FINISHED:
        sweep.end_point(config.run, RunState.FINISHED)
    elif cluster.job == "chief":
        sweep.end_point(config.run, RunState.STOPPED, why or "")
