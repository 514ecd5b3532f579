"""What a drill does around its fault, and what it makes of what it sees: findings, to be held against the bounds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fleet.drills.drill import Drill, Findings, Scenario
from fleet.drills.recovery import PATIENCE, describe_recovery, recovers
from fleet.drills.testbed import DrillFailed, Testbed
from fleet.drills.watch import FaultWatch, describe_process
from fleet.hosts.run import AS_TRAINER
from fleet.site.topology import Task


def five_times(testbed: Testbed, drill: Drill, once: Scenario) -> Findings:
    """Let a scenario come five times over, each after the run has trained again; the memory of the ps must not grow."""
    testbed.train(drill.program, drill.settings)
    before = _memory(testbed)
    found = Findings()
    for _ in range(5):
        each = once(testbed, drill)
        found.detected = max(filter(None, (found.detected, each.detected)), default=None)
        found.paused = max(filter(None, (found.paused, each.paused)), default=None)
        found.lost = max(found.lost or 0, each.lost or 0)
        found.restarted = sorted({*found.restarted, *each.restarted})
        found.problems += each.problems
        if each.problems:
            break
        testbed.wait(testbed.trains_beyond_a_checkpoint, 60.0, "a new checkpoint")
    found.proof = "the coordinator's process was gone five times"
    after = _memory(testbed)
    grown = {name: after[name] - before[name] for name in before if name in after}
    worst = max(grown.values(), default=0)
    found.notes.append(f"the memory of a ps grew by {worst} MiB at most")
    found.expect(worst <= MAX_MEMORY_MIB, f"the memory of a ps grew by {worst} MiB: {grown}")
    return found


MAX_MEMORY_MIB = 250  # of a model that takes 122 MiB on each of two ps


def _memory(testbed: Testbed) -> dict[str, int]:
    """Each ps's resident memory in MiB."""
    found = {}
    for task in testbed.tasks("ps"):
        process = testbed.processes([task.host])[task.name]
        text = testbed.on(task.host, f"grep VmRSS /proc/{process.pid}/status || true")
        if text.strip():
            found[task.name] = int(text.split()[1]) // 1024
    return found


def fails(testbed: Testbed, drill: Drill, message: str) -> Findings:
    """The run ends with the user's own error: a permanent exit code, no restart, the user's line in the message."""
    testbed.forget_run()
    testbed.train(drill.program, drill.settings, wait=False)
    begun = testbed.console.clock()
    testbed.cluster.start(testbed.inventory.tasks)
    return _ends_with_an_error(testbed, begun, message, drill)


def _ends_with_an_error(testbed: Testbed, begun: float, message: str, drill: Drill) -> Findings:
    found = Findings()

    def failed() -> bool:
        return testbed.sample().coordinator.active == "failed"

    testbed.wait(failed, drill.paused + PATIENCE, f"{testbed.chief.name} fails")
    found.detected = testbed.console.clock() - begun
    first = testbed.sample().coordinator
    found.proof = f"{testbed.chief.name} failed"
    testbed.console.sleep(5.0)
    last = testbed.sample()
    found.expect(first.exit_status == 78, f"it exited with {first.exit_status}, not with 78")
    found.expect(first.start == last.coordinator.start, "it was started again")
    text = str(last.status.get("message", ""))
    found.expect(last.status.get("state") == "failed", f"the run's state is {last.status.get('state')}, not failed")
    found.expect(message in text, f"its message doesn't say {message!r}: {text!r}")
    found.notes.append(text[:100])
    testbed.forget_run()
    return found


def all_checkpoints_bad(testbed: Testbed, drill: Drill) -> Findings:
    """No checkpoint can be read: one clear, permanent error, rather than a new training in the old one's place."""
    testbed.train(drill.program, drill.settings)
    begun = testbed.console.clock()
    proof = drill.fault.inject(testbed)
    found = _ends_with_an_error(testbed, begun, "checkpoint", drill)
    found.proof = proof
    aside = testbed.on(testbed.chief.host, f"{AS_TRAINER} ls {shlex.quote(testbed.checkpoint_dir)}").split()
    found.expect([name for name in aside if name.endswith(".bad")], "nothing was set aside by name")
    return found


