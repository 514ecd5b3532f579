"""What the coordinator makes of its members' records, and what it leaves for the next process."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster.deadlines import Phases
from trainer.cluster.member import Event, Member, MemberState
from trainer.cluster.members import draining, member_troubles
from trainer.cluster.members import membership as module
from trainer.cluster.members.heartbeat import Heartbeat
from trainer.cluster.members.membership import Membership
from trainer.cluster.reach import missing_ways
from trainer.cluster.reach.way_reader import Verdict, WayReader
from trainer.cluster.spec import VACANT, ClusterConfig
from trainer.core.settings.config import Config
from trainer.core.states import Phase
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress

# Nothing listens there, and nothing asks.
CLUSTER = ClusterConfig({"chief": ["h:1"], "worker": ["a:1", "b:1"], "ps": ["c:1"]}, "chief", 0)
HERE = {"worker-0": "w0", "worker-1": "w1", "ps-0": "p0"}


class Watched:
    """A membership that a test tells what is heard, and that does not end this process."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, phases: Phases) -> None:
        monkeypatch.setattr(Heartbeat, "start", lambda self: None)
        monkeypatch.setattr(WayReader, "start", lambda self: None)
        self.directory = RunDirectory(path, "mine")
        self.config = Config(program="p:P", run="mine", shared_dir=str(path))
        self.reports: list[tuple[Any, ...]] = []
        self.shut: list[str] = []
        self._monkeypatch = monkeypatch
        self._phases = phases
        monkeypatch.setattr(member_troubles, "shut", self.shut.append)
        self.begin()

    def begin(self) -> None:
        """Begin a coordinator's process."""
        self.progress = Progress(self.config, self.directory, Notifier())
        self.membership = Membership(self.config, CLUSTER, self.directory, self.progress, self._phases)
        self._monkeypatch.setattr(
            self.membership, "_give_up", lambda event, message, tasks: self.reports.append(("end", event, *tasks))
        )
        self._monkeypatch.setattr(
            self.membership._news, "_report", lambda event, task, message: self.reports.append((event, task))
        )

    def hear(self, change: Callable[[Member], Member], *tasks: str) -> None:
        self.membership.heartbeat.change(change, *tasks)

    def answers(self, **processes: str) -> None:
        now = time.monotonic()
        for name, process in processes.items():
            self.hear(lambda member, process=process: member.answered(now, now + 1e6, process), name.replace("_", "-"))

    def refuses(self, task: str) -> None:
        now = time.monotonic()
        self.hear(lambda member: member.refused(now, now + 1e6), task)

    def is_silent(self, task: str, seconds: float, since: float = 0.0) -> None:
        self.hear(lambda member: member.unanswered(time.monotonic() - since, seconds, 5.0), task)

    def forms(self, **processes: str) -> None:
        self.answers(**{task.replace("-", "_"): process for task, process in HERE.items()} | processes)
        handler = signal.getsignal(signal.SIGTERM)
        self.membership.form()
        signal.signal(signal.SIGTERM, handler)

    def looks(self) -> list[tuple[Any, ...]]:
        self.reports.clear()
        self.membership.poll()
        return list(self.reports)

    @property
    def asked(self) -> dict[str, str]:
        self.progress.close(5)
        return (read_record(self.directory.state) or {}).get("restart", {})


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(tmp_path, monkeypatch, Phases({}))
    found.forms()
    yield found
    found.membership.leave()


def trains(watched: Watched, **busy: float) -> Any:
    calls = {task.replace("_", "-"): since for task, since in busy.items()}
    watched.membership.handler = SimpleNamespace(busy=calls, updating_since=None)
    return watched.membership.handler


def test_nobody_waits_for_a_place_that_no_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    """As remove-host leaves one: the tasks behind it keep their numbers."""
    vacant = dataclasses.replace(CLUSTER, jobs={**CLUSTER.jobs, "worker": ["a:1", VACANT, "b:1"]})
    config = dataclasses.replace(watched.config, ps_grace_seconds=1, member_wait_timeout_seconds=1)
    membership = Membership(config, vacant, watched.directory, watched.progress, Phases({}))
    now = time.monotonic()
    for task, process in {"worker-0": "w0", "worker-2": "w2", "ps-0": "p0"}.items():
        membership.heartbeat.change(lambda member, process=process: member.answered(now, now + 1e6, process), task)
    handler = signal.getsignal(signal.SIGTERM)
    formed = membership.form()
    signal.signal(signal.SIGTERM, handler)
    assert formed.jobs == {"chief": ["h:1"], "worker": ["a:1", "b:1"], "ps": ["c:1"]}
    membership.poll()
    assert "worker-1" not in watched.progress.status.without
    assert membership.seen().keys() == {"worker-0", "worker-2", "ps-0"}
    membership.leave()


