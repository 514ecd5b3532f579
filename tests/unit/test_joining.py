"""When workers and ps that are added take part in the training, and what the plan of a start says of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from fleet.planning.decision import RunChoice
from fleet.planning.plan import AT_A_SAVE, AT_ONCE, NEVER, Plan, render_plan
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.topology import Task
from trainer.training.loop.joining import RETRY_SECONDS, Joining

TASKS = [
    Task("chief", 0, "head", "a", 1, server=False),
    *(Task("ps", number, "store", "b", 2 + number, server=True) for number in range(2)),
    *(Task("worker", number, "far", "c", 2 + number, server=True) for number in range(2)),
]
CHIEF, NEW = TASKS[0], [TASKS[2], TASKS[4]]


def plan(start: list[Task], behind: dict[str, str | None] | None = None, **settings: Any) -> Plan:
    variables = {task.host: {"trainer_run": settings} for task in TASKS}
    hosts = {task.host: Host(task.host, task.address) for task in TASKS}
    inventory = Inventory("site", {"chief": ["head"], "ps": ["store"], "worker": ["far"]}, hosts, TASKS, variables, "")
    return Plan(inventory, "abc", RunChoice({}, write=False, new=False), behind or {}, [], start, {}, untried=False)


@pytest.mark.parametrize(
    ("settings", "worker", "ps"),
    [
        ({}, AT_ONCE, AT_A_SAVE),
        ({"elastic": False}, AT_ONCE, NEVER),
        ({"input_position": "exact"}, AT_A_SAVE, AT_A_SAVE),
        ({"evaluation": "exact", "elastic": False}, NEVER, NEVER),
    ],
)
def test_the_plan_says_when_those_that_start_take_part(settings: dict[str, Any], worker: str, ps: str) -> None:
    made = plan(NEW, **settings)
    assert made.joining.keys() == {"ps-1", "worker-1"}
    assert made.joining["worker-1"].startswith(worker)
    assert made.joining["ps-1"] == ps
    assert made.as_json()["join"] == made.joining
    for task, when in made.joining.items():
        assert f"{task} {when}" in render_plan(made) or f"ps-1, worker-1 {when}" in render_plan(made)


def test_nobody_joins_a_coordinator_that_starts_too() -> None:
    assert plan([CHIEF, *NEW]).joining == {}
    assert plan(NEW, behind={"head": None}).joining == {}
    assert plan(NEW, strategy="multi_worker_mirrored").joining == {}
    assert "join" not in render_plan(plan([]))


class FakeMembers:
    """Members, a runner and calls that write down what they are asked."""

    def __init__(self, *, takes_in: bool = True, divides: bool | None = True) -> None:
        self.takes_in, self.divides = takes_in, divides
        self.new: dict[str, str] = {}
        self.ready: list[str] = []
        self.drained: list[str] = []
        self.serving = {"worker-0", "worker-1"}
        self.calls: list[tuple[str, ...]] = []

    def newcomers(self) -> dict[str, str]:
        return self.new

    def drained_workers(self) -> list[str]:
        return self.drained

    def workers_serving(self) -> set[str]:
        return self.serving

    def leave_out(self, tasks: list[str]) -> bool | None:
        self.calls.append(("leave out", *tasks))
        return self.divides

    def take_in(self, task: str, address: str) -> bool:
        self.calls.append(("take in", task, address))
        self.takes_in = bool(self.divides)
        return self.takes_in

    def joined(self, *task: str) -> Any:
        """As both ask for it: of the members, and of the runner."""
        self.calls += [("joined", *task)] if task else []
        return [] if task else self.ready

    def join(self, task: str) -> None:
        self.calls.append(("count", task))


def test_a_worker_is_counted_before_it_is_taken_in_and_told_when_it_has_joined() -> None:
    all_of_them = FakeMembers()
    joining = Joining(all_of_them, all_of_them, all_of_them)
    joining.poll(is_recovering=False)
    assert all_of_them.calls == []
    all_of_them.new = {"worker-2": "e:1"}
    joining.poll(is_recovering=False)
    assert all_of_them.calls == [("take in", "worker-2", "e:1"), ("count", "worker-2")]
    all_of_them.new, all_of_them.ready = {}, ["worker-2"]
    joining.poll(is_recovering=False)
    assert all_of_them.calls[2:] == [("count", "worker-2"), ("joined", "worker-2")]


def test_where_workers_join_at_a_save_nobody_is_asked() -> None:
    pretence = FakeMembers(takes_in=False)
    pretence.new = {"worker-2": "e:1"}
    Joining(pretence, pretence, pretence).poll(is_recovering=False)
    assert pretence.calls == []


def test_where_the_data_can_t_be_divided_meanwhile_nobody_joins() -> None:
    pretence = FakeMembers(divides=False)
    pretence.new = {"worker-2": "e:1", "worker-3": "f:1"}
    joining = Joining(pretence, pretence, pretence)
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls == [("take in", "worker-2", "e:1")]


def test_others_read_for_a_drained_worker_until_it_is_back() -> None:
    pretence = FakeMembers(takes_in=False)  # which no drain needs
    joining = Joining(pretence, pretence, pretence)
    pretence.drained = ["worker-1"]
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls == [("leave out", "worker-1")]
    pretence.serving.discard("worker-1")
    assert joining.leaving == []
    pretence.drained = []
    joining.poll(is_recovering=False)  # it is removed for good, or does not answer yet
    assert pretence.calls == [("leave out", "worker-1")]
    pretence.serving.add("worker-1")
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls[1:] == [("leave out",)]


def test_a_drained_worker_whose_part_can_t_be_given_ends_the_generation_once_it_has_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    pretence = FakeMembers(divides=False)
    joining = Joining(pretence, pretence, pretence)
    pretence.drained = ["worker-1"]
    joining.poll(is_recovering=False)
    assert joining.leaving == []
    pretence.serving.discard("worker-1")
    assert joining.leaving == ["worker-1"]
    joining.poll(is_recovering=False)
    assert pretence.calls == [("leave out", "worker-1")]
    assert "the others can't read the data of worker-1 before the cluster is formed again" in caplog.text
    pretence.drained = []
    pretence.serving.add("worker-1")
    joining.poll(is_recovering=False)
    assert joining.leaving == []


def test_a_worker_that_is_back_gets_its_part_once_the_data_can_be_divided(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pretence = FakeMembers()
    joining = Joining(pretence, pretence, pretence)
    pretence.drained = ["worker-1"]
    joining.poll(is_recovering=False)
    pretence.drained, pretence.divides = [], False
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls == [("leave out", "worker-1"), ("leave out",)]
    assert joining.leaving == []
    assert "among all workers\n" not in caplog.text
    assert "the data stay divided among all workers but worker-1" in caplog.text
    now[0] = RETRY_SECONDS
    joining.poll(is_recovering=False)
    pretence.divides, now[0] = True, 2 * RETRY_SECONDS
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls[2:] == [("leave out",)] * 2
    assert "among all workers\n" in caplog.text


def test_the_data_are_not_divided_while_tensorflow_takes_in_a_worker() -> None:
    pretence = FakeMembers()
    joining = Joining(pretence, pretence, pretence)
    pretence.drained = ["worker-1"]
    joining.poll(is_recovering=True)
    assert pretence.calls == []
    joining.poll(is_recovering=False)
    assert pretence.calls == [("leave out", "worker-1")]


def test_of_data_without_parts_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pretence = FakeMembers(divides=None)
    joining = Joining(pretence, pretence, pretence)
    pretence.drained = ["worker-1"]
    joining.poll(is_recovering=False)
    joining.poll(is_recovering=False)
    assert pretence.calls == [("leave out", "worker-1")]
    assert caplog.text == ""


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_data_are_not_divided_while_a_worker_joins(is_lost: bool) -> None:
    """It has been promised a part; one that dies meanwhile may never join."""
    pretence = FakeMembers()
    joining = Joining(pretence, pretence, pretence)
    pretence.new = {"worker-2": "e:1"}
    pretence.serving.add("worker-2")
    joining.poll(is_recovering=False)
    pretence.new, pretence.drained = {}, ["worker-1"]
    if is_lost:
        pretence.serving.remove("worker-2")
        joining.poll(is_recovering=False)
        assert pretence.calls[-1] == ("leave out", "worker-1")
        return
    joining.poll(is_recovering=False)
    assert ("leave out", "worker-1") not in pretence.calls
    pretence.ready = ["worker-2"]
    joining.poll(is_recovering=False)
    pretence.ready = []
    joining.poll(is_recovering=False)
    assert pretence.calls[-1] == ("leave out", "worker-1")


def test_the_plan_names_a_run_that_was_chosen_before_and_the_inventory_does_not_name() -> None:
    made = replace(plan([], run="digits"), choice=RunChoice({"run": "digits-2"}, write=False, new=False))
    line = "  run     digits-2, chosen before; the inventory names digits (--run digits)"
    assert line in render_plan(made).splitlines()
    same = replace(made, choice=RunChoice({"run": "digits"}, write=False, new=False))
    assert "chosen before" not in render_plan(same)
