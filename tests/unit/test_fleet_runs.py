"""`fab logs`, `tensorboard`, `runs`, `checkpoints` and `export` on pretended hosts."""

from __future__ import annotations

import io
import json
import os
import re
from functools import partial

import pytest

from fleet.actions.console import Console
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.verbs.export import export_run
from fleet.verbs.logs import show_logs
from fleet.verbs.runs import show_checkpoints, show_runs
from fleet.verbs.tensorboard import open_tensorboard
from tests.unit.fake_hosts import TASKS, FakeHosts, board_at, led, printed, status


def test_logs_of_all_tasks_name_the_task_of_each_line(hosts: FakeHosts, console: Console) -> None:
    show_logs(Cluster(hosts.inventory, hosts), console, None, 5, follow=False)
    assert re.search(r"^ps-0        \| ([\d-]+ )?\d\d:\d\d:\d\d ps-0 says$", printed(console), re.MULTILINE)
    assert len(printed(console).splitlines()) == len(TASKS)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_logs_that_nobody_reads_any_more_are_followed_no_longer(hosts: FakeHosts) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        with pytest.raises(KeyboardInterrupt):
            show_logs(Cluster(hosts.inventory, hosts), Console(stream), "worker-1", 5, follow=True)


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_one_task_are_its_lines(hosts: FakeHosts, console: Console, follow: bool) -> None:
    show_logs(Cluster(hosts.inventory, hosts), console, "worker-1", 5, follow)
    assert re.fullmatch(r"([\d-]+ )?\d\d:\d\d:\d\d worker-1 says\n", printed(console))


def test_tensorboard_is_led_to_through_the_chiefs_host(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "tunnel", partial(led, hosts, 3), raising=False)
    with pytest.raises(HostsUnreachable, match="the connection was lost"):
        open_tensorboard(Cluster(board_at(hosts, "http://fd00::7:6006"), hosts), console, 7000)
    assert printed(console) == "TensorBoard is at http://localhost:7000 until Ctrl-C\n"
    assert hosts.done == [f"tunnel {(hosts.inventory.chief.host, 7000, 'fd00::7', 6006)}"]


def test_no_tensorboard_is_the_operators_mistake(hosts: FakeHosts, console: Console) -> None:
    with pytest.raises(OperatorMistake, match="group tensorboard is empty"):
        open_tensorboard(Cluster(board_at(hosts, None), hosts), console, 6006)


def test_runs_are_listed(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    show_runs(Cluster(hosts.inventory, hosts), console)
    assert "digits" in printed(console)
    assert "a model lies in" not in printed(console)


@pytest.mark.parametrize(("metric", "order"), [("loss", ["b", "a", "c", "d"]), ("accuracy", ["a", "b", "c", "d"])])
def test_the_best_run_comes_first_and_its_model_is_named(
    hosts: FakeHosts, console: Console, metric: str, order: list[str]
) -> None:
    metrics = {"a": {"loss": 0.5, "accuracy": 0.9}, "c": {"loss": "NaN", "accuracy": "NaN"}, "d": {}}
    metrics["b"] = {"loss": 0.25, "accuracy": 0.8}
    runs = [{"run": run, "state": "finished", "evaluation": {"step": 9, "metrics": metrics[run]}} for run in "abcd"]
    runs[1]["export"] = "/srv/trainer/runs/b/export"
    hosts.runs = json.dumps(runs)
    cluster, console.json_out = Cluster(hosts.inventory, hosts), io.StringIO()
    show_runs(cluster, console, metric)
    assert [run["run"] for run in json.loads(console.json_out.getvalue())["runs"]] == order
    console.json_out = None
    show_runs(cluster, console, metric)
    first, _, *rows, last = printed(console).splitlines()
    assert first == f"by {metric}, the {'least' if metric == 'loss' else 'greatest'} first"
    assert [row.split()[0] for row in rows] == order
    assert last == "a model lies in head:/srv/trainer/runs/RUN/export"
    with pytest.raises(OperatorMistake, match=r"--by is 'acc': expected a metric .*; the runs have accuracy, loss"):
        show_runs(cluster, console, "acc")


def test_of_a_metric_whose_best_is_unknown_the_least_is_not_called_the_best(hosts: FakeHosts, console: Console) -> None:
    runs = [
        {"run": run, "state": "finished", "evaluation": {"metrics": {"ndcg": value}}}
        for run, value in (("a", 0.5), ("b", 0.25))
    ]
    hosts.runs = json.dumps(runs)
    show_runs(Cluster(hosts.inventory, hosts), console, "ndcg")
    first, _, *rows = printed(console).splitlines()
    assert first == "by ndcg, the least first: its name does not say whether that is the best"
    assert [row.split()[0] for row in rows] == ["b", "a"]


def test_checkpoints_are_listed(hosts: FakeHosts, console: Console) -> None:
    cluster = Cluster(hosts.inventory, hosts)
    show_checkpoints(cluster, console)
    assert printed(console) == "no checkpoint yet\n"
    saved = {"step": 20, "created": 1.0, "size": 2**20, "loss": 0.5, "evaluation": {"accuracy": 0.75}, "kept": ["best"]}
    hosts.checkpoints = Answer(json.dumps([saved, {**saved, "loss": None, "evaluation": None}]))
    show_checkpoints(cluster, console, "digits")
    assert re.search(r"20 .* 1\.0 +0\.5 +accuracy 0\.75 +best", printed(console))


def test_checkpoints_of_a_run_that_is_not_there_are_the_operators_mistake(hosts: FakeHosts, console: Console) -> None:
    hosts.checkpoints = Answer("", "error: there is no run x", code=78)
    with pytest.raises(OperatorMistake, match=r"^there is no run x$"):
        show_checkpoints(Cluster(hosts.inventory, hosts), console, "x")


def test_a_run_is_exported_on_the_chiefs_host(hosts: FakeHosts, console: Console) -> None:
    hosts.exported = Answer(json.dumps({"run": "old", "step": 30, "export": "/srv/trainer/runs/old/export"}))
    export_run(Cluster(hosts.inventory, hosts), console, "old")
    assert printed(console) == "exported step 30 of old to head:/srv/trainer/runs/old/export\n"
    assert hosts.done == ["trainer export --json --settings /etc/trainer/run.json --run old"]


def test_why_a_run_is_not_exported_is_said(hosts: FakeHosts, console: Console) -> None:
    hosts.exported = Answer("", "error: run old is training", code=78)
    with pytest.raises(OperatorMistake, match=r"^run old is training$"):
        export_run(Cluster(hosts.inventory, hosts), console, "old")
    with pytest.raises(OperatorMistake, match="--run"):
        export_run(Cluster(hosts.inventory, hosts), console, "a b")