def test_nothing_is_said_of_members_that_answer(watched: Watched) -> None:
    assert watched.looks() == []
    assert watched.membership.workers == ["worker-0", "worker-1"]
    assert watched.membership.workers_serving() == {"worker-0", "worker-1"}
    assert watched.membership.lost_ps() == []
    assert not watched.membership.hurt


def test_a_member_whose_memory_ran_out_is_named_by_the_first_coordinator_that_hears_it(watched: Watched) -> None:
    lacked = watched.membership._ways._lacked
    lacked("worker-1", "w1", "out of memory")
    lacked("ps-0", "p0", "out of memory")
    assert watched.reports == [("out-of-memory", "worker-1"), ("out-of-memory", "ps-0")]
    watched.membership.leave()
    watched.progress.close(5)
    watched.begin()
    lacked = watched.membership._ways._lacked
    watched.reports.clear()
    lacked("worker-1", "w1", "out of memory")
    lacked("ps-0", "the next one", "out of memory")
    assert watched.reports == [("out-of-memory", "ps-0")]


def test_a_worker_that_is_replaced_is_told_twice_and_then_used(watched: Watched) -> None:
    watched.refuses("worker-1")
    assert watched.looks() == [("member-lost", "worker-1")]
    assert watched.looks() == []
    assert watched.membership.hurt
    assert watched.membership.workers_serving() == {"worker-0"}
    watched.answers(worker_1="new")
    assert watched.looks() == [("member-back", "worker-1")]
    assert watched.looks() == []
    watched.membership.workers_taken_in({"worker-1"})
    watched.refuses("worker-1")
    assert watched.looks() == [("member-lost", "worker-1")]


def test_a_worker_that_was_replaced_twice_is_not_told_again_when_the_cluster_is_formed(watched: Watched) -> None:
    for process in ("second", "third"):
        watched.refuses("worker-1")
        watched.looks()
        watched.answers(worker_1=process)
        watched.looks()
        watched.membership.workers_taken_in({"worker-1"})
    watched.reports.clear()
    watched.forms(worker_1="third")
    assert watched.reports == []


