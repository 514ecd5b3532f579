"""For how long a member was quiet, and how often members are asked: with time as an argument."""

from __future__ import annotations

from trainer.cluster.member import Member
from trainer.cluster.members.heartbeat import HURRY_SECONDS, PERIOD_SECONDS, TICK_SECONDS, Hurry, QuietTimes


def test_a_member_is_quiet_from_the_first_question_that_is_not_answered() -> None:
    quiet = QuietTimes()
    assert quiet.seconds("ps-0", 5.0) == 0.0
    quiet.asked("ps-0", 10.0)
    quiet.asked("ps-0", 12.0)
    assert quiet.seconds("ps-0", 13.0) == 3.0
    quiet.answered("ps-0", 14.0)
    assert quiet.seconds("ps-0", 15.0) == 1.0


def test_what_this_process_missed_is_left_out() -> None:
    quiet = QuietTimes()
    quiet.asked("ps-0", 10.0)
    quiet.miss(4.0)
    quiet.asked("ps-1", 14.0)
    assert (quiet.seconds("ps-0", 15.0), quiet.seconds("ps-1", 15.0)) == (1.0, 1.0)


def test_a_refusal_is_no_silence() -> None:
    quiet = QuietTimes()
    quiet.asked("ps-0", 10.0)
    quiet.refused("ps-0")
    assert quiet.seconds("ps-0", 60.0) == 0.0


def test_members_that_are_here_are_asked_often_for_a_while_only() -> None:
    hurry, member = Hurry(0.0), Member("ps-0", "a:1").answered(100.0, 100.0, "one")
    assert not hurry.is_due(member, 100.0 + TICK_SECONDS)
    assert hurry.is_due(member, 100.0 + PERIOD_SECONDS)
    hurry.begin(100.0, 0.0)
    assert hurry.is_due(member, 100.0 + TICK_SECONDS)
    assert not hurry.is_due(Member("ps-0", "a:1").answered(100.0 + HURRY_SECONDS, 105.0, "one"), 105.0 + TICK_SECONDS)


def test_a_question_is_due_at_once_when_an_answer_is_waited_for_that_was_not_asked_for_before() -> None:
    hurry, member = Hurry(0.0), Member("ps-0", "a:1").answered(100.0, 100.0, "one")
    assert hurry.begin(100.1, 100.1)
    assert hurry.wants(member)
    assert hurry.is_due(member, 100.1)
    assert not hurry.begin(100.2, 100.1)  # which is waited for already
    assert not hurry.wants(Member("ps-0", "a:1").answered(100.3, 100.3, "one"))
