"""Every hostile inventory is refused in few short lines, without a traceback."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from fleet.site.preflight import inventory_problems
from fleet.site.schema.problems import describe_problems, name_known
from tests.unit.hostile import cases, inventory

CASES = list(cases())


def test_the_right_inventory_that_they_spoil_is_right() -> None:
    assert inventory_problems(*inventory({}, {})) == []


@pytest.mark.parametrize("case", CASES, ids=[f"{number}" for number in range(len(CASES))])
def test_a_hostile_inventory_is_refused_in_short_lines(case: Any) -> None:
    name, groups, hosts = case
    problems = inventory_problems(*inventory(groups, hosts))
    assert problems, name
    lines = describe_problems(problems).splitlines()
    assert len(lines) <= 11, name
    assert max(map(len, lines)) < 1200, name
    assert all(line.isprintable() for line in lines), name
    assert not any("datetime" in line for line in lines), name


def test_names_of_cases_are_told_apart() -> None:
    assert len({case[0] for case in CASES}) == len(CASES) >= 150


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"worker_tasks": 20_000_000}, "expected a number of tasks from 0 to 256"),
        ({"trainer_run": [[]] * 50_000}, "20000 values"),
    ],
)
def test_an_absurd_number_is_refused_in_constant_memory(variables: dict[str, Any], message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = inventory_problems(*inventory({}, {"worker-1": variables}))
    assert message in describe_problems(problems)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_too_many_hosts_are_refused_at_once() -> None:
    (problem,) = inventory_problems({"all": ["x"] * 200_000}, {})
    assert "200,000 hosts; expected 10,000 at most" in str(problem)


def test_too_many_tasks_are_refused_before_any_is_made() -> None:
    many = [f"worker-{i}" for i in range(100)]
    problems = inventory_problems(*inventory({"worker": many}, {"all": {"worker_tasks": 250}}))
    assert "would run 25,002 tasks, 25,000 of them of worker" in describe_problems(problems)


def test_anchors_that_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value: Any = ["x"]
    for _ in range(60):
        value = [value] * 9
    began = time.process_time()
    problems = inventory_problems(*inventory({}, {"all": {"trainer_run": {"program": value}}}))
    assert "can't be read: it has more than 20000 values" in describe_problems(problems)
    assert time.process_time() - began < 30  # expanded, it would never end


def test_ten_problems_are_told_and_the_rest_counted() -> None:
    hosts = {f"w{i}": {"worker_tasks": -i - 1} for i in range(25)}
    text = describe_problems(inventory_problems(*inventory({"worker": list(hosts)}, hosts)))
    assert len(text.splitlines()) == 11
    assert text.endswith("and 15 more; `fab validate --json` lists them all")


def test_one_mistake_of_many_hosts_is_one_problem() -> None:
    hosts = {f"w{i}": {"worker_tasks": -1} for i in range(25)}
    problem, *_ = inventory_problems(*inventory({"worker": list(hosts)}, hosts))
    assert str(problem).startswith("hosts w0, w1, w2 and 22 more have worker_tasks: -1; expected")
    assert len(problem.hosts) == 25


def test_hosts_without_an_address_are_one_problem() -> None:
    groups, variables = inventory({"worker": [f"w{i}" for i in range(25)]}, {})
    for host in groups["worker"]:
        del variables[host]["ansible_host"]
    (problem,) = inventory_problems(groups, variables)
    assert str(problem).startswith("hosts w0, w1, w2 and 22 more have no address. Give each one that every other host")
    assert len(problem.hosts) == 25


def test_a_long_value_does_not_take_the_place_of_the_reason() -> None:
    run = {"trainer_run": {"program": "trainer.examples.digits:Digits", "run": "x" * 500}}
    (problem,) = inventory_problems(*inventory({}, {"all": run}))
    assert "run: is the name of a directory: letters, digits" in str(problem)
    assert len(str(problem)) < 300


def test_of_many_names_few_are_listed() -> None:
    many = [f"worker-{i}" for i in range(300)]
    assert name_known("wroker-7", many) == "Did you mean worker-7? It has: worker-0, worker-1, worker-2 and 297 more"
    assert name_known("WORKER-1", many[:2]).startswith("Did you mean worker-1?")
    assert name_known("head", many[:2]) == "It has: worker-0, worker-1"