@pytest.fixture
def leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Name a task as one that leaves in order."""
    place = tmp_path / "leaving"
    place.mkdir()
    monkeypatch.setattr(draining, "LEAVING", place)
    return lambda task: (place / task).touch()


def test_one_that_leaves_in_order_is_no_fault(watched: Watched, leaves: Callable[[str], None]) -> None:
    leaves("worker-1")
    assert draining.is_leaving("worker-1")
    assert not draining.is_leaving("worker-0")
    assert watched.membership.drained_workers() == []  # whose data others would read
    watched.refuses("worker-1")
    assert watched.looks() == [("member-left", "worker-1")]
    assert watched.progress.status.without == {"worker-1": "closed"}
    watched.answers(worker_1="new")
    assert watched.looks() == [("member-back", "worker-1")]
    assert watched.progress.status.without == {"worker-1": "serving"}
    watched.membership.workers_taken_in({"worker-1"})
    assert watched.looks() == []
    assert watched.progress.status.without == {}


def test_drained_workers_are_those_of_the_generation_and_never_all(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "DRAINED", tmp_path)
    for task in ("worker-1", "ps-0", "worker-7"):
        (tmp_path / task).touch()
    assert watched.membership.drained_workers() == ["worker-1"]
    (tmp_path / "worker-0").touch()
    assert watched.membership.drained_workers() == []


def test_nobody_leaves_where_the_names_can_t_be_read(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "LEAVING", tmp_path / "file")
    (tmp_path / "file").touch()
    assert watched.membership.leaving_ps() == []
    assert not draining.is_leaving("worker-1")


def test_a_ps_that_leaves_is_not_taken_in_again_while_it_still_answers(
    watched: Watched, leaves: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watched.membership.leaving_ps() == []
    leaves("ps-0")
    leaves("worker-0")
    leaves("ps-7")  # of no such cluster
    assert watched.membership.leaving_ps() == ["ps-0"]
    watched.hear(lambda member: member.released(0.0), "ps-0")
    monkeypatch.setattr(Member, "is_steady", lambda self, now: True)
    assert watched.membership.returned() == []
    (draining.LEAVING / "ps-0").unlink()
    assert watched.membership.returned() == ["ps-0"]


def test_a_silent_worker_is_left_out_while_the_others_train(watched: Watched) -> None:
    trains(watched)
    watched.is_silent("worker-1", 6.0)
    assert watched.looks() == [("member-silent", "worker-1")]
    assert watched.looks() == []
    assert watched.membership._silent_addresses() == ["b:1"]
    assert watched.asked == {"worker-1": "w1"}
    watched.answers(worker_1="w1")
    assert watched.looks() == []
    assert watched.membership.workers_serving() == {"worker-0"}
    watched.answers(worker_1="new")
    assert watched.looks() == [("member-back", "worker-1")]
    assert watched.asked == {}
    assert watched.membership._silent_addresses() == []


def test_a_silent_worker_that_tensorflow_does_not_let_go_of_ends_the_process(watched: Watched) -> None:
    trains(watched, worker_1=time.monotonic())
    watched.is_silent("worker-1", 6.0)
    assert watched.looks() == [("member-silent", "worker-1")]
    trains(watched, worker_1=time.monotonic() - 100.0)
    watched.hear(lambda member: member.answered(1.0, 1.0, "w1"), "worker-1")
    watched.answers(worker_1="again")
    watched.membership.workers_taken_in({"worker-1"})
    watched.is_silent("worker-1", 6.0, since=member_troubles.DROP_SECONDS + 1.0)
    assert ("end", "recovering", "worker-1") in watched.looks()


def test_a_worker_that_is_silent_before_the_training_ends_the_process(watched: Watched) -> None:
    watched.is_silent("worker-1", 6.0)
    assert watched.looks()[0] == ("end", "member-silent", "worker-1")


def test_a_silent_ps_ends_the_process(watched: Watched) -> None:
    trains(watched)
    watched.is_silent("ps-0", 6.0)
    assert watched.looks()[0] == ("end", "member-silent", "ps-0")


def test_taking_in_a_worker_has_its_time(watched: Watched) -> None:
    trains(watched).updating_since = time.monotonic() - 1.0
    assert watched.looks() == []
    trains(watched).updating_since = time.monotonic() - module.TAKE_SECONDS - 1.0
    assert watched.looks() == [("end", "recovering")]


@pytest.mark.parametrize(("quiet", "shut"), [(3.0, []), (4.5, ["b:1"])])
def test_the_connections_to_a_host_that_was_reset_are_shut(watched: Watched, quiet: float, shut: list[str]) -> None:
    """It has reported to none that they are gone."""
    trains(watched)
    watched.is_silent("worker-1", quiet)
    watched.answers(worker_1="new")
    watched.looks()
    watched.looks()
    assert watched.shut == shut


def test_a_ps_that_is_lost_once_more_has_its_time_as_well(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.refuses("ps-0")
    assert watched.looks() == [("ps-lost", "ps-0")]
    watched.membership.generation_over("ps-0 has ended")
    watched.forms(ps_0="second")
    later = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    watched.refuses("ps-0")
    assert watched.looks() == [("ps-lost", "ps-0")]
    assert watched.looks() == []


def test_a_lost_ps_ends_the_process_when_tensorflow_does_not_say_so(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.answers(ps_0="another process")
    assert watched.looks() == [("ps-lost", "ps-0")]
    assert watched.membership.lost_ps() == ["ps-0"]
    assert watched.looks() == []
    monkeypatch.setattr(member_troubles, "REPORT_SECONDS", -1.0)
    assert watched.looks() == [("end", "recovering", "ps-0")]
    watched.membership.generation_over("ps-0 has ended")
    assert watched.looks() == []
    assert watched.membership.lost_ps() == []


def test_a_phase_beyond_its_deadline_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases({"training": 0.0001})
    late = Watched(tmp_path, monkeypatch, phases)
    assert late.looks() == []
    phases.enter(Phase.TRAINING)
    while not phases.overdue():
        pass
    assert late.looks() == [("end", "phase-overdue")]
    late.membership.leave()


def test_a_member_that_was_left_out_comes_back_as_another_process(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.cluster.member.STEADY_SECONDS", 0.0)
    watched.refuses("worker-1")
    watched.hear(lambda member: member.looked_at(member.since + 60.0), "worker-1")
    watched.membership.generation_over("ps-0 has ended")
    watched.answers(worker_0="w0", ps_0="new")
    handler = signal.getsignal(signal.SIGTERM)
    assert watched.membership.form().jobs["worker"] == ["a:1"]
    signal.signal(signal.SIGTERM, handler)
    watched.looks()
    assert watched.asked == {"worker-1": "w1"}
    watched.answers(worker_1="w1")
    assert watched.membership.returned() == []
    watched.answers(worker_1="new")
    assert watched.membership.returned() == ["worker-1"]


def test_the_next_process_has_no_member_start_again_and_waits_for_no_worker(watched: Watched) -> None:
    watched.membership.leave()
    assert watched.asked == {}
    watched.begin()
    watched.answers(worker_0="w0", ps_0="p0")
    watched.refuses("worker-1")
    watched.hear(lambda member: member.looked_at(member.since + 60.0), "worker-1")
    handler = signal.getsignal(signal.SIGTERM)
    assert watched.membership.form().jobs["worker"] == ["a:1"]
    signal.signal(signal.SIGTERM, handler)


def test_members_that_are_unusable_are_asked_to_start_again(watched: Watched) -> None:
    watched.membership.leave(unusable=True)
    assert watched.asked == HERE


def test_one_on_another_release_is_told_once_a_process(watched: Watched) -> None:
    trains(watched)

    def runs_old(process: str) -> None:
        now = time.monotonic()
        watched.hear(lambda member: member.held_back(Event.OTHER_RELEASE, now, now, process, "runs old"), "worker-1")

    runs_old("w2")
    assert watched.looks() == [("member-other-release", "worker-1"), ("member-lost", "worker-1")]
    runs_old("w2")
    assert watched.looks() == []
    assert watched.membership.workers_serving() == {"worker-0"}
    runs_old("w3")
    assert watched.looks() == [("member-other-release", "worker-1")]
    watched.answers(worker_1="w4")
    assert watched.looks() == [("member-back", "worker-1")]


FAILED = "UNAVAILABLE: from remote target /job:ps/replica:0/task:0 while calling /tensorflow.WorkerService/RecvTensor"
WAY = "worker-1 can't reach ps-0 at c:1 (no answer in 4 s); its packets leave from 10.0.3.31"


def handled(watched: Watched, **busy: float) -> None:
    """Have a generation with TensorFlow's handler, whose workers have had calls since then."""
    watched.forms()
    calls = {task.replace("_", "-"): since for task, since in busy.items()}
    watched.membership.handler = SimpleNamespace(busy=calls, updating_since=None)


