"""`fab ways` on hosts that are only pretended."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.topology import Task
from fleet.verbs.ways import show_ways
from tests.unit.fake_hosts import AnsweringHosts
from trainer.cluster.reach.ways import Way

TASKS = [
    Task("chief", 0, "head", "192.0.2.1", 2222, server=False),
    Task("ps", 0, "store", "192.0.2.2", 2300, server=True),
    Task("ps", 1, "six", "2001:db8::6", 2300, server=True),
    Task("worker", 0, "far", "192.0.2.3", 2400, server=True),
    Task("worker", 1, "far", "192.0.2.3", 2401, server=True),
]


def answer_of(source: str, **ways: Way) -> str:
    return json.dumps(
        {"source": source, "ways": {task.replace("_", "-"): way.as_record() for task, way in ways.items()}}
    )


def inventory(tasks: list[Task] = TASKS) -> Inventory:
    hosts = {task.host: Host(task.host, task.address) for task in tasks}
    return Inventory("inventory/x", {}, hosts, tasks, {})


WORKS = Way("192.0.2.2:2300", seconds=0.001)
BROKEN = Way("192.0.2.2:2300", why="no answer in 4 s", source="192.0.2.31")
RIGHT = {
    "head": Answer(answer_of("chief-0", ps_0=WORKS)),
    "store": Answer(answer_of("ps-0", worker_0=Way("192.0.2.3:2400", refused=True))),
    "six": Answer(answer_of("ps-1", worker_0=WORKS)),
    "far": Answer(f"{answer_of('worker-0', ps_0=WORKS)}\n{answer_of('worker-1', ps_0=WORKS)}\n"),
}


def shown(answers: Mapping[str, Answer]) -> tuple[str, AnsweringHosts]:
    hosts, out = AnsweringHosts(answers), io.StringIO()
    try:
        show_ways(Cluster(inventory(), hosts), Console(out=out))  # type: ignore[arg-type]
    finally:
        text = out.getvalue()
    return text, hosts


def test_each_host_tries_the_ways_of_its_tasks() -> None:
    text, hosts = shown(RIGHT)
    assert (
        "--source worker-1 chief-0=192.0.2.1:2222 ps-0=192.0.2.2:2300 'ps-1=[2001:db8::6]:2300'" in hosts.asked["far"]
    )
    assert "worker-0=" not in hosts.asked["far"]
    assert "worker-1=192.0.2.3:2401" in hosts.asked["store"]
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["FROM", "chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert ["worker-1", "-", "ok", "-", "-", "-"] in rows
    assert ["ps-0", "-", "-", "-", "closed", "-"] in rows


def test_a_broken_way_is_named_with_both_ends_and_the_address_of_its_packets() -> None:
    with pytest.raises(ClusterTrouble) as error:
        shown(RIGHT | {"far": Answer(answer_of("worker-0", ps_0=BROKEN))})
    assert "worker-0 can't reach ps-0 at 192.0.2.2:2300 (no answer in 4 s); its packets leave from 192.0.2.31" in str(
        error.value
    )


def test_a_host_that_says_nothing_or_is_away_is_named() -> None:
    with pytest.raises(ClusterTrouble, match="six: invalid choice: 'ways'"):
        shown(RIGHT | {"six": Answer("", "usage\ninvalid choice: 'ways'", 2)})
    with pytest.raises(HostsUnreachable, match="far"):
        shown(RIGHT | {"far": Answer("", unreachable="timed out")})


def test_without_ps_there_is_no_matrix() -> None:
    with pytest.raises(OperatorMistake, match="has no ps"):
        show_ways(Cluster(inventory(TASKS[:1]), AnsweringHosts({})), Console(out=io.StringIO()))  # type: ignore[arg-type]
