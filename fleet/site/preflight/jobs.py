"""What is wrong with how many hosts and tasks each job has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fleet.site.members import NUMBERED_JOBS, Groups, HostVars, busy_jobs, run_settings, strategy_of
from fleet.site.schema import checks
from fleet.site.schema.inventory_reading import InventoryReading
from fleet.site.schema.problems import Problem, name_hosts, name_some, show
from fleet.site.topology import MAX_ENVIRONMENT_STRING, Topology, tf_config
from trainer.cluster.spec import JOBS
from trainer.core.settings.config import Config
from trainer.core.settings.strategies import STRATEGIES

# More vacant places for each present member are no machines that went, but a mistyped index.
MAX_VACANT = 10


def group_problems(reading: InventoryReading) -> Iterator[Problem]:
    groups = reading.groups
    chiefs = tasks_of(groups, reading.values, "chief")
    if len(chiefs) != 1:
        named = f"has {len(chiefs)} ({', '.join(chiefs[:3])})" if chiefs else "is empty"
        yield Problem(f"group chief {named}; expected exactly one host: the one that runs the coordinator")
    servers = groups.get("nfs_server", ())
    if len(servers) > 1:
        yield Problem(
            f"group nfs_server has {', '.join(servers[:3])}; expected one host, or none where the shared path comes "
            "from outside"
        )
    evaluators = tasks_of(groups, reading.values, "evaluator")
    if len(evaluators) > 1:
        yield Problem(
            f"group evaluator has {len(evaluators)} ({', '.join(evaluators[:3])}); expected one host, or none"
        )


def unshared_problems(groups: Groups) -> Iterator[Problem]:
    """What needs a path that all hosts share, where there is none."""
    why = "cluster_shared_dir is empty: the chief alone has the run directory"
    if groups.get("evaluator"):
        yield Problem(
            f"group evaluator has {', '.join(groups['evaluator'])}, and {why}. Empty the group, and let the "
            "coordinator evaluate with trainer_run: {evaluation: inline}; or give all hosts a shared path"
        )
    if groups.get("nfs_server"):
        yield Problem(
            f"group nfs_server has {', '.join(groups['nfs_server'])}, and cluster_shared_dir is empty. Name there the "
            "path where every host mounts what it serves, such as /srv/trainer; or empty the group"
        )
    if boards := [host for host in groups.get("tensorboard", ()) if host not in groups.get("chief", ())]:
        yield Problem(
            f"group tensorboard has {', '.join(boards)}, and {why}. Put the chief's host into the group instead; or "
            "give all hosts a shared path"
        )


def missing_jobs(groups: Groups, hostvars: HostVars) -> Iterator[Problem]:
    strategy = strategy_of(groups, hostvars)
    for job in STRATEGIES[strategy].jobs:
        if job != "chief" and not tasks_of(groups, hostvars, job):
            yield Problem(f"group {job} is empty; the strategy {strategy} needs at least one {job}")
    if "data" in busy_jobs(groups, hostvars) and not tasks_of(groups, hostvars, "data"):
        yield Problem(
            "group data is empty, and trainer_run has input: service; expected at least one host there, which reads "
            "the training data. Or leave input out: each worker reads for itself"
        )


def taskless_problems(reading: InventoryReading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse an evaluator's host that is to evaluate, and to run nothing."""
    hosts = list(reading.groups.get("evaluator", ()))
    if "evaluator" in busy and hosts and not tasks_of(reading.groups, reading.values, "evaluator"):
        text = (
            f"{name_hosts(hosts)}: evaluator_tasks is 0, and evaluation is sidecar, so that nothing is evaluated; "
            "expected 1. Or take the host out of the group evaluator, or choose another evaluation"
        )
        yield reading.problem(text, hosts, "evaluator_tasks", "0")


def tasks_of(groups: Groups, hostvars: HostVars, job: str) -> list[str]:
    """Name a job's hosts, each as often as it runs the job."""
    named: list[str] = []
    for host in groups.get(job, ()):
        count = hostvars[host].get(f"{job}_tasks", 1)
        named += [host] * (count if isinstance(count, int) else 1)
    return named


def task_problem(reading: InventoryReading) -> Problem | None:
    """Refuse more tasks than any cluster has, before one is made."""
    counts = {
        job: sum(reading.values[host].get(f"{job}_tasks", 1) for host in reading.groups.get(job, ())) for job in JOBS
    }
    number = sum(counts.values())
    if number <= checks.MAX_TASKS:
        return None
    most = max(counts, key=lambda job: counts[job])
    return Problem(
        f"the hosts would run {number:,} tasks, {counts[most]:,} of them of {most}; expected {checks.MAX_TASKS:,} at "
        f"most. Lower {most}_tasks"
    )


def _minimums(reading: InventoryReading) -> Iterable[tuple[str, Any]]:
    """Return what cluster_minimum says, by job."""
    chief = checks.reference_host(reading.groups)
    minimum = reading.values[chief].get("cluster_minimum") if chief else None
    return minimum.items() if isinstance(minimum, dict) else ()


