"""How a coordinator waits for others: its members, the data service, and the chief's end of a run in step."""

from __future__ import annotations

import logging
import time

from trainer.cluster.members.draining import away_for_a_reboot
from trainer.cluster.members.formation import names
from trainer.cluster.probe import SERVICE_METHODS, silent
from trainer.cluster.rendezvous import gather
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import Infrastructure, Stopped, UserError
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest, end_when_asked
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.telemetry.progress import Progress

log = logging.getLogger(__name__)
WAIT_POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0
END_SECONDS = 600.0


def wait_for_members(config: Config, cluster: ClusterConfig, directory: RunDirectory, progress: Progress) -> None:
    """Wait until every other member is present, naming those that aren't; a membership waits for its own.

    The constructors of strategies would wait as well, but for ever and without a word.
    """
    named: dict[str, str] = {}
    shown = 0.0

    def on_missing(missing: dict[str, str]) -> None:
        nonlocal named, shown
        if not progress.leads and directory.finished(config.steps) is not None:
            raise Infrastructure("the run has finished meanwhile")  # which this member finds at its next start
        if missing != named or time.monotonic() - shown >= REMIND_SECONDS:
            message = f"no answer from {names(missing)}"
            log.info("waiting for members: %s", message)
            progress.enter(RunState.WAITING, message)
            named, shown = missing, time.monotonic()

    if config.strategy == "multi_worker_mirrored":
        gather(cluster, config.as_dict(), on_missing)
    else:
        while missing := silent(cluster.servers):
            on_missing(missing)
            time.sleep(WAIT_POLL_SECONDS)
    log.info("all %d other members are present", len(cluster.servers))
    end_when_asked()


def wait_for_data_service(config: Config, cluster: ClusterConfig, stopping: StopRequest, progress: Progress) -> None:
    """Wait until the dispatcher and a data worker are there, naming who isn't: TensorFlow would wait without a word.

    Raises UserError when the user's limit to the waiting is over, in which a planned reboot does not count.
    """
    began, shown, limit = time.monotonic(), "", config.member_wait_timeout_seconds
    while True:
        dispatcher, data = (
            silent({f"{job}-{index}": address for index, address in enumerate(cluster.service[job])}, method)
            for job, method in SERVICE_METHODS.items()
        )
        if not dispatcher and len(data) < len(cluster.service["data"]):
            if data:
                log.info("the data service begins without %s", names(data))
            return
        if (dispatcher | data).keys() & set(away_for_a_reboot()):
            began = time.monotonic()
        message = f"no answer from {names(dispatcher | data)}"
        if message != shown:
            log.info("waiting for the data service: %s", message)
            progress.enter(RunState.WAITING, message)
            shown = message
        if stopping():
            raise Stopped
        if 0 < limit < (seconds := time.monotonic() - began):
            raise UserError(
                f"waited {seconds:.0f} s (member_wait_timeout_seconds) for the data service, and {message}: the "
                "dispatcher and one data worker must be present. Start them, or set input: local"
            )
        time.sleep(WAIT_POLL_SECONDS)


def wait_for_the_end(directory: RunDirectory, config: Config, step: int, stopping: StopRequest) -> None:
    """Wait until the chief has finished the run: it would take a member's end for a death."""
    limit = max(END_SECONDS, config.saving_timeout_seconds)  # the chief exports meanwhile
    deadline = time.monotonic() + limit
    while directory.finished(config.steps) is None:
        if stopping():
            raise Stopped
        if time.monotonic() > deadline:  # ending as if finished, the chief's next start would wait for this member
            raise Infrastructure(f"the chief has not finished the run {limit:.0f} s after its last step")
        time.sleep(WAIT_POLL_SECONDS)
    log.info("run %s: trained to step %d", config.run, step)
