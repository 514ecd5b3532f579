"""A drill after which the run trains again by itself: what it must have done, held against the bounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from fleet.drills.drill import Drill, Findings
from fleet.drills.testbed import SHORT_STEP, Process, Testbed
from fleet.drills.watch import FaultWatch, describe_process, longest_pause, lowest_step, new_steps, steps_lost
from fleet.site.topology import Task
from trainer.cluster.spec import SERVICE_JOBS

# After this time beyond its bound, what is watched for is given up.
PATIENCE = 60.0
# A training that a lasting fault must not stop trains in so many of its last seconds.
TRAINS_BY_THEN = 15.0
RETURN_SECONDS = 90.0
TIMES_USED = 3
RestoredStep = Callable[[FaultWatch], int]  # the lowest step to which a run may go back


def recovers(
    testbed: Testbed, drill: Drill, *, goes_on: bool = True, tensors: bool = False, restored: RestoredStep | None = None
) -> Findings:
    """The drill's fault comes, and the run trains again by itself: while it lasts if it `goes_on`, else after it.

    `tensors`: the program compares what was restored with the checkpoint. `restored` says which step the run may go
    back to; without it that is the newest checkpoint before the fault.
    """
    fault = drill.fault
    testbed.train(drill.program, drill.settings)
    if drill.long_step:
        testbed.begin_long_step()
    found = Findings()
    watch = FaultWatch(testbed)
    hit = fault.hits(testbed)
    try:
        watch.begin()
        found.proof = fault.inject(testbed)
        if fault.injects_late:
            watch.begun = testbed.console.clock() - 0.5
        if drill.long_step:
            testbed.pace(SHORT_STEP)
        others, reverted = _until_reverted(found, watch, testbed, drill, hit, goes_on)
        _until_recovered(watch, testbed, drill, hit, reverted)
        if fault.lasts or not drill.long_step:
            found.problems += take_part_again(testbed, watch, hit)
    finally:
        fault.revert(testbed)
        testbed.pace(SHORT_STEP)
    describe_recovery(found, watch, testbed, drill, hit, None if goes_on or not fault.lasts else reverted)
    floor = restored(watch) if restored else watch.newest_checkpoint
    low = lowest_step(watch.samples)
    found.expect(low is None or low >= floor, f"it went back to step {low}, before the checkpoint {floor}")
    if fault.takes_away:
        _expect_untouched(found, testbed, hit, others)
    if tensors:
        _expect_equal_tensors(found, testbed, watch)
    return found


def _until_reverted(
    found: Findings, watch: FaultWatch, testbed: Testbed, drill: Drill, hit: Sequence[Task], goes_on: bool
) -> tuple[dict[str, Process], float]:
    """Look on while a lasting fault lasts, and revert it; return the other hosts' processes then, and the time.

    A fault that is over at once counts as reverted when it began.
    """
    fault = drill.fault
    if not fault.lasts:
        return {}, watch.begun
    ends = testbed.console.clock() + fault.lasts
    watch.away = [task.host for task in hit] if fault.takes_ssh else []
    watch.until(lambda: testbed.console.clock() >= ends, fault.lasts)
    if goes_on:
        trained = watch.has_trained_since(ends - TRAINS_BY_THEN)
        found.expect(trained, f"nothing was trained at the end of the {fault.lasts:.0f} s of the fault")
    others = testbed.processes(away=[task.host for task in hit])
    fault.revert(testbed)
    watch.away = []
    return others, testbed.console.clock()


def _until_recovered(watch: FaultWatch, testbed: Testbed, drill: Drill, hit: Sequence[Task], reverted: float) -> None:
    must = [task.name for task in testbed.inventory.tasks if drill.must_restart(task, hit)]
    watch.until(
        lambda: (
            watch.run_again(must)
            and trains_again(watch, reverted)
            # A supervisor may be so fast that the coordinator finds out only now.
            and (drill.detected is None or watch.detected_after() is not None)
        ),
        drill.paused + PATIENCE,
    )


def _expect_untouched(found: Findings, testbed: Testbed, hit: Sequence[Task], others: Mapping[str, Process]) -> None:
    """Expect that each other process is the same as before the revert."""
    now = testbed.processes()
    for name in others:
        same = name in now and not now[name].succeeds(others[name])
        found.expect(same, f"{name} was restarted when {', '.join(task.name for task in hit)} came back")


def _expect_equal_tensors(found: Findings, testbed: Testbed, watch: FaultWatch) -> None:
    """Expect that the program found what it restored after the fault equal to the checkpoint."""
    equal = tensors_that_equal(testbed, watch.first.clock - watch.first.at + watch.begun)
    found.expect(equal, "nothing says that the restored tensors are the checkpoint's")
    found.notes.append(f"{equal} tensors equal the checkpoint's")


def trains_again(watch: FaultWatch, reverted: float) -> bool:
    """Whether it has trained since the fault was reverted, and by the coordinator's newest process."""
    pairs = pairwise(watch.samples)
    begun = [now.at for before, now in pairs if before.coordinator.start != now.coordinator.start]
    return watch.has_trained_since(max([watch.begun, reverted, *begun]) + 1.0)