def state(watched: Watched, task: str) -> MemberState:
    return watched.membership.heartbeat.members()[task].state


def test_a_failed_call_is_put_down_to_the_way_when_the_ps_lives(watched: Watched) -> None:
    handled(watched)
    watched.reports.clear()
    assert watched.membership.way_lost("worker-1", FAILED) == "worker-1 can't reach ps-0 at c:1 (its call failed)"
    assert watched.reports == [("member-half-connected", "worker-1")]
    assert (state(watched, "worker-1"), state(watched, "worker-0")) == (MemberState.HALF, MemberState.TRAINING)
    assert watched.membership.lost_ps() == []
    assert watched.membership.heartbeat.members()["worker-1"].must_restart == "w1"


def test_a_failed_call_is_the_ps_s_when_that_has_ended(watched: Watched) -> None:
    handled(watched)
    watched.refuses("ps-0")
    assert watched.membership.way_lost("worker-1", FAILED) == ""
    assert state(watched, "worker-1") is MemberState.TRAINING


@pytest.mark.parametrize("forms_again", [False, True])
def test_a_failed_call_of_a_generation_that_is_over_says_nothing_of_a_way(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, forms_again: bool
) -> None:
    handled(watched)

    def hurry(since: float = 0.0) -> None:
        """The ps is lost and back while it is asked for."""
        watched.membership.release()
        watched.answers(ps_0="p1")
        if forms_again:
            watched.hear(lambda member: member.taken(time.monotonic()), *HERE)
            watched.membership._watching = True

    monkeypatch.setattr(watched.membership.heartbeat, "hurry", hurry)
    assert watched.membership.way_lost("worker-1", FAILED) == ""
    assert watched.membership.heartbeat.members()["worker-1"].must_restart is None


def test_a_failed_call_that_names_nobody_else_is_the_workers_own(watched: Watched) -> None:
    handled(watched)
    assert watched.membership.way_lost("worker-1", "Socket closed") == ""
    assert watched.membership.way_lost("worker-1", FAILED.replace("job:ps", "job:worker")) == ""
    assert state(watched, "worker-1") is MemberState.TRAINING


