"""What a drill does around its fault, and what it makes of what it sees: findings, to be held against the bounds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fleet.drills.drill import Drill, Findings, Scene
from fleet.drills.recovery import PATIENCE, describe_recovery
from fleet.drills.stage import DrillFailed, Stage
from fleet.drills.watch import (
    Watch,
    describe_process,
)
from fleet.run import AS_TRAINER
from fleet.site.topology import Task


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
        found.expect(worst <= MAX_MEMORY_MIB, f"the memory of a ps grew by {worst} MiB: {grown}")
        return found

    return play


MAX_MEMORY_MIB = 250  # of a model that takes 122 MiB on each of two ps


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
    text = str(last.status.get("message", ""))
    found.expect(last.status.get("state") == "failed", f"the run's state is {last.status.get('state')}, not failed")
    found.expect(message in text, f"its message doesn't say {message!r}: {text!r}")
    found.notes.append(text[:100])
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
    """A member is missing when the run starts: it is named, with host and port, and waited for."""

    def play(stage: Stage, drill: Drill) -> Findings:
        stage.forget_run()
        stage.train(drill.program, drill.settings, wait=False)
        missing = stage.victim(job)
        stage.cluster.stop([missing])
        return _is_waited_for(stage, drill, missing, f"{missing.address}:{missing.port}", [missing], lambda: None)

    return play


def wrong_port(job: str) -> Scene:
    """The coordinator gets a wrong port for a member: it names the address that doesn't answer."""

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
    """Start all but `missing`, see it named and waited for, fix, start `later`, and see the run train."""
    found = Findings()
    named = f"{missing.name} ({address})"
    try:
        stage.cluster.start([task for task in stage.inventory.tasks if task != missing or missing not in later])
        begun = stage.desk.clock()

        def is_named() -> bool:
            sample = stage.look()
            return sample.coordinator.runs and named in sample.status_text

        stage.wait(is_named, drill.paused + PATIENCE, f"{named} is named")
        found.detected = stage.desk.clock() - begun
        sample = stage.look()
        found.expect(named in str(sample.status.get("message")), f"status.json doesn't name {named}")
        stage.desk.sleep(10.0)
        still = stage.look()
        found.proof = f"systemd's status line names {named}"
        found.expect(still.state == "waiting", f"it doesn't wait: {still.status_text}")
        found.expect(still.coordinator.start == sample.coordinator.start, "the coordinator was restarted")
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
        lines = asked.result()[other].strip().splitlines()
    refused_at = stage.desk.clock()
    found.proof = f"a second coordinator ran on {other}: {lines[-1]}"
    refused = [line for line in lines if chief.host in line or "holds" in line or "lease" in line]
    found.expect(lines[-1] == "exit code 75", f"it was not refused with 75: {lines[-3:]}")
    found.expect(refused, f"nothing says who holds the run: {lines[-3:]}")
    found.notes += [refused[-1][-100:]] if refused else []
    watch.until(lambda: watch.has_trained_since(refused_at), 30.0)
    describe_recovery(found, watch, stage, drill, [], None)
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
