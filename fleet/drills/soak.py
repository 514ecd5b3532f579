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
from fleet.drills.recovery import PATIENCE, last_restart, take_part_again, tensors_that_equal
from fleet.drills.stage import DrillFailed, NotHere, Process, Sample, Stage
from fleet.drills.watch import Watch, describe_process, longest_pause, steps_lost
from fleet.drills.ways import AWay
from fleet.errors import FleetError
from fleet.site.topology import Task

PROGRAM = "trainer.drill:SoakProgram"
START_PAUSE = 90.0  # a start of the whole cluster, from the command to the first step
PROCESS_SECONDS = 60.0  # until the task that is to be hit has a process
ACTION_SECONDS = 600.0
TWO_AT_ONCE = 0.5  # of the rounds have two faults


class Moment(Enum):
    TRAINING = "while it trains"
    START = "in the start"
    SAVE = "in a save"


WEIGHTS = {Moment.TRAINING: 3, Moment.SAVE: 2, Moment.START: 1}


@dataclass(frozen=True)
class Blow:
    """A fault of the catalogue, aimed at a task if it is a task's. Times in seconds."""

    drill: Drill
    task: Task | None
    after: float  # the round's moment
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
    moment: Moment
    blows: tuple[Blow, ...]

    def bound(self, factor: float) -> float:
        """The longest time without a new step (seconds): that of the drills, one after the other.

        A fault that stays is done without, unless it holds up the coordinator, a start, or what another fault needs.
        """
        pauses = sum(blow.drill.paused for blow in self.blows) + START_PAUSE * (self.moment is Moment.START)
        stays = max(blow.fault.lasts for blow in self.blows)
        hits_coordinator = any(blow.task and blow.task.job == "chief" for blow in self.blows)
        held_up = hits_coordinator or len(self.blows) > 1 or self.moment is Moment.START
        return pauses * factor + stays * held_up

    def __str__(self) -> str:
        first, *others = self.blows
        text = f"{self.moment.value}, after {first.after:g} s: {first}"
        return text + "".join(f", {blow.after - first.after:g} s later {blow}" for blow in others)


