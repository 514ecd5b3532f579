"""What holds for each verb of the second day: its plan, its line in the history, typed twice, left at any moment."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import FleetError, OperatorMistake
from fleet.hosts import history
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.site.inventory import load_inventory
from fleet.verbs.backup import back_up
from fleet.verbs.canary import CanaryRequest, canary
from fleet.verbs.clone_run import clone_run
from fleet.verbs.delete_run import delete_run
from fleet.verbs.drain import drain, undrain
from fleet.verbs.prune import prune
from fleet.verbs.queue import QueueRequest, queue_add, queue_move, queue_remove
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.restore_run import restore_run
from fleet.verbs.rollback import rollback
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from tests.unit import fake_hosts
from tests.unit import test_canary as canaries
from tests.unit import test_plans as plans
from tests.unit import test_queue_verbs as queues
from tests.unit import test_second_day as day
from tests.unit import test_update_hosts as updates
from tests.unit.test_upkeep import make
from trainer.run.directory import run_directories

WHY = "as agreed"
# What they have begun they put back: test_fleet_start_rollback.py, test_short_way.py and test_host_scripts.py.
STARTS = {"start-cluster", "restart-cluster", "sweep"}
# These stop tasks: all of them, or those of the host that they name.
STOPPING = {"stop-cluster", "drain", "undrain", "update-hosts", "rollback", "remove-host", "replace-host"}


@dataclass
class Deed:
    """A verb on pretended hosts, what it changes there, and the outcomes of its first call and of a second one."""

    hosts: Any
    do: Callable[[Console, bool], None]
    look: Callable[[], Any]
    first: str = "done"
    second: str = "nothing to do"

    def call(self, plan: bool = False) -> tuple[str, str]:
        """Return the outcome, and what was printed."""
        answers = io.StringIO()
        release = "new" if isinstance(self.hosts, canaries.Hosts) else "abc123"
        console = fake_hosts.console_of(self.hosts, release, json_out=answers)
        self.do(console, plan)
        record = json.loads(answers.getvalue())  # a stop's is that of fab status, with what was planned
        outcome = record["outcome"] if "outcome" in record else "planned" if record["planned"] else "done"
        return str(outcome), fake_hosts.printed(console)

    def state(self) -> Any:
        units = {name: (unit.up, unit.parked, unit.file_state) for name, unit in self.hosts.units.items()}
        return units, self.hosts.release, self.look()


Make = Callable[[plans.Case], Deed]


def drains(hosts: day.Hosts) -> Any:
    return set(hosts.marks), set(hosts.recorded), set(hosts.leavers)


def stop(case: plans.Case) -> Deed:
    hosts = day.make_hosts()
    return Deed(
        hosts, lambda console, plan: stop_cluster(day.cluster(hosts), console, WHY, plan), lambda: None, second="done"
    )


def leave(case: plans.Case) -> Deed:
    hosts = day.make_hosts()
    return Deed(
        hosts, lambda console, plan: drain(day.cluster(hosts), console, "ps-b", WHY, plan), lambda: drains(hosts)
    )


def come_back(case: plans.Case) -> Deed:
    hosts = day.make_hosts()
    drain(day.cluster(hosts), case.console(hosts), "ps-b")

    def act(console: Console, plan: bool) -> None:
        undrain(day.cluster(hosts), console, "ps-b", WHY, plan)

    return Deed(hosts, act, lambda: drains(hosts))


def update(case: plans.Case) -> Deed:
    hosts = updates.make_hosts()
    hosts.updates = {"ps-b": ["openssl"], "w-a": ["openssl"], "head": ["openssl"]}
    hosts.reboots = {"ps-b": "linux-image", "head": "linux-image"}
    ask = {"reason": WHY}

    def act(console: Console, plan: bool) -> None:
        update_hosts(day.cluster(hosts), console, UpdateRequest(**ask, plan_only=plan))  # type: ignore[arg-type]

    return Deed(hosts, act, lambda: (drains(hosts), hosts.updates, hosts.reboots))


def try_out(case: plans.Case) -> Deed:
    hosts = canaries.make_hosts(case.monkeypatch)

    def act(console: Console, plan: bool) -> None:
        canary(day.cluster(hosts), console, CanaryRequest("w-b", 20, reason=WHY, plan_only=plan))

    return Deed(hosts, act, lambda: hosts.done[-1:] in ([], ["end on w-b"]), "passed", "passed")


def go_back(case: plans.Case) -> Deed:
    hosts = day.keep_releases(day.make_hosts(), case.monkeypatch)
    then = {host: names for host, names in history.members_of(hosts.inventory).items() if host != "ps-b"}
    hosts.lines = [day.shipped(name, day.NOW, members=then) for name in ("old2", "old1")]
    hosts.lines.append(day.shipped("abc123", day.NOW))
    return Deed(
        hosts, lambda console, plan: rollback(day.cluster(hosts), console, None, WHY, plan), lambda: drains(hosts)
    )


def of_a_site(case: plans.Case) -> tuple[day.Hosts, Path]:
    hosts, place = case.hosts_of_a_site(), case.path / "mine"
    drain(day.cluster(hosts), case.console(hosts), "w-a")
    return hosts, place


def take_away(case: plans.Case) -> Deed:
    hosts, place = of_a_site(case)

    def act(console: Console, plan: bool) -> None:
        remove_host(Cluster(load_inventory(str(place)), hosts), console, "w-a", WHY, plan)

    return Deed(hosts, act, lambda: (hosts.recorded, (place / "hosts.yml").read_text()))


def replace(case: plans.Case) -> Deed:
    hosts, place = of_a_site(case)
    written: dict[str, Any] = {}
    case.monkeypatch.setattr(Cluster, "_write_shared", lambda _, name, record: written.update({name: record}))

    def act(console: Console, plan: bool) -> None:
        replace_host(Cluster(load_inventory(str(place)), hosts), console, "w-a", "w-x", "192.0.2.99", WHY, plan)

    return Deed(hosts, act, lambda: (hosts.recorded, dict(written), (place / "hosts.yml").read_text()))


def wait_in_turn(case: plans.Case) -> Deed:
    hosts = queues.make_hosts(case.path)

    def act(console: Console, plan: bool) -> None:
        queue_add(queues.cluster(hosts), console, QueueRequest("next", reason=WHY), plan_only=plan)

    return Deed(hosts, act, lambda: order(hosts), second="there already")


def with_queue(case: plans.Case) -> queues.Hosts:
    hosts = queues.make_hosts(case.path)
    for name in ("next", "last"):
        queue_add(queues.cluster(hosts), case.console(hosts), QueueRequest(name))
    hosts.lines = []
    return hosts


def order(hosts: queues.Hosts) -> list[str]:
    """Return what trains and waits; nothing where no queue was made yet."""
    entries = hosts.queue.entries if (hosts.place / "queue.json").exists() else []
    return [entry.name for entry in entries if "removed" not in entry.record]


def move(case: plans.Case) -> Deed:
    hosts = with_queue(case)

    def act(console: Console, plan: bool) -> None:
        queue_move(queues.cluster(hosts), console, "last", "first", WHY, plan)

    return Deed(hosts, act, lambda: order(hosts), second="done")


def take_out(case: plans.Case) -> Deed:
    hosts = with_queue(case)

    def act(console: Console, plan: bool) -> None:
        queue_remove(queues.cluster(hosts), console, "next", reason=WHY, plan_only=plan)

    return Deed(hosts, act, lambda: order(hosts), second="not there")


def of_runs(case: plans.Case) -> tuple[Cluster, Callable[[], Any]]:
    config = case.config()
    for number, name in enumerate(["old", "digits"]):
        directory = make(config, name)
        for path in (directory.status, directory.state, directory.settings):
            os.utime(path, (number, number))
    cluster = case.keeper()

    def look() -> Any:
        copies = sorted(path.name for path in (case.path / "backups").iterdir())
        return copies, [each.run for each in run_directories(Path(config.shared_dir))]

    return cluster, look


def copy(case: plans.Case) -> Deed:
    cluster, look = of_runs(case)
    to = str(case.path / "backups")
    return Deed(
        cluster.hosts,
        lambda console, plan: back_up(cluster, console, "digits", to, plan, WHY),
        look,
        second="there already",
    )


def take_back(case: plans.Case) -> Deed:
    cluster, look = of_runs(case)
    back_up(cluster, case.console(cluster.hosts), "digits", str(case.path / "backups"))
    where = str(case.path / "backups/digits@20")
    return Deed(
        cluster.hosts,
        lambda console, plan: restore_run(cluster, console, where, "again", plan, WHY),
        look,
        second="there already",
    )


def clone(case: plans.Case) -> Deed:
    cluster, look = of_runs(case)
    return Deed(
        cluster.hosts,
        lambda console, plan: clone_run(cluster, console, "digits", "twin", plan, WHY),
        look,
        second="there already",
    )


def delete(case: plans.Case) -> Deed:
    cluster, look = of_runs(case)
    return Deed(
        cluster.hosts,
        lambda console, plan: delete_run(cluster, console, "old", True, plan, WHY),
        look,
        second="not there",
    )


def remove_old(case: plans.Case) -> Deed:
    cluster, look = of_runs(case)
    return Deed(
        cluster.hosts, lambda console, plan: prune(cluster, console, 1, ["runs"], True, plan, WHY), look, second="done"
    )


DEEDS: Mapping[str, Make] = {
    "stop-cluster": stop,
    "queue-add": wait_in_turn,
    "queue-move": move,
    "queue-remove": take_out,
    "drain": leave,
    "undrain": come_back,
    "update-hosts": update,
    "canary": try_out,
    "rollback": go_back,
    "remove-host": take_away,
    "replace-host": replace,
    "delete-run": delete,
    "prune": remove_old,
    "backup": copy,
    "restore-run": take_back,
    "clone-run": clone,
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The history's lines, which the hosts get too."""
    found: list[dict[str, Any]] = []
    write = history._script_of

    def noted(inventory: Any, line: Mapping[str, Any], settings: bool) -> str:
        found.append(dict(line))
        return write(inventory, line, settings)

    monkeypatch.setattr(history, "_script_of", noted)
    return found