def never_starts(testbed: Testbed, drill: Drill, job: str) -> Findings:
    """A member is missing when the run starts: it is named, with host and port, and waited for."""
    testbed.forget_run()
    testbed.train(drill.program, drill.settings, wait=False)
    missing = testbed.victim(job)
    testbed.cluster.stop([missing])
    return _is_waited_for(testbed, drill, missing, f"{missing.address}:{missing.port}", [missing], lambda: None)


def wrong_port(testbed: Testbed, drill: Drill) -> Findings:
    """The coordinator gets a wrong port for a worker: it names the address that doesn't answer."""
    testbed.forget_run()
    testbed.train(drill.program, drill.settings, wait=False)
    missing, chief = testbed.victim("worker"), testbed.chief
    right, wrong = f"{missing.address}:{missing.port}", f"{missing.address}:{(missing.port or 0) + 7}"
    file = f"/etc/trainer/{chief.name}.env"
    text = testbed.on(chief.host, f"cat {file}")
    if right not in text:
        raise DrillFailed(f"{file} on {chief.host} has no {right}")

    def write(content: str) -> None:
        testbed.on(chief.host, f"printf '%s\\n' {shlex.quote(content.rstrip())} | root tee {file} >/dev/null")

    def fix() -> None:
        write(text)
        testbed.cluster.stop([chief])

    write(text.replace(right, wrong))
    return _is_waited_for(testbed, drill, missing, wrong, [chief], fix)


def _is_waited_for(
    testbed: Testbed, drill: Drill, missing: Task, address: str, later: list[Task], fix: Callable[[], None]
) -> Findings:
    """Start all but `missing`, see it named and waited for, fix, start `later`, and see the run train."""
    found = Findings()
    named = f"{missing.name} ({address})"
    try:
        testbed.cluster.start([task for task in testbed.inventory.tasks if task != missing or missing not in later])
        begun = testbed.console.clock()

        def is_named() -> bool:
            sample = testbed.sample()
            return sample.coordinator.runs and named in sample.status_text

        testbed.wait(is_named, drill.paused + PATIENCE, f"{named} is named")
        found.detected = testbed.console.clock() - begun
        sample = testbed.sample()
        found.expect(named in str(sample.status.get("message")), f"status.json doesn't name {named}")
        testbed.console.sleep(10.0)
        still = testbed.sample()
        found.proof = f"systemd's status line names {named}"
        found.expect(still.state == "waiting", f"it doesn't wait: {still.status_text}")
        found.expect(still.coordinator.start == sample.coordinator.start, "the coordinator was restarted")
    finally:
        fix()
        testbed.cluster.start(later)
    begun = testbed.console.clock()
    testbed.wait(
        lambda: testbed.sample().state == "training" and (testbed.sample().step or 0) > 0, 120.0, "it trains at last"
    )
    found.paused = testbed.console.clock() - begun
    return found


def second_coordinator(testbed: Testbed, drill: Drill) -> Findings:
    """Another coordinator on the same run, from another host: it is refused, and the first doesn't notice."""
    testbed.train(drill.program, drill.settings)
    found = Findings()
    chief, other = testbed.chief, testbed.victim("worker").host
    environment = testbed.on(chief.host, f"cat /etc/trainer/{chief.name}.env")
    watch = FaultWatch(testbed)
    watch.begin()
    # With a parent of its own it is the coordinator itself and no supervisor, which would start the next one.
    task = "exec timeout 60 env/bin/python -m trainer --parent $$"
    inner = f'set -a; eval "$1"; cd /opt/trainer/current && {task}'
    script = f'{AS_TRAINER} sh -c {shlex.quote(inner)} sh {shlex.quote(environment)} 2>&1; echo "exit code $?"'
    with ThreadPoolExecutor(1) as pool:  # whether the first one trains is watched meanwhile
        asked = pool.submit(testbed.everywhere, script, [other], 90.0)
        watch.away = [other]
        watch.until(asked.done, 120.0)
        watch.away = []
        lines = asked.result()[other].strip().splitlines()
    refused_at = testbed.console.clock()
    found.proof = f"a second coordinator ran on {other}: {lines[-1]}"
    refused = [line for line in lines if chief.host in line or "holds" in line or "lease" in line]
    found.expect(lines[-1] == "exit code 75", f"it was not refused with 75: {lines[-3:]}")
    found.expect(refused, f"nothing says who holds the run: {lines[-3:]}")
    found.notes += [refused[-1][-100:]] if refused else []
    watch.until(lambda: watch.has_trained_since(refused_at), 30.0)
    describe_recovery(found, watch, testbed, drill, [], None)
    found.detected = refused_at - watch.begun
    return found


