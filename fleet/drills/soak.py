"""`fab drill --random`: faults by chance, one or two at a time, in whatever the training is doing, and one verdict.

The seed decides which faults come, whom they hit, in which phase and after how many seconds; not how long the cluster
takes over them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from typing import Any

from fleet.drills.catalogue import SOON
from fleet.drills.drill import Drill
from fleet.drills.faults import Fault, Kill, await_save, run_everywhere
from fleet.drills.recovery import PATIENCE, take_part_again, tensors_that_equal, trains_again
from fleet.drills.testbed import DrillFailed, NotHere, Process, RunSample, Testbed
from fleet.drills.watch import FaultWatch, describe_process, longest_pause, steps_lost
from fleet.drills.ways import WayFault
from fleet.errors import FleetError
from fleet.site.topology import Task

PROGRAM = "trainer.drill:SoakProgram"
START_PAUSE = 90.0  # a start of the whole cluster, from the command to the first step
PROCESS_SECONDS = 60.0  # until the task that is to be hit has a process
ACTION_SECONDS = 600.0
TWO_AT_ONCE = 0.5  # of the rounds have two faults


class RoundPhase(Enum):
    TRAINING = "while it trains"
    START = "in the start"
    SAVE = "in a save"


WEIGHTS = {RoundPhase.TRAINING: 3, RoundPhase.SAVE: 2, RoundPhase.START: 1}


@dataclass(frozen=True)
class Injection:
    """A fault of the catalogue, aimed at a task if it is a task's. Times in seconds."""

    drill: Drill
    task: Task | None
    after: float  # the round's phase
    lasts: float  # if it is one that lasts

    @property
    def fault(self) -> Fault:
        return self.drill.fault.at(self.task, self.lasts)

    def __str__(self) -> str:
        of = [self.task.name] if self.task else []
        of += [f"{self.lasts:g} s"] if self.fault.lasts else []
        return f"{self.drill.name} ({', '.join(of)})" if of else self.drill.name


@dataclass(frozen=True)
class Round:
    number: int
    phase: RoundPhase
    injections: tuple[Injection, ...]

    def bound(self, factor: float) -> float:
        """The longest time without a new step (seconds): that of the drills, one after the other.

        A fault that stays is done without, unless it holds up the coordinator, a start, or what another fault needs.
        """
        pauses = sum(injection.drill.paused for injection in self.injections) + START_PAUSE * (
            self.phase is RoundPhase.START
        )
        stays = max(injection.fault.lasts for injection in self.injections)
        hits_coordinator = any(injection.task and injection.task.job == "chief" for injection in self.injections)
        held_up = hits_coordinator or len(self.injections) > 1 or self.phase is RoundPhase.START
        return pauses * factor + stays * held_up

    def __str__(self) -> str:
        first, *others = self.injections
        text = f"{self.phase.value}, after {first.after:g} s: {first}"
        return text + "".join(f", {injection.after - first.after:g} s later {injection}" for injection in others)


