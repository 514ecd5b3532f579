"""`fab drill`: choose the drills, go through them, judge, and give the cluster back."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleet.actions.console import Console
from fleet.drills.catalogue import BY_CHANCE, CATALOGUE
from fleet.drills.drill import Drill, Findings
from fleet.drills.soak import SoakTest, rounds, victims
from fleet.drills.testbed import DrillFailed, NotHere, Testbed, victim
from fleet.drills.ways import WayFault
from fleet.errors import ClusterTrouble, FleetError, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.history import Trail
from fleet.output.tables import render_table
from fleet.signals import undisturbed
from fleet.site.inventory import Inventory


def list_drills(console: Console) -> None:
    """Say what each drill does, and its bounds."""
    outcomes = [
        {"drill": each.name, "noticed_bound": each.detected, "paused_bound": json_number(each.paused)}
        | {"destructive": each.destructive, "text": each.text}
        for each in CATALOGUE
    ]
    rows = [
        [drill.name, _seconds(drill.detected), _seconds(drill.paused), "yes" if drill.destructive else "", drill.text]
        for drill in CATALOGUE
    ]
    table = render_table(["DRILL", "NOTICED", "PAUSED", "DESTRUCTIVE", "WHAT HAPPENS"], rows)
    console.answer("drill", {"outcome": None, "drills": outcomes}, table)


def drill(
    cluster: Cluster,
    console: Console,
    names: Sequence[str],
    everything: bool = False,
    factor: float = 1.0,
    reason: str | None = None,
) -> None:
    """Go through drills, one line each; raise ClusterTrouble when one fails.

    Bounds are multiplied by `factor`, for machines that do something else besides. `reason` is for the history.

    Raises OperatorMistake for a name that is no drill's and for a drill that the inventory doesn't permit.
    """
    check(cluster.inventory, factor)
    chosen = [each.with_bounds_times(factor) for each in choose(names, everything)]
    refusals = {each.name: why for each in chosen if (why := why_not_allowed(each, cluster.inventory))}
    if refusals and not everything:
        raise OperatorMistake("\n".join(f"{name}: {why}" for name, why in refusals.items()))
    failed: list[str] = []
    outcomes: list[dict[str, Any]] = []
    asked = [each for each in chosen if each.name not in refusals]
    with Trail(cluster, console, "drill", reason) as trail:
        with taken(cluster, console, trail, drills=["all"] if everything else list(names)) as testbed:
            for name, why in refusals.items():
                console.print(f"skip  {name}: {why}")
            for each in asked:
                testbed.go_on()
                found = _go_through(testbed, each, skips=everything)
                if found is None:
                    continue
                outcomes.append(as_json(found, each))
                if found.problems:
                    failed.append(each.name)
        outcome = "failed" if failed else "passed"
        console.print_json("drill", {"outcome": outcome, "drills": outcomes, "skipped": refusals})
        if failed:
            raise ClusterTrouble(f"{len(failed)} of {len(asked)} drills failed: {', '.join(failed)}")


def soak(
    cluster: Cluster,
    console: Console,
    seed: int | None = None,
    minutes: float = 10.0,
    factor: float = 1.0,
    reason: str | None = None,
) -> None:
    """Let faults come by chance for so long; raise ClusterTrouble when what is promised was not kept.

    Without a `seed` one is drawn. `reason` is for the history. Raises OperatorMistake when the inventory permits none
    of the faults.
    """
    check(cluster.inventory, factor)
    seed = random.SystemRandom().randrange(1, 1_000_000) if seed is None else seed
    drills = [each for each in CATALOGUE if each.name in BY_CHANCE]
    refusals = {each.name: why for each in drills if (why := why_not_allowed(each, cluster.inventory))}
    drills = [each for each in drills if each.name not in refusals]
    if not drills:
        raise OperatorMistake("\n".join(f"{name}: {why}" for name, why in refusals.items()))
    console.print(f"seed {seed}: `fab drill --random --seed {seed}` does the same faults in the same order")
    for name, why in refusals.items():
        console.print(f"skip  {name}: {why}")
    with Trail(cluster, console, "drill", reason) as trail:
        with taken(cluster, console, trail, seed=seed) as testbed:
            for each in [each for each in drills if isinstance(each.fault, WayFault) and not victims(testbed, each)]:
                refusals[each.name] = "no task has such a way to a ps of another host"
                console.print(f"skip  {each.name}: {refusals[each.name]}")
                drills.remove(each)
            soaked, begun = SoakTest(testbed, seed, factor), console.clock()
            problems = soaked.go_on_until(begun + 60 * minutes, rounds(seed, testbed, drills))
            console.print(soaked.summary(console.clock() - begun))
        outcome = "failed" if problems else "passed"
        console.print_json("drill", {"outcome": outcome, "seed": seed, "problems": problems, "skipped": refusals})
        if problems:
            raise ClusterTrouble("\n".join([f"{len(problems)} promises were not kept, seed {seed}:", *problems]))


def check(inventory: Inventory, factor: float) -> None:
    """Raise OperatorMistake where no drill can be done at all."""
    if not 1 <= factor < math.inf:
        raise OperatorMistake(
            f"--bounds-factor {factor:g} is no factor for the bounds: give a number from 1 on, such as 2"
        )
    if inventory.chief.server or not any(task.job == "ps" for task in inventory.tasks):
        raise OperatorMistake(
            "drills are for clusters with parameter servers; the inventory's strategy is another. Set strategy: "
            "parameter_server in trainer_run"
        )


@contextmanager
def taken(cluster: Cluster, console: Console, trail: Trail, **what: Any) -> Iterator[Testbed]:
    """Have the operator's cluster, and give it back as it was whatever happens; the history has `what` is done.

    No start is made meanwhile: its settings would be overwritten by those that are given back.
    """
    testbed = Testbed(cluster, console)
    cluster.acquire_start_lock("drill")
    testbed.take_over()
    trail.begin(**what)
    try:
        yield testbed
    finally:
        with undisturbed():
            try:
                testbed.keep()
                testbed.give_back()
            finally:
                cluster.release_start_lock()
        console.print("the cluster is as it was before")


def choose(names: Sequence[str], everything: bool) -> list[Drill]:
    known = {each.name: each for each in CATALOGUE}
    if everything:
        return list(CATALOGUE)
    if not names:
        raise OperatorMistake("which drill? Name one, or several with commas, or --all; `fab drill --list` has them")
    for name in names:
        if name not in known:
            raise OperatorMistake(f"there is no drill {name!r}; `fab drill --list` has them: {', '.join(known)}")
    return [known[name] for name in names]


def why_not_allowed(each: Drill, inventory: Inventory) -> str | None:
    """Say why the inventory doesn't permit a drill, and how to fix it."""
    site = inventory.variables[inventory.chief.host]
    if not inventory.is_shared:
        return "its programs take their pace from a file on the shared path, and the hosts share none"
    if each.destructive and site.get("drills_destructive") is not True:
        return (
            "it fills, cuts off, reboots or powers off machines. Where that harms nobody, set drills_destructive: true "
            "in group_vars/all.yml"
        )
    for need in each.needs:
        if need == "power":
            lacking = [name for name in ("drill_power_off", "drill_power_on") if not site.get(name)]
            if lacking:
                return (
                    f"{' and '.join(lacking)} is missing: the control machine's command for a host's power, with "
                    "{host} or {address} in it. Set it in group_vars/all.yml (docs/drills.md has examples)"
                )
            continue
        job, _, count = need.partition(" ")
        tasks = [task for task in inventory.tasks if task.job == job]
        if len(tasks) < int(count or 1):
            fix = ". Its group has tasks with trainer_run: {input: service} alone" if job == "data" else ""
            return f"the inventory has {len(tasks)} {job}; it needs {count or 1}{fix}"
        if each.destructive and all(task.host == inventory.chief.host for task in tasks):
            return f"every {job} is on the coordinator's host; it needs one elsewhere"
        if each.destructive and job == "data":
            task = victim(inventory, job)
            if any(other.job == "ps" and other.host == task.host for other in inventory.tasks):
                return f"the host of {task.name}, {task.host}, has a ps too, so that this would be the drill ps-off"
    return None


