"""A coordinator goes on with the variables that the one before left on the ps, whose processes stay."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import MINUTE, PROGRAMS, ROOT, Process, Runs, until

from trainer.cluster.probe import answers
from trainer.tasks.local import free_addresses, local_cluster

pytestmark = pytest.mark.timeout(600)
CHECK = Path(__file__).with_name("handover_check.py")


class Servers:
    """Two workers and two ps, and the coordinators that come to them, one after the other."""

    def __init__(self, runs: Runs, pause: Path) -> None:
        self._runs = runs
        self._coordinators: list[Process] = []
        self.pause = pause
        self.run = ""
        self.cluster = local_cluster(2, 2)
        self.processes = {}
        for job in ("worker", "ps"):
            for index in range(2):
                self.processes[f"{job}-{index}"] = self.start(job, index)
        for job in ("worker", "ps"):
            for address in self.cluster[job]:
                until(lambda address=address: answers(address), f"an answer of {address}")

    def start(self, job: str, index: int) -> Process:
        config = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
        if job == "worker":
            return self._runs.task(TF_CONFIG=config)
        # Else what they have in memory grows as malloc gives each thread a part of its own.
        return self._runs.start(["-m", "trainer"], TF_CONFIG=config, MALLOC_ARENA_MAX="2")

    def coordinator(self, *options: str, pause: Path | None = None, **jobs: list[str]) -> Coordinator:
        # A port of its own, since the one before may be frozen and not dead.
        cluster = {**self.cluster, "chief": free_addresses(1), **jobs}
        config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        path = f"{ROOT}:{PROGRAMS}"
        arguments = [str(CHECK), str(pause or self.pause), "--run", self.run, *options]
        self._coordinators.append(self._runs.script(*arguments, TF_CONFIG=config, PYTHONPATH=path))
        return Coordinator(self._coordinators[-1])

    def memory(self) -> float:
        """Return what both ps have in memory, in MiB."""
        pids = [pid for index in range(2) for pid in self.processes[f"ps-{index}"].children]
        pages = [int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) for pid in pids]
        return sum(pages) * 4096 / 2**20

    def end_coordinators(self) -> None:
        for process in self._coordinators:
            process.end()

    def end(self) -> None:
        for process in self.processes.values():
            process.end()


class Coordinator:
    def __init__(self, process: Process) -> None:
        self.process = process

    def answers_with(self, key: str) -> list[dict[str, Any]]:
        # TensorFlow may have written behind it on the same line.
        lines = [line for line in self.process.output.splitlines() if line.startswith("{") and "}" in line]
        return [answer for answer, _ in map(json.JSONDecoder().raw_decode, lines) if key in answer]

    def wait_for(self, key: str, after: int = 0) -> dict[str, Any]:
        """Wait until it has said this more than `after` times, and return what it said last."""
        return until(
            lambda: len(found := self.answers_with(key)) > after and found[-1],
            key,
            2 * MINUTE,
            lambda: self.process.output,
        )

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        self.process.wait(MINUTE)


@pytest.fixture(scope="module")
def started(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(runs, tmp_path_factory.mktemp("handover") / "pause")
    yield servers
    servers.end()


@pytest.fixture
def servers(started: Servers, request: pytest.FixtureRequest) -> Iterator[Servers]:
    """The same servers for all tests, each with a run of its own."""
    started.run = request.node.name
    started.pause.unlink(missing_ok=True)
    yield started
    started.end_coordinators()


def trained(coordinator: Coordinator, steps: int) -> int:
    return until(
        lambda: (rows := coordinator.answers_with("trained")) and rows[-1]["trained"] >= steps and rows[-1]["trained"],
        f"step {steps}",
        2 * MINUTE,
        lambda: coordinator.process.output,
    )


def paused(servers: Servers, coordinator: Coordinator) -> dict[str, Any]:
    """Let the coordinator make no more calls, and return the state that it is in."""
    # It may have said so before, when the file was still there from the coordinator before.
    count = len(coordinator.answers_with("paused"))
    servers.pause.touch()
    return coordinator.wait_for("paused", after=count)["paused"]


@pytest.mark.parametrize(("optimizer", "times"), [("adam", 1), pytest.param("legacy", 2, marks=pytest.mark.matrix)])
def test_each_coordinator_goes_on_where_the_killed_one_was(servers: Servers, optimizer: str, times: int) -> None:
    first = servers.coordinator("--optimizer", optimizer, "--rate", "0.125")
    assert first.wait_for("taken")["taken"] is False
    trained(first, 20)
    left = paused(servers, first)
    first.kill()
    for _ in range(times):
        then = servers.coordinator("--optimizer", optimizer)
        begun = then.wait_for("taken")
        assert {**begun, "taken": True, **left} == begun
        then.wait_for("paused")
        servers.pause.unlink()
        trained(then, left["step"] + 20)
        left = paused(servers, then)
        then.kill()
    servers.pause.unlink()
    # In the middle of its calls.
    then = servers.coordinator("--optimizer", optimizer)
    reached = trained(then, left["step"] + 30)
    then.kill()
    last = servers.coordinator("--optimizer", optimizer).wait_for("taken")
    assert last["taken"]
    assert reached <= last["step"] <= reached + 20
    assert all(process.code is None for process in servers.processes.values())


@pytest.mark.matrix
def test_nothing_changes_when_the_coordinator_before_thaws(servers: Servers) -> None:
    first = servers.coordinator(pause=servers.pause.with_name("never"))
    trained(first, 20)
    first.process.send(signal.SIGSTOP)
    reached = first.answers_with("trained")[-1]["trained"]
    then = servers.coordinator()
    begun = then.wait_for("taken")
    assert begun["taken"]
    assert begun["step"] >= reached
    trained(then, begun["step"] + 20)
    state = paused(servers, then)
    count = len(then.answers_with("paused"))
    first.process.send(signal.SIGCONT)
    assert first.wait_for("error")["infrastructure"], first.process.output
    until(lambda: len(then.answers_with("paused")) > count + 3, "more looks")
    assert then.answers_with("paused")[-1]["paused"] == state


def test_what_does_not_match_is_not_taken(servers: Servers) -> None:
    first = servers.coordinator()
    trained(first, 10)
    first.kill()
    then = servers.coordinator("--survey")
    assert then.wait_for("survey")["survey"] == {
        "other shapes": False,
        "another partition": False,
        "another optimizer": False,
        "a table that training changes": False,
        "an older step than the newest checkpoint's": False,
        "the same": True,
        "another run": False,
    }


def test_the_next_strategy_of_the_same_process_takes_what_was_set_aside(servers: Servers) -> None:
    first = servers.coordinator("--set-aside")
    before, after = first.wait_for("before")["before"], first.wait_for("after")
    assert after == {**after, "taken": True, "after": before}
    reached = trained(first, before["step"] + 20)
    first.kill()
    then = servers.coordinator().wait_for("taken")
    assert then["taken"]
    assert then["step"] >= reached


@pytest.mark.matrix
def test_dead_coordinators_leave_no_memory_on_the_ps(servers: Servers) -> None:
    """One that dies before it leaves anything, and four that train."""
    large = ["--rows", "200000"]  # 37 MiB with its slots
    memory = []
    for number in range(5):
        trains = number != 2
        then = servers.coordinator(*large, *([] if trains else ["--no-offer"]))
        taken = then.wait_for("taken")
        assert taken["taken"] is (number > 0)
        if trains:
            trained(then, taken["step"] + 20)
            memory.append(servers.memory())
            then.kill()
    assert max(memory[2:]) - memory[1] < 30, memory


def test_a_position_in_the_data_is_written_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.run.data_position import Position
    from trainer.training import handover

    written: list[Any] = []
    clock = iter((10.0, 10.2, 10.9, 11.1, 13.0, 13.5))
    left = object.__new__(handover.Handover)
    vars(left).update(
        _records=SimpleNamespace(context=1),
        _own={},
        _offers=[{"local": {}, "input": None, "place": [0, 1]}],
        _refreshed_at=0.0,
    )
    left._write = lambda server, contexts, offer: written.append(offer["input"])  # type: ignore[method-assign]
    monkeypatch.setattr(handover, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for taken in range(1, 7):
        left.refresh(Position(1, ((0, taken),)))
        assert left.position == Position(1, ((0, taken),))
    assert [record["parts"] for record in written] == [[[0, 1]], [[0, 4]], [[0, 5]]]


RUN = {"format": 1, "run": "r", "program": "a:B"}


def offered(server: int, batch: str = "x", ps: int = 3, **more: Any) -> dict[str, Any]:
    first = {} if server else {"local": {}, "input": None}
    return {**RUN, "offer": {"batch": batch, "place": [server, ps], **first}, **more}


@pytest.mark.parametrize(
    ("records", "lacking"),
    [
        ([offered(0), {}, offered(2)], {1}),
        ([offered(0), {**RUN, "offer": {}}, {}], {1, 2}),
        ([offered(0), offered(1), offered(2)], set()),
        ([{}, {}, {}], set()),
        ([{}, offered(1), offered(2)], set()),  # what the first alone has is gone
        ([offered(0), {}, offered(2, "y")], set()),
        ([offered(0), {}, offered(2, program="a:C")], set()),
        ([offered(0, ps=2), {}, offered(2, ps=2)], set()),
    ],
)
def test_ps_that_are_other_processes_are_told_from_another_runs(records: Any, lacking: set[int]) -> None:
    from trainer.training.handover_records import HandoverRecords

    known = object.__new__(HandoverRecords)
    vars(known).update(_run=RUN)
    assert known.lacking(records) == lacking
