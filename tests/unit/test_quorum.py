"""Which hosts a start can do without."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.planning.quorum import find_shortages, minimum
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.schema.definition import definition
from fleet.site.topology import Task


def make_inventory(workers: int = 5, ps: int = 2, minimum: Any = None, **run: Any) -> Inventory:
    tasks = [Task("chief", 0, "head", "h", 2222, server=False), Task("evaluator", 0, "eye", "e", None, server=False)]
    tasks += [Task("ps", index, f"ps-{index}", "p", 2300, server=True) for index in range(ps)]
    tasks += [Task("worker", index, f"worker-{index}", "w", 2400, server=True) for index in range(workers)]
    tasks += [Task("data", index, f"data-{index}", "d", 2600, server=True) for index in range(2)]
    variables = {"trainer_run": run} | ({} if minimum is None else {"cluster_minimum": minimum})
    hosts = {task.host: Host(task.host, task.address) for task in tasks}
    return Inventory("inventory/pretended", {}, hosts, tasks, dict.fromkeys(hosts, variables))


@pytest.mark.parametrize(
    ("away", "given", "run", "short"),
    [
        (["worker-0", "worker-1", "worker-2", "worker-3", "ps-0", "eye"], None, {}, []),
        (["ps-0", "ps-1"], None, {}, ["0 of 2 ps can be started, and at least 1 must be"]),
        (["head"], None, {}, ["0 of 1 chief can be started, and at least 1 must be"]),
        (["worker-0"], None, {"elastic": False}, ["4 of 5 worker can be started, and at least 5 must be"]),
        (["worker-0"], None, {"strategy": "multi_worker_mirrored"}, ["4 of 5 worker"]),
        (["worker-0"], {"worker": 0.8}, {}, []),
        (["worker-0", "worker-1"], {"worker": 0.8}, {}, ["3 of 5 worker can be started, and at least 4 must be"]),
        (["worker-0", "ps-1"], {"worker": 4, "ps": "all"}, {}, ["1 of 2 ps can be started, and at least 2 must be"]),
        (["eye"], {"evaluator": 1}, {}, ["0 of 1 evaluator"]),
        (["data-0"], None, {}, []),
        (["data-0", "data-1"], None, {"elastic": False}, ["0 of 2 data can be started, and at least 1 must be"]),
        (["data-0"], {"data": "all"}, {}, ["1 of 2 data can be started, and at least 2 must be"]),
        (["worker-0"], {"worker": 9}, {}, ["4 of 5 worker can be started, and at least 5 must be"]),
    ],
)
def test_each_job_has_its_minimum(away: list[str], given: Any, run: dict[str, Any], short: list[str]) -> None:
    found = find_shortages(make_inventory(minimum=given, **run), away)
    assert len(found) == len(short)
    assert all(text.startswith(expected) for text, expected in zip(found, short, strict=True))


@pytest.mark.parametrize(
    ("part", "members", "least"), [(0.8, 10, 8), (0.8, 9, 8), (0.7, 10, 7), (1.0, 3, 3), (1, 3, 1)]
)
def test_a_part_is_rounded_up(part: float, members: int, least: int) -> None:
    assert minimum(make_inventory(minimum={"worker": part}), "worker", members) == least


@pytest.mark.parametrize("right", [{}, {"worker": 0.8, "ps": "all"}, {"worker": 4, "evaluator": 1}, {"ps": 1.0}])
def test_a_number_a_part_and_all_are_right(right: Any) -> None:
    assert definition().variables["cluster_minimum"].reason_against(right) is None


@pytest.mark.parametrize(
    "wrong",
    [{"worker": "most"}, {"chief": 0}, {"worker": 1.5}, {"worker": -1}, {"worker": True}, {"wrker": 1}, ["ps"], 3],
)
def test_what_means_no_number_is_refused(wrong: Any) -> None:
    assert definition().variables["cluster_minimum"].reason_against(wrong) is not None