def test_one_that_lacks_a_way_is_told_once_more_with_its_address_and_once_when_it_is_back(watched: Watched) -> None:
    handled(watched)
    watched.membership.way_lost("worker-1", FAILED)
    now = time.monotonic()
    watched.hear(lambda m: m.held_back(Event.PARTED, now, now, "next", WAY), "worker-1")
    assert watched.looks() == [("member-half-connected", "worker-1")]
    watched.hear(lambda m: m.held_back(Event.PARTED, now, now, "next", WAY.replace("4 s", "5 s")), "worker-1")
    assert watched.looks() == []
    watched.answers(worker_1="next")
    assert watched.looks() == [("member-back", "worker-1")]
    assert watched.looks() == []


def test_a_worker_whose_call_waits_for_an_answer_that_was_lost_is_left_out(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    handled(watched, worker_0=now - 100, worker_1=now - 100)
    watched.membership._ways.verdict = Verdict(parted={"worker-1": WAY})
    watched.looks()
    assert state(watched, "worker-1") is MemberState.TRAINING  # a way may be lost for a moment
    monkeypatch.setattr(missing_ways, "STUCK_SECONDS", -1.0)
    watched.looks()
    assert (state(watched, "worker-1"), state(watched, "worker-0")) == (MemberState.HALF, MemberState.TRAINING)


def test_a_worker_whose_calls_end_is_not_left_out_for_a_way_that_takes_no_new_connection(watched: Watched) -> None:
    handled(watched)
    watched.membership._ways.verdict = Verdict(parted={"worker-1": WAY})
    watched.membership._missing_ways._parted_since = {"worker-1": time.monotonic() - 100}
    watched.looks()
    assert state(watched, "worker-1") is MemberState.TRAINING


def test_a_ps_is_lost_when_no_worker_trains_and_none_reaches_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled(watched)
    monkeypatch.setattr(missing_ways, "LOST_SECONDS", -1.0)
    watched.membership._ways.verdict = Verdict(lost={"ps-0": "no worker has a way to it"})
    watched.looks()
    assert watched.membership.unreachable_ps() == {}  # a worker trains
    for task in ("worker-0", "worker-1"):
        watched.membership.way_lost(task, FAILED)
    assert ("ps-lost", "ps-0") in watched.looks()
    assert watched.membership.unreachable_ps() == {"ps-0": "no worker has a way to it"}
    assert watched.membership.lost_ps() == ["ps-0"]


def add(watched: Watched, path: Path, **jobs: list[str]) -> None:
    """Have the coordinator's environment file name more members."""
    config = {"cluster": CLUSTER.jobs | jobs, "task": {"type": "chief", "index": 0}}
    path.write_text(f"TF_CONFIG='{json.dumps(config)}'\n")
    membership = watched.membership
    membership._growing.cluster = membership._cluster = dataclasses.replace(CLUSTER, source=path)
    membership._growing._looked_at = -1e9


def test_a_worker_that_is_added_joins_once_it_answers(watched: Watched, tmp_path: Path) -> None:
    add(watched, tmp_path / "chief-0.env", worker=["a:1", "b:1", "e:1"])
    assert watched.looks() == []
    membership = watched.membership
    assert membership.heartbeat.members()["worker-2"].state is MemberState.STARTING
    assert membership.newcomers() == {}
    watched.answers(worker_2="w2")
    assert membership.newcomers() == {"worker-2": "e:1"}
    membership.join("worker-2")
    assert membership.newcomers() == {}
    assert membership.returned() == []
    assert membership.workers == ["worker-0", "worker-1", "worker-2"]
    membership.workers_taken_in(["worker-2"])
    membership.joined("worker-2")
    assert watched.looks() == []
    assert membership.heartbeat.members()["worker-2"].state is MemberState.TRAINING


def test_a_ps_that_is_added_is_one_that_is_back(watched: Watched, tmp_path: Path) -> None:
    """A generation that begins before it answers does not wait for it."""
    add(watched, tmp_path / "chief-0.env", ps=["c:1", "f:1"])
    watched.looks()
    watched.hear(lambda member: member.looked_at(time.monotonic() + 10), "ps-1")
    watched.forms()
    assert watched.membership.servers == ["ps-0"]
    watched.answers(ps_1="p1")
    past = time.monotonic() - 10
    watched.hear(lambda member: dataclasses.replace(member, steady_since=past), "ps-1")
    assert watched.membership.returned() == ["ps-1"]
    assert watched.membership.newcomers() == {}


def test_a_worker_that_leaves_does_not_join(watched: Watched, tmp_path: Path, leaves: Callable[[str], None]) -> None:
    add(watched, tmp_path / "chief-0.env", worker=["a:1", "b:1", "e:1"])
    watched.looks()
    watched.answers(worker_2="w2")
    leaves("worker-2")
    assert watched.membership.newcomers() == {}
