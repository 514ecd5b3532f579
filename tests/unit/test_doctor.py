"""Each finding of `fab doctor` has here what causes it; nothing is found where nothing is wrong."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_look
import pytest

from fleet.actions.console import Console
from fleet.doctor import cluster
from fleet.doctor.cluster import judge_control, judge_look
from fleet.doctor.examination import PROBE, Examination
from fleet.doctor.finding import ERROR, WARNING, Finding, joined_findings, render_findings, sorted_findings
from fleet.doctor.hosts import judge_hosts
from fleet.errors import ClusterTrouble, OperatorMistake
from fleet.hosts import agent
from fleet.hosts.cluster import Cluster, Observation
from fleet.hosts.observation import question, read_answer
from fleet.hosts.run import Run
from fleet.hosts.ssh import PREAMBLE, Answer
from fleet.hosts.units import Unit
from fleet.site.inventory import Host
from fleet.verbs import doctor as verb
from tests.unit import fake_hosts
from tests.unit import test_json_output as answers
from tests.unit import test_second_day as day
from tests.unit.stand_ins import put_program
from trainer.cluster.reach.ways import Way

GB = 10**9
INVENTORY = fake_hosts.make_inventory()
FACTS: dict[str, Any] = {
    "apart": 0.1,
    "room": {"/": {"size": 100 * GB, "free": 50 * GB, "files": 10**6, "files_free": 10**6}, "/srv/trainer": None},
    "memory": {"size": 8 * 2**30, "available": 4 * 2**30},
    "memory_pace": 8.0,
    "disk_pace": 200.0,
    "disk_why": "",
    "unmeasured": "",
    "path": {"rc": 0, "why": ""},
    "shared": {"pace": 100.0, "why": ""},
    "listeners": {},
    "units": {"failed": [], "clock": ["chrony.service"]},
    "limits": {"trainer@ps-0.service": 1048576},
    "unreadable": [],
    "proxies": {},
}
UNMEASURED = {"disk_pace": None, "memory_pace": None, "shared": None, "unmeasured": "no memory"}
TAKEN = {"name": "nginx", "pid": "7", "unit": "nginx.service", "address": "*"}


def facts(**changes: Any) -> dict[str, Any]:
    """Return the facts of three hosts, with `store` changed."""
    found = {host: copy.deepcopy(FACTS) for host in INVENTORY.hosts}
    found["store"] |= changes
    return found


def judge(each: Mapping[str, Any]) -> list[Finding]:
    return judge_hosts(INVENTORY, Observation(), each)


def room(**changes: int) -> dict[str, Any]:
    return {"/": {**FACTS["room"]["/"], **changes}}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert judge(facts()) == []
    assert judge(facts(shared=None)) == []
    assert judge(facts(room={"/run": room(free=3 * 10**8)["/"]})) == []


@pytest.mark.parametrize(
    ("changes", "level", "part", "what", "fix"),
    [
        ({"room": room(free=10**8)}, ERROR, "room", "/ has 100 MB free of 100.0 GB", "du -xh"),
        ({"room": room(free=10**9)}, WARNING, "room", "/ has 1,000 MB free", "du -xh"),
        ({"room": {"/srv/trainer": room(free=0)["/"]}}, ERROR, "room", "/srv/trainer has 0 MB free", "fab prune"),
        ({"room": {"/run": room(free=10**6)["/"]}}, ERROR, "room", "/run has 1 MB free", "du -xh /run"),
        ({"room": room(files_free=9)}, WARNING, "room", "room for 9 more files", "du -xh"),
        ({"memory": {"size": 2**30, "available": 2**20}}, WARNING, "memory", "1 MiB of memory are left", "ps"),
        ({"path": {"rc": None, "why": ""}}, ERROR, "shared path", "its check is not installed", "--limit store"),
        ({"path": {"rc": 1, "why": "nothing is mounted"}}, ERROR, "shared path", "nothing is mounted", "remount"),
        ({"shared": {"pace": None, "why": "EROFS"}}, ERROR, "shared path", "can't write to /srv/trainer: EROFS", "df"),
        ({"shared": {"pace": 2.0, "why": ""}}, WARNING, "shared path", "2 MiB/s to the shared path", "nfsiostat"),
        ({"listeners": {"2300": TAKEN}}, ERROR, "ports", "port 2300 of ps-0 is taken by nginx", "stop nginx.service"),
        ({"listeners": {"2300": {**TAKEN, "unit": ""}}}, ERROR, "ports", "nginx (process 7)", "kill 7"),
        ({"units": {"failed": ["psfleet-firewall.service"], "clock": ["x"]}}, ERROR, "units", "failed", "journalctl"),
        ({"units": {"failed": [], "clock": []}}, WARNING, "clock", "no service keeps its clock", "chrony"),
        ({"limits": {"trainer@ps-0.service": 1024}}, WARNING, "limits", "may open 1,024 files", "LimitNOFILE"),
        ({"unreadable": ["/etc/trainer/run.json"]}, ERROR, "umask", "can't read /etc/trainer/run.json", "site.yml"),
        ({"proxies": {"http://p:3128": "refused"}}, WARNING, "proxies", "http://p:3128 of systemd's", "DefaultEnv"),
        ({"apart": 61.0}, ERROR, "clock", "1 min 1 s ahead of the others'", "timedatectl"),
        ({"apart": -30.0}, ERROR, "clock", "30 s behind the others'", "timedatectl"),
        ({"disk_pace": 20.0}, WARNING, "disk", "writes 20 MiB/s to /var/tmp, and its peers 200", "iostat"),
        ({"disk_pace": None, "disk_why": "EROFS"}, ERROR, "disk", "can't be written to /var/tmp: EROFS", "dmesg"),
        ({"disk_pace": None, "disk_why": "no end within 20 s"}, ERROR, "disk", "/var/tmp: no end within", "iostat"),
        (UNMEASURED, WARNING, "disk", "how fast disk, memory and shared path are is unknown: no memory", "free"),
        ({"memory_pace": 0.5}, WARNING, "memory", "copies 0.5 GiB/s of memory, and its peers 8", "top"),
        ({"shared": {"pace": 20.0, "why": ""}}, WARNING, "link", "to the shared path, and its peers 100", "fab ways"),
    ],
)  # fmt: skip
def test_a_fact_that_is_wrong_is_found(changes: dict[str, Any], level: str, part: str, what: str, fix: str) -> None:
    found = [each for each in judge(facts(**changes)) if each.part == part]
    assert [(each.level, each.where) for each in found] == [(level, "store")], judge(facts(**changes))
    assert what in found[0].what
    assert fix in found[0].fix


def test_a_port_that_its_own_task_has_is_right() -> None:
    own = {**TAKEN, "unit": "trainer@ps-0.service"}
    assert judge(facts(listeners={"2300": own})) == []


def test_of_two_hosts_none_is_an_outlier() -> None:
    two = {host: each for host, each in facts(disk_pace=1.0, apart=60.0).items() if host != "far"}
    assert judge(two) == []


def test_a_host_that_is_not_reached_is_found_with_the_way_to_see_why() -> None:
    known = Host("store", "192.0.2.20", user="admin", port=2222, key_file=Path("k"))
    inventory = replace(INVENTORY, hosts={**INVENTORY.hosts, "store": known})
    (found,) = judge_hosts(inventory, Observation(unreachable={"store": "no answer in 10 s"}), {})
    assert (found.level, found.part, found.fix) == (ERROR, "SSH", "ssh -v -i k -p 2222 admin@192.0.2.20")
    other_key = "store shows another host key. If it was made again, remove the old key: ssh-keygen -R store"
    (found,) = judge_hosts(inventory, Observation(unreachable={"store": other_key}), {})
    assert found.fix == "ssh-keygen -R store"


def test_a_host_without_systemd_is_not_taken_for_one_without_ssh(tmp_path: Path) -> None:
    """The real script, where systemctl says what it does in a container; others of its commands fail there too."""
    put_program(tmp_path / "systemctl", "#!/bin/sh\necho Failed to connect to bus: Host is down >&2; exit 1")
    seen, path = Observation(), f"{tmp_path}:{os.environ['PATH']}"
    for host in ("head", "far"):
        command = ["sh", "-c", PREAMBLE + question(INVENTORY, host, True, True, True)]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)
        read_answer(INVENTORY, host, Answer(done.stdout, done.stderr, done.returncode), seen, True)
    found = judge_hosts(INVENTORY, seen, {})
    assert [(each.where, each.part) for each in found] == [("head", "systemd"), ("far", "systemd")]
    assert all(each.what.endswith(".service: Failed to connect to bus: Host is down") for each in found)


@pytest.fixture
def look() -> Examination:
    observation = Observation(
        units={
            task.name: Unit(task.unit, active="active", sub="running", file_state="enabled") for task in INVENTORY.tasks
        },
        listening={task.name: True for task in INVENTORY.tasks if task.port},
        configured={task.name: True for task in INVENTORY.tasks},
        releases=dict.fromkeys(INVENTORY.hosts, "abc"),
        clocks=dict.fromkeys(INVENTORY.hosts, 1000.0),
        run=Run("digits", state="training", updated=999.0, step=5),
    )
    return Examination(observation)


def test_a_cluster_that_trains_is_right(look: Examination) -> None:
    assert judge_look(INVENTORY, look, "abc") == []


def set_run(**changes: Any) -> Callable[[Examination], None]:
    def change(look: Examination) -> None:
        assert look.observation.run is not None
        look.observation.run = replace(look.observation.run, **changes)

    return change


CAUSES: list[tuple[Callable[[Examination], Any], str, str, str, str]] = [
    (lambda look: setattr(look, "unfit", "no lock"), "control machine", "release", "no lock", "fab validate"),
    (lambda look: look.broken.update(far="no python3"), "far", "look", "no python3", "site.yml --limit far"),
    (
        lambda look: look.ways.update(far={"problems": [host_look.clock_problem("far", 0.0, 3e5)], "notes": []}),
        "far", "clock", "its clock is 3.5 days behind", "Set it: `timedatectl set-ntp true`",
    ),
    (lambda look: look.observation.releases.update(far=None), "far", "release", "nothing is installed", "site.yml"),
    (lambda look: look.observation.releases.update(far="old"), "far", "release", "release old", "fab start-cluster"),
    (
        lambda look: setattr(look, "differs", {"far": "/etc/trainer/worker-1.env differs"}),
        "far", "files", "worker-1.env differs", "site.yml --limit far --diff",
    ),
    (
        lambda look: setattr(look, "differs", {"far": "psfleet-firewall.service is not enabled, or does not run"}),
        "far", "firewall", "psfleet-firewall.service is not enabled", "site.yml --limit far",
    ),
    (
        lambda look: look.observation.units.update({"ps-0": Unit("trainer@ps-0.service", active="failed")}),
        "store", "units", "ps-0 is failed", "fab logs --task ps-0",
    ),
    (
        lambda look: setattr(look.observation, "run_error", OperatorMistake("run.json: stepps")),
        "run", "run", "stepps", "fab start-cluster",
    ),
    (set_run(state="failed", message="no such file"), "run digits", "run", "failed: no such file", "fix the"),
    (set_run(without={"worker-1": "given up"}), "run digits", "run", "goes on without worker-1", "--task worker-1"),
    (set_run(ways={"ps-0": {"worker-1": "broken: no answer"}}), "run digits", "addresses and routes", "0 of 1", "ways"),
    (set_run(ways={"ps-0": {"worker-1": "slow, 1 s"}}), "run digits", "addresses and routes", "slow, 1 s", "ways"),
    (set_run(updated=100.0), "run digits", "run", "status says that it trains, and is 15 min old", "fab start-cluster"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "where", "part", "what", "fix"), CAUSES)
def test_what_is_wrong_with_the_whole_is_found(
    look: Examination, cause: Callable[[Examination], Any], where: str, part: str, what: str, fix: str
) -> None:
    cause(look)
    found = [each for each in judge_look(INVENTORY, look, "abc") if each.part == part]
    assert [each.where for each in found] == [where], judge_look(INVENTORY, look, "abc")
    assert what in found[0].what
    assert fix in found[0].fix


def test_what_only_ansible_can_tell_is_no_finding(look: Examination) -> None:
    look.differs = {
        "far": "what it should hold can't be worked out here: x",
        "store": "roles/trainer: only Ansible can",
    }
    assert judge_look(INVENTORY, look, "abc") == []


def test_the_control_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("x")
    key.chmod(0o600)
    inventory = replace(INVENTORY, hosts={"head": Host("head", "192.0.2.1", key_file=key)})
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100 * GB))
    assert judge_control(tmp_path, inventory, []) == []
    key.chmod(0o644)
    assert judge_control(tmp_path, inventory, [])[0].fix == f"chmod 600 {key}"
    key.unlink()
    assert "can't be read" in judge_control(tmp_path, inventory, [])[0].what
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=GB))
    monkeypatch.setattr(cluster, "find_ansible", lambda: (_ for _ in ()).throw(OperatorMistake("not installed")))
    tmp_path.chmod(0o777)
    found = judge_control(tmp_path, None, [cluster.Problem("steps is -1")])
    assert [each.part for each in found] == ["inventory", "Ansible", "rights", "room"]
    tmp_path.chmod(0o755)


def test_errors_come_first_and_each_once() -> None:
    one, other = Finding(WARNING, "a", "room", "w", "m"), Finding(ERROR, "b", "room", "e", "do it")
    assert sorted_findings([one, other, one]) == [other, one]
    shown = render_findings([other, one])
    same = [replace(other, where=host) for host in ("c", "d", "e")]
    assert joined_findings([other, *same, one]) == [replace(other, where="b, c, d and 1 more"), one]
    assert shown.splitlines()[1].split() == ["1", "error", "b", "room", "e"]
    assert "  1  do it" in shown


# The probe itself, on this machine.


@pytest.fixture(scope="module")
def probe() -> Any:
    basic = types.ModuleType("ansible.module_utils.basic")
    basic.AnsibleModule = agent.AnsibleModule  # type: ignore[attr-defined]
    module = types.ModuleType("doctor")
    before = sys.modules.get("ansible.module_utils.basic")
    sys.modules["ansible.module_utils.basic"] = basic
    try:
        exec(compile(PROBE.read_text(), "doctor", "exec"), module.__dict__)
    finally:
        if before is None:
            del sys.modules["ansible.module_utils.basic"]
        else:
            sys.modules["ansible.module_utils.basic"] = before
    return module


def test_a_host_without_a_place_for_temporary_files_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(agent.tempfile, "TemporaryDirectory", refuse)
    step = {"name": "port", "port": 1, "host": "127.0.0.1"}
    assert agent.answer({"steps": [step], "look": ["/nowhere"]})["steps"] == {"port": {"open": False}}


def test_the_probe_measures_room_and_memory(probe: Any, tmp_path: Path) -> None:
    found = probe.room(str(tmp_path))
    assert 0 < found["free"] <= found["size"]
    assert probe.room("/nowhere") is None
    assert 0 < probe.memory()["available"] <= probe.memory()["size"]


def test_the_probe_waits_for_no_path_that_hangs(probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs

    def hang(path: str) -> Any:
        assert path != str(tmp_path), "it would never end"
        return real(path)

    monkeypatch.setattr(os, "statvfs", hang)
    asked = {"shared_dir": str(tmp_path), "path_check": "/nowhere"}
    found = probe.probe({**asked, "units": [], "readable": []})
    assert found["room"][str(tmp_path)]["size"] > 0


def test_the_probe_tries_proxies_and_keeps_their_passwords(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        right = server.getsockname()[1]
        named = f"http_proxy=http://u:geheim@127.0.0.1:1\nhttps_proxy=http://127.0.0.1:{right}\nHTTP_PROXY=nonsense\nLANG=C\n"
        monkeypatch.setattr(probe, "run", lambda *words, **_: (0, named, ""))
        assert probe.proxies() == {
            "http://127.0.0.1:1": "Connection refused",
            "nonsense": "it names no host with a port",
        }


def test_the_probe_says_what_the_check_of_the_path_says(probe: Any, tmp_path: Path) -> None:
    script = tmp_path / "check"
    assert probe.check_path(str(script)) == {"rc": None, "why": ""}
    script.write_text("#!/bin/sh\necho 'shared path: full' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert probe.check_path(str(script)) == {"rc": 1, "why": "shared path: full"}


def test_a_container_has_its_machines_clock(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kept in ((0, ["the container's machine"]), (1, ["chrony.service"])):
        results = {"systemd-detect-virt": (code, "", ""), "systemctl": (0, "chrony.service loaded active\n", "")}
        monkeypatch.setattr(probe, "run", lambda *words, results=results, **_: results[words[0]])
        assert probe.units()["clock"] == kept


def test_what_a_user_cant_read_is_named(probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    asked: list[str] = []
    monkeypatch.setattr(probe, "run", lambda *words, **_: (asked.append(words[-1]) or 1, "", ""))
    assert probe.unreadable([str(tmp_path / "there"), str(tmp_path / "gone")]) == [str(tmp_path / "there")]


# The verb.


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch, look: Examination) -> Examination:
    monkeypatch.setattr(verb, "judge_control", lambda *_: [])
    monkeypatch.setattr(verb, "inventory_problems", lambda _: [])
    monkeypatch.setattr(verb, "try_ways", lambda _: ({}, {}, []))
    monkeypatch.setattr(verb, "examine", lambda _: look)
    look.facts = facts()
    return look


def console_of() -> Console:
    return Console(io.StringIO(), build=lambda _: "abc", json_out=io.StringIO(), progress_out=io.StringIO())


def test_a_right_cluster_ends_with_0_and_says_the_next_command(calm: Examination) -> None:
    console = console_of()
    verb.doctor(Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY)), console)
    assert answers.answer_of(console)["findings"] == []
    assert "nothing is wrong with 3 hosts" in fake_hosts.printed(console)
    assert fake_hosts.printed(console).endswith("next: fab status\n")


def test_a_finding_ends_with_1_and_begins_with_the_worst_fix(calm: Examination) -> None:
    calm.facts = facts(unreadable=["/etc/trainer/run.json"], limits={"trainer@ps-0.service": 1024})
    calm.facts["far"] = {**calm.facts["far"], "limits": {"trainer@ps-0.service": 1024}}  # as the table joins them
    console = console_of()
    with pytest.raises(ClusterTrouble) as ended:
        verb.doctor(Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY)), console)
    assert (ended.value.code, str(ended.value)) == (1, "")
    found = answers.answer_of(console)
    assert (found["errors"], found["warnings"]) == (1, 2)
    assert "\n1 error, 1 warning; begin with: ansible-playbook site.yml --limit store" in fake_hosts.printed(console)


def test_before_the_first_site_yml_only_that_and_what_would_stop_it_is_found(
    calm: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.observation.releases = dict.fromkeys(INVENTORY.hosts)
    calm.observation.services = {"head": [Unit("tensorboard.service")]}
    calm.observation.units = {task.name: Unit(task.unit) for task in INVENTORY.tasks}
    bare = {"path": {"rc": None, "why": ""}, "limits": {"trainer@ps-0.service": 1024}, "room": room(free=10**8)}
    calm.facts = facts(**bare)
    wrong = [f"{host}: sh: cd: can't cd to /opt/trainer/current" for host in INVENTORY.hosts]
    monkeypatch.setattr(verb, "try_ways", lambda _: ({}, {}, wrong))
    console = console_of()
    with pytest.raises(ClusterTrouble):
        verb.doctor(Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY)), console)
    found = {(each["where"], each["part"]): each["fix"] for each in answers.answer_of(console)["findings"]}
    release, full = ("head, store, far", "release"), ("store", "room")
    assert found.keys() == {release, full}
    assert found[release] == "ansible-playbook site.yml"


def test_a_drained_host_that_is_off_is_no_trouble(calm: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calm.observation
    seen.drains["far"], seen.unreachable["far"] = {"host": "far"}, "no route"
    del seen.units["worker-1"], seen.releases["far"], calm.facts["far"]
    set_run(without={"worker-1": "drained"})(calm)
    monkeypatch.setattr(verb, "try_ways", lambda _: ({}, {}, ["ps-0 can't reach worker-1 at 192.0.2.31:2400 (no)"]))
    console = console_of()
    verb.doctor(Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY)), console)
    assert answers.answer_of(console)["findings"] == []


@pytest.mark.parametrize(
    ("change", "outcomes", "at_work", "what"),
    [
        ("drain", ["begun"], None, "drain of w-b, begun by ana@desk 16 min ago, has not ended"),
        ("drain", ["left"], None, "drain of w-b, begun by ana@desk 16 min ago, has not ended"),
        ("drain", ["begun"], "a drain of ana@desk since 10:41:07 UTC", ""),
        ("drain", ["done"], None, ""),
        ("drain", ["failed"], None, ""),
        ("drain", ["begun", "done"], None, ""),  # typed again
        ("drain", [], None, ""),
        ("start-cluster", ["begun"], None, "start-cluster of w-b, begun by ana@desk 16 min ago, has not ended"),
        ("start-cluster", ["left"], None, ""),  # what was started goes on
    ],
)
def test_a_change_that_was_broken_off_is_found(
    calm: Examination,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    outcomes: list[str],
    at_work: str | None,
    what: str,
) -> None:
    calm.observation.clocks["head"] = 1000.0
    hosts = day.make_hosts()
    acts = [{"time": 40.0, "verb": change, "who": "ana", "from": "desk", "hosts": ["w-b"]}] * len(outcomes)
    hosts.lines = [json.dumps({**act, "outcome": each}) for act, each in zip(acts, outcomes, strict=True)]
    hosts.lines.append(json.dumps({"time": 50.0, "verb": "backup", "outcome": "begun"}))  # which changes nothing
    monkeypatch.setattr(verb, "who_is_at_work", lambda *_: at_work)
    found = verb.judge_changes(day.cluster(hosts), calm)
    assert [(each.level, each.part, each.what) for each in found] == ([(WARNING, "history", what)] if what else [])
    hosts.unreachable = dict.fromkeys(hosts.inventory.hosts, "no route")
    assert verb.judge_changes(day.cluster(hosts), calm) == []


def test_a_clock_that_is_ahead_makes_no_run_silent(look: Examination) -> None:
    look.observation.clocks["far"] = 5000.0
    assert judge_look(INVENTORY, look, "abc") == []


def test_a_typed_password_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "read_source", lambda *_, **__: (_ for _ in ()).throw(OperatorMistake("no password")))
    assert [str(each) for each in verb.inventory_problems(INVENTORY)] == ["no password"]
    assert verb.inventory_problems(replace(INVENTORY, vault_password="x")) == []


def test_ways_that_are_broken_or_slow_are_found(calm: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each host found is made up; test_doctor_causes.py has a way without a route, and nothing a slow one."""
    cluster = Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY))
    monkeypatch.setattr(verb, "try_ways", lambda _: ({}, {}, ["worker-1 to ps-0: no answer"]))
    (found,) = verb.judge_ways(cluster, calm)
    assert (found.level, found.fix) == (ERROR, "fab ways")
    paces = {"ps-0": 0.01, "worker-0": 0.01, "worker-1": 0.3}
    rows = {task: {"chief-0": way(seconds)} for task, seconds in paces.items()}
    monkeypatch.setattr(verb, "try_ways", lambda _: (rows, {}, []))
    (found,) = verb.judge_ways(cluster, calm)
    assert (found.level, found.where, found.part) == (WARNING, "far", "link")


