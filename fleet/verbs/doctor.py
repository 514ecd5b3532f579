"""`fab doctor`: look at everything, and say what is wrong, how bad that is, and what fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from fleet.actions.console import Console
from fleet.doctor.cluster import judge_control, judge_history, judge_look
from fleet.doctor.examination import Examination, examine
from fleet.doctor.finding import ERROR, WARNING, Finding, joined_findings, render_findings, sorted_findings
from fleet.doctor.hosts import judge_hosts
from fleet.errors import ClusterTrouble, FleetError, OperatorMistake
from fleet.hosts import history
from fleet.hosts.cluster import Cluster
from fleet.hosts.drains import tasks_of
from fleet.hosts.lock import who_is_at_work
from fleet.places import site
from fleet.site.inventory import Inventory, find_problems, read_source
from fleet.site.paces import FAR_BELOW, FEWEST_PEERS
from fleet.site.schema.problems import Problem
from fleet.verbs.gpu_check import ask_gpus, gpu_hosts
from fleet.verbs.ways import try_ways

# What site.yml makes where it has never been: till then that is no news. What would stop it is.
_MADE_BY_SITE = ("shared path", "units", "limits", "umask", "link", "GPU")
WAY_SECONDS = 0.2  # a way that is faster than this is never slow, whatever its peers are


def diagnose(cluster: Cluster, console: Console) -> list[Finding]:
    """Return what is wrong with the control machine, the hosts, their ways, the release, the tasks and the run."""
    with console.progress() as progress:
        progress.show("looking at the control machine")
        found = judge_control(site(), cluster.inventory, inventory_problems(cluster.inventory))
        progress.show(f"looking at {len(cluster.inventory.everyone)} hosts")
        look = examine(cluster)
        found += judge_hosts(cluster.inventory, look.observation, look.facts)
        found += judge_look(cluster.inventory, look, release_here(cluster, console))
        found += judge_changes(cluster, look)
        progress.show("trying the ways between the members")
        found += judge_ways(cluster, look)
        if hosts := [host for host in gpu_hosts(cluster.inventory) if host not in look.observation.unreachable]:
            progress.show("proving the GPUs")
            found += judge_gpus(cluster, hosts)
    bare = look.observation.bare(cluster.inventory)
    return sorted_findings([each for each in found if each.where not in bare or each.part not in _MADE_BY_SITE])


def doctor(cluster: Cluster, console: Console) -> None:
    """Say what is wrong; raises ClusterTrouble, without words, where there is anything."""
    found = diagnose(cluster, console)
    if console.json_out is not None:
        errors = count_errors(found)
        record = {"errors": errors, "warnings": len(found) - errors, "findings": [asdict(each) for each in found]}
        console.print_json("doctor", record)
    if not found:
        number = len(cluster.inventory.everyone)
        console.print(f"nothing is wrong with {number} hosts, as far as fab doctor looks\nnext: fab status")
        return
    rows = joined_findings(found)
    console.print(render_findings(rows))
    counts = ((count_errors(rows), "error"), (len(rows) - count_errors(rows), "warning"))
    summary = ", ".join(f"{number} {word}{'s' * (number != 1)}" for number, word in counts)
    console.print(f"\n{summary}; begin with: {rows[0].fix}\nfor a report: fab bundle")
    raise ClusterTrouble("")


def count_errors(found: Sequence[Finding]) -> int:
    return sum(each.level == ERROR for each in found)


def inventory_problems(inventory: Inventory) -> list[Problem]:
    """Return what `fab validate` finds; nothing where a vault's password was typed, which it would ask for again."""
    if inventory.vault_password is not None:
        return []
    try:
        return list(find_problems(read_source(inventory.source, lenient=True)))
    except OperatorMistake as error:
        return [Problem(str(error))]


def judge_changes(cluster: Cluster, look: Examination) -> list[Finding]:
    """Return the last change that has not ended, unless one is at work."""
    chief = cluster.inventory.chief.host
    try:
        found = judge_history(history.read(cluster)[0], look.observation.clocks.get(chief, 0.0))
    except FleetError:  # why the path can't be read is said already
        return []
    return [] if found and who_is_at_work(cluster.hosts, chief) else found


def release_here(cluster: Cluster, console: Console) -> str | None:
    """Return the release that this folder makes; None where it makes none, which the look says."""
    try:
        return console.build(cluster.inventory)
    except FleetError:
        return None


def judge_ways(cluster: Cluster, look: Examination) -> list[Finding]:
    """Return the ways between members that are broken, and a member whose ways are far slower than the others'."""
    try:
        found, _, wrong = try_ways(cluster)
    except OperatorMistake:  # without ps there is no way to try
        return []
    drained = {task.name for task in tasks_of(cluster.inventory, [*look.observation.drains])}
    # Where nothing is installed, or was not seen, no way could be tried.
    untried = {*look.observation.bare(cluster.inventory), *look.observation.unreachable}
    wrong = [each for each in wrong if each.partition(":")[0] not in untried]
    wrong = [each for each in wrong if drained.isdisjoint(each.split())]  # no task needs the ways to and from these
    findings = [Finding(ERROR, each.partition(" ")[0], "addresses and routes", each, "fab ways") for each in wrong]
    pace = {task: median(way.seconds for way in row.values()) for task, row in found.items() if row}
    if len(pace) < FEWEST_PEERS or look.observation.unreachable.keys() & cluster.inventory.hosts.keys():
        return findings
    middle = median(pace.values())
    for task, seconds in pace.items():
        if seconds > max(WAY_SECONDS, FAR_BELOW * middle):
            what = f"{task} takes {seconds:.3f} s to reach the others, and its peers {middle:.3f} (median)"
            host = cluster.inventory.task(task).host
            findings.append(Finding(WARNING, host, "link", what, "look at its link: `ethtool`, `ip -s link`; fab ways"))
    return findings


def judge_gpus(cluster: Cluster, hosts: list[str]) -> list[Finding]:
    reports, _ = ask_gpus(cluster, hosts)
    fix = "fab gpu-check, and docs/gpu.md"
    return [Finding(ERROR, host, "GPU", problem, fix) for host, each in reports.items() for problem in each["problems"]]