def _minimum_problem(reading: InventoryReading, value: str, message: str) -> Problem:
    place = reading.place(str(checks.reference_host(reading.groups)), "cluster_minimum")
    return Problem(message, (), "cluster_minimum", value, *place)


def minimum_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a minimum that all hosts together don't reach."""
    for job, least in _minimums(reading):
        number = len(tasks_of(reading.groups, reading.values, job))
        if isinstance(least, int) and least > number:
            yield _minimum_problem(
                reading,
                str(least),
                f"cluster_minimum: {job} is {least}, and the hosts have {number} of that job; expected {number} at "
                "most, a part such as 0.8, or all",
            )


def zero_problems(reading: InventoryReading, jobs: Sequence[str]) -> Iterator[Problem]:
    """Refuse a minimum of 0 of a job without which nothing is trained."""
    for job, least in _minimums(reading):
        if least == 0 and job in jobs and job != "evaluator":
            yield _minimum_problem(
                reading,
                "0",
                f"cluster_minimum: {job} is 0, and nothing is trained without any {job}; expected 1 at least, a part "
                f"such as 0.8, or all. Or leave {job} out: then the strategy says how many it needs",
            )


def idle_minimum_problems(reading: InventoryReading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse a minimum of a job that has no tasks: a start would wait for them."""
    for job, least in _minimums(reading):
        if least != 0 and job not in busy:
            yield _minimum_problem(
                reading,
                show(least),
                f"cluster_minimum: {job} is {least}, and these run settings start no {job}; expected {job} to "
                "be left out. Or see strategy, evaluation and input in trainer_run",
            )


def unwaited_problems(reading: InventoryReading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse a start with some members of a training that waits for all of them."""
    chief = checks.reference_host(reading.groups)
    values = reading.values[chief] if chief else {}
    run, minimum = values.get("trainer_run"), values.get("cluster_minimum")
    if not isinstance(run, dict) or not isinstance(minimum, dict) or run.get("elastic", True) is not False:
        return
    for job, least in minimum.items():
        number = len(tasks_of(reading.groups, reading.values, job))
        part = isinstance(least, float) and least < 1
        if job in ("ps", "worker") and job in busy and (part or (isinstance(least, int) and 0 < least < number)):
            yield _minimum_problem(
                reading,
                show(least),
                f"cluster_minimum: {job} is {least}, and elastic: false has the training wait for all {number}; "
                f"expected all. Or leave elastic out",
            )


def unevaluated_problems(reading: InventoryReading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse to keep the best checkpoints where none is evaluated."""
    run = reading.values[checks.reference_host(reading.groups) or ""].get("trainer_run")
    kept = run.get("checkpoints_kept_best") if isinstance(run, dict) else 0
    if "evaluator" in busy and kept and not tasks_of(reading.groups, reading.values, "evaluator"):
        text = (
            f"trainer_run: checkpoints_kept_best is {show(kept)}, evaluation is sidecar, and group evaluator is empty, "
            "so that the best ones are unknown; expected a host there, or evaluation: inline"
        )
        yield reading.problem(text, (), "trainer_run.checkpoints_kept_best", show(kept))


def vacancy_problems(topology: Topology, groups: Groups, hostvars: HostVars) -> Iterator[Problem]:
    strategy = strategy_of(groups, hostvars)
    elastic = STRATEGIES[strategy].remote and run_settings(groups, hostvars).get("elastic", Config.elastic)
    for job in NUMBERED_JOBS:
        places = [name for name in topology.vacant if name.startswith(f"{job}-")]
        present = [task for task in topology.tasks if task.job == job]
        if len(places) > MAX_VACANT * len(present):
            last = max(present, key=lambda task: task.index)
            yield Problem(
                f"{last.name} on '{last.host}' has the highest {job}_index, and of the places below "
                f"{len(places)} are vacant; {len(present)} are taken. Number the hosts from 0 on, with few gaps"
            )
    if topology.vacant and not elastic:
        why = "elastic: false" if STRATEGIES[strategy].remote else f"the strategy {strategy}"
        yield Problem(
            f"no host is {name_some(topology.vacant)}, and {why} needs every member. Give a new machine that index "
            "(ps_index, worker_index), or number the hosts without a gap"
        )


def size_problems(topology: Topology) -> Iterator[Problem]:
    if not topology.tasks:
        return
    longest = max(topology.tasks, key=lambda task: len(task.name))
    size = len("TF_CONFIG=") + len(tf_config(topology.cluster_json, longest.job, longest.index))
    if size > MAX_ENVIRONMENT_STRING:
        yield Problem(
            f"TF_CONFIG for {len(topology.tasks)} tasks is {size:,} bytes; one environment variable holds at most "
            f"{MAX_ENVIRONMENT_STRING:,}. Use fewer tasks"
        )
