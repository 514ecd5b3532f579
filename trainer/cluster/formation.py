"""Which members train: those of the inventory that answer, once the others have been waited for.

Strategies' constructors would wait for every member, for ever and without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from trainer.cluster.spec import Cluster
from trainer.config import Config
from trainer.failures import UserError

if TYPE_CHECKING:
    from trainer.cluster.heartbeat import Heartbeat

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
HEAR_SECONDS = 3.0  # all have answered by then, or failed to
# One that was asked to start anew and has not gone by then runs where nobody heeds that: it is used as it is.
HEED_SECONDS = 15.0
RETURN_SECONDS = 60.0  # one that has gone is waited for


class MembershipChanged(Exception):
    """The cluster shall be formed anew in this process, from the newest checkpoint; nothing is in flight."""


def form(
    config: Config,
    cluster: Cluster,
    heartbeat: Heartbeat,
    unfit: Mapping[str, str],
    without: Collection[str],
    restart: Callable[[dict[str, str]], None],
    tell: Callable[[dict[str, str]], None],
    asked: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Wait for the members and return those to train on (task name to identity).

    `unfit` are processes (by task) that shall not be used as they are, for what an earlier coordinator left there:
    `restart` is called once with those that answer, and others are waited for in their place; `asked` are those that
    were asked already. `without` are members that the training already goes on without: they are not waited for. `tell`
    is called with the missing (task name to address), again and again.
    Raises UserError when the user's limit to the waiting is over.
    """
    heartbeat.hurry = True
    began = time.monotonic()
    asked = dict(asked or {})
    asked_at = began
    while True:
        # Only who was asked after the turn before was over: it may have ended because of one that has just died.
        here = heartbeat.identities(since=began)
        waited = time.monotonic() - began
        if not heartbeat.heard(since=began) and waited < HEAR_SECONDS:
            time.sleep(POLL_SECONDS)
            continue
        old = stale(here, unfit)
        if old.keys() - asked.keys():
            asked.update(old)
            asked_at = time.monotonic()
            restart(asked)
        if old and time.monotonic() - asked_at > HEED_SECONDS:
            log.warning("%s did not start anew when asked to: used as it is", ", ".join(old))
            unfit = {task: identity for task, identity in unfit.items() if task not in old}
            continue
        here = {task: identity for task, identity in here.items() if task not in old}
        missing = {task: address for task, address in cluster.servers.items() if task not in here}
        returning = time.monotonic() - asked_at < RETURN_SECONDS and missing.keys() & asked.keys()
        if not missing or (not returning and can_do_without(config, cluster, missing, without, waited)):
            heartbeat.hurry = False
            return here
        tell(missing)
        if config.member_wait_timeout_seconds and waited > config.member_wait_timeout_seconds:
            raise UserError(
                f"waited {waited:.0f} s (member_wait_timeout_seconds) for {names(missing)}: start it, or take it out"
            )
        time.sleep(POLL_SECONDS)


def stale(here: Mapping[str, str], unfit: Mapping[str, str]) -> dict[str, str]:
    """Return the members whose processes are still those that shall not be used."""
    return {task: identity for task, identity in here.items() if unfit.get(task) == identity}


def can_do_without(
    config: Config, cluster: Cluster, missing: Collection[str], without: Collection[str], waited: float
) -> bool:
    """Return whether the training can go on without the missing ones now."""
    if not config.elastic:
        return False
    for job, patience in (("ps", config.ps_wait_seconds), ("worker", config.worker_wait_seconds)):
        absent = {task for task in missing if task.startswith(f"{job}-")}
        if len(absent) == len(cluster.jobs.get(job, [])) or (not absent <= set(without) and waited < patience):
            return False
    return True


def names(members: Mapping[str, str]) -> str:
    return ", ".join(f"{task} ({address})" for task, address in members.items())