def undisturbed(testbed: Testbed, drill: Drill) -> Findings:
    """What happens to the evaluator concerns the training not at all; and it evaluates again afterwards."""
    found = recovers(testbed, drill)
    step, begun = testbed.sample().step or 0, testbed.console.clock()
    testbed.wait(lambda: _evaluation(testbed) >= step, 120.0, "a checkpoint of after the fault is evaluated")
    found.notes.append(f"evaluated again after {testbed.console.clock() - begun:.0f} s")
    return found


def _evaluation_text(testbed: Testbed) -> str:
    return testbed.on(
        testbed.chief.host, f"{AS_TRAINER} cat {shlex.quote(testbed.run_dir)}/evaluation.json 2>/dev/null || true"
    )


def _evaluation(testbed: Testbed) -> int:
    text = _evaluation_text(testbed)
    match = re.search(r'"step": (\d+)', text)
    return int(match[1]) if match else -1


def saves_again(testbed: Testbed, drill: Drill) -> Findings:
    """While nothing can be saved, training goes on and complains; afterwards a checkpoint is saved again."""
    began = int(testbed.on(testbed.chief.host, "date +%s"))
    found = recovers(testbed, drill)
    newest = max(testbed.sample().checkpoints, default=0)

    def saved() -> bool:
        return max(testbed.sample().checkpoints, default=0) > newest

    testbed.wait(saved, 60.0, "a checkpoint is saved after the fault")
    complaints = testbed.on(testbed.chief.host, _complaints(testbed.chief, began))
    found.expect(complaints.strip(), "nothing was complained about in the log")
    found.notes.append((complaints.strip().splitlines() or [""])[-1][:120])
    return found


def _complaints(task: Task, since: int) -> str:
    return (
        f"root journalctl --quiet --no-pager --output=cat --unit={task.unit} --since=@{since} "
        "| grep -E 'cannot save|could not be saved|save failed|failed to save|not saved' || true"
    )


GOOD_ACCURACY = 0.95  # of a run without a fault


def finishes(testbed: Testbed, drill: Drill) -> Findings:
    """A run with a fault in it goes to its end, is as good as one without, and everything ends with it."""
    testbed.forget_run()
    testbed.train(drill.program, drill.settings)
    begun = testbed.console.clock()
    found = Findings(proof=drill.fault.inject(testbed))
    ends = {task.name for task in testbed.inventory.tasks}

    def ended() -> bool:
        return all(process.active == "inactive" for process in testbed.processes().values())

    try:
        testbed.wait(lambda: testbed.sample().status.get("state") == "finished", drill.paused + PATIENCE, "it finishes")
        found.notes.append(f"finished after {testbed.console.clock() - begun:.0f} s")
        testbed.wait(ended, 60.0, "every task ends")
    except DrillFailed as error:
        found.problems.append(str(error))
    for name, process in testbed.processes().items():
        good = (process.active, process.result) == ("inactive", "success")
        found.expect(good or name not in ends, f"{name} is {describe_process(process)}, and should have finished")
    text = _evaluation_text(testbed)
    value = re.search(r'"accuracy": ([0-9.]+)', text)
    found.notes.append(f"accuracy {float(value[1]):.4f}" if value else "no accuracy")
    found.expect(value and float(value[1]) >= GOOD_ACCURACY, f"accuracy is not at least {GOOD_ACCURACY}: {text[:100]}")
    testbed.forget_run()
    return found
