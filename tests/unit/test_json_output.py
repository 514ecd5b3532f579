"""What each verb answers with `--json` is as fleet/site/schema/answers.json says, and all of it is said there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import invoke
import jsonschema
import pytest

from fleet.actions.console import VERSION, Console
from fleet.drills import runner
from fleet.drills.catalogue import CATALOGUE
from fleet.drills.drill import Findings
from fleet.errors import FleetError, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.schema.problems import Problem
from fleet.site.topology import Task
from fleet.verbs.advise import advise
from fleet.verbs.canary import CanaryRequest, canary
from fleet.verbs.drain import drain, undrain
from fleet.verbs.export import export_run
from fleet.verbs.gpu_check import check_gpus
from fleet.verbs.history import show_history
from fleet.verbs.hosts import show_hosts
from fleet.verbs.logs import show_logs
from fleet.verbs.ok_to_stop import ok_to_stop
from fleet.verbs.queue import QueueRequest, queue_add, queue_move, queue_remove, show_queue
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.report import make_report
from fleet.verbs.runs import show_checkpoints, show_runs
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.stop import stop_cluster
from fleet.verbs.sweep import show_sweep
from fleet.verbs.tensorboard import open_tensorboard
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from fleet.verbs.validate import validate
from fleet.verbs.ways import show_ways
from tests.unit import fake_hosts, test_canary, test_update_hosts
from tests.unit import test_second_day as day
from tests.unit.test_advise import make_hosts as make_advised
from tests.unit.test_fleet_ways import RIGHT as WAYS
from tests.unit.test_fleet_ways import inventory as of_ways
from tests.unit.test_gpu_fab import RIGHT
from tests.unit.test_queue_verbs import make_hosts as make_queue
from trainer.core.states import RunState
from trainer.telemetry.status import Status

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "fleet/site/schema/answers.json").read_text(encoding="utf-8"))
WORKERS = {"worker-0": {"steps": 20, "steps_per_second": 2.5}}
EVENT = {"time": 1.0, "event": "ps-lost", "task": "ps-0", "host": "x", "seconds": 1.5, "steps_lost": 3, "message": "m"}


def closed(schema: Any) -> Any:
    """Return the schema with keys refused that it doesn't name, wherever it names any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: closed(value) for key, value in schema.items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            inside[key] = strict(schema[key])
    if "properties" in schema:
        inside["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
    return inside


def strict(schema: Any) -> Any:
    return {"allOf": [closed(schema)], "unevaluatedProperties": False} if names_keys(schema) else closed(schema)


def names_keys(schema: Any) -> bool:
    if "$ref" in schema:
        return names_keys(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    return "properties" in schema or any(map(names_keys, [*schema.get("anyOf", ()), *schema.get("allOf", ())]))


STRICT = jsonschema.Draft202012Validator({**closed(SCHEMA), "unevaluatedProperties": False})


@pytest.fixture
def hosts() -> fake_hosts.FakeHosts:
    hosts = fake_hosts.FakeHosts(fake_hosts.make_inventory(), run_status=fake_hosts.status("new", None))
    run = json.loads(json.dumps(Status("digits", "/srv/x", state="training", step=20).__dict__))  # type: ignore[arg-type]
    run |= {"loss": "NaN", "metrics": {"accuracy": 0.5}, "workers": WORKERS, "events": [EVENT], "host": "x", "pid": 1}
    run |= {"evaluation": {"step": 10, "metrics": {"loss": 0.5}}, "ledger": {"goodput": 0.5, "elapsed": 2.0}}
    hosts.runs = json.dumps([run])
    saved = {"step": 20, "created": 1.0, "size": 5, "loss": 0.5, "evaluation": {"loss": 0.1}, "kept": ["newest"]}
    hosts.checkpoints = Answer(json.dumps([saved]))
    hosts.exported = Answer(json.dumps({"run": "digits", "step": 30, "export": "/srv/x"}))
    return hosts


@pytest.fixture
def console(hosts: fake_hosts.FakeHosts) -> Console:
    return fake_hosts.console_of(hosts, json_out=io.StringIO())


def answer_of(console: Console) -> dict[str, Any]:
    """Return the one answer on standard output, which is as it is documented."""
    assert isinstance(console.json_out, io.StringIO)
    found: dict[str, Any] = json.loads(console.json_out.getvalue())
    STRICT.validate(found)
    assert found["version"] == VERSION
    return found


def cluster_of(hosts: fake_hosts.FakeHosts) -> Cluster:
    return Cluster(hosts.inventory, hosts)


def test_the_schema_is_one_and_knows_the_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["version"] == {"const": VERSION}


def test_each_verb_has_json_a_schema_and_a_row_in_the_docs() -> None:
    found = [each for each in runpy.run_path(str(ROOT / "fabfile.py")).values() if isinstance(each, invoke.Task)]
    named = {verb.name.replace("_", "-") for verb in found}
    assert len(named) >= 13
    assert [verb.name for verb in found if "json" not in [flag.name for flag in verb.get_arguments()]] == []
    assert named == set(SCHEMA["properties"]["verb"]["enum"])
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    assert named == set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("restart", [False, True])
def test_a_start_that_is_followed_to_its_end(hosts: fake_hosts.FakeHosts, console: Console, restart: bool) -> None:
    hosts.tick = fake_hosts.train()
    start_cluster(cluster_of(hosts), console, StartRequest(restart=restart))
    found = answer_of(console)
    assert found["verb"] == ("restart-cluster" if restart else "start-cluster")
    assert (found["outcome"], found["run"]["state"], found["evaluated"]) == ("finished", "finished", True)
    assert "run digits finished" in fake_hosts.printed(console)


def test_a_start_that_is_left(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    hosts.tick = fake_hosts.train()
    start_cluster(cluster_of(hosts), console, StartRequest("digits-2", detach=True))
    found = answer_of(console)
    assert (found["outcome"], found["plan"]["select"]) == ("training", {"run": "digits-2"})


def test_a_plan(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    start_cluster(cluster_of(hosts), console, StartRequest(plan_only=True))
    assert answer_of(console)["plan"]["start"] == [task.name for task in hosts.inventory.tasks]


def test_a_run_that_was_finished_before(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    hosts.run_status = fake_hosts.status("finished", 30, evaluation={"step": 30, "metrics": {}})
    start_cluster(cluster_of(hosts), console, StartRequest())
    assert answer_of(console)["outcome"] == "finished before"


def test_what_is_refused_leaves_standard_output_empty(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    with pytest.raises(OperatorMistake):
        start_cluster(cluster_of(hosts), console, StartRequest("a/b"))
    assert isinstance(console.json_out, io.StringIO)
    assert console.json_out.getvalue() == ""


def test_a_sweep_that_is_left_or_looked_at(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    start_cluster(cluster_of(hosts), console, StartRequest(detach=True, sweep=fake_hosts.SWEEP))
    found = answer_of(console)
    assert (found["verb"], found["outcome"], found["sweep"]) == ("sweep", "training", None)
    hosts.sweep = fake_hosts.swept("finished", "training", present="s-2") | {"attempt": 1}
    console.json_out = io.StringIO()
    show_sweep(cluster_of(hosts), console)
    assert answer_of(console)["sweep"]["present"] == "s-2"


def test_the_queue_and_its_changes(console: Console, tmp_path: Path) -> None:
    hosts = make_queue(tmp_path)

    def answer(act: Callable[..., None], *words: Any) -> dict[str, Any]:
        console.json_out = io.StringIO()
        act(Cluster(hosts.inventory, hosts), console, *words)
        return answer_of(console)

    asked = QueueRequest("next", points=[{"rate": 0.1}], priority=2, minutes=3, reason="why")
    assert answer(queue_add, asked, True)["outcome"] == "planned"
    assert answer(queue_add, asked)["ahead"] == ["digits"]
    assert answer(queue_add, QueueRequest("last"))["started"] is False
    assert answer(queue_move, "last", "first")["order"] == ["digits", "last", "next"]
    assert answer(queue_remove, "last")["outcome"] == "done"
    assert answer(queue_remove, "last")["outcome"] == "not there"
    hosts.finish("digits", RunState.FAILED)
    entries = answer(show_queue)["queue"]["entries"]
    assert [(each["name"], each["state"]) for each in entries] == [
        ("last", "removed"),
        ("digits", "failed"),
        ("next", "queued"),
    ]


def test_advice() -> None:
    hosts = make_advised()
    console = fake_hosts.console_of(hosts, json_out=io.StringIO())
    advise(Cluster(hosts.inventory, hosts), console, 60.0)
    found = answer_of(console)
    assert (found["seconds"], found["advice"][0]["names"]) == (60.0, ["worker-1"])


def test_a_stop(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    hosts.run_status = fake_hosts.status("stopped", 20)
    stop_cluster(cluster_of(hosts), console)
    found = answer_of(console)
    assert (found["verb"], found["run"]["step"]) == ("stop-cluster", 20)


@pytest.mark.parametrize("deep", [False, True])
def test_a_status(hosts: fake_hosts.FakeHosts, console: Console, deep: bool) -> None:
    fake_hosts.run_up(hosts)
    hosts.run_status = json.loads(hosts.runs)[0]
    hosts.unreachable["far"] = "no route"
    console.verify_hosts = lambda *_: {"head": "a file differs"}
    with pytest.raises(HostsUnreachable):
        show_status(cluster_of(hosts), console, deep=deep)
    found = answer_of(console)
    assert found["run"]["workers"] == WORKERS
    assert [task["state"] for task in found["tasks"] if task["host"] == "far"] == ["unreachable"]
    assert found.get("damage") == ({"head": "a file differs"} if deep else None)


def test_lists_and_an_export(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    for verb, key, show in (
        ("runs", "runs", show_runs),
        ("checkpoints", "checkpoints", show_checkpoints),
        ("export", "export", export_run),
    ):
        console.json_out = io.StringIO()
        show(cluster_of(hosts), console)
        found = answer_of(console)
        assert found["verb"] == verb
        assert found[key]


def test_a_page_that_was_written(hosts: fake_hosts.FakeHosts, console: Console, tmp_path: Path) -> None:
    hosts.report = Answer(json.dumps({"runs": ["digits"], "html": "<html>"}))
    make_report(cluster_of(hosts), console, [], tmp_path / "page.html")
    found = answer_of(console)
    assert (found["verb"], found["runs"], found["size"]) == ("report", ["digits"], 6)
    assert Path(found["report"]).read_text(encoding="utf-8") == "<html>"


def test_each_line_of_a_journal_is_an_object(hosts: fake_hosts.FakeHosts, console: Console) -> None:
    show_logs(cluster_of(hosts), console, None, None, follow=False)
    assert isinstance(console.json_out, io.StringIO)
    lines = [json.loads(line) for line in console.json_out.getvalue().splitlines()]
    for line in lines:
        STRICT.validate(line)
    assert [line["message"] for line in lines if line["task"] == "ps-0"] == ["ps-0 says"]


def test_the_address_of_tensorboard(
    hosts: fake_hosts.FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = fake_hosts.board_at(hosts, "http://10.0.0.9:6006")
    monkeypatch.setattr(hosts, "tunnel", partial(fake_hosts.led, hosts, 0), raising=False)
    with pytest.raises(HostsUnreachable):
        open_tensorboard(Cluster(inventory, hosts), console, 7007)
    assert answer_of(console)["url"] == "http://localhost:7007"


def test_an_inventory_that_is_wrong(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("steps: must be at least 1, not 0", hosts=("a",), variable="trainer_run", value="0")
    monkeypatch.setattr("fleet.verbs.validate.read_source", lambda *_: SimpleNamespace(name="inventory/x"))
    monkeypatch.setattr("fleet.verbs.validate.find_problems", lambda _: [problem])
    with pytest.raises(OperatorMistake):
        validate(console, "inventory/x")
    assert answer_of(console)["problems"][0]["variable"] == "trainer_run"


def test_gpus(console: Console) -> None:
    report = Answer(json.dumps(RIGHT))
    tasks = [Task("chief", 0, "a", "192.0.2.1", 2222, server=False)]
    inventory = Inventory("x", {"gpu": ["a"]}, {"a": Host("a", "192.0.2.1")}, tasks, {})
    check_gpus(Cluster(inventory, fake_hosts.AnsweringHosts({"a": report})), console)
    assert answer_of(console)["hosts"] == {"a": RIGHT}


def test_ways(console: Console) -> None:
    show_ways(Cluster(of_ways(), fake_hosts.AnsweringHosts(WAYS)), console)  # type: ignore[arg-type]
    assert answer_of(console)["ways"]["ps-0"]["worker-0"]["listens"] is False


@pytest.fixture
def drilled(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """A testbed on which nothing is done: only what is said of a drill counts here."""

    def set_up(problems: list[str]) -> None:
        found = Findings("seen", 1.5, 3.0, 20, ["worker-1"], [], problems)
        monkeypatch.setattr(runner, "_go_through", lambda testbed, each, skips: found)

    class Empty:
        def go_on(self) -> None: ...

    monkeypatch.setattr(runner, "taken", contextlib.contextmanager(lambda *_, **_more: iter([Empty()])))
    monkeypatch.setattr(
        runner, "why_not_allowed", lambda each, inventory: "no power" if each.name == "ps-off" else None
    )
    return set_up


@pytest.mark.parametrize("problems", [[], ["it was not noticed"]])
def test_drills(
    hosts: fake_hosts.FakeHosts, console: Console, drilled: Callable[[list[str]], None], problems: list[str]
) -> None:
    drilled(problems)
    try:
        runner.drill(cluster_of(hosts), console, [], everything=True)
    except FleetError:
        assert problems
    found = answer_of(console)
    assert found["outcome"] == ("failed" if problems else "passed")
    assert found["skipped"] == {"ps-off": "no power"}
    assert len(found["drills"]) == len(CATALOGUE) - 1


def test_the_list_of_drills(console: Console) -> None:
    runner.list_drills(console)
    assert [each["drill"] for each in answer_of(console)["drills"]] == [each.name for each in CATALOGUE]


def test_who_takes_part() -> None:
    hosts = day.make_hosts()
    cluster = cluster_of(hosts)

    def answer_to(verb: Callable[..., None], *words: Any, **more: Any) -> dict[str, Any]:
        console = fake_hosts.console_of(hosts, json_out=io.StringIO())
        with pytest.raises(OperatorMistake) if words == ("head",) else contextlib.nullcontext():
            verb(cluster, console, *words, **more)
        return answer_of(console)

    assert answer_to(ok_to_stop, ["w-b"])["ok"] is True
    assert answer_to(drain, "w-b", plan_only=True)["outcome"] == "planned"
    assert answer_to(drain, "head", plan_only=True)["outcome"] == "refused"
    assert answer_to(drain, "w-b", "a new disk")["outcome"] == "done"
    assert [row["state"] for row in answer_to(show_hosts)["hosts"]] == ["ready"] * 4 + ["drained"]
    assert answer_to(remove_host, "w-b", plan_only=True)["outcome"] == "planned"
    assert answer_to(replace_host, "w-b", "w-c", plan_only=True)["hosts"] == ["w-b", "w-c"]
    assert answer_to(undrain, "w-b")["next"] == "fab hosts"
    assert [act["verb"] for act in answer_to(show_history)["history"]] == ["drain", "undrain"]


@pytest.mark.parametrize(("plan", "outcome"), [(True, "planned"), (False, "done")])
def test_an_update_of_hosts(plan: bool, outcome: str) -> None:
    hosts = test_update_hosts.make_hosts()
    hosts.updates = {"w-b": ["openssl"]}
    console = fake_hosts.console_of(hosts, json_out=io.StringIO())
    update_hosts(cluster_of(hosts), console, UpdateRequest(["ps-a", "w-b"], "always", plan_only=plan))
    found = answer_of(console)
    assert (found["outcome"], len(found["hosts"])) == (outcome, 2)
    console.json_out = io.StringIO()
    show_history(cluster_of(hosts), console)
    answer_of(console)


@pytest.mark.parametrize(("plan", "outcome"), [(True, "planned"), (False, "passed")])
def test_a_canary(monkeypatch: pytest.MonkeyPatch, plan: bool, outcome: str) -> None:
    hosts = test_canary.make_hosts(monkeypatch)
    console = test_canary.console_of(hosts)
    canary(cluster_of(hosts), console, CanaryRequest("w-b", 20, plan_only=plan))
    found = answer_of(console)
    assert (found["outcome"], found["plan"]["step"], found["trial"] is None) == (outcome, 15, plan)
