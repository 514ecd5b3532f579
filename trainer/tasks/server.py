"""A worker or a parameter server: TensorFlow's own server, kept by systemd, told what to do by the coordinator.

What it computes, TensorFlow tells it. When to end, the run's state record does: a finished run needs no servers, and a
member that can no longer be used is asked for a new process. Where it sees no such record, because the chief alone has
the run directory, the coordinator sends it a command (trainer/cluster/remote_commands.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from trainer.cluster.members.fence import limit_waits
from trainer.cluster.members.growth import Growing
from trainer.cluster.probe import answers, incarnation
from trainer.cluster.reach.way_probe import Ways
from trainer.cluster.reach.ways import CHIEF, targets
from trainer.cluster.remote_commands import ASKED, received
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, TRY_AGAIN, is_stale, naming_port
from trainer.core.settings.config import Config, ConfigError
from trainer.process.server_library import load_server_library
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.run.release import StaysOut
from trainer.run.selections.selection import selected_sweep
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.resources import record_resources

log = logging.getLogger(__name__)
# Longer than for the others' question: a machine that is busy beyond measure must not have its server killed as well.
SELF_CHECK_SECONDS = 10.0
# A call that waits for a ps which froze or lost its network holds a thread, for as long as that lasts: with
# TensorFlow's default, one a core, a server of few cores would soon have none left, not even to say that it lives.
THREADS = 32
RUN_POLL_SECONDS = 1.0
# The coordinator is to be the first to find that a member is silent.
MARGIN_SECONDS = 1.0
STALE = "restarting: the shared path's file handle is stale, and must be mounted again"
# What only the shared path says is seen so often in a row: a network file system may show the selection of the run
# before once more, and calls the handle of a file stale that was just replaced.
LOOKS = 3
EXPORTING = ", and its model is not exported yet"
EXPORT_LOOKS = 600  # a coordinator whose host is gone exports nothing


def run_server(cluster: ClusterConfig, notifier: Notifier, selected: Callable[[], Config]) -> None:
    """Serve until the process is ended, or the run ends it; `selected` reads the settings of the run.

    It sets no signal handler, since `join` would never run one.
    """
    library = load_server_library()
    if cluster.job == "ps":
        library.set_visible_devices([], "GPU")  # a ps computes nothing that a worker beside it could not use
    options = library.ConfigProto(inter_op_parallelism_threads=max(THREADS, os.cpu_count() or 1))
    # A thread without work would go on looking for some, and take the processor from those that have it.
    options.experimental.disable_thread_spinning = True
    options.gpu_options.allow_growth = True
    with naming_port(cluster.task, cluster.address):
        server = library.Server(
            library.ClusterSpec(cluster.jobs),
            job_name=cluster.job,
            task_index=cluster.index,
            protocol="grpc",
            config=options,
        )
    log.info("%s serves at %s", cluster.task, cluster.address)
    notifier.ready(f"{cluster.task} serves at {cluster.address}")
    own = f"localhost:{cluster.address.rpartition(':')[2]}"
    notifier.watch(partial(answers, own, SELF_CHECK_SECONDS))
    settings = LastRead(selected)
    follow_run(notifier, partial(ending, cluster.task, own, settings))
    record_resources(cluster.task, partial(served_run, settings))
    Ways(own, partial(others_of, Growing(cluster)), lack=notifier.lack).start()
    threading.Thread(target=keep_limited, args=(settings,), name="connections", daemon=True).start()
    server.join()


def others_of(growing: Growing) -> dict[str, str]:
    """Return whom this server exchanges tensors with (task to address), also those that were added since it started."""
    growing.poll(time.monotonic())
    cluster = growing.cluster
    return targets(cluster.task, {**cluster.servers, CHIEF: cluster.jobs["chief"][0]})


class LastRead:
    """Reads the settings when it is called, and knows what was read last: reading hangs as long as the path does."""

    def __init__(self, read: Callable[[], Config]) -> None:
        self._read = read
        self.config: Config | None = None

    def __call__(self) -> Config:
        self.config = self._read()
        return self.config


def served_run(settings: LastRead) -> RunDirectory | None:
    """Return the directory of the run that was read last, where this host sees it."""
    config = settings.config
    if config is None or config.local_run_dir or not trains_here(config):
        return None
    return RunDirectory(config.shared_dir, config.run)


def trains_here(config: Config) -> bool:
    """Return whether workers and ps serve the run that is selected."""
    return config.traits.remote


def follow_run(notifier: Notifier, look: Callable[[], tuple[int | None, str]]) -> None:
    """Follow the run in a thread; `look` returns what `ending` does."""
    threading.Thread(target=follow, args=(notifier, look), name="run", daemon=True).start()


def follow(notifier: Notifier, look: Callable[[], tuple[int | None, str]]) -> None:
    """End this process as soon as a look says so; a path that hangs stops only this thread."""
    seen, before = 0, ""
    while True:
        code, why = look()
        seen, before = seen + 1 if why == before else 1, why
        enough = EXPORT_LOOKS if why.endswith(EXPORTING) else LOOKS
        if code is not None and (why == ASKED or seen == enough):
            log.info("%s", why)
            notifier.status(why)
            if why == STALE:
                notifier.restart_unit()
            os._exit(notifier.ends(code))
        time.sleep(RUN_POLL_SECONDS)


def keep_limited(settings: LastRead) -> None:
    """Let no connection of this server stand for longer than a member may be silent.

    A ps would go on sending to the process that a worker had before it was cut off, and its new one wait for it. This
    thread reads nothing itself: a shared path that hangs must not stop it.
    """
    while True:
        if settings.config is not None:
            limit_waits(settings.config.heartbeat_timeout_seconds + MARGIN_SECONDS)
        time.sleep(RUN_POLL_SECONDS)


def ending(
    task: str, address: str, selected: Callable[[], Config], serves: Callable[[Config], bool] = trains_here
) -> tuple[int | None, str]:
    """Return what this server should exit with now and why, or None; what can't be read asks for nothing.

    Nothing is asked of it either where the run that is selected is not one that it `serves`.
    """
    try:
        config = selected()
        if not serves(config):
            return None, ""
        if config.local_run_dir:
            return received(incarnation(address))
        directory = RunDirectory(config.shared_dir, config.run)
        asked = ((read_record(directory.state) or {}).get("restart") or {}).get(task)
        finished = directory.finished(config.steps)
        # TensorFlow says of each function that the export traces that it can't tell a server which is gone.
        exporting = finished is not None and config.export and directory.is_export_left()
        sweep = selected_sweep(config)
        over = f"{sweep.title} is over" if sweep is not None and sweep.is_over() else ""
    except StaysOut as error:
        return TRY_AGAIN, str(error)
    except OSError as error:
        return (TRY_AGAIN, STALE) if is_stale(error) else (None, "")
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return None, ""
    if over:
        return FINISHED, over
    if finished is not None and sweep is None:
        return FINISHED, f"run {config.run} finished at step {finished}{EXPORTING if exporting else ''}"
    if asked is not None and asked == incarnation(address):
        return TRY_AGAIN, ASKED
    return None, ""
