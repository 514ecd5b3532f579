"""Which changes of the members end a generation, and when they may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.training.loop.joining import Joining
from trainer.training.loop.member_changes import MemberChanges


class Members:
    def __init__(self) -> None:
        self.lost, self.leaving, self.back = ["ps-0"], ["ps-1"], ["worker-1"]

    def lost_ps(self) -> list[str]:
        return self.lost

    def leaving_ps(self) -> list[str]:
        return self.leaving

    def returned(self) -> list[str]:
        return self.back


class Storage:
    def __init__(self, why: str | None = None, *, is_free: bool = True) -> None:
        self._why, self._is_free = why, is_free

    def trouble(self) -> str | None:
        return self._why

    def settle(self, seconds: float | None = None, /) -> bool:
        assert seconds == 0
        return self._is_free


def test_without_members_nothing_changes() -> None:
    changes = MemberChanges(None, Storage(), elastic=True)
    changes.poll(is_recovering=False)
    changes.look_for_returned(is_recovering=False)
    assert (changes.lost, changes.leaving, changes.returned) == ([], [], [])


@pytest.mark.parametrize(
    ("storage", "is_recovering", "leaving"),
    [(Storage(), False, ["ps-1"]), (Storage("full"), False, []), (Storage(), True, [])],
)
def test_a_ps_may_leave_where_a_save_will_not_fail(storage: Storage, is_recovering: bool, leaving: list[str]) -> None:
    changes = MemberChanges(Members(), storage, elastic=True)
    changes.poll(is_recovering)
    assert changes.lost == ["ps-0"]
    assert changes.leaving == leaving


@pytest.mark.parametrize(
    ("storage", "elastic", "is_recovering", "returned"),
    [
        (Storage(), True, False, ["worker-1"]),
        (Storage(), False, False, []),
        (Storage(), True, True, []),
        (Storage("full"), True, False, []),
        (Storage(is_free=False), True, False, []),
    ],
)
def test_a_member_is_taken_in_where_that_can_be_done_now(
    storage: Storage, elastic: bool, is_recovering: bool, returned: list[str]
) -> None:
    changes = MemberChanges(Members(), storage, elastic=elastic)
    changes.look_for_returned(is_recovering)
    assert changes.returned == returned
    assert changes.are_wanted == bool(returned)


def test_members_that_have_returned_stay_found_until_they_are_put_off() -> None:
    members = Members()
    changes = MemberChanges(members, Storage(), elastic=True)
    changes.look_for_returned(is_recovering=False)
    members.back = []
    changes.look_for_returned(is_recovering=False)
    assert changes.message == "worker-1 answers again"
    changes.put_off()
    changes.look_for_returned(is_recovering=False)
    assert changes.returned == []


def test_a_ps_that_leaves_is_named_before_members_that_return() -> None:
    changes = MemberChanges(Members(), Storage(), elastic=True)
    changes.poll(is_recovering=False)
    changes.look_for_returned(is_recovering=False)
    assert changes.message == "ps-1 leaves, and the checkpoint is saved"


@pytest.mark.parametrize("elastic", [True, False])
def test_a_generation_ends_for_a_drained_worker_whose_data_others_can_t_read(elastic: bool) -> None:
    """Without `elastic` the next one would wait for it."""
    members = Members()
    members.leaving = []
    joining: Any = SimpleNamespace(leaving=["worker-1"], poll=lambda is_recovering: None)
    changes = MemberChanges(members, Storage(), joining, elastic=elastic)
    changes.poll(is_recovering=False)
    assert changes.leaving == (["worker-1"] if elastic else [])
    changes.poll(is_recovering=True)
    assert changes.leaving == []


def test_for_a_worker_that_joins_no_generation_ends() -> None:
    members = Members()
    members.back = ["ps-2", "worker-1"]
    runner: Any = SimpleNamespace(takes_in=True)
    changes = MemberChanges(members, Storage(), Joining(None, runner, runner), elastic=True)
    changes.look_for_returned(is_recovering=False)
    assert changes.returned == ["ps-2"]
    changes.put_off()
    runner.takes_in = False
    changes.look_for_returned(is_recovering=False)
    assert changes.returned == ["ps-2", "worker-1"]
