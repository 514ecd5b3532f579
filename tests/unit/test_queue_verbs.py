"""`fab queue` and its changes, on hosts that are only pretended and whose trainer is the real one."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fleet.actions import older_queue
from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.output.tables import ProgressLine
from fleet.verbs.queue import QueueRequest, queue_add, queue_move, queue_remove, show_queue
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.stop import stop_cluster
from tests.hosts import ROOT
from tests.unit import fake_hosts
from tests.unit import test_second_day as day
from trainer.__main__ import main
from trainer.core.settings.parameters import parse_assignments
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.run.selections.queue import Queue, queue_file
from trainer.telemetry.queue import describe_queue


@dataclass
class Hosts(day.Hosts):
    """Hosts with a queue; its file and the selection lie in `place`."""

    place: Path = Path()

    def _answer(self, host: str, script: str) -> Answer:
        if found := re.search(r"-m trainer (queue .*)", script):
            return self._queue(shlex.split(found[1]))
        selected = self.place / "selection.json"
        self.selection = selected.read_text() if selected.exists() else self.selection
        answer = super()._answer(host, script)
        if self.done and self.done[-1] == "select":
            selected.write_text(self.selection)
        return answer

    def _queue(self, words: list[str]) -> Answer:
        words[words.index("--settings") + 1] = str(self.place / "run.json")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words, {})
        return Answer(out.getvalue(), err.getvalue(), code)

    @property
    def queue(self) -> Queue:
        return Queue.read(self.place)

    def finish(self, run: str, state: RunState = RunState.FINISHED) -> None:
        self.queue.end_point(run, state, "why" if state is RunState.FAILED else "")


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return make_hosts(tmp_path)


def make_hosts(tmp_path: Path) -> Hosts:
    """Hosts on which the run digits trains, and nothing waits."""
    made = day.make_hosts()
    write_record(tmp_path / "run.json", {"program": "p:P", "run": "digits", "shared_dir": str(tmp_path)})
    RunDirectory(tmp_path, "digits").set_state(RunState.TRAINING, 20)
    found = Hosts(made.inventory, run_status=made.run_status, units=made.units, place=tmp_path)
    found.checkpoints = made.checkpoints
    return found


@pytest.fixture
def proven() -> list[Any]:
    return []


@pytest.fixture
def console(hosts: Hosts, proven: list[Any]) -> Console:
    def prove(_cluster: Cluster, release: str, selection: Mapping[str, Any], _display: ProgressLine) -> None:
        if selection.get("run") == "broken":
            raise OperatorMistake("program p:P: build_model failed")
        proven.append((release, selection))

    console = fake_hosts.console_of(hosts)
    console.prove = prove
    return console


def cluster(hosts: Hosts) -> Cluster:
    return Cluster(hosts.inventory, hosts)


def idle(hosts: Hosts) -> None:
    """Have the tasks ended by themselves, after what was to be trained."""
    hosts.set_all(active="inactive", sub="dead")


def test_beside_a_training_a_run_is_proven_and_waits_for_its_end(
    hosts: Hosts, console: Console, proven: list[Any]
) -> None:
    asked = QueueRequest("next", "p:Q", {"rate": 0.1}, settings={"steps": 50}, minutes=30, reason="as agreed")
    queue_add(cluster(hosts), console, asked)
    assert proven == [("abc123", {"run": "next", "program": "p:Q", "program_args": {"rate": 0.1}})]
    assert hosts.done == []  # nothing was stopped or started
    assert [entry.name for entry in hosts.queue.entries] == ["digits", "next"]
    assert hosts.queue.entries[1].seconds == 1800
    assert json.loads((hosts.place / "selection.json").read_text()) == {"queue": {}}
    acts = [json.loads(line) for line in hosts.lines]
    assert [(act["verb"], act["outcome"], act["run"], act["reason"]) for act in acts] == [
        ("queue-add", "begun", "next", "as agreed"),
        ("queue-add", "done", "next", "as agreed"),
    ]
    assert fake_hosts.printed(console).endswith("next is added after digits\nlook: fab queue\n")


def test_a_search_waits_as_one_entry_and_needs_who_evaluates(hosts: Hosts, console: Console, proven: list[Any]) -> None:
    asked = {"trials": 3, "metric": "loss", "parameters": {"rate": {"low": 0.1, "high": 1.0}}}
    request = QueueRequest("found", "p:Q", points=[], search=asked, sweep_file="found.yml")
    queue_add(cluster(hosts), console, request)
    assert proven[0][1]["sweep"] == {"name": "found", "attempt": 1, "points": [], "search": asked}
    assert [(entry.name, entry.size) for entry in hosts.queue.entries] == [("digits", 1), ("found", 3)]
    assert hosts.queue.entries[1].record["points"] == []  # without it, an earlier release would train a run `found`
    show_queue(cluster(hosts), console)
    assert re.search(r"found .* queued +0 of 3 points", fake_hosts.printed(console))
    summary = cluster(hosts).ask_queue("list", [])
    for entry in summary["entries"]:
        del entry["size"]  # as an earlier release answers, which has no searches
    assert "queued" in describe_queue(summary)
    hosts.inventory = replace(
        hosts.inventory, tasks=tuple(each for each in hosts.inventory.tasks if each.job != "evaluator")
    )
    with pytest.raises(OperatorMistake, match="evaluation is sidecar without an evaluator"):
        queue_add(cluster(hosts), console, request)


@pytest.mark.parametrize(
    ("asked", "as_shipped", "command"),
    [
        (QueueRequest("next"), False, "fab queue-add next"),
        (
            QueueRequest("next", "p:Q", {"rate": 0.1, "name": "a b"}, None, {"steps": 50}, -3, 1.5),
            True,
            "fab queue-add next --program p:Q --set rate=0.1 --set 'name=\"a b\"' --setting steps=50 --minutes 1.5 "
            "--priority=-3 --as-shipped",
        ),
        (
            QueueRequest("rates", "p:Q", {"rate": 1}, [{"rate": 1}], {}, 2, reason="it's due", sweep_file="a b.yml"),
            False,
            """fab queue-add --sweep 'a b.yml' --priority=2 --reason 'it'"'"'s due'""",
        ),
    ],
)
def test_a_plan_names_the_whole_command(
    hosts: Hosts, console: Console, asked: QueueRequest, as_shipped: bool, command: str
) -> None:
    queue_add(cluster(hosts), console, asked, True, as_shipped)
    assert fake_hosts.printed(console).endswith(f"nothing was done. Do it: {command}\n")
    sets = [after for flag, after in itertools.pairwise(shlex.split(command)) if flag == "--set"]
    assert parse_assignments(sets) == ({} if asked.sweep_file else asked.program_args)


def test_typed_twice_it_is_added_once(hosts: Hosts, console: Console, proven: list[Any]) -> None:
    for _ in range(2):
        queue_add(cluster(hosts), console, QueueRequest("next"))
    assert len(proven) == 1
    assert len(hosts.lines) == 2
    assert "next waits already after digits\n" in fake_hosts.printed(console)


def test_a_plan_says_where_it_would_go_and_adds_nothing(hosts: Hosts, console: Console, proven: list[Any]) -> None:
    queue_add(cluster(hosts), console, QueueRequest("one"))
    before = (hosts.place / "queue.json").read_text()
    queue_add(cluster(hosts), console, QueueRequest("two", priority=3), plan_only=True)
    assert "would add two after digits\n  pause   none" in fake_hosts.printed(console)
    queue_add(cluster(hosts), console, QueueRequest("one"), plan_only=True)
    assert "one waits already after digits\n  pause   none" in fake_hosts.printed(console)
    assert (hosts.place / "queue.json").read_text() == before
    assert len(proven) == 1


def test_what_can_not_be_built_is_refused_and_not_added(hosts: Hosts, console: Console) -> None:
    with pytest.raises(OperatorMistake, match="build_model failed"):
        queue_add(cluster(hosts), console, QueueRequest("broken"))
    assert not (hosts.place / "queue.json").exists()


def test_another_checkout_is_refused_beside_a_training_unless_asked_for(
    hosts: Hosts, console: Console, proven: list[Any]
) -> None:
    console.build = lambda _: "def456"
    with pytest.raises(OperatorMistake, match="the hosts train with release abc123, and this checkout is def456"):
        queue_add(cluster(hosts), console, QueueRequest("next"))
    queue_add(cluster(hosts), console, QueueRequest("next"), as_shipped=True)
    assert proven[0][0] == "abc123"


def test_an_idle_cluster_is_started_for_what_is_added(hosts: Hosts, console: Console, proven: list[Any]) -> None:
    RunDirectory(hosts.place, "digits").set_state(RunState.FINISHED, 30, asked=30)
    idle(hosts)
    queue_add(cluster(hosts), console, QueueRequest("next", reason="as agreed"))
    assert proven == []  # the start proves it
    assert "start chief-0" in hosts.done
    output = fake_hosts.printed(console)
    assert "next is added as the next\nthe cluster has nothing else to train: it is started\n" in output
    assert "the queue is worked off without this machine. Look: fab queue." in output
    assert json.loads(hosts.lines[-1])["reason"] == "as agreed"


def test_a_run_that_the_start_refuses_is_taken_back(hosts: Hosts, console: Console) -> None:
    RunDirectory(hosts.place, "digits").set_state(RunState.FINISHED, 30, asked=30)
    idle(hosts)
    refuse = fake_hosts.raises(OperatorMistake("program p:P: build_model failed"))
    with pytest.raises(OperatorMistake, match="build_model failed"):
        queue_add(cluster(hosts), replace(console, ship=refuse), QueueRequest("broken"))
    assert hosts.queue.present() is None
    assert "broken is taken back\n" in fake_hosts.printed(console)


def test_a_run_that_is_added_beside_another_start_waits(hosts: Hosts, console: Console) -> None:
    RunDirectory(hosts.place, "digits").set_state(RunState.FINISHED, 30, asked=30)
    idle(hosts)
    hosts.held = Answer("taken by a start of ann@laptop since 10:41:07 UTC")
    queue_add(cluster(hosts), console, QueueRequest("next"))
    assert [each.name for each in hosts.queue.in_order()] == ["next"]
    output = fake_hosts.printed(console)
    assert "taken by a start of ann@laptop since 10:41:07 UTC" in output
    assert "next waits. If nothing begins it: fab start-cluster --queue\n" in output
    assert hosts.done == []


def test_a_cluster_that_was_stopped_by_hand_stays_stopped(hosts: Hosts, console: Console) -> None:
    stop_cluster(cluster(hosts), console, "maintenance")
    assert json.loads(hosts.lines[-1])["reason"] == "maintenance"
    hosts.done.clear()
    queue_add(cluster(hosts), console, QueueRequest("next"))
    assert hosts.done == []
    assert "the cluster is stopped: `fab start-cluster` proves what waits" in fake_hosts.printed(console)
    start_cluster(cluster(hosts), console, StartRequest())
    assert "start chief-0" in hosts.done


def test_a_coordinator_that_has_just_found_the_queue_empty_is_started_again(hosts: Hosts, console: Console) -> None:
    queue_add(cluster(hosts), console, QueueRequest("one"))
    for run in ("digits", "one"):
        hosts.finish(run)
    looks = iter(range(100))

    def end(_: fake_hosts.FakeHosts) -> None:
        if next(looks) == 4:
            idle(hosts)

    hosts.tick = end
    queue_add(cluster(hosts), console, QueueRequest("two"))
    assert "start chief-0" in hosts.done


def test_a_start_leaves_a_queue_that_is_over_idle_and_says_so(hosts: Hosts, console: Console) -> None:
    queue_add(cluster(hosts), console, QueueRequest("one"))
    hosts.finish("digits")
    hosts.finish("one", RunState.FAILED)
    idle(hosts)
    start_cluster(cluster(hosts), console, StartRequest())
    assert hosts.done == []
    output = fake_hosts.printed(console)
    assert "queue: over, 1 failed; nothing is left to train\n" in output
    assert output.endswith("nothing is left to train, and the cluster stays idle. Add a run: fab queue-add RUN\n")


def test_a_run_of_ones_own_goes_first_and_the_queue_goes_on_when_asked(hosts: Hosts, console: Console) -> None:
    queue_add(cluster(hosts), console, QueueRequest("one"))
    hosts.tick = fake_hosts.train()
    start_cluster(cluster(hosts), console, StartRequest("mine", detach=True))
    assert json.loads(hosts.selection) == {"run": "mine"}
    show_queue(cluster(hosts), console)
    assert fake_hosts.printed(console).endswith("go on with it: fab start-cluster --queue\n")
    start_cluster(cluster(hosts), console, StartRequest(queue=True, reason="his turn"))
    assert json.loads(hosts.selection) == {"queue": {}}
    assert "  select  the queue\n" in fake_hosts.printed(console)
    assert json.loads(hosts.lines[-1])["reason"] == "his turn"


@pytest.mark.parametrize("request_", [StartRequest("mine", queue=True), StartRequest(program="p:P", queue=True)])
def test_the_queue_and_a_run_are_not_asked_for_together(hosts: Hosts, console: Console, request_: StartRequest) -> None:
    with pytest.raises(OperatorMistake, match="--queue goes on with what waits"):
        start_cluster(cluster(hosts), console, request_)


def test_a_program_is_not_laid_over_the_queue(hosts: Hosts, console: Console) -> None:
    queue_add(cluster(hosts), console, QueueRequest("one"))
    with pytest.raises(OperatorMistake, match="the queue is selected, and each of its runs has its own program"):
        start_cluster(cluster(hosts), console, StartRequest(program="p:Q"))


def test_an_empty_queue_is_not_started(hosts: Hosts, console: Console) -> None:
    with pytest.raises(OperatorMistake, match="the queue is empty: add a run with fab queue-add RUN"):
        start_cluster(cluster(hosts), console, StartRequest(queue=True))


def test_who_follows_a_run_is_left_when_the_queue_has_the_next(hosts: Hosts, console: Console) -> None:
    def tick(_: fake_hosts.FakeHosts) -> None:
        begun.setdefault("at", hosts.now)
        seconds = hosts.now - begun["at"]
        name = "digits" if seconds < 10 else "next"
        hosts.run_status = fake_hosts.status("training", int(seconds), hosts.now) | {"run": name}

    begun: dict[str, float] = {}
    hosts.tick = tick
    start_cluster(cluster(hosts), console, StartRequest())
    assert fake_hosts.printed(console).endswith(
        "run digits is trained no more, and another one is. Look: fab status, fab queue\n"
    )


@pytest.mark.parametrize(
    "act",
    [
        lambda *about: queue_remove(*about, "../x"),
        lambda *about: queue_move(*about, "../x", "first"),
        lambda *about: queue_move(*about, "digits", "before:../x"),
    ],
)
def test_a_name_that_no_run_can_have_is_refused_before_a_host_is_asked(
    hosts: Hosts, console: Console, act: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "run", pytest.fail)
    with pytest.raises(OperatorMistake, match=r"'\.\./x' can't name a run"):
        act(cluster(hosts), console)


def test_moves_and_removals_say_what_comes_of_them_and_leave_a_line(hosts: Hosts, console: Console) -> None:
    for name in ("a", "b"):
        queue_add(cluster(hosts), console, QueueRequest(name))
    queue_move(cluster(hosts), console, "b", "first", plan_only=True)
    queue_move(cluster(hosts), console, "b", "first", "it is urgent")
    output = fake_hosts.printed(console)
    assert "the order would be digits, b, a\n  pause   none" in output
    assert "nothing was done. Do it: fab queue-move b --first\n" in output
    assert "the order is digits, b, a\nlook: fab queue\n" in output
    queue_remove(cluster(hosts), console, "a", plan_only=True)
    assert "a" in [point.run for point in hosts.queue.to_prove()]
    queue_remove(cluster(hosts), console, "a", reason="no need")
    queue_remove(cluster(hosts), console, "a")
    assert fake_hosts.printed(console).endswith("a does not wait in the queue, and does not train\nlook: fab queue\n")
    for plan in (True, False):
        with pytest.raises(OperatorMistake, match="digits has begun: with --stop"):
            queue_remove(cluster(hosts), console, "digits", plan_only=plan)
    queue_remove(cluster(hosts), console, "digits", stop=True, plan_only=True)
    assert fake_hosts.printed(console).endswith("Do it: fab queue-remove digits --stop\n")
    queue_remove(cluster(hosts), console, "digits", stop=True)
    acts = [json.loads(line) for line in hosts.lines][4:]
    assert [(act["verb"], act["outcome"], act.get("reason")) for act in acts] == [
        ("queue-move", "begun", "it is urgent"),
        ("queue-move", "done", "it is urgent"),
        ("queue-remove", "begun", "no need"),
        ("queue-remove", "done", "no need"),
        ("queue-remove", "begun", None),
        ("queue-remove", "done", None),
    ]


def test_status_says_that_a_run_is_of_the_queue(hosts: Hosts, console: Console) -> None:
    queue_add(cluster(hosts), console, QueueRequest("next"))
    show_status(cluster(hosts), console)
    assert "\nof the queue: fab queue\n" in fake_hosts.printed(console)


@pytest.mark.parametrize("has_settings", [False, True])
def test_a_rollback_is_refused_to_a_release_that_can_not_read_the_queue(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_settings: bool
) -> None:
    day.keep_releases(hosts, monkeypatch)
    queue_add(cluster(hosts), console, QueueRequest("next"))
    settings = {"program": "p:P", "run": "digits", "shared_dir": str(tmp_path)}
    hosts.lines = [day.shipped("old1", settings if has_settings else None)]
    python = tmp_path / "releases/old1/env/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(older_queue, "RELEASES", str(tmp_path / "releases"))
    monkeypatch.setattr(older_queue, "SETTINGS", str(tmp_path / ("none" if has_settings else "run.json")))
    trainer = older_queue.TRAINER.replace("/etc/trainer/run.json", older_queue.SETTINGS)
    monkeypatch.setattr(older_queue, "TRAINER", trainer)
    answer = hosts._answer

    def run(host: str, script: str) -> Answer:
        if "releases/old1 &&" not in script:
            return answer(host, script)
        root = 'root() { while [ "$1" != -- ]; do shift; done; shift; "$@"; }'
        done = subprocess.run(
            ["sh", "-c", f"{root}\n{script}"],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
            check=False,
        )
        return Answer(done.stdout, done.stderr, done.returncode)

    monkeypatch.setattr(hosts, "_answer", run)
    rollback(cluster(hosts), console, plan_only=True)
    assert "release  abc123 -> old1" in fake_hosts.printed(console)
    queue_file(tmp_path).write_text('{"entries": [{"name": "s", "points": []}]}')  # as an older one reads a search
    for plan_only in (True, False):
        with pytest.raises(OperatorMistake, match=r"old1 can't read the queue, .* has an entry that is none"):
            rollback(cluster(hosts), console, plan_only=plan_only)
    assert (hosts.done, len(hosts.lines)) == ([], 1)
    (hosts.place / "selection.json").write_text('{"run": "digits"}')
    rollback(cluster(hosts), console)
    assert "head has old1" in hosts.done