def rounds(seed: int, stage: Stage, drills: Sequence[Drill]) -> Iterator[Round]:
    """Yield the seed's faults, without an end. The same inventory and the same drills give the same ones."""
    chance = random.Random(seed)
    for number in count(1):
        (moment,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        longest = 20.0 if moment is Moment.START else 0.0 if moment is Moment.SAVE else 5.0
        first = _blow(chance, stage, drills, round(chance.uniform(0.0, longest), 1))
        if chance.random() >= TWO_AT_ONCE:
            yield Round(number, moment, (first,))
            continue
        # At once, or in the recovery from the first one.
        after = first.after + chance.choice((0.0, round(chance.uniform(0.5, 20.0), 1)))
        second = _blow(chance, stage, drills, after)
        while not go_together(stage, first, second):
            second = _blow(chance, stage, drills, after)
        yield Round(number, moment, (first, second))


def _blow(chance: random.Random, stage: Stage, drills: Sequence[Drill], after: float) -> Blow:
    drill = chance.choice(drills)
    tasks = victims(stage, drill)
    # Over before anybody has acted on it, or long after.
    lasts = chance.choice((10.0, 60.0))
    return Blow(drill, chance.choice(tasks) if tasks else None, after, lasts)


def victims(stage: Stage, drill: Drill) -> list[Task]:
    """Whom a drill may hit: any task of the job that it hits when it is done by name."""
    tasks = stage.tasks(*{task.job for task in drill.fault.chosen(stage)})
    if not drill.destructive:
        return tasks
    if isinstance(drill.fault, AWay):
        tasks = [task for task in tasks if has_way(stage, drill.fault, task)]
        # On a ps's host it would be that ps's ways, too.
        with_ps = {task.host for task in stage.tasks("ps")}
        tasks = [task for task in tasks if task.host not in with_ps] or tasks
    # The coordinator's own host is watched, and has to answer.
    return [task for task in tasks if task.host != stage.chief.host] or tasks


def has_way(stage: Stage, fault: AWay, task: Task) -> bool:
    """Whether the hosts of the task and of a ps are such that the way between them can be broken so."""
    try:
        fault.at(task, fault.lasts).reaches(stage)
    except NotHere:
        return False
    return True


def go_together(stage: Stage, first: Blow, second: Blow) -> bool:
    """Whether the one takes nothing from the other: who is away can't be frozen; who was killed can be again."""
    if isinstance(first.fault, Kill) and isinstance(second.fault, Kill):
        return True
    one, other = [{blow.task.host} | blow.fault.reaches(stage) if blow.task else set() for blow in (first, second)]
    return first.drill != second.drill and not one & other


def proof_of(fault: Fault, stage: Stage) -> str:
    """Strike; a host that lacks what the fault needs breaks no promise."""
    try:
        return fault.strike(stage)
    except NotHere as error:
        return f"passed over: {error}"


@dataclass
class Outcome:
    """What a round came to. Times in seconds."""

    paused: float = 0.0
    lost: int = 0
    restarted: Sequence[str] = ()
    proofs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    over: bool = False  # whether nothing can be asked of this run any more


def went_back_too_far(samples: Sequence[Sample], damaged: Collection[int]) -> str | None:
    """Say where the step went below the newest checkpoint that existed and was whole."""
    newest = highest = 0
    for sample in samples:
        if sample.state == "training" and sample.step is not None:
            if sample.step < min(newest, highest):
                return f"it went back to step {sample.step}, before the checkpoint {newest}"
            highest = max(highest, sample.step)
        newest = max([newest, *(step for step in sample.checkpoints if step not in damaged)])
    return None


def who_failed(samples: Sequence[Sample], processes: dict[str, Process]) -> list[str]:
    """Say which task has failed for good, and what the run said of it."""
    failed = [f"{name} is {describe_process(one)}" for name, one in processes.items() if one.active == "failed"]
    last = samples[-1]
    if last.coordinator.active == "failed" or last.state == "failed":
        failed.append(f"the run has failed: {last.status.get('message') or last.status_text}")
    return failed


def judge(outcome: Outcome, samples: Sequence[Sample], processes: dict[str, Process], bound: float) -> None:
    """Hold a round against what is promised."""
    outcome.problems += who_failed(samples, processes)
    outcome.over = outcome.over or bool(outcome.problems)
    damaged = [int(step) for proof in outcome.proofs for step in re.findall(r"ckpt-(\d+)\S* truncated", proof)]
    outcome.problems += filter(None, [went_back_too_far(samples, damaged)])
    if outcome.paused > bound:
        outcome.problems.append(f"no step for {outcome.paused:.0f} s, and {bound:.0f} s is the bound")


def describe(each: Round, outcome: Outcome, bound: float) -> list[str]:
    """One line, and one more for each problem."""
    line = f"{'FAIL' if outcome.problems else 'pass'}  {each.number:>3}  {each}: "
    line += f"paused {outcome.paused:.0f} s (bound {bound:.0f} s); {outcome.lost} steps lost; "
    line += f"restarted {', '.join(outcome.restarted) or 'nothing'} [{'; '.join(outcome.proofs)}]"
    return [line, *(f"      {problem}" for problem in outcome.problems)]


class Soak:
    """A run that is hit until the time is over."""

    def __init__(self, stage: Stage, seed: int, factor: float) -> None:
        self._stage = stage
        self._factor = factor
        self._settings = {**SOON, "api": random.Random(seed).choice(("custom_loop", "fit"))}
        self.outcomes: list[tuple[Round, Outcome]] = []

    def go_on_until(self, end: float, coming: Iterator[Round]) -> list[str]:
        """Do one round after the other; returns what went wrong."""
        stage = self._stage
        stage.train(PROGRAM, self._settings)
        for each in coming:
            if stage.desk.clock() >= end:
                break
            stage.keep()
            bound = each.bound(self._factor)
            outcome = self._do(each, bound)
            self.outcomes.append((each, outcome))
            for line in describe(each, outcome, bound):
                stage.desk.say(line)
            if outcome.over:
                stage.forget_run(keep=True)
                return [f"round {each.number}: {outcome.problems[-1]}"]
        problems = [
            f"round {each.number}: {problem}" for each, outcome in self.outcomes for problem in outcome.problems
        ]
        problems += self._end()
        stage.forget_run(keep=bool(problems))
        return problems

    def _do(self, each: Round, bound: float) -> Outcome:
        outcome = Outcome()
        try:
            self._stage.wait(self._stage.trains_beyond_a_checkpoint, bound + PATIENCE, "it trains beyond a checkpoint")
            watch = Watch(self._stage)
        except (DrillFailed, FleetError) as error:
            outcome.problems.append(str(error))
            outcome.over = True
            return outcome
        try:
            self._strike(each, watch, outcome, bound)
        except (DrillFailed, FleetError) as error:
            outcome.problems.append(str(error))
            outcome.over = True
        outcome.paused = longest_pause(watch.begun, watch.samples)
        outcome.lost = steps_lost(watch.samples)
        outcome.restarted = watch.restarted()
        judge(outcome, watch.samples, watch.processes, bound)
        return outcome

    def _strike(self, each: Round, watch: Watch, outcome: Outcome, bound: float) -> None:
        stage, clock = self._stage, self._stage.desk.clock
        if each.moment is Moment.SAVE:
            run_everywhere(stage, {stage.chief.host: await_save(stage)}, 90.0)
        watch.begin()
        if each.moment is Moment.START:
            stage.stop_all()
            watch.begun = clock()
            stage.cluster.start(stage.inventory.tasks)
        with ExitStack() as healing:
            plan = [(blow.after, True, blow) for blow in each.blows]
            plan += [(blow.after + blow.fault.lasts, False, blow) for blow in each.blows if blow.fault.lasts]
            for after, strikes, blow in sorted(plan, key=lambda entry: entry[:2]):
                watch.until(lambda: False, watch.begun + after - clock())
                fault = blow.fault
                if strikes:
                    self._await_processes(watch, fault)
                    watch.away = [task.host for task in fault.hits(stage)] if fault.takes_ssh else watch.away
                    healing.callback(fault.heal, stage)
                    outcome.proofs.append(self._meanwhile(watch, partial(proof_of, fault)))
                else:
                    self._meanwhile(watch, fault.heal)
                    watch.away = [] if fault.takes_ssh else watch.away
            healed = clock()
            recovered = watch.until(
                lambda: (
                    bool(who_failed(watch.samples, watch.processes))
                    or (all(process.runs for process in watch.processes.values()) and self._trains_since(watch, healed))
                ),
                bound + PATIENCE,
            )
        if not recovered:
            message = watch.last.status.get("message") or watch.last.status_text
            down = [f"{name} is {describe_process(each)}" for name, each in watch.processes.items() if not each.runs]
            outcome.problems.append(f"it doesn't train as a whole again: {'; '.join([*down, message])}")
            outcome.over = True
        elif not who_failed(watch.samples, watch.processes):
            hit = {task.name: task for blow in each.blows for task in blow.fault.hits(stage)}
            outcome.problems += take_part_again(stage, watch, list(hit.values()))

    def _trains_since(self, watch: Watch, healed: float) -> bool:
        return watch.has_trained_since(max(healed, last_restart(watch)) + 1.0)

    def _await_processes(self, watch: Watch, fault: Fault) -> None:
        """Wait until the task that is to be hit has a process: it may be on its way back from the fault before."""
        stage, tasks = self._stage, fault.aims(self._stage)
        hosts = [task.host for task in tasks]

        def there() -> bool:
            found = stage.processes(hosts)
            return all(task.name in found and found[task.name].pid for task in tasks)

        if not watch.until(there, PROCESS_SECONDS):
            raise DrillFailed(f"no process of {', '.join(task.name for task in tasks)} in {PROCESS_SECONDS:.0f} s")

    def _meanwhile(self, watch: Watch, action: Callable[[Stage], Any]) -> Any:
        """Look on while something is done that takes its time."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(action, self._stage)
            watch.until(done.done, ACTION_SECONDS)
            return done.result()

    def _end(self) -> list[str]:
        """Stop, which saves; start again, and have the program compare what it restored with that checkpoint."""
        stage, problems = self._stage, list[str]()
        try:
            stage.stop_all()
            last = stage.look()
            step = last.status.get("step")
            if last.status.get("state") != "stopped" or step != max(last.checkpoints, default=None):
                problems.append(
                    f"asked to stop, its state is {last.status.get('state')} at step {step}, and its newest "
                    f"checkpoint is {max(last.checkpoints, default=None)}"
                )
            stage.configure(PROGRAM, {**self._settings, "api": "fit"})
            since = last.clock
            stage.cluster.start(stage.inventory.tasks)
            stage.wait(
                lambda: (sample := stage.look()).state == "training" and (sample.step or 0) > (step or 0),
                START_PAUSE * self._factor + PATIENCE,
                f"it goes on after step {step}",
            )
            if not (equal := tensors_that_equal(stage, since)):
                problems.append("nothing says that the tables at the end are the checkpoint's")
            stage.desk.say(f"at the end: {equal} tensors equal those of the checkpoint of step {step}")
        except (DrillFailed, FleetError) as error:
            problems.append(f"at the end: {error}")
        return problems

    def summary(self, seconds: float) -> str:
        struck = [blow for each, _ in self.outcomes for blow in each.blows]
        worst = max(self.outcomes, key=lambda one: one[1].paused, default=None)
        text = f"{len(self.outcomes)} rounds, {len(struck)} faults in {seconds / 60:.1f} minutes"
        if worst:
            text += f"; the longest pause {worst[1].paused:.0f} s (round {worst[0].number})"
        return f"{text}; {sum(outcome.lost for _, outcome in self.outcomes)} steps trained again"