def rounds(seed: int, testbed: Testbed, drills: Sequence[Drill]) -> Iterator[Round]:
    """Yield the seed's faults, without an end. The same inventory and the same drills give the same ones."""
    chance = random.Random(seed)
    for number in count(1):
        (phase,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        longest = 20.0 if phase is RoundPhase.START else 0.0 if phase is RoundPhase.SAVE else 5.0
        first = _injection(chance, testbed, drills, round(chance.uniform(0.0, longest), 1))
        if chance.random() >= TWO_AT_ONCE:
            yield Round(number, phase, (first,))
            continue
        # At once, or in the recovery from the first one.
        after = first.after + chance.choice((0.0, round(chance.uniform(0.5, 20.0), 1)))
        second = _injection(chance, testbed, drills, after)
        while not go_together(testbed, first, second):
            second = _injection(chance, testbed, drills, after)
        yield Round(number, phase, (first, second))


def _injection(chance: random.Random, testbed: Testbed, drills: Sequence[Drill], after: float) -> Injection:
    drill = chance.choice(drills)
    tasks = victims(testbed, drill)
    # Over before anybody has acted on it, or long after.
    lasts = chance.choice((10.0, 60.0))
    return Injection(drill, chance.choice(tasks) if tasks else None, after, lasts)


def victims(testbed: Testbed, drill: Drill) -> list[Task]:
    """Whom a drill may hit: any task of the job that it hits when it is done by name."""
    tasks = testbed.tasks(*{task.job for task in drill.fault.chosen(testbed)})
    if not drill.destructive:
        return tasks
    if isinstance(drill.fault, WayFault):
        tasks = [task for task in tasks if has_way(testbed, drill.fault, task)]
        # On a ps's host it would be that ps's ways, too.
        with_ps = {task.host for task in testbed.tasks("ps")}
        tasks = [task for task in tasks if task.host not in with_ps] or tasks
    # The coordinator's own host is watched, and has to answer.
    return [task for task in tasks if task.host != testbed.chief.host] or tasks


def has_way(testbed: Testbed, fault: WayFault, task: Task) -> bool:
    """Whether the hosts of the task and of a ps are such that the way between them can be broken so."""
    try:
        fault.at(task, fault.lasts).reaches(testbed)
    except NotHere:
        return False
    return True


def go_together(testbed: Testbed, first: Injection, second: Injection) -> bool:
    """Whether the one takes nothing from the other: who is away can't be frozen; who was killed can be again."""
    if isinstance(first.fault, Kill) and isinstance(second.fault, Kill):
        return True
    one, other = [
        {injection.task.host} | injection.fault.reaches(testbed) if injection.task else set()
        for injection in (first, second)
    ]
    return first.drill != second.drill and not one & other


def proof_of(fault: Fault, testbed: Testbed) -> str:
    """Inject a fault; a host that lacks what it needs breaks no promise."""
    try:
        return fault.inject(testbed)
    except NotHere as error:
        return f"passed over: {error}"


@dataclass
class RoundOutcome:
    """What a round came to. Times in seconds."""

    paused: float = 0.0
    lost: int = 0
    restarted: Sequence[str] = ()
    proofs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    over: bool = False  # whether nothing can be asked of this run any more


def went_back_too_far(samples: Sequence[RunSample], damaged: Collection[int]) -> str | None:
    """Say where the step went below the newest checkpoint that existed and was whole."""
    newest = highest = 0
    for sample in samples:
        if sample.state == "training" and sample.step is not None:
            if sample.step < min(newest, highest):
                return f"it went back to step {sample.step}, before the checkpoint {newest}"
            highest = max(highest, sample.step)
        newest = max([newest, *(step for step in sample.checkpoints if step not in damaged)])
    return None


def who_failed(samples: Sequence[RunSample], processes: dict[str, Process]) -> list[str]:
    """Say which task has failed for good, and what the run said of it."""
    failed = [f"{name} is {describe_process(one)}" for name, one in processes.items() if one.active == "failed"]
    last = samples[-1]
    if last.coordinator.active == "failed" or last.state == "failed":
        failed.append(f"the run has failed: {last.status.get('message') or last.status_text}")
    return failed


def judge(outcome: RoundOutcome, samples: Sequence[RunSample], processes: dict[str, Process], bound: float) -> None:
    """Hold a round against what is promised."""
    outcome.problems += who_failed(samples, processes)
    outcome.over = outcome.over or bool(outcome.problems)
    damaged = [int(step) for proof in outcome.proofs for step in re.findall(r"ckpt-(\d+)\S* truncated", proof)]
    outcome.problems += filter(None, [went_back_too_far(samples, damaged)])
    if outcome.paused > bound:
        outcome.problems.append(f"no step for {outcome.paused:.0f} s, and {bound:.0f} s is the bound")


def describe(each: Round, outcome: RoundOutcome, bound: float) -> list[str]:
    """One line, and one more for each problem."""
    line = f"{'FAIL' if outcome.problems else 'pass'}  {each.number:>3}  {each}: "
    line += f"paused {outcome.paused:.0f} s (bound {bound:.0f} s); {outcome.lost} steps lost; "
    line += f"restarted {', '.join(outcome.restarted) or 'nothing'} [{'; '.join(outcome.proofs)}]"
    return [line, *(f"      {problem}" for problem in outcome.problems)]


class SoakTest:
    """A run that is hit until the time is over."""

    def __init__(self, testbed: Testbed, seed: int, factor: float) -> None:
        self._testbed = testbed
        self._factor = factor
        self._settings = {**SOON, "api": random.Random(seed).choice(("custom_loop", "fit"))}
        self.outcomes: list[tuple[Round, RoundOutcome]] = []

    def go_on_until(self, end: float, coming: Iterator[Round]) -> list[str]:
        """Do one round after the other; returns what went wrong."""
        testbed = self._testbed
        testbed.train(PROGRAM, self._settings)
        for each in coming:
            if testbed.console.clock() >= end:
                break
            testbed.go_on()
            bound = each.bound(self._factor)
            outcome = self._do(each, bound)
            self.outcomes.append((each, outcome))
            for line in describe(each, outcome, bound):
                testbed.console.print(line)
            if outcome.over:
                testbed.forget_run(keep=True)
                return [f"round {each.number}: {outcome.problems[-1]}"]
        problems = [
            f"round {each.number}: {problem}" for each, outcome in self.outcomes for problem in outcome.problems
        ]
        problems += self._end()
        testbed.forget_run(keep=bool(problems))
        return problems

    def _do(self, each: Round, bound: float) -> RoundOutcome:
        outcome = RoundOutcome()
        try:
            self._testbed.wait(
                self._testbed.trains_beyond_a_checkpoint, bound + PATIENCE, "it trains beyond a checkpoint"
            )
            watch = FaultWatch(self._testbed)
        except (DrillFailed, FleetError) as error:
            outcome.problems.append(str(error))
            outcome.over = True
            return outcome
        try:
            self._inject(each, watch, outcome, bound)
        except (DrillFailed, FleetError) as error:
            outcome.problems.append(str(error))
            outcome.over = True
        outcome.paused = longest_pause(watch.begun, watch.samples)
        outcome.lost = steps_lost(watch.samples)
        outcome.restarted = watch.restarted()
        judge(outcome, watch.samples, watch.processes, bound)
        return outcome

    def _inject(self, each: Round, watch: FaultWatch, outcome: RoundOutcome, bound: float) -> None:
        testbed, clock = self._testbed, self._testbed.console.clock
        if each.phase is RoundPhase.SAVE:
            run_everywhere(testbed, {testbed.chief.host: await_save(testbed)}, 90.0)
        watch.begin()
        if each.phase is RoundPhase.START:
            testbed.stop_all()
            watch.begun = clock()
            testbed.cluster.start(testbed.inventory.tasks)
        with ExitStack() as reverting:
            plan = [(one.after, True, one) for one in each.injections]
            plan += [(one.after + one.fault.lasts, False, one) for one in each.injections if one.fault.lasts]
            for after, injects, one in sorted(plan, key=lambda entry: entry[:2]):
                watch.until(lambda: False, watch.begun + after - clock())
                fault = one.fault
                if injects:
                    self._await_processes(watch, fault)
                    watch.away = [task.host for task in fault.hits(testbed)] if fault.takes_ssh else watch.away
                    reverting.callback(fault.revert, testbed)
                    outcome.proofs.append(self._meanwhile(watch, partial(proof_of, fault)))
                else:
                    self._meanwhile(watch, fault.revert)
                    watch.away = [] if fault.takes_ssh else watch.away
            since = clock()
            recovered = watch.until(
                lambda: (
                    bool(who_failed(watch.samples, watch.processes))
                    or (all(process.runs for process in watch.processes.values()) and trains_again(watch, since))
                ),
                bound + PATIENCE,
            )
        if not recovered:
            message = watch.last.status.get("message") or watch.last.status_text
            down = [f"{name} is {describe_process(each)}" for name, each in watch.processes.items() if not each.runs]
            outcome.problems.append(f"it doesn't train as a whole again: {'; '.join([*down, message])}")
            outcome.over = True
        elif not who_failed(watch.samples, watch.processes):
            hit = {task.name: task for one in each.injections for task in one.fault.hits(testbed)}
            outcome.problems += take_part_again(testbed, watch, list(hit.values()))

    def _await_processes(self, watch: FaultWatch, fault: Fault) -> None:
        """Wait until the task that is to be hit has a process: it may be on its way back from the fault before."""
        testbed, tasks = self._testbed, fault.aims(self._testbed)
        hosts = [task.host for task in tasks]

        def there() -> bool:
            found = testbed.processes(hosts)
            return all(task.name in found and found[task.name].pid for task in tasks)

        if not watch.until(there, PROCESS_SECONDS):
            raise DrillFailed(f"no process of {', '.join(task.name for task in tasks)} in {PROCESS_SECONDS:.0f} s")

    def _meanwhile(self, watch: FaultWatch, action: Callable[[Testbed], Any]) -> Any:
        """Look on while something is done that takes its time."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(action, self._testbed)
            watch.until(done.done, ACTION_SECONDS)
            return done.result()

    def _end(self) -> list[str]:
        """Stop, which saves; start again, and have the program compare what it restored with that checkpoint."""
        testbed, problems = self._testbed, list[str]()
        try:
            testbed.stop_all()
            last = testbed.sample()
            step = last.status.get("step")
            if last.status.get("state") != "stopped" or step != max(last.checkpoints, default=None):
                problems.append(
                    f"asked to stop, its state is {last.status.get('state')} at step {step}, and its newest "
                    f"checkpoint is {max(last.checkpoints, default=None)}"
                )
            testbed.configure(PROGRAM, {**self._settings, "api": "fit"})
            since = last.clock
            testbed.cluster.start(testbed.inventory.tasks)
            testbed.wait(
                lambda: (sample := testbed.sample()).state == "training" and (sample.step or 0) > (step or 0),
                START_PAUSE * self._factor + PATIENCE,
                f"it goes on after step {step}",
            )
            if not (equal := tensors_that_equal(testbed, since)):
                problems.append("nothing says that the tables at the end are the checkpoint's")
            testbed.console.print(f"at the end: {equal} tensors equal those of the checkpoint of step {step}")
        except (DrillFailed, FleetError) as error:
            problems.append(f"at the end: {error}")
        return problems

    def summary(self, seconds: float) -> str:
        injected = [injection for each, _ in self.outcomes for injection in each.injections]
        worst = max(self.outcomes, key=lambda one: one[1].paused, default=None)
        text = f"{len(self.outcomes)} rounds, {len(injected)} faults in {seconds / 60:.1f} minutes"
        if worst:
            text += f"; the longest pause {worst[1].paused:.0f} s (round {worst[0].number})"
        return f"{text}; {sum(outcome.lost for _, outcome in self.outcomes)} steps trained again"
