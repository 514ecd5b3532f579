"""Which run and which tasks a start chooses."""

from __future__ import annotations

import pytest

from fleet.errors import OperatorMistake
from fleet.hosts.run import Run
from fleet.hosts.units import Unit
from fleet.planning.decision import choose, pick_restarts
from tests.unit.fake_hosts import IN_STEP, TASKS, UP, make_inventory


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", ".hidden", "a" * 150])
def test_name_that_can_be_no_directory_is_refused(name: str) -> None:
    with pytest.raises(OperatorMistake, match="--run"):
        choose(name, None, {}, None)


@pytest.mark.parametrize("program", ["digits", "digits.py", "a b:C", "a:B:C", ":C"])
def test_program_that_names_no_object_is_refused(program: str) -> None:
    with pytest.raises(OperatorMistake, match="--program"):
        choose(None, program, {}, None)


def test_program_inside_a_class_is_taken() -> None:
    assert choose(None, "m:Outer.Inner", {}, None).selection == {"program": "m:Outer.Inner"}


def test_choice_of_a_run_drops_the_program_that_was_chosen_for_another() -> None:
    choice = choose("b", None, {"run": "a", "program": "p:P"}, Run("a", program="p:P"))
    assert (choice.selection, choice.write, choice.new) == ({"run": "b"}, True, True)


def test_choice_of_a_program_keeps_the_run() -> None:
    present = Run("a", program="p:P")
    choice = choose(None, "q:Q", {"run": "a"}, present)
    assert (choice.selection, choice.write, choice.new) == ({"run": "a", "program": "q:Q"}, True, True)


def test_parameters_go_to_the_run_that_is_named_and_add_up_where_none_is() -> None:
    present = Run("a", program="p:P", program_args={"rate": 0.1, "units": 8})
    before = {"run": "a", "program_args": {"rate": 0.1}}
    choice = choose("b", None, before, present, program_args={"units": 9})
    assert (choice.selection, choice.new) == ({"run": "b", "program_args": {"units": 9}}, True)
    choice = choose("b", None, before, present)
    assert choice.selection == {"run": "b"}
    choice = choose(None, None, before, present, program_args={"units": 8})
    assert choice.selection == {"run": "a", "program_args": {"rate": 0.1, "units": 8}}
    assert not choice.new
    # Which the proof refuses: it must come to that, also where the run is finished.
    assert choose(None, None, before, present, program_args={"units": 9}).new


def test_choice_of_what_runs_already_is_no_new_run() -> None:
    choice = choose("a", None, {}, Run("a", program="p:P"))
    assert (choice.selection, choice.write, choice.new) == ({"run": "a"}, True, False)
    choice = choose(None, None, {"run": "a"}, Run("a"))
    assert (choice.write, choice.new) == (False, False)


@pytest.mark.parametrize(
    ("up", "new", "stopped"),
    [
        ([], False, []),
        ([], True, []),
        (["chief-0", "ps-0", "worker-0", "evaluator-0"], False, []),
        (["chief-0", "ps-0", "worker-0", "evaluator-0"], True, ["chief-0", "evaluator-0"]),
        (["ps-0", "worker-0", "evaluator-0"], False, []),
    ],
)
def test_servers_serve_one_coordinator_after_the_other(up: list[str], new: bool, stopped: list[str]) -> None:
    inventory = make_inventory()
    units = {task.name: Unit(task.unit, **(UP if task.name in up else {})) for task in TASKS}
    assert [task.name for task in pick_restarts(inventory, units, new)] == stopped


@pytest.mark.parametrize(
    ("up", "new", "stopped"),
    [
        (["chief-0", "worker-0", "worker-1"], True, ["chief-0", "worker-0", "worker-1"]),
        (["worker-0", "worker-1", "evaluator-0"], True, ["worker-0", "worker-1", "evaluator-0"]),
        (["worker-0", "worker-1"], False, []),
    ],
)
def test_members_that_train_in_step_read_one_run_only(up: list[str], new: bool, stopped: list[str]) -> None:
    inventory = make_inventory(IN_STEP)
    units = {task.name: Unit(task.unit, **(UP if task.name in up else {})) for task in IN_STEP}
    assert [task.name for task in pick_restarts(inventory, units, new)] == stopped
