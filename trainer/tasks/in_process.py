"""Workers and parameter servers inside this process, for a debugger, a notebook or a unit test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Mapping
from typing import Any

from trainer.cluster.spec import SERVICE_JOBS, ClusterConfig, free_addresses
from trainer.core.failures import FINISHED
from trainer.core.runtime import prepare_tensorflow
from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.strategies import STRATEGIES
from trainer.tasks.coordinator import run_coordinator
from trainer.tasks.evaluator import run_evaluator
from trainer.telemetry.logs import load_tensorflow, set_up_logging
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.prometheus import listen, serve
from trainer.telemetry.outlets.systemd import Notifier

# The first server's number counts for the whole process. A worker's call keeps one busy while it waits for a ps of the
# same pool: with TensorFlow's default, one a core, two workers on two cores would wait for ever.
THREADS = 64
# TensorFlow can't stop a server: those that there are serve the next cluster as well.
_addresses: dict[str, list[str]] = {"worker": [], "ps": [], "dispatcher": [], "data": []}
_servers: list[Any] = []


def run_in_process(
    config: Config, workers: int, servers: int, evaluator: bool, data: int, scraped: Mapping[str, str]
) -> int:
    """Train as the coordinator of a cluster in this process, then evaluate; returns the exit code.

    `scraped` is the environment's word on where.
    """
    set_up_logging(journal=False)
    collector = MetricsCollector()
    if (listener := listen(scraped)) is not None:
        serve(listener, collector)
    prepare_tensorflow()
    cluster = start_cluster(config.strategy, workers, servers, data)
    # What would be Ctrl-C for a supervisor stops this one likewise: after a checkpoint.
    signal.signal(signal.SIGINT, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    code = run_coordinator(config, cluster, Notifier(), in_process=True, collector=collector)
    return run_evaluator(config, Notifier(), lambda: config) if code == FINISHED and evaluator else code


def start_cluster(strategy: str, workers: int, servers: int, data: int = 0) -> ClusterConfig:
    """Start those of the strategy's servers that are missing; returns the cluster, with this process as its chief.

    With `data` there is a data service of so many data workers, or of more that an earlier training had.

    Its chief has a port of its own. What ran on the cluster before can't be used any more.
    """
    if STRATEGIES[strategy].in_step:
        raise ConfigError(
            "multi_worker_mirrored needs a process for each member: leave --in-process out, or take mirrored"
        )
    # While the servers still know what the last training left: they complain of what they are told to forget later.
    gc.collect()
    used = STRATEGIES[strategy].jobs
    sizes = {"worker": workers if "worker" in used else 0, "ps": servers if "ps" in used else 0}
    for job, size in sizes.items():
        while len(_addresses[job]) < size:
            start_server(job, len(_addresses[job]))
    jobs = {"chief": free_addresses(1), **{job: _addresses[job][:size] for job, size in sizes.items() if size}}
    if data:
        start_data_service(data)
    service = {job: _addresses[job] for job in SERVICE_JOBS} if data else {}
    cluster = ClusterConfig(jobs, "chief", 0, service)
    cluster.check_strategy(strategy)
    return cluster


def start_server(job: str, index: int) -> None:
    """Start one server on a free port."""
    tf = load_tensorflow()
    [address] = free_addresses(1)
    options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=THREADS)
    if job == "ps":
        options.device_count["GPU"] = 0
    options.gpu_options.allow_growth = True
    # The coordinator tells it who else is in the cluster.
    alone = tf.train.ClusterSpec({job: {index: address}})
    _servers.append(tf.distribute.Server(alone, job_name=job, task_index=index, protocol="grpc", config=options))
    _addresses[job].append(address)


def start_data_service(workers: int) -> None:
    """Start a dispatcher, without a journal since it lives as long as those that train, and its data workers."""
    service = load_tensorflow().data.experimental.service
    if not _addresses["dispatcher"]:
        dispatcher = service.DispatchServer(service.DispatcherConfig(protocol="grpc"))
        _servers.append(dispatcher)
        _addresses["dispatcher"].append(dispatcher.target.removeprefix("grpc://"))
    [address] = _addresses["dispatcher"]
    while len(_addresses["data"]) < workers:
        [own] = free_addresses(1)
        port = int(own.rpartition(":")[2])
        config = service.WorkerConfig(dispatcher_address=address, worker_address=own, port=port, protocol="grpc")
        _servers.append(service.WorkerServer(config))
        _addresses["data"].append(own)