def make_deed(verb: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Deed:
    path.mkdir(exist_ok=True)
    return DEEDS[verb](plans.Case(path, monkeypatch))


def test_each_verb_with_a_plan_is_here() -> None:
    assert DEEDS.keys() == plans.CASES.keys() - STARTS


@pytest.mark.parametrize("verb", DEEDS)
def test_a_plan_does_nothing_and_names_the_command(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]
) -> None:
    deed = make_deed(verb, tmp_path, monkeypatch)
    lines.clear()
    before = deed.state(), list(deed.hosts.done), list(deed.hosts.holds)
    outcome, printed = deed.call(plan=True)
    assert (outcome, lines) == ("planned", [])
    assert (deed.state(), deed.hosts.done, deed.hosts.holds) == before
    assert re.search(rf"[Dd]o it: fab {verb}\b.* --reason '{WHY}'", printed), printed


@pytest.mark.parametrize("verb", DEEDS)
def test_what_is_done_leaves_its_reason_and_says_what_comes_next(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]
) -> None:
    deed = make_deed(verb, tmp_path, monkeypatch)
    lines.clear()
    outcome, printed = deed.call()
    assert outcome == deed.first
    noted = [line for line in lines if line["verb"] == verb]
    assert [(line["outcome"], line["reason"]) for line in (noted[0], noted[-1])] == [("begun", WHY), ("done", WHY)]
    assert all(line["who"] and line["from"] for line in noted)
    assert re.search(r"fab [a-z-]+|ansible-playbook site.yml", printed.splitlines()[-1]), printed


