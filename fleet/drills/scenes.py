"""What a drill does around its fault, and what it makes of what it sees: findings, to be held against the bounds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from fleet.cluster import AS_TRAINER
from fleet.drills.drill import Drill, Findings, Scene
from fleet.drills.stage import SHORT_STEP, DrillFailed, Process, Stage
from fleet.drills.watch import (
    Watch,
    describe_process,
    longest_pause,
    lowest_step,
    new_steps,
    steps_lost,
)
from fleet.site.inventory import Task
from trainer.cluster.spec import SERVICE_JOBS

# After this time beyond its bound, what is watched for is given up.
PATIENCE = 60.0
# A training that a lasting fault must not stop trains in so many of its last seconds.
TRAINS_BY_THEN = 15.0
RETURN_SECONDS = 90.0
TIMES_USED = 3


def recovers(*, goes_on: bool = True, tensors: bool = False, restored: Callable[[Watch], int] | None = None) -> Scene:
    """The drill's fault comes, and the run trains again by itself: while it lasts if it `goes_on`, else after it.

    `tensors`: the program compares what was restored with the checkpoint. `restored` says which step the run may go
    back to; without it that is the newest checkpoint before the fault.
    """

    def play(stage: Stage, drill: Drill) -> Findings:
        fault = drill.fault
        stage.train(drill.program, drill.settings)
        if drill.long_step:
            stage.begin_long_step()
        found = Findings()
        watch = Watch(stage)
        others: dict[str, Process] = {}
        hit = fault.hits(stage)
        must = [task.name for task in stage.inventory.tasks if drill.must_restart(stage, task, hit)]
        try:
            watch.begin()
            found.proof = fault.strike(stage)
            if fault.strikes_late:
                watch.begun = stage.desk.clock() - 0.5
            if drill.long_step:
                stage.pace(SHORT_STEP)
            healed = watch.begun
            if fault.lasts:
                ends = stage.desk.clock() + fault.lasts
                watch.away = [task.host for task in hit] if fault.takes_ssh else []
                watch.until(lambda: stage.desk.clock() >= ends, fault.lasts)
                if goes_on:
                    trained = watch.has_trained_since(ends - TRAINS_BY_THEN)
                    found.expect(trained, f"nothing was trained at the end of the {fault.lasts:.0f} s of the fault")
                others = stage.processes(away=[task.host for task in hit])
                fault.heal(stage)
                watch.away, healed = [], stage.desk.clock()
            watch.until(
                lambda: (
                    watch.run_again(must)
                    and watch.has_trained_since(max(healed, last_restart(watch)) + 1.0)
                    # A supervisor may be so fast that the coordinator finds out only now.
                    and (drill.detected is None or watch.detected_after() is not None)
                ),
                drill.paused + PATIENCE,
            )
            if fault.lasts or not drill.long_step:
                found.problems += take_part_again(stage, watch, hit)
        finally:
            fault.heal(stage)
            stage.pace(SHORT_STEP)
        _describe_recovery(found, watch, stage, drill, hit, None if goes_on or not fault.lasts else healed)
        floor = restored(watch) if restored else watch.newest_checkpoint
        low = lowest_step(watch.samples)
        found.expect(low is None or low >= floor, f"it went back to step {low}, before the checkpoint {floor}")
        if fault.takes_away:
            now = stage.processes()
            for name in others:
                same = name in now and not now[name].succeeds(others[name])
                found.expect(same, f"{name} was started anew when {', '.join(task.name for task in hit)} came back")
        if tensors:
            equal = tensors_that_equal(stage, watch.first.clock - watch.first.at + watch.begun)
            found.expect(equal, "nothing says that the restored tensors are the checkpoint's")
            found.notes.append(f"{equal} tensors equal the checkpoint's")
        return found

    return play


def last_restart(watch: Watch) -> float:
    """When the coordinator was last seen to be another process."""
    at = watch.begun
    for before, sample in pairwise(watch.samples):
        if before.coordinator.start != sample.coordinator.start:
            at = sample.at
    return at


def _describe_recovery(
    found: Findings, watch: Watch, stage: Stage, drill: Drill, hit: Sequence[Task], healed: float | None
) -> None:
    found.detected = watch.detected_after()
    found.paused = longest_pause(watch.begun, watch.samples)
    if healed is not None:
        after = [at for at in new_steps(watch.samples) if at > healed]
        found.paused = after[0] - healed if after else None
    found.lost = steps_lost(watch.samples)
    found.restarted = watch.restarted()
    for task in stage.inventory.tasks:
        anew = task.name in found.restarted
        if drill.must_restart(stage, task, hit):
            found.expect(anew, f"{task.name} was not started anew")
        elif not drill.may_restart(stage, task, hit):
            found.expect(not anew, f"{task.name} was started anew, and should have gone on")
    for name, process in watch.processes.items():
        found.expect(process.runs, f"{name} is {describe_process(process)}")
    found.expect(
        watch.has_trained_since(max(watch.begun, healed or 0.0)),
        f"it doesn't train again: {watch.last.status.get('message') or watch.last.said}",
    )


# Who sends a server what it needs for nothing but steps; to a dispatcher its data workers, each second.
SENDERS = {"worker": "ps", "ps": "worker", "data": "worker", "dispatcher": "data"}


class Traffic:
    """What others send to a server, which they do for nothing but steps."""

    def __init__(self, stage: Stage, task: Task) -> None:
        self._stage, self._task = stage, task
        others = stage.tasks(SENDERS[task.job])
        # The coordinator asks every server each second whether it lives.
        self._addresses = {other.address for other in others} - {stage.chief.address}
        self._least: int | None = None

    def grows(self) -> bool:
        """Whether more has come since this was asked before."""
        if not self._addresses:
            return True
        process = self._stage.processes([self._task.host])[self._task.name]
        text = self._stage.on(self._task.host, "root ss -Htnpi state established")
        received = read_traffic(text, process.pid, self._addresses)
        # Less than before: connections were closed, and others are counted anew.
        before, self._least = self._least, received if self._least is None else min(self._least, received)
        return before is not None and received > before


def take_part_again(stage: Stage, watch: Watch, hit: Sequence[Task]) -> list[str]:
    """Look on until those who were hit do their part, and steps are trained with them; returns what is wrong."""
    # What was under way when a host was cut off comes once more when it is back: hence several times.
    used = [task for task in hit if task.server and (task.job not in SERVICE_JOBS or stage.is_served)]
    missing = {task.name: (Traffic(stage, task), TIMES_USED) for task in used}

    def all_used() -> bool:
        for name, (traffic, times) in list(missing.items()):
            if traffic.grows():
                missing[name] = traffic, times - 1
            if missing[name][1] == 0:
                del missing[name]
        return not missing

    if not watch.until(all_used, RETURN_SECONDS):
        return [f"{', '.join(missing)} takes no part"]
    since = stage.desk.clock()
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


def tensors_that_equal(stage: Stage, since: float) -> int:
    """How many the program itself found equal to the checkpoint's since then, by its log and its host's clock."""
    text = stage.on(
        stage.chief.host,
        f"root journalctl --quiet --no-pager --output=cat --unit={stage.chief.unit} --since=@{since:.0f} "
        "| grep -F 'tensors are those of' || true",
    )
    count = re.search(r"all (\d+) tensors", text)
    return int(count[1]) if count else 0


def five_times(once: Scene) -> Scene:
    """The scene five times over, each after the run has trained again; the memory of the ps must not grow."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.train(drill.program, drill.settings)
        before = _memory(stage)
        found = Findings()
        for _ in range(5):
            each = once(stage, drill)
            found.detected = max(filter(None, (found.detected, each.detected)), default=None)
            found.paused = max(filter(None, (found.paused, each.paused)), default=None)
            found.lost = max(found.lost or 0, each.lost or 0)
            found.restarted = sorted({*found.restarted, *each.restarted})
            found.problems += each.problems
            if each.problems:
                break
            stage.wait(stage.trains_beyond_a_checkpoint, 60.0, "a new checkpoint")
        found.proof = "the coordinator's process was gone five times"
        after = _memory(stage)
        grown = {name: after[name] - before[name] for name in before if name in after}
        worst = max(grown.values(), default=0)
        found.notes.append(f"the memory of a ps grew by {worst} MiB at most")
        found.expect(worst <= MOST_MEMORY_MIB, f"the memory of a ps grew by {worst} MiB: {grown}")
        return found

    return play


