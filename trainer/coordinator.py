"""What runs the training program: makes the strategy, trains, saves, exports.

It is the coordinator (TensorFlow's job `chief`), and under multi_worker_mirrored every member.
"""

from __future__ import annotations

import logging
import signal
import threading
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
from trainer.lease import Lease
from trainer.logs import without_chatter
from trainer.members import silent
from trainer.metrics import Progress
from trainer.notify import Notifier
from trainer.program import load_program, program_file
from trainer.rendezvous import gather
from trainer.status import numbers

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0
END_SECONDS = 600.0


class StopRequest:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self) -> bool:
        return self.received

    def listen(self) -> None:
        """Handle SIGTERM from now on; only after the strategy is made, which would take the handler away."""
        on_sigterm(self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        log.info("asked to stop: saving after the calls in flight")


def on_sigterm(handler: Any) -> None:
    """Set the handler of SIGTERM; a thread of somebody's test or notebook may not."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def run_coordinator(config: Config, cluster: Cluster, notifier: Notifier) -> int:
    """Train the run to its end; returns the exit code.

    Under multi_worker_mirrored the workers run this too; only the chief writes to the run directory.
    """
    cluster.check_strategy(config.strategy)
    leads = cluster.job == "chief"
    directory = RunDirectory(config.shared_dir, config.run)
    progress: Progress | None = None
    lease: Lease | None = None
    file: Path | None = None
    try:
        finished = directory.finished(config.steps)
        if finished is not None:
            log.info("run %s finished at step %d; start a new one with --run NAME", config.run, finished)
            notifier.ready(f"run {config.run} finished at step {finished}")
            return FINISHED
        if leads:
            notifier.ready(f"taking the lease of run {config.run}")
            lease = Lease.acquire(directory, config.lease_seconds, log.info)
            directory.claim(config)
        progress = Progress(config, directory, notifier, leads)
        progress.enter("waiting", "loading TensorFlow and the program")
        notifier.ready(progress.status.line())
        notifier.watch(lambda: True)
        with without_chatter():
            import tensorflow  # noqa: F401
        program = load_program(config.program)
        file = program_file(program)
        train(config, cluster, program, directory, progress, lease)
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
    finally:
        if lease is not None:
            lease.release()


def enter(progress: Progress | None, state: str, message: str) -> None:
    if progress is not None:
        progress.enter(state, message)


def train(
    config: Config,
    cluster: Cluster,
    program: Any,
    directory: RunDirectory,
    progress: Progress,
    lease: Lease | None = None,
) -> None:
    """Wait for the members and train on them to the end; raises Stopped when asked to stop."""
    import tensorflow as tf

    from trainer.course import Course
    from trainer.evaluation import make_evaluation
    from trainer.export import export_model
    from trainer.fit import train_with_fit
    from trainer.loop import train_with_loop
    from trainer.placement import report_placement
    from trainer.replicas import OwnReplicas, RemoteReplicas
    from trainer.strategies import make_strategy

    started = time.monotonic()
    if config.seed is not None:
        tf.keras.utils.set_random_seed(config.seed)
    if cluster.servers:
        wait_for_members(config, cluster, directory, progress)
    strategy = make_strategy(config, cluster)
    stopping = StopRequest()
    stopping.listen()
    progress.enter("waiting", "building the model")
    replicas: Any
    if config.strategy == "parameter_server":
        replicas = RemoteReplicas(config, program, strategy, cluster.workers)
        report_placement(config, replicas.model, len(cluster.jobs["ps"]))
    else:
        replicas = OwnReplicas(config, program, strategy)
    evaluate = make_evaluation(config, program, replicas.model, strategy, cluster.workers)
    course = Course(config, replicas, directory, progress, stopping, evaluate, lease)
    course.restore()
    if progress.leads:
        directory.set_state("training", course.step, epoch=lease.epoch if lease else None)
    first, begun = course.step, time.monotonic()
    ended = ""
    try:
        if config.api == "fit":
            if not train_with_fit(config, program, replicas, course):
                course.save(wait=True)
                ended = ", where a callback ended it"
        else:
            if hasattr(program, "callbacks"):
                log.info("the custom loop calls no callbacks: the program's are for api: fit")
            train_with_loop(replicas, course)
    except Stopped:
        if progress.leads:
            directory.set_state("stopped", course.step)
        raise
    course.evaluate()
    course.settle()
    if not progress.leads:
        wait_for_the_end(directory, config, course.step, stopping)
        progress.enter("finished")
        return
    seconds = time.monotonic() - begun
    progress.enter("training", "exporting the model")
    export = export_model(program, directory, course.step, replicas.element_spec)
    progress.exported(export)
    directory.set_state("finished", course.step, config.steps)
    progress.enter("finished", ended.lstrip(", "))
    if config.strategy == "multi_worker_mirrored":
        # The others look for this; one that still looks when the chief is gone would report its loss as an error.
        time.sleep(2 * POLL_SECONDS)
    log.info(
        "run %s finished: %s trained to step %d%s; %d steps in %.1f s (%.4g steps/s), %.1f s in all; "
        "%s; checkpoint %s; model %s",
        config.run, config.program, course.step, ended, course.step - first, seconds, (course.step - first) / seconds,
        time.monotonic() - started, numbers(course.values), progress.status.checkpoint, export,
    )  # fmt: skip


def wait_for_members(config: Config, cluster: Cluster, directory: RunDirectory, progress: Progress) -> None:
    """Wait until every other member is there, naming those that aren't.

    The constructors of strategies would wait as well, but for ever and without a word.
    """
    named: dict[str, str] = {}
    told = 0.0

    def tell(missing: dict[str, str]) -> None:
        nonlocal named, told
        if not progress.leads and directory.finished(config.steps) is not None:
            raise Infrastructure("the run has finished meanwhile")  # which this member finds at its next start
        if missing != named or time.monotonic() - told >= REMIND_SECONDS:
            message = "no answer from " + ", ".join(f"{task} ({address})" for task, address in missing.items())
            log.info("waiting for members: %s", message)
            progress.enter("waiting", message)
            named, told = missing, time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    on_sigterm(stop)
    if config.strategy == "multi_worker_mirrored":
        gather(cluster, config.as_dict(), tell)
    else:
        while missing := silent(cluster.servers):
            tell(missing)
            time.sleep(POLL_SECONDS)
    log.info("all %d other members are there", len(cluster.servers))
    # While the constructor waits, no Python handler could run.
    on_sigterm(signal.SIG_DFL)


def wait_for_the_end(directory: RunDirectory, config: Config, step: int, stopping: StopRequest) -> None:
    """Wait until the chief has finished the run: it would take a member's end for a death."""
    deadline = time.monotonic() + END_SECONDS
    while directory.finished(config.steps) is None:
        if stopping():
            raise Stopped
        if time.monotonic() > deadline:  # ending as if finished, the chief's next start would wait for this member
            raise Infrastructure(f"the chief has not finished the run {END_SECONDS:.0f} s after its last step")
        time.sleep(POLL_SECONDS)
    log.info("run %s: trained to step %d", config.run, step)
