"""Which members a generation begins with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster import member as rules
from trainer.cluster.member import Event, Member, MemberState
from trainer.cluster.members import draining, formation
from trainer.cluster.members.formation import can_do_without, describe_missing, form
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.release import FIX

CLUSTER = ClusterConfig({"chief": ["h:1"], "worker": ["a:1", "b:1", "c:1"], "ps": ["d:1", "e:1"]}, "chief", 0)


def config(**settings: object) -> Config:
    return Config.from_dict({"program": "p:P", "ps_grace_seconds": 30.0, "worker_wait_seconds": 60.0, **settings})


AWAY, CLOSED, SILENT = MemberState.AWAY, MemberState.CLOSED, MemberState.SILENT


@pytest.mark.parametrize(
    ("missing", "first", "without", "waited", "settings", "expected"),
    [
        # The very first start waits for workers, and no other.
        ({"worker-1": AWAY}, True, set(), 59.0, {}, False),
        ({"worker-1": AWAY}, True, set(), 60.0, {}, True),
        ({"worker-1": AWAY}, False, set(), 0.0, {}, True),
        ({"worker-1": SILENT, "worker-2": AWAY}, False, set(), 0.0, {}, True),
        ({"worker-1": MemberState.GIVEN_UP}, False, set(), 0.0, {}, True),
        ({"worker-1": MemberState.OTHER_RELEASE}, False, set(), 0.0, {}, True),
        # One that closed a moment ago may be back in another.
        ({"worker-1": CLOSED}, False, set(), 1e6, {}, False),
        ({"worker-1": MemberState.STARTING}, False, set(), 1e6, {}, False),
        ({"worker-0": AWAY, "worker-1": AWAY, "worker-2": AWAY}, False, set(), 1e6, {}, False),
        ({"ps-0": AWAY}, False, set(), 29.0, {}, False),
        ({"ps-0": SILENT}, False, set(), 30.0, {}, True),
        ({"ps-0": AWAY}, False, {"ps-0"}, 0.0, {}, True),
        ({"ps-0": AWAY, "worker-1": AWAY}, False, set(), 30.0, {}, True),
        ({"ps-0": AWAY, "ps-1": AWAY}, False, {"ps-0", "ps-1"}, 1e6, {}, False),
        ({"worker-1": AWAY}, False, set(), 1e6, {"elastic": False}, False),
        ({"ps-0": AWAY}, False, {"ps-0"}, 1e6, {"elastic": False}, False),
    ],
)
def test_who_can_be_done_without(
    missing: dict[str, MemberState],
    first: bool,
    without: set[str],
    waited: float,
    settings: dict[str, object],
    expected: bool,
) -> None:
    members = {task: Member(task, "a:1", state) for task, state in missing.items()}
    here = CLUSTER.servers.keys() - missing.keys()
    assert can_do_without(config(**settings), here, members, first, without, waited) is expected


def test_no_ps_is_done_without_where_the_checkpoint_fits_the_model_on_all_of_them_alone() -> None:
    ps, worker = (Member(task, "h:1", AWAY) for task in ("ps-0", "worker-1"))
    here = ["worker-0", "ps-1"]
    assert can_do_without(config(), here, {"ps-0": ps}, False, {"ps-0"}, 1e6)
    assert not can_do_without(config(), here, {"ps-0": ps}, False, {"ps-0"}, 1e6, every_ps=True)
    assert can_do_without(config(), here, {"worker-1": worker}, False, set(), 1e6, every_ps=True)


def test_cluster_of_those_who_are_there_moves_up() -> None:
    smaller = CLUSTER.only({"worker-0", "worker-2", "ps-1"})
    assert smaller.jobs == {"chief": ["h:1"], "worker": ["a:1", "c:1"], "ps": ["e:1"]}


class Hears:
    """A heartbeat of whose members a test says what is heard."""

    def __init__(self, **here: str) -> None:
        self.records = {task: Member(task, address) for task, address in CLUSTER.servers.items()}
        self.hears(**here)
        for task in self.records.keys() - {task.replace("_", "-") for task in here}:
            self.records[task] = self.records[task].refused(0.0, time.monotonic() + 1e6).looked_at(1e6)

    def hears(self, **here: str) -> None:
        now = time.monotonic()
        for name, process in here.items():
            task = name.replace("_", "-")
            self.records[task] = self.records[task].answered(now, now + 1e6, process)

    def members(self) -> dict[str, Member]:
        return dict(self.records)

    def hurry(self, since: float) -> None:
        pass


def take(
    hears: Hears, tell: Callable[[dict[str, Member]], None] = lambda missing: None, **settings: Any
) -> dict[str, str]:
    return form(config(**settings), hears, False, (), tell)  # type: ignore[arg-type]


def test_a_generation_begins_at_once_with_who_is_there() -> None:
    here = {"worker_0": "w0", "ps_0": "p0", "ps_1": "p1"}
    assert take(Hears(**here)) == {"worker-0": "w0", "ps-0": "p0", "ps-1": "p1"}


@pytest.mark.parametrize("task", ["worker-1", "ps-1"])
def test_one_that_comes_to_the_cluster_while_it_forms_is_not_waited_for(task: str) -> None:
    hears = Hears(worker_0="w0", ps_0="p0")
    hears.records = {known: hears.records[known] for known in ("worker-0", "ps-0")}
    hears.records[task] = Member(task, "n:1", MemberState.AWAY)
    limits = {"member_wait_timeout_seconds": 2.0, "ps_grace_seconds": 0.1}
    assert take(hears, **limits) == {"worker-0": "w0", "ps-0": "p0"}


def test_a_generation_begins_at_once_without_a_ps_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LEAVING", tmp_path)
    (tmp_path / "ps-1").touch()
    (tmp_path / "worker-0").touch()  # which may train until it is stopped
    here = {"worker_0": "w0", "ps_0": "p0", "ps_1": "p1"}
    assert take(Hears(**here), ps_grace_seconds=1e6) == {"worker-0": "w0", "ps-0": "p0"}


def test_the_first_training_does_not_wait_for_hosts_that_were_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "DRAINED", tmp_path)
    for task in ("ps-1", "worker-1", "worker-2"):
        (tmp_path / task).touch()
    here = Hears(worker_0="w0", ps_0="p0")
    settings = config(ps_grace_seconds=1e6, worker_wait_seconds=1e6)
    began = time.monotonic()
    for task in ("ps-1", "worker-1", "worker-2"):
        here.records[task] = Member(task, "x:1", MemberState.AWAY)
    assert form(settings, here, True, (), lambda missing: None) == {"worker-0": "w0", "ps-0": "p0"}  # type: ignore[arg-type]
    assert time.monotonic() - began < 10


def test_a_drained_host_counts_in_the_limit_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "DRAINED", tmp_path)
    (tmp_path / "ps-1").touch()
    with pytest.raises(UserError, match="member_wait_timeout_seconds"):
        take(Hears(worker_0="w0"), member_wait_timeout_seconds=0.2, ps_grace_seconds=0.1)


def test_a_process_that_must_start_again_is_waited_for() -> None:
    hears = Hears(worker_0="w0", ps_0="p0", ps_1="p1")
    hears.records["ps-1"] = Member("ps-1", "e:1", must_restart="p1")
    hears.hears(ps_1="p1")
    calls: list[list[str]] = []

    def tell(missing: dict[str, Member]) -> None:
        calls.append(sorted(missing))
        if len(calls) == 3:
            hears.hears(ps_1="new")

    assert take(hears, tell)["ps-1"] == "new"
    assert calls[0] == ["ps-1", "worker-1", "worker-2"]


def test_one_that_does_not_heed_that_is_used_as_it_is() -> None:
    hears = Hears(worker_0="w0", ps_0="p0", ps_1="p1")
    now = time.monotonic()
    stale = Member("ps-1", "e:1", must_restart="p1").answered(now - 2 * rules.HEED_SECONDS, 0.0, "p1")
    hears.records["ps-1"] = stale
    hears.hears(ps_1="p1")
    assert take(hears)["ps-1"] == "p1"


def test_the_limit_of_waiting_names_who_is_missing() -> None:
    with pytest.raises(
        UserError, match=r"member_wait_timeout_seconds\), and no answer from ps-0 \(d:1\), ps-1 \(e:1\)\. "
    ):
        take(Hears(worker_0="w0", worker_1="w1", worker_2="w2"), member_wait_timeout_seconds=0.2, ps_grace_seconds=0.1)


def test_a_planned_reboot_is_named_and_no_part_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LEAVING", tmp_path)
    (tmp_path / "ps-1").touch()
    hears = Hears(worker_0="w0", worker_1="w1", worker_2="w2", ps_0="p0")
    began = now = time.monotonic()
    named: set[str] = set()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 100.0

    def tell(missing: dict[str, Member]) -> None:
        named.add(describe_missing(missing))
        if now - began > 5000.0:
            (tmp_path / "ps-1").unlink(missing_ok=True)
        if now - began > 5500.0:
            hears.hears(ps_1="p1")

    monkeypatch.setattr(formation, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert take(hears, tell, elastic=False, member_wait_timeout_seconds=1000.0)["ps-1"] == "p1"
    assert named == {"waiting until ps-1 (e:1) is back: its host was taken out in order", "no answer from ps-1 (e:1)"}


def test_one_on_another_release_is_named_with_both_and_the_fix() -> None:
    away = Member("worker-0", "a:1", MemberState.AWAY)
    other = Member("worker-1", "b:1").held_back(
        Event.OTHER_RELEASE, 1.0, 1.0, "w1", "runs release old, and mine is new"
    )
    assert describe_missing({"worker-0": away}) == "no answer from worker-0 (a:1)"
    assert describe_missing({"worker-0": away, "worker-1": other}) == (
        f"no answer from worker-0 (a:1); worker-1 (b:1) runs release old, and mine is new: {FIX}"
    )