def describe_recovery(
    found: Findings, watch: FaultWatch, testbed: Testbed, drill: Drill, hit: Sequence[Task], reverted: float | None
) -> None:
    found.detected = watch.detected_after()
    found.paused = longest_pause(watch.begun, watch.samples)
    if reverted is not None:
        after = [at for at in new_steps(watch.samples) if at > reverted]
        found.paused = after[0] - reverted if after else None
    found.lost = steps_lost(watch.samples)
    found.restarted = watch.restarted()
    for task in testbed.inventory.tasks:
        restarted = task.name in found.restarted
        if drill.must_restart(task, hit):
            found.expect(restarted, f"{task.name} was not restarted")
        elif not drill.may_restart(task, hit):
            found.expect(not restarted, f"{task.name} was restarted, and should have gone on")
    for name, process in watch.processes.items():
        found.expect(process.runs, f"{name} is {describe_process(process)}")
    found.expect(
        watch.has_trained_since(max(watch.begun, reverted or 0.0)),
        f"it doesn't train again: {watch.last.status.get('message') or watch.last.status_text}",
    )


# The members that send a server what it needs for nothing but steps; to a dispatcher its data workers, each second.
SENDERS = {"worker": "ps", "ps": "worker", "data": "worker", "dispatcher": "data"}


class Traffic:
    """What others send to a server, which they do for nothing but steps."""

    def __init__(self, testbed: Testbed, task: Task) -> None:
        self._testbed, self._task = testbed, task
        others = testbed.tasks(SENDERS[task.job])
        # The coordinator asks every server each second whether it lives.
        self._addresses = {other.address for other in others} - {testbed.chief.address}
        self._least: int | None = None

    def grows(self) -> bool:
        """Whether more has come since this was asked before."""
        if not self._addresses:
            return True
        process = self._testbed.processes([self._task.host])[self._task.name]
        text = self._testbed.on(self._task.host, "root ss -Htnpi state established")
        received = read_traffic(text, process.pid, self._addresses)
        # Less than before: connections were closed, and others are counted again.
        before, self._least = self._least, received if self._least is None else min(self._least, received)
        return before is not None and received > before


def take_part_again(testbed: Testbed, watch: FaultWatch, hit: Sequence[Task]) -> list[str]:
    """Look on until those who were hit do their part, and steps are trained with them; returns what is wrong."""
    # What was under way when a host was cut off comes once more when it is back: hence several times.
    used = [task for task in hit if task.server and (task.job not in SERVICE_JOBS or testbed.is_served)]
    missing = {task.name: (Traffic(testbed, task), TIMES_USED) for task in used}

    def all_used() -> bool:
        for name, (traffic, times) in list(missing.items()):
            if traffic.grows():
                missing[name] = traffic, times - 1
            if missing[name][1] == 0:
                del missing[name]
        return not missing

    if not watch.until(all_used, RETURN_SECONDS):
        return [f"{', '.join(missing)} takes no part"]
    since = testbed.console.clock()
    trained = watch.until(lambda: watch.has_trained_since(since), PATIENCE)
    return [] if trained else ["nothing was trained with all members"]


def read_traffic(text: str, pid: int, addresses: Collection[str]) -> int:
    """Read `ss -Htnpi state established`: the bytes that a process received from these addresses."""
    total = 0
    for line in re.sub(r"\n\s+", " ", text).splitlines():
        words = line.split()
        if len(words) > 3 and f"pid={pid}," in line:
            address = words[3].rpartition(":")[0].removeprefix("[::ffff:").removesuffix("]")
            count = re.search(r"bytes_received:(\d+)", line)
            total += int(count[1]) if count and address in addresses else 0
    return total


def tensors_that_equal(testbed: Testbed, since: float) -> int:
    """How many the program itself found equal to the checkpoint's since then, by its log and its host's clock."""
    text = testbed.on(
        testbed.chief.host,
        f"root journalctl --quiet --no-pager --output=cat --unit={testbed.chief.unit} --since=@{since:.0f} "
        "| grep -F 'tensors are those of' || true",
    )
    count = re.search(r"all (\d+) tensors", text)
    return int(count[1]) if count else 0
