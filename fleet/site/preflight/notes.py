"""What is said of a right inventory: groups that are unused, and the like."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fleet.site.members import NUMBERED_JOBS, Groups, HostVars, busy_jobs, run_settings, storage_of, strategy_of
from fleet.site.preflight.jobs import tasks_of
from fleet.site.schema.problems import name_hosts
from fleet.site.topology import derive_topology
from fleet.site.wireguard import is_encrypted
from trainer.cluster.spec import JOBS
from trainer.core.settings.config import Config
from trainer.core.settings.strategies import STRATEGIES


def preflight_notes(groups: Groups, hostvars: HostVars) -> list[str]:
    """List what is right and yet may surprise: no shared path, groups without a task, a training without evaluation."""
    strategy, busy = strategy_of(groups, hostvars), busy_jobs(groups, hostvars)
    evaluation = run_settings(groups, hostvars).get("evaluation", Config.evaluation)
    notes = [
        f"group {job} ({', '.join(groups[job])}) is unused: the strategy {strategy} has no {job}"
        for job in JOBS
        if groups.get(job) and job not in busy and job not in ("evaluator", "data")
    ]
    storage = storage_of(hostvars[groups["chief"][0]])
    if not storage.shared:
        notes.append(
            f"no path is shared (cluster_shared_dir is empty): the runs lie on the disk of {groups['chief'][0]} alone, "
            f"in {storage.path}, and checkpoints go through the coordinator's memory; wheels are copied to each "
            "host; there is no evaluator, and no lease that another host would see: docs/storage.md"
        )
    if groups.get("evaluator") and "evaluator" not in busy:
        notes.append(
            f"group evaluator ({', '.join(groups['evaluator'])}) is unused: it evaluates with evaluation: sidecar, "
            f"and this is {evaluation}"
        )
    if groups.get("data") and "data" not in busy:
        notes.append(
            f"group data ({', '.join(groups['data'])}) is unused: it reads with trainer_run: {{input: service}}, and "
            "this is local"
        )
    if evaluation == "sidecar" and not tasks_of(groups, hostvars, "evaluator"):
        notes.append(
            "nothing is evaluated: evaluation is sidecar and the group evaluator is empty. "
            + ("Put a host there, or let the " if storage.shared else "Let the ")
            + "coordinator do it with trainer_run: {evaluation: inline}"
        )
    numbered = any(f"{job}_index" in hostvars[groups[job][0]] for job in NUMBERED_JOBS if groups.get(job))
    vacant = ", ".join(derive_topology(groups, hostvars).vacant) if numbered else ""
    if vacant:
        notes.append(f"no host is {vacant}: the training goes on without, until a new machine has that index")
    notes += [*_gpu_notes(groups, strategy), *_idle_notes(groups, hostvars), *_jobless_notes(groups)]
    notes += _webhook_notes(run_settings(groups, hostvars), groups["chief"][0], hostvars)
    return notes


def _gpu_notes(groups: Groups, strategy: str) -> Iterator[str]:
    computing = ("worker", "evaluator") if STRATEGIES[strategy].remote else ("worker", "evaluator", "chief")
    for host in groups.get("gpu", ()):
        if not any(host in groups.get(job, ()) for job in computing):
            yield f"{host} is in the group gpu and has no task that computes: its GPU is not used"


def _idle_notes(groups: Groups, hostvars: HostVars) -> Iterator[str]:
    """Say which settings do nothing, since the switch that they belong to is off."""
    chief = hostvars[groups["chief"][0]]
    tunnel = next((name for name in chief if str(name).startswith("wireguard_")), None)
    if tunnel and not is_encrypted(chief):
        yield f"{tunnel} is set, and nothing is encrypted: that takes cluster_encryption: true"
    tellers = groups.get("alertmanager", ())
    if tellers and not any(hostvars[host].get("alertmanager_receivers") for host in tellers):
        yield "alertmanager_receivers is empty: Alertmanager shows the alerts, and sends them to nobody"
    elif not tellers and "alertmanager_receivers" in chief:
        yield "alertmanager_receivers is set, and group alertmanager is empty: no alert is sent"


def _jobless_notes(groups: Groups) -> Iterator[str]:
    """Name hosts that stand in no group: perhaps one was forgotten."""
    if hosts := [host for host in groups.get("ungrouped", ()) if host != "localhost"]:
        yield f"{name_hosts(hosts)}: in no group, so psfleet does nothing with {'it' if len(hosts) == 1 else 'them'}"


def _webhook_notes(settings: Mapping[str, Any], chief: str, hostvars: HostVars) -> Iterator[str]:
    """Say where the coordinator's list of addresses (firewall_egress) keeps it from a webhook."""
    url, secret = settings.get("notify_webhook"), settings.get("notify_webhook_secret")
    outward = hostvars[chief].get("firewall_egress", [])
    if not (url or secret) or hostvars[chief].get("firewall_closes") == "none" or "any" in outward:
        return
    named = urlsplit(url).hostname or "" if url else ""
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        # A name may lead into the networks that are named; where there are none, only to a member.
        if not outward and named != "localhost":
            where = f"notify_webhook names {named}" if url else f"notify_webhook_secret is {secret}"
            yield (
                f"{where}, and firewall_egress of {chief} is empty: its tasks reach members and name servers alone. "
                "Name the webhook's networks there, or [any]"
            )
        return
    members = {str(value) for each in hostvars.values() for value in map(each.get, ("cluster_address", "ansible_host"))}
    networks = [ipaddress.ip_network(each, strict=False) for each in outward]
    if not address.is_loopback and named not in members and not any(address in network for network in networks):
        yield (
            f"notify_webhook names {named}, which the coordinator does not reach: add it to firewall_egress of "
            f"{chief}, as in firewall_egress: [{named}/{address.max_prefixlen}]"
        )