MOST_MEMORY_MIB = 250  # of a model that takes 122 MiB on each of two ps


def _memory(stage: Stage) -> dict[str, int]:
    """Each ps's resident memory in MiB."""
    found = {}
    for task in stage.tasks("ps"):
        process = stage.processes([task.host])[task.name]
        text = stage.on(task.host, f"grep VmRSS /proc/{process.pid}/status || true")
        if text.strip():
            found[task.name] = int(text.split()[1]) // 1024
    return found


def fails(message: str) -> Scene:
    """The run ends with the user's own error: a permanent exit code, no restart, the user's line in the message."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.forget_run()
        stage.train(drill.program, drill.settings, wait=False)
        begun = stage.desk.clock()
        stage.cluster.start(stage.inventory.tasks)
        return _ends_with_an_error(stage, begun, message, drill)

    return play


def _ends_with_an_error(stage: Stage, begun: float, message: str, drill: Drill) -> Findings:
    found = Findings()

    def failed() -> bool:
        return stage.look().coordinator.active == "failed"

    stage.wait(failed, drill.paused + PATIENCE, f"{stage.chief.name} fails")
    found.detected = stage.desk.clock() - begun
    first = stage.look().coordinator
    found.proof = f"{stage.chief.name} failed"
    stage.desk.sleep(5.0)
    last = stage.look()
    found.expect(first.exit_status == 78, f"it exited with {first.exit_status}, not with 78")
    found.expect(first.start == last.coordinator.start, "it was started again")
    said = str(last.status.get("message", ""))
    found.expect(last.status.get("state") == "failed", f"the run's state is {last.status.get('state')}, not failed")
    found.expect(message in said, f"its message doesn't say {message!r}: {said!r}")
    found.notes.append(said[:100])
    stage.forget_run()
    return found


def all_checkpoints_bad(stage: Stage, drill: Drill) -> Findings:
    """No checkpoint can be read: one clear, permanent error, rather than a new training in the old one's place."""
    stage.train(drill.program, drill.settings)
    begun = stage.desk.clock()
    proof = drill.fault.strike(stage)
    found = _ends_with_an_error(stage, begun, "checkpoint", drill)
    found.proof = proof
    aside = stage.on(stage.chief.host, f"{AS_TRAINER} ls {shlex.quote(stage.checkpoint_dir)}").split()
    found.expect([name for name in aside if name.endswith(".bad")], "nothing was set aside by name")
    return found