def way(seconds: float) -> Way:
    return Way.read({"works": True, "address": "192.0.2.1:2222", "seconds": seconds})


def test_gpus_that_are_not_as_expected_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is made up; test_doctor_causes.py has that of this machine."""
    monkeypatch.setattr(verb, "ask_gpus", lambda *_: ({"far": {"problems": ["no driver"]}}, {}))
    (found,) = verb.judge_gpus(Cluster(INVENTORY, fake_hosts.FakeHosts(INVENTORY)), ["far"])
    assert (found.where, found.part, found.what) == ("far", "GPU", "no driver")


@pytest.mark.parametrize(
    ("pace", "found"),
    [({"disk_pace": 7.0}, {"disk_pace": 7.0, "unmeasured": ""}), ({"failed": True, "msg": "no memory"}, UNMEASURED)],
)
def test_the_hosts_are_asked_all_at_once_and_their_answers_taken(
    monkeypatch: pytest.MonkeyPatch, pace: dict[str, Any], found: dict[str, Any]
) -> None:
    """What the probe found counts where the pace could not be measured, too."""
    from fleet.doctor import examination as looking

    class Short:
        def __init__(self, cluster: Cluster) -> None:
            pass

        def questions(self) -> dict[str, Any]:
            return {"far": {"look": ["/etc/x"], "steps": [], "sources": {}}}

        def judge(self, answers: Mapping[str, Any], hosts: list[str]) -> dict[str, str]:
            return {"far": "/etc/x differs"}

    class Hosts(fake_hosts.FakeHosts):
        def run(self, scripts: Any, timeout: float = 30, data: Any = None) -> dict[str, Answer]:
            if not data:
                return {host: Answer("1000.5\n") for host in scripts}
            given = {host: json.loads(text) for host, text in data.items()}
            wanted = {"doctor", "host_look", "host_pace"}
            assert all(wanted <= each["sources"].keys() for each in given.values())
            paths = {
                step["arguments"]["path"] for each in given.values() for step in each["steps"] if step["name"] == "pace"
            }
            assert paths == {"/srv/trainer"}
            assert {each["steps"][-1]["name"] for each in given.values()} == {"pace"}  # if it fails, all else was done
            steps = {"doctor": {**FACTS}, "pace": pace, "ways": {"problems": [], "notes": []}}
            broken = {"doctor": {"failed": True, "msg": "no disk"}, "pace": {}, "ways": {"failed": True}}
            looks = {host: json.dumps({"steps": broken if host == "head" else steps}) for host in scripts}
            answers = super().run(scripts, timeout)
            looks["store"] = ""
            answers["store"] = replace(answers["store"], stderr="Traceback\nOSError: no place for files\n")
            return {
                host: replace(each, stdout=f"@look\n{looks[host]}\n{each.stdout}") for host, each in answers.items()
            }

    monkeypatch.setattr(looking, "ShortWay", Short)
    seen = looking.examine(Cluster(INVENTORY, Hosts(INVENTORY, run_status=fake_hosts.status("new", None))))
    assert (seen.differs, seen.broken, sorted(seen.facts)) == (
        {"far": "/etc/x differs"},
        {"head": "no disk", "store": "OSError: no place for files"},
        ["far"],
    )
    assert seen.facts["far"]["apart"] < -1e6
    assert {key: seen.facts["far"][key] for key in found} == found
    assert seen.facts["far"]["room"] == FACTS["room"]
