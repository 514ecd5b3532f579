"""What is left to do for a run that an earlier process has finished."""

from __future__ import annotations

import logging
from functools import partial

from trainer.cluster.deadlines import Phases
from trainer.cluster.remote_commands import COMING_SECONDS, shut_down_servers
from trainer.cluster.spec import ClusterConfig
from trainer.core.program import load_program
from trainer.core.settings.config import Config
from trainer.core.states import Phase, RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease, check_lease
from trainer.telemetry.logs import load_tensorflow
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.status import read_status

log = logging.getLogger(__name__)


def complete_finished(
    directory: RunDirectory,
    config: Config,
    cluster: ClusterConfig,
    step: int,
    notifier: Notifier,
    *,
    ends_servers: bool,
) -> None:
    """Do what the process that finished the run at this step could not; raises Infrastructure.

    `ends_servers` says that servers which share no path with this host must hear of the end.
    """
    log.info("run %s finished at step %d; start a new one with --run NAME", config.run, step)
    notifier.ready(f"run {config.run} finished at step {step}")
    if cluster.job == "chief":
        write_finished(directory, config, step)
        finish_export(directory, config, step, notifier)
    if config.local_run_dir and ends_servers:
        notifier.watch(lambda: True)
        load_tensorflow()
        shut_down_servers(cluster.servers, COMING_SECONDS)


def write_finished(directory: RunDirectory, config: Config, step: int) -> None:
    """Say in the status that the run is finished, where the process that finished it could not any more."""
    status = read_status(directory, config)
    if status.state is not RunState.FINISHED:
        status.state, status.phase, status.message, status.step = RunState.FINISHED, None, "", step
        try:
            status.write(directory)
        except OSError as error:
            log.warning("cannot write down that the run is finished: %s", error)


def finish_export(directory: RunDirectory, config: Config, step: int, notifier: Notifier) -> None:
    """Export the model where the process that finished the run could not any more; raises Infrastructure."""
    if not config.export or not directory.is_export_left():
        return
    phases = Phases({Phase.SAVING: config.saving_timeout_seconds})
    notifier.watch(phases.in_time)
    lease = Lease.acquire(directory, config.lease_seconds, notifier.status)
    try:
        if not directory.is_export_left():  # the holder before has made it
            return
        phases.enter(Phase.SAVING)
        load_tensorflow()
        from trainer.training.exports.export import export_what_is_due, not_exported

        load = partial(load_program, config.program, config.program_args, evaluates=False)
        wrong = export_what_is_due(load, directory, step)
        check_lease(lease)
        status = read_status(directory, config)
        status.export, status.message = None if wrong else str(directory.export), not_exported(config.run, wrong)
        status.write(directory)
    finally:
        lease.release()