def _go_through(testbed: Testbed, each: Drill, skips: bool) -> Findings | None:
    """Do one drill and print its line; with `skips` one that no host can do is None, and no failure."""
    try:
        found = each.scenario(testbed, each)
    except (DrillFailed, FleetError) as error:
        if skips and isinstance(error, NotHere):
            testbed.console.print(f"skip  {each.name}: {error}")
            return None
        found = Findings(problems=[str(error)])
    judge(found, each)
    for line in describe(found, each):
        testbed.console.print(line)
    if found.problems:
        testbed.forget_run(keep=True)
    return found


def as_json(found: Findings, each: Drill) -> dict[str, Any]:
    """Return what `--json` says of a drill that was done."""
    return {
        "drill": each.name,
        "passed": not found.problems,
        "noticed_seconds": found.detected,
        "paused_seconds": found.paused,
        "noticed_bound": each.detected,
        "paused_bound": json_number(each.paused),
        "steps_lost": found.lost,
        "restarted": list(found.restarted),
        "problems": list(found.problems),
    }


def json_number(value: float | None) -> float | None:
    """Return a bound; None where there is none, for which JSON has no word."""
    return value if value is not None and math.isfinite(value) else None


def judge(found: Findings, each: Drill) -> None:
    """Hold the findings against the drill's bounds."""
    if each.detected is not None and found.proof:
        found.expect(found.detected is not None, "it was not noticed")
        found.expect(
            found.detected is None or found.detected <= each.detected,
            f"noticed after {_seconds(found.detected)}, and {_seconds(each.detected)} is the bound",
        )
    found.expect(
        found.paused is None or found.paused <= each.paused,
        f"no step for {_seconds(found.paused)}, and {_seconds(each.paused)} is the bound",
    )


def describe(found: Findings, each: Drill) -> list[str]:
    """One line, and one more for each problem."""
    parts = [f"{'FAIL' if found.problems else 'pass'}  {each.name}:"]
    if found.detected is not None:
        parts.append(f"noticed {_seconds(found.detected)} (bound {_seconds(each.detected) or 'none'});")
    if found.paused is not None:
        parts.append(f"paused {_seconds(found.paused)} (bound {_seconds(each.paused)});")
    if found.lost is not None:
        parts.append(f"{found.lost} steps lost;")
    parts.append(f"restarted {', '.join(found.restarted) or 'nothing'}")
    parts += [f"[{text}]" for text in (found.proof, *found.notes) if text]
    return [" ".join(parts), *(f"      {problem}" for problem in found.problems)]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s" if value < 10 and value != int(value) else f"{value:.0f} s"