def never_starts(job: str) -> Scene:
    """A member is not there when the run starts: it is named, with host and port, and waited for."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.forget_run()
        stage.train(drill.program, drill.settings, wait=False)
        missing = stage.victim(job)
        stage.cluster.stop([missing])
        return _is_waited_for(stage, drill, missing, f"{missing.address}:{missing.port}", [missing], lambda: None)

    return play


def wrong_port(job: str) -> Scene:
    """The coordinator is told a wrong port for a member: it names the address that doesn't answer."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.forget_run()
        stage.train(drill.program, drill.settings, wait=False)
        missing, chief = stage.victim(job), stage.chief
        right, wrong = f"{missing.address}:{missing.port}", f"{missing.address}:{(missing.port or 0) + 7}"
        file = f"/etc/trainer/{chief.name}.env"
        text = stage.on(chief.host, f"cat {file}")
        if right not in text:
            raise DrillFailed(f"{file} on {chief.host} has no {right}")

        def write(content: str) -> None:
            stage.on(chief.host, f"printf '%s\\n' {shlex.quote(content.rstrip())} | root tee {file} >/dev/null")

        def mend() -> None:
            write(text)
            stage.cluster.stop([chief])

        write(text.replace(right, wrong))
        return _is_waited_for(stage, drill, missing, wrong, [chief], mend)

    return play


def _is_waited_for(
    stage: Stage, drill: Drill, missing: Task, address: str, later: list[Task], mend: Callable[[], None]
) -> Findings:
    """Start all but `missing`, see it named and waited for, mend, start `later`, and see the run train."""
    found = Findings()
    named = f"{missing.name} ({address})"
    try:
        stage.cluster.start([task for task in stage.inventory.tasks if task != missing or missing not in later])
        begun = stage.desk.clock()

        def is_named() -> bool:
            sample = stage.look()
            return sample.coordinator.runs and named in sample.said

        stage.wait(is_named, drill.paused + PATIENCE, f"{named} is named")
        found.detected = stage.desk.clock() - begun
        sample = stage.look()
        found.expect(named in str(sample.status.get("message")), f"status.json doesn't name {named}")
        stage.desk.sleep(10.0)
        still = stage.look()
        found.proof = f"systemd's status line names {named}"
        found.expect(still.state == "waiting", f"it doesn't wait: {still.said}")
        found.expect(still.coordinator.start == sample.coordinator.start, "the coordinator started anew")
    finally:
        mend()
        stage.cluster.start(later)
    begun = stage.desk.clock()
    stage.wait(lambda: stage.look().state == "training" and (stage.look().step or 0) > 0, 120.0, "it trains at last")
    found.paused = stage.desk.clock() - begun
    return found


