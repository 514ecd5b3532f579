"""The coordinator in a sweep: each process trains one point, and the next process the next one."""

from __future__ import annotations

import logging
import time
from functools import partial

from trainer.cluster.commands import COMING_SECONDS, shut_down_servers
from trainer.cluster.spec import Cluster
from trainer.core.config import Config
from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, USER_ERROR, Stopped
from trainer.core.signals import StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.selection import selected_sweep
from trainer.run.sweep import Sweep
from trainer.tasks.coordinator import run_coordinator
from trainer.telemetry.metrics import Told
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.outlets.webhook import Notifications
from trainer.telemetry.status import read_status

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 5.0  # before the next try to write to a shared path that is full


def write_outcome(sweep: Sweep, config: Config, cluster: Cluster, code: int, stopping: StopRequest) -> int | None:
    """Write down what became of a point; returns the exit code where this process ends with that, None else."""
    try:
        end_point(sweep, config, cluster, code)
    except OSError as error:
        log.error("cannot write down what became of %s, trying again: %s", config.run, error)
        if not stopping():
            time.sleep(PATIENCE_SECONDS)
        return STOPPED if stopping() else TRY_AGAIN
    if stopping():  # a run's last save and its export are not broken off
        log.info("sweep %s is stopped after %s", sweep.name, config.run)
        return STOPPED
    return None


def train_point(
    config: Config,
    cluster: Cluster,
    notifier: Notifier,
    told: Told | None = None,
    notifications: Notifications | None = None,
) -> int:
    """Train the run; returns the exit code, which in a sweep with points left asks for another process (75).

    `told` is what this process says to who scrapes it.
    A point that fails is written down, and the next one begins.
    """
    sweep = selected_sweep(config)
    train = partial(run_coordinator, config, cluster, notifier, told=told, notifications=notifications)
    if sweep is None:
        return train()
    if sweep.present() is not None:
        stopping = StopRequest()
        try:
            code = train(keeps_servers=True, stopping=stopping)
            stopping.listen()  # what is written here is written to its end
        except Stopped:
            return STOPPED
        if code not in (FINISHED, USER_ERROR):
            return code
        if (left := write_outcome(sweep, config, cluster, code, stopping)) is not None:
            return left
    if (point := sweep.present()) is not None:
        log.info("sweep %s goes on with %s", sweep.name, point.run)
        return TRY_AGAIN
    log.info("sweep %s is over", sweep.name)
    notifier.ready(f"sweep {sweep.name} is over")
    if config.local_run_dir:
        notifier.watch(lambda: True)
        shut_down_servers(cluster.servers, COMING_SECONDS)
    return FINISHED


def end_point(sweep: Sweep, config: Config, cluster: Cluster, code: int) -> None:
    """Write down what became of the point; a member that has finished waits for the chief to do so."""
    if code == USER_ERROR:
        message = read_status(RunDirectory(config.shared_dir, config.run)).message
        sweep.end_point(config.run, RunState.FAILED, message)
    elif cluster.job == "chief":
        sweep.end_point(config.run, RunState.FINISHED)
    else:
        time.sleep(POLL_SECONDS)
