"""The data service's tasks: the dispatcher, and the data workers that read and preprocess for those that train.

They are `tf.data.experimental.service`'s servers. The dispatcher keeps its journal on the shared path, so that the one
that is started after it goes on where it was.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.cluster.probe import SERVICE_METHODS, answers
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import TRY_AGAIN
from trainer.core.settings.config import Config
from trainer.run.catalogue import SET_ASIDE
from trainer.run.directory import LeasedDirectory
from trainer.run.lease import Lease
from trainer.run.records import read_record, readable, write_record
from trainer.run.selections.selection import selected_sweep
from trainer.tasks.server import RUN_POLL_SECONDS, SELF_CHECK_SECONDS, ending, follow_run
from trainer.telemetry.logs import load_tensorflow
from trainer.telemetry.outlets.systemd import Notifier

log = logging.getLogger(__name__)
HEARTBEAT_MS = 1000
# A data worker that says nothing for so long gets no more tasks: those that train are told to read from the others.
LOST_MS = 10_000
WRITTEN = "tf_data_dispatcher_journal"  # what TensorFlow writes there first
SEEN_SECONDS = 5.0  # until every host sees on the shared path that there is another journal, and its data worker ends
GC_MS = 60_000  # how often it looks for jobs that were not read for five minutes, as those of earlier generations
DISPATCHER_TIMEOUT_MS = 365 * 24 * 3600 * 1000  # a data worker waits for its dispatcher, however long that takes
POLL_SECONDS = 0.5


def run_service(cluster: ClusterConfig, notifier: Notifier, selected: Callable[[], Config]) -> None:
    """Serve until the process is ended, or the run ends it; `selected` reads the settings of the run."""
    notifier.ready(f"{cluster.task} starts")
    # It is watched from the moment when it answers; before, it may wait for a dispatcher for as long as that takes.
    serving: list[Any] = []
    own = f"localhost:{cluster.address.rpartition(':')[2]}"
    is_alive = partial(answers, own, SELF_CHECK_SECONDS, SERVICE_METHODS[cluster.job])
    notifier.watch(lambda: not serving or is_alive())

    def read() -> Config:
        config = selected()
        if cluster.job == "dispatcher" and serving:
            Journal(config).claim()
        return config

    follow_run(notifier, partial(ending, cluster.task, own, read, serves))
    load_tensorflow()
    if cluster.job == "dispatcher":
        server = start_dispatcher(cluster, notifier, selected())
    else:
        server = start_data_worker(cluster, notifier, Journal(selected()))
    serving.append(server)
    log.info("%s serves at %s", cluster.task, cluster.address)
    notifier.status(f"{cluster.task} serves at {cluster.address}")
    server.join()


def serves(config: Config) -> bool:
    """Return whether the data service reads for the run that is selected."""
    return config.input == "service"


def start_dispatcher(cluster: ClusterConfig, notifier: Notifier, config: Config) -> Any:
    """Start the dispatcher, with what its journal says; one that can't be read is set aside.

    Raises LeaseHeld where another dispatcher keeps the journal: a shared path has one.
    """
    import tensorflow as tf

    journal = Journal(config)
    journal.acquire_lease(config.lease_seconds, notifier.status)
    journal.prepare()
    service = tf.data.experimental.service
    settings = service.DispatcherConfig(
        port=int(cluster.address.rpartition(":")[2]),
        protocol="grpc",
        work_dir=str(journal.path),
        fault_tolerant_mode=True,
        worker_timeout_ms=LOST_MS,
        job_gc_check_interval_ms=GC_MS,
    )
    try:
        return service.DispatchServer(settings)
    except (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        log.warning("the journal can't be read: beginning without it, it is kept as %s.bad (%s)", journal.path, error)
        journal.set_aside()
        return service.DispatchServer(settings)


class Journal:
    """The directory where the dispatcher writes down what it has begun, so that the next one goes on with it.

    It grows with each generation of a run. A dispatcher that starts for another run begins an empty one. Its jobs then
    have the numbers of the earlier ones, by which data workers that still know those would give out other data. So a
    journal has a name of its own, and data workers end when there is another.
    """

    def __init__(self, config: Config) -> None:
        sweep = selected_sweep(config)
        self._owner = {"sweep": sweep.name} if sweep is not None else {"run": config.run}
        directory = Path(config.shared_dir) / "data-service"
        self._record = directory / "owner.json"
        self._leased = LeasedDirectory(directory, f"the data service of {config.shared_dir}", "dispatcher")
        self.path = directory / "journal"

    def acquire_lease(self, seconds: float, waiting: Callable[[str], None]) -> Lease:
        """Keep other dispatchers away from it, as `Lease.acquire` does; this process ends when it loses the lease."""
        return Lease.acquire(self._leased, seconds, waiting)

    def prepare(self) -> None:
        """Keep the journal where it is of this run, and else begin an empty one."""
        if not self._is_own() or not (self.path / WRITTEN).is_dir():
            if self.path.exists():
                shutil.rmtree(self.path)  # what stays there would be taken for this run's
            self._begin()

    def claim(self) -> None:
        """Say that the present run's jobs are in it, also where the dispatcher began for another one."""
        if not self._is_own():
            write_record(self._record, {**self._owner, "journal": self.name()})

    def set_aside(self) -> None:
        """Rename what can't be read, and begin an empty one."""
        aside = self.path.with_name(self.path.name + SET_ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        self.path.rename(aside)
        self._begin()

    def name(self) -> str | None:
        """Return the journal's name, or None where it can't be read."""
        try:
            return (read_record(self._record) or {}).get("journal")
        except (OSError, ValueError):
            return None

    def _begin(self) -> None:
        had_one = self._record.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        write_record(self._record, {**self._owner, "journal": uuid.uuid4().hex})
        if had_one:
            time.sleep(SEEN_SECONDS)

    def _is_own(self) -> bool:
        return {key: value for key, value in readable(self._record).items() if key != "journal"} == self._owner


def follow_journal(journal: Journal, name: str | None) -> None:
    """End this process when the dispatcher has begun another journal."""
    while journal.name() in (None, name):
        time.sleep(RUN_POLL_SECONDS)
    log.info("restarting: the dispatcher has begun another journal")
    os._exit(TRY_AGAIN)


def start_data_worker(cluster: ClusterConfig, notifier: Notifier, journal: Journal) -> Any:
    """Start the data worker once the dispatcher answers."""
    import tensorflow as tf

    [dispatcher] = cluster.service["dispatcher"]
    while not answers(dispatcher, method=SERVICE_METHODS["dispatcher"]):
        notifier.status(f"{cluster.task} waits for the dispatcher at {dispatcher}")
        time.sleep(POLL_SECONDS)
    threading.Thread(target=follow_journal, args=(journal, journal.name()), name="journal", daemon=True).start()
    service = tf.data.experimental.service
    return service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=cluster.address,
            port=int(cluster.address.rpartition(":")[2]),
            protocol="grpc",
            heartbeat_interval_ms=HEARTBEAT_MS,
            dispatcher_timeout_ms=DISPATCHER_TIMEOUT_MS,
        )
    )