def second_coordinator(stage: Stage, drill: Drill) -> Findings:
    """Another coordinator on the same run, from another host: it is refused, and the first doesn't notice."""
    stage.train(drill.program, drill.settings)
    found = Findings()
    chief, other = stage.chief, stage.victim("worker").host
    environment = stage.on(chief.host, f"cat /etc/trainer/{chief.name}.env")
    watch = Watch(stage)
    watch.begin()
    # With a parent of its own it is the coordinator itself and no supervisor, which would start the next one.
    task = "exec timeout 60 env/bin/python -m trainer --parent $$"
    inner = f'set -a; eval "$1"; cd /opt/trainer/current && {task}'
    script = f'{AS_TRAINER} sh -c {shlex.quote(inner)} sh {shlex.quote(environment)} 2>&1; echo "exit code $?"'
    with ThreadPoolExecutor(1) as pool:  # whether the first one trains is watched meanwhile
        asked = pool.submit(stage.everywhere, script, [other], 90.0)
        watch.away = [other]
        watch.until(asked.done, 120.0)
        watch.away = []
        said = asked.result()[other].strip().splitlines()
    refused_at = stage.desk.clock()
    found.proof = f"a second coordinator ran on {other}: {said[-1]}"
    refused = [line for line in said if chief.host in line or "holds" in line or "lease" in line]
    found.expect(said[-1] == "exit code 75", f"it was not refused with 75: {said[-3:]}")
    found.expect(refused, f"nothing says who holds the run: {said[-3:]}")
    found.notes += [refused[-1][-100:]] if refused else []
    watch.until(lambda: watch.has_trained_since(refused_at), 30.0)
    _describe_recovery(found, watch, stage, drill, [], None)
    found.detected = refused_at - watch.begun
    return found


def undisturbed(scene: Scene) -> Scene:
    """What happens to the evaluator concerns the training not at all; and it evaluates again afterwards."""

    def play(stage: Stage, drill: Drill) -> Findings:
        found = scene(stage, drill)
        step, begun = stage.look().step or 0, stage.desk.clock()
        stage.wait(lambda: _evaluation(stage) >= step, 120.0, "a checkpoint of after the fault is evaluated")
        found.notes.append(f"evaluated again after {stage.desk.clock() - begun:.0f} s")
        return found

    return play


def _evaluation_text(stage: Stage) -> str:
    return stage.on(
        stage.chief.host, f"{AS_TRAINER} cat {shlex.quote(stage.run_dir)}/evaluation.json 2>/dev/null || true"
    )


def _evaluation(stage: Stage) -> int:
    text = _evaluation_text(stage)
    match = re.search(r'"step": (\d+)', text)
    return int(match[1]) if match else -1


def saves_again(scene: Scene) -> Scene:
    """While nothing can be saved, training goes on and complains; afterwards a checkpoint is saved again."""

    def play(stage: Stage, drill: Drill) -> Findings:
        began = int(stage.on(stage.chief.host, "date +%s"))
        found = scene(stage, drill)
        newest = max(stage.look().checkpoints, default=0)

        def saved() -> bool:
            return max(stage.look().checkpoints, default=0) > newest

        stage.wait(saved, 60.0, "a checkpoint is saved after the healing")
        complaints = stage.on(stage.chief.host, _complaints(stage.chief, began))
        found.expect(complaints.strip(), "nothing was complained about in the log")
        found.notes.append((complaints.strip().splitlines() or [""])[-1][:120])
        return found

    return play


def _complaints(task: Task, since: int) -> str:
    return (
        f"root journalctl --quiet --no-pager --output=cat --unit={task.unit} --since=@{since} "
        "| grep -E 'cannot save|could not be saved|save failed|failed to save|not saved' || true"
    )


def finishes(metric: str, least: float) -> Scene:
    """A run with a fault in it goes to its end, is as good as one without, and everything ends with it."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.forget_run()
        stage.train(drill.program, drill.settings)
        begun = stage.desk.clock()
        found = Findings(proof=drill.fault.strike(stage))
        ends = {task.name for task in stage.inventory.tasks}

        def ended() -> bool:
            return all(process.active == "inactive" for process in stage.processes().values())

        try:
            stage.wait(lambda: stage.look().status.get("state") == "finished", drill.paused + PATIENCE, "it finishes")
            found.notes.append(f"finished after {stage.desk.clock() - begun:.0f} s")
            stage.wait(ended, 60.0, "every task ends")
        except DrillFailed as error:
            found.problems.append(str(error))
        for name, process in stage.processes().items():
            good = (process.active, process.result) == ("inactive", "success")
            found.expect(good or name not in ends, f"{name} is {describe_process(process)}, and should have finished")
        text = _evaluation_text(stage)
        value = re.search(rf'"{metric}": ([0-9.]+)', text)
        found.notes.append(f"{metric} {float(value[1]):.4f}" if value else f"no {metric}")
        found.expect(value and float(value[1]) >= least, f"{metric} is not at least {least}: {text[:100]}")
        stage.forget_run()
        return found

    return play
