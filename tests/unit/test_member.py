"""What becomes of a member's record, by what is heard of it; and that none is left idle or waited for by it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster import member as rules
from trainer.cluster.member import HERE, TRANSITIONS, Event, Member, MemberState, to_take_in
from trainer.cluster.members import heartbeat as heartbeat_module
from trainer.cluster.members.heartbeat import Heartbeat

DESIGN = Path(__file__).parents[2] / "docs/design.md"
TIMEOUT = 5.0
WORKER = Member("worker-0", "a:1")


def trained(**more: Any) -> Member:
    return WORKER.answered(1.0, 1.0, "one").taken(1.0).answered(100.0, 100.0, **{"incarnation": "one", **more})


def test_the_page_shows_every_transition() -> None:
    text = DESIGN.read_text().partition("| state | ")[2].partition("\n\n")[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    shown = {(MemberState(row[0]), Event(event)): row[1 + i] for row in rows for i, event in enumerate(header)}
    assert len(rows) == len(MemberState)
    assert shown == {
        (state, event): TRANSITIONS[state, event].value if (state, event) in TRANSITIONS else ""
        for state in MemberState
        for event in Event
    }


def test_a_worker_serves_when_it_answers_and_trains_when_it_is_taken_in() -> None:
    assert WORKER.state is MemberState.STARTING
    serving = WORKER.answered(1.0, 0.9, "one")
    assert (serving.state, serving.since, serving.incarnation, serving.why) == (
        MemberState.SERVING,
        1.0,
        "one",
        "answers",
    )
    assert serving.is_here(since=0.9)
    assert not serving.is_here(since=0.95)
    training = serving.taken(2.0)
    assert (training.state, training.taken_in, training.is_lost) == (MemberState.TRAINING, "one", False)
    assert training.released(3.0).state is MemberState.SERVING


def test_one_that_ended_is_expected_for_seconds_and_then_away() -> None:
    closed = trained().refused(101.0, 101.0)
    assert (closed.state, closed.is_lost, closed.is_expected) == (MemberState.CLOSED, True, True)
    away = closed.looked_at(101.0 + rules.AWAY_SECONDS)
    assert (away.state, away.is_expected, away.is_lost) == (MemberState.AWAY, False, True)
    back = away.answered(200.0, 200.0, "two")
    assert (back.state, back.is_lost) == (MemberState.SERVING, True)
    assert not back.taken(201.0).is_lost


def test_one_that_lacks_a_way_is_left_out_and_asked_to_start_again() -> None:
    half = trained().cut_off(200.0, "worker-0 can't reach ps-1")
    assert (half.state, half.why, half.must_restart) == (MemberState.HALF, "worker-0 can't reach ps-1", "one")
    assert not half.is_lost
    assert not half.is_here()
    assert half.answered(201.0, 201.0, "one").state is MemberState.STARTING
    kept_out = half.held_back(Event.PARTED, 202.0, 202.0, "two", "worker-0 can't reach ps-1")
    assert (kept_out.state, kept_out.must_restart, kept_out.is_lost) == (MemberState.HALF, None, True)
    assert kept_out.looked_at(900.0).state is MemberState.HALF
    assert kept_out.answered(901.0, 901.0, "two").state is MemberState.SERVING


def test_a_ps_that_nobody_can_use_is_lost() -> None:
    ps = Member("ps-0", "a:1").answered(1.0, 1.0, "one").taken(1.0).cut_off(2.0, "no worker has a way to it")
    assert (ps.state, ps.is_lost) == (MemberState.HALF, True)


def test_one_that_is_cut_off_again_and_again_is_given_up_for_a_while() -> None:
    member, now = trained(), 100.0
    for number in range(rules.SHORT_LIVES + 1):
        assert member.state is MemberState.TRAINING, number
        member = member.cut_off(now + 1.0, "a way")
        if member.state is MemberState.HALF:
            member = member.answered(now + 2.0, now + 2.0, f"next {number}").taken(now + 3.0)
        now += 4.0
    assert member.state is MemberState.GIVEN_UP


def test_a_port_that_is_closed_and_open_for_one_process_is_given_up_and_named() -> None:
    member = trained()
    for number in range(rules.FLIPS):
        now = 101.0 + 2 * number
        assert member.state is MemberState.TRAINING, number
        member = member.refused(now, now).answered(now + 1.0, now + 1.0, "one")
    assert (member.state, member.why) == (MemberState.GIVEN_UP, rules.TWO_HOSTS)
    back = member.looked_at(member.until).answered(300.0, 300.0, "one").answered(400.0, 400.0, "one")
    assert (back.state, back.flips) == (MemberState.TRAINING, 0)


def test_one_that_is_replaced_between_two_questions_is_lost_all_the_same() -> None:
    replaced = trained().answered(101.0, 101.0, "two")
    assert (replaced.state, replaced.is_lost, replaced.ended) == (MemberState.SERVING, True, ("one", 0.0))


def test_a_silent_worker_is_not_used_as_it_is() -> None:
    quiet = trained().unanswered(104.0, 4.0, TIMEOUT)
    assert quiet.state is MemberState.TRAINING
    silent = quiet.unanswered(105.0, 5.0, TIMEOUT)
    assert (silent.state, silent.must_restart) == (MemberState.SILENT, "one")
    thawed = silent.answered(160.0, 160.0, "one")
    assert (thawed.state, thawed.is_here()) == (MemberState.STARTING, False)
    assert thawed.answered(162.0, 162.0, "two").state is MemberState.SERVING
    heedless = thawed.answered(161.0 + rules.HEED_SECONDS, 170.0, "one")
    assert (heedless.state, heedless.must_restart) == (MemberState.TRAINING, None)


def test_a_silent_ps_may_be_used_as_it_is() -> None:
    ps = Member("ps-0", "a:1").answered(1.0, 1.0, "one").taken(1.0).unanswered(7.0, 6.0, TIMEOUT)
    assert (ps.state, ps.must_restart) == (MemberState.SILENT, None)


def test_a_ps_that_was_asked_to_start_again_has_the_time_of_a_start() -> None:
    ps = Member("ps-0", "a:1", incarnation="old", must_restart="old").answered(1.0, 1.0, "old").refused(2.0, 2.0)
    assert ps.looked_at(2.0 + 2 * rules.AWAY_SECONDS).is_expected
    assert not ps.looked_at(2.0 + rules.RETURN_SECONDS).is_expected
    new = ps.answered(3.0, 3.0, "new")
    assert (new.state, new.must_restart) == (MemberState.SERVING, None)


def test_how_quiet_a_process_was_when_it_ended_is_kept_until_it_answers_after_all() -> None:
    ended = trained().unanswered(112.0, 12.0, 15.0).refused(112.0, 112.0)
    assert ended.ended == ("one", 12.0)
    assert ended.refused(120.0, 120.0).ended == ("one", 12.0)
    assert ended.answered(121.0, 121.0, "one").ended is None


def test_a_worker_that_ends_again_and_again_is_given_up_for_longer_each_time() -> None:
    member, now, pauses = WORKER, 0.0, []
    for life in range(rules.SHORT_LIVES + 2):
        member = member.answered(now, now, str(life)).taken(now)
        assert member.state is MemberState.TRAINING
        member = member.refused(now + 1.0, now + 1.0)
        now += 2.0
        if member.state is MemberState.GIVEN_UP:
            pauses.append(member.until - (now - 1.0))
            assert member.answered(now, now, "idle").state is MemberState.GIVEN_UP
            now = member.until
            member = member.looked_at(now)
    assert pauses == [rules.PAUSE_SECONDS, 2 * rules.PAUSE_SECONDS, 4 * rules.PAUSE_SECONDS]
    lasting = member.answered(now, now, "last").taken(now).refused(now + 2 * rules.SHORT_SECONDS, now)
    assert (lasting.short_lives, lasting.state) == (0, MemberState.CLOSED)


def test_a_process_whose_release_is_not_known_yet_is_waited_for() -> None:
    for member in (WORKER, WORKER.refused(1.0, 1.0).looked_at(1e3)):
        asked = member.held_back(Event.UNPROVEN, 2e3, 2e3, "one")
        assert (asked.state, asked.since, asked.is_here(), asked.is_expected) == (
            MemberState.STARTING,
            2e3,
            False,
            True,
        )
        still = asked.held_back(Event.UNPROVEN, 2e3 + 2 * rules.AWAY_SECONDS, 2e3, "one")
        assert still.looked_at(still.since).is_expected
        assert still.answered(3e3, 3e3, "one").state is MemberState.SERVING


def test_a_process_of_another_release_is_left_out_until_it_is_replaced() -> None:
    unproven = trained().held_back(Event.UNPROVEN, 101.0, 101.0, "two")
    assert (unproven.is_lost, unproven.ended) == (True, ("one", 0.0))
    other = unproven.held_back(Event.OTHER_RELEASE, 102.0, 102.0, "two", "runs release a, and the coordinator b")
    assert (other.state, other.is_here(), other.is_expected) == (MemberState.OTHER_RELEASE, False, False)
    assert other.why == "runs release a, and the coordinator b"
    assert other.left_out().must_restart is None
    assert other.looked_at(1e6).state is MemberState.OTHER_RELEASE
    back = other.refused(103.0, 103.0).held_back(Event.UNPROVEN, 104.0, 104.0, "three").answered(105.0, 105.0, "three")
    assert back.taken(106.0).state is MemberState.TRAINING


def test_one_that_was_asked_to_start_again_has_done_so_as_another_process_of_any_release() -> None:
    silent = trained().unanswered(105.0, 5.0, TIMEOUT)
    assert silent.held_back(Event.UNPROVEN, 106.0, 106.0, "one").must_restart == "one"
    assert silent.held_back(Event.UNPROVEN, 106.0, 106.0, "two").must_restart is None


def test_none_is_taken_in_while_one_more_is_gone() -> None:
    assert to_take_in({"a", "b", "c"}, {"a", "b"}, {"a", "c"}) == {"a"}
    assert to_take_in({"a", "b", "c"}, {"a"}, {"a", "c"}) == set()


class World:
    """Workers that die, freeze, come back; the real heartbeat and rules; TensorFlow as it behaves."""

    TICK = 0.1
    WORKERS = 4

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(heartbeat_module, "digest", lambda answer: answer)
        tasks = [f"worker-{i}" for i in range(self.WORKERS)]
        self.process: dict[str, str | None] = {task: f"{task} 0" for task in tasks}
        self.frozen: set[str] = set()
        self.changed = dict.fromkeys(tasks, self.now)  # when it died, froze, thawed or came
        self.back_at: dict[str, float] = {}
        self.asked: list[tuple[str, float]] = []
        self.count = 0
        self.heartbeat = Heartbeat({task: Member(task, "a:1", since=self.now) for task in tasks}, TIMEOUT)
        self.heartbeat._lines = {task: self.line(task) for task in tasks}
        self.has: dict[str, str] = {}  # TensorFlow's workers, by task, with the process it is connected to
        self.lost = dict.fromkeys(tasks, 0.0)

    def line(self, task: str) -> Any:
        """Return what stands for a channel to a member."""

        def opened() -> None:
            line.opened_at = self.now

        def ask(heard: Callable[[Any], None]) -> None:
            self.asked.append((task, line.asked_at))

        line = SimpleNamespace(opened_at=self.now, asked_at=None, open=opened, close=lambda: None, ask=ask)
        return line

    def answer(self) -> None:
        import grpc

        open_still = []
        for task, asked_at in self.asked:
            error = done = None
            if task in self.frozen:
                if self.now - asked_at < 2.0:
                    open_still.append((task, asked_at))
                    continue
                error = SimpleNamespace(code=lambda: grpc.StatusCode.DEADLINE_EXCEEDED, details=lambda: "deadline")
            elif self.process[task] is None:
                error = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: "Connection refused")
            done = SimpleNamespace(
                cancelled=lambda: False,
                exception=lambda error=error: error,
                result=lambda process=self.process[task]: process,
            )
            self.heartbeat._heard(task, asked_at, done)
        self.asked = open_still

    def fault(self) -> None:
        task = self.random.choice(list(self.process))
        alive, frozen = self.process[task] is not None, task in self.frozen
        what = self.random.choice(["kill", "freeze"]) if alive and not frozen else "back"
        if what == "kill":
            self.process[task] = None
            self.back_at[task] = self.now + self.random.choice([0.3, 3.0, 30.0])
        elif what == "freeze":
            self.frozen.add(task)
        elif frozen:
            self.frozen.discard(task)
            if self.random.random() < 0.3:
                self.process[task] = None
                self.back_at[task] = self.now + 1.0
        self.changed[task] = self.now

    def passes(self) -> None:
        """Let a moment pass."""
        self.now += self.TICK
        for task, at in list(self.back_at.items()):
            if self.now >= at:
                self.count += 1
                self.process[task] = f"{task} {self.count}"
                self.changed[task] = self.now
                del self.back_at[task]
        self.answer()
        for task in self.process:
            self.heartbeat._look_at(task, self.now)
        members = self.heartbeat.members()
        for task, member in members.items():
            # The process ends soon after it is asked to, if it can.
            if member.must_restart == self.process[task] is not None and task not in self.frozen:
                self.process[task], self.back_at[task] = None, self.now + 1.0
                self.changed[task] = self.now
            # A socket that closes is noticed at once, one that was shut too.
            if task in self.has and (self.process[task] != self.has[task] or member.state is MemberState.SILENT):
                del self.has[task]
                self.lost[task] = self.now
        self.heartbeat.hurry()
        serving = {task for task, member in members.items() if member.is_here(max(self.lost.values(), default=0.0))}
        back = to_take_in(list(self.process), self.lost, serving)
        self.updates(back, serving)

    def updates(self, back: set[str], serving: set[str]) -> None:
        if not back:
            return
        for task in set(self.has) | back:
            absent = self.process[task] is None or task in self.frozen
            # TensorFlow waits for each: none has been absent for longer than the detection takes.
            assert not absent or self.now - self.changed[task] < TIMEOUT + 2.5, task
            if absent:
                return
        for task in back:
            self.has[task] = str(self.process[task])
            self.lost.pop(task)
        self.lost = {task: at for task, at in self.lost.items() if task not in self.has}
        self.heartbeat.change(lambda member: member.taken(self.now), *back)

    def idle(self, seconds: float) -> set[str]:
        """Return the workers that are present for so long, and that TensorFlow does not use."""
        members = self.heartbeat.members()
        return {
            task
            for task, process in self.process.items()
            if process is not None
            and task not in self.frozen
            and self.now - self.changed[task] > seconds
            and members[task].state is not MemberState.GIVEN_UP
            and self.has.get(task) != process
        }


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_nobody_who_is_there_is_left_idle_or_waits_for_the_absent(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed, monkeypatch)
    for _ in range(40):
        for _ in range(world.random.choice([1, 1, 2])):
            world.fault()
        for _ in range(int(world.random.choice([0.5, 4.0, 20.0]) / World.TICK)):
            world.passes()
            last = max(world.changed.values())
            if world.now - last > TIMEOUT + 2.5:
                assert not world.idle(TIMEOUT + 2.5)
    assert world.has
    assert all(member.state in MemberState for member in world.heartbeat.members().values())


def test_here_are_those_that_answer() -> None:
    assert {MemberState.SERVING, MemberState.TRAINING} == HERE
    assert re.fullmatch("[a-z ]+", " ".join(state.value for state in MemberState))
