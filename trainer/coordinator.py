"""The coordinator (TensorFlow's job `chief`): makes the strategy, trains, saves, exports."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.checkpoints import RunDirectory
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.failures import (
    FINISHED,
    STOPPED,
    TRY_AGAIN,
    USER_ERROR,
    Infrastructure,
    Stopped,
    UserError,
    explain,
    is_infrastructure,
)
from trainer.logs import without_chatter
from trainer.members import silent
from trainer.metrics import Progress
from trainer.notify import Notifier
from trainer.program import load_program, program_file
from trainer.status import numbers

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0


class StopRequest:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self) -> bool:
        return self.received

    def listen(self) -> None:
        """Handle SIGTERM from now on; only after the strategy is made, which would take the handler away."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        log.info("asked to stop: saving after the calls in flight")


def run_coordinator(config: Config, cluster: Cluster, notifier: Notifier) -> int:
    """Train the run to its end; returns the exit code."""
    cluster.check_strategy()
    directory = RunDirectory(config.shared_dir, config.run)
    finished = directory.finished(config.steps)
    if finished is not None:
        log.info("run %s finished at step %d; start a new one with --run NAME", config.run, finished)
        notifier.ready(f"run {config.run} finished at step {finished}")
        return FINISHED

    progress: Progress | None = None
    file: Path | None = None
    try:
        directory.claim(config)
        progress = Progress(config, directory, notifier)
        progress.enter("waiting", "loading TensorFlow and the program")
        notifier.ready(progress.status.line())
        notifier.watch(lambda: True)
        with without_chatter():
            import tensorflow  # noqa: F401
        program = load_program(config.program)
        file = program_file(program)
        wait_for_members(cluster, progress)
        train(config, cluster, program, directory, progress)
        return FINISHED
    except Stopped:
        enter(progress, "stopped", "")
        log.info("stopped at step %s on request", progress.status.step if progress else None)
        return STOPPED
    except Exception as error:
        message = str(error) if isinstance(error, UserError | Infrastructure) else explain(error, file)
        if is_infrastructure(error, file):
            log.error("trouble with the cluster, trying again: %s", message)
            enter(progress, "waiting", message)
            return TRY_AGAIN
        log.error("run %s failed: %s", config.run, message, exc_info=not isinstance(error, UserError))
        enter(progress, "failed", message)
        return USER_ERROR


def enter(progress: Progress | None, state: str, message: str) -> None:
    if progress is not None:
        progress.enter(state, message)


def train(config: Config, cluster: Cluster, program: Any, directory: RunDirectory, progress: Progress) -> None:
    """Train on the members that wait for it; raises Stopped when asked to stop."""
    import tensorflow as tf

    from trainer.export import export_model
    from trainer.loop import CustomLoop
    from trainer.partitioners import make_partitioner

    started = time.monotonic()
    if config.seed is not None:
        tf.keras.utils.set_random_seed(config.seed)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs), task_type=cluster.job, task_id=cluster.index, rpc_layer="grpc"
    )
    partitioner = make_partitioner(config, len(cluster.jobs["ps"]))
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    stopping = StopRequest()
    stopping.listen()
    if hasattr(program, "callbacks"):
        log.info("the custom loop has no epochs: the program's callbacks are not called")
    progress.enter("waiting", "building the model")
    loop = CustomLoop(config, program, strategy, cluster.workers, directory, progress)
    loop.restore()
    directory.set_state("training", loop.step)
    first, begun = loop.step, time.monotonic()
    values = loop.train(stopping)
    step = loop.step
    if step < config.steps:
        directory.set_state("stopped", step)
        raise Stopped
    seconds = time.monotonic() - begun
    progress.enter("training", "exporting the model")
    export = export_model(program, directory, step, loop.element_spec)
    progress.exported(export)
    directory.set_state("finished", step)
    progress.enter("finished")
    log.info(
        "run %s finished: %s trained to step %d; %d steps in %.1f s (%.4g steps/s), %.1f s in all; "
        "%s; checkpoint %s; model %s",
        config.run, config.program, step, step - first, seconds, (step - first) / seconds,
        time.monotonic() - started, numbers(values), progress.status.checkpoint, export,
    )  # fmt: skip


def wait_for_members(cluster: Cluster, progress: Progress) -> None:
    """Wait until every worker and ps answers, naming those that don't.

    The strategy's constructor would wait as well, but for ever and without a word.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    named: dict[str, str] = {}
    told = 0.0
    while missing := silent(cluster.servers):
        if missing != named or time.monotonic() - told >= REMIND_SECONDS:
            listed = ", ".join(f"{task} ({address})" for task, address in missing.items())
            message = f"no answer from {listed}"
            log.info("waiting for members: %s", message)
            progress.enter("waiting", message)
            named, told = missing, time.monotonic()
        time.sleep(POLL_SECONDS)
    log.info("all %d members answer", len(cluster.servers))
    # While the constructor waits, no Python handler could run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