@pytest.mark.parametrize("verb", DEEDS.keys() - STOPPING)
def test_what_trains_is_not_touched(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deed = make_deed(verb, tmp_path, monkeypatch)
    units = deed.state()[0]
    deed.hosts.done.clear()
    assert deed.call()[0] == deed.first
    assert deed.state()[0] == units
    assert [each for each in deed.hosts.done if each.split()[0] in ("start", "stop", "park", "go")] == []


@pytest.mark.parametrize("verb", DEEDS)
def test_typed_twice_it_changes_nothing_more(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deed = make_deed(verb, tmp_path, monkeypatch)
    deed.call()
    before = deed.state()
    assert (deed.call()[0], deed.state()) == (deed.second, before)


@pytest.mark.parametrize("verb", DEEDS)
@pytest.mark.parametrize("fault", ["left", "killed", "lost"])
def test_what_ends_at_any_question_to_the_hosts_goes_on(
    verb: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first script that the hosts get, before the second, and so on.

    Or the control machine is lost after each of them, or it is one that no host answers.
    """
    whole = make_deed(verb, tmp_path / "whole", monkeypatch)
    number = disturb(whole.hosts, monkeypatch, 0, fault)
    whole.call()
    for at in range(1, len(number) + 1):
        deed = make_deed(verb, tmp_path / str(at), monkeypatch)
        with monkeypatch.context() as patch:
            disturb(deed.hosts, patch, at, fault)
            with contextlib.suppress(FleetError) if fault == "lost" else pytest.raises((KeyboardInterrupt, Killed)):
                deed.call()
        assert deed.call()[0] in (deed.first, deed.second), at
        if (fault, verb) != ("lost", "rollback"):  # hosts that it can't drain are said, and stay
            assert comparable(deed, tmp_path / str(at)) == comparable(whole, tmp_path / "whole"), at


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "done"])
@pytest.mark.parametrize("verb", DEEDS)
def test_what_another_cluster_has_is_not_changed(
    verb: str, plan: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]
) -> None:
    """As where an inventory was copied: the coordinator's host, and with it runs and queue, are another cluster's."""
    deed = make_deed(verb, tmp_path, monkeypatch)
    look, note = deed.hosts._observe, json.dumps({"name": "198.51.100.7"})
    monkeypatch.setattr(deed.hosts, "_observe", lambda host, *more: f"{look(host, *more)}\n@cluster\n{note}\n")
    lines.clear()
    before = deed.state()
    with pytest.raises(OperatorMistake, match=r"host 'head': it belongs to the cluster 198\.51\.100\.7"):
        deed.call(plan)
    assert (deed.state(), lines) == (before, [])


@pytest.mark.parametrize("verb", DEEDS)
def test_a_cluster_that_another_stops_meanwhile_stays_stopped(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each question to the hosts, but for a start itself: what is under way then is no more held up."""
    for deed in meanwhile(verb, tmp_path, monkeypatch, lambda hosts: day.stop_meanwhile(hosts)):
        assert {name for name, unit in deed.hosts.units.items() if unit.up or unit.enabled} == set()


@pytest.mark.parametrize("verb", DEEDS)
def test_a_training_that_ends_meanwhile_holds_up_no_verb(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(hosts: Any) -> None:
        hosts.tick = lambda _: None
        hosts.run_status = fake_hosts.status("finished", 30, hosts.now)
        hosts.set_all(active="inactive", sub="dead", result="success")

    for deed in meanwhile(verb, tmp_path, monkeypatch, end):
        with contextlib.suppress(FleetError):  # as that nothing trains
            deed.call()
        if isinstance(deed.hosts, day.Hosts):
            assert deed.hosts.recorded.keys() <= deed.hosts.marks.keys()  # no drain is left half done


def meanwhile(verb: str, path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Any], None]) -> Iterator[Deed]:
    """Yield what a verb left where something happened before its first question to the hosts, its second, and so on."""
    for at in itertools.count(1):
        deed = make_deed(verb, path / str(at), monkeypatch)
        happened: list[bool] = []
        with monkeypatch.context() as patch, contextlib.suppress(FleetError):
            patch.setattr(deed.hosts, "run", before_call(at, deed.hosts, happens, happened))
            deed.call()
        if not happened:
            return
        yield deed


def before_call(at: int, hosts: Any, happens: Callable[[Any], None], happened: list[bool]) -> Callable[..., Any]:
    """Return the hosts' `run` before whose call number `at`, unless that is a start, something happens."""
    ask, calls = hosts.run, itertools.count(1)

    def run(scripts: Mapping[str, str], *words: Any, **more: Any) -> Any:
        is_start = any("systemctl start" in script for script in scripts.values())
        if next(calls) >= at and not happened and not is_start:
            happened.append(True)
            happens(hosts)
        return ask(scripts, *words, **more)

    return run


class Killed(BaseException):
    """The control machine is lost."""


def disturb(hosts: Any, patch: pytest.MonkeyPatch, at: int, fault: str) -> list[None]:
    """Have something happen at the hosts' call number `at`; returns as many entries as there were calls."""
    calls: list[None] = []

    def counted(ask: Callable[..., Any], is_lock: bool) -> Callable[..., Any]:
        def run(*words: Any, **more: Any) -> Any:
            calls.append(None)
            if fault == "killed" and 0 < at <= len(calls):
                if len(calls) == at:
                    ask(*words, **more)
                raise Killed
            if len(calls) == at and fault == "left":
                raise KeyboardInterrupt
            if len(calls) == at and not is_lock:
                return dict.fromkeys(words[0], Answer(unreachable="no route"))
            return ask(*words, **more)

        return run

    for name in ("run", "follow", "hold"):
        patch.setattr(hosts, name, counted(getattr(hosts, name), name == "hold"))
    return calls


def comparable(deed: Deed, path: Path) -> str:
    return repr(deed.state()).replace(str(path), "")
