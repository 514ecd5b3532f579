"""A machine goes for good, or another takes its place: the inventory's lines, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret

from fleet.actions.console import Console
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CLEAN
from fleet.hosts.removed_hosts import REMOVED
from fleet.hosts.ssh import Answer
from fleet.site.inventory import find_problems, load_inventory
from fleet.site.reader import read_source
from fleet.verbs.drain import drain, set_aside
from fleet.verbs.remove_host import remove_host, replace_host
from tests.unit import fake_hosts
from tests.unit.stand_ins import put_program
from tests.unit.test_second_day import Hosts

HOSTS = """---
# Ours.
chief:
  hosts:
    head: {ansible_host: 192.0.2.10}
ps:
  hosts:
    ps-a:
      ansible_host: 192.0.2.20
    # The one with the large disk.
    ps-b:
      ansible_host: 192.0.2.21
worker:
  hosts:
    w-a:
      ansible_host: 192.0.2.30
    w-b:
      ansible_host: 192.0.2.31

    # Bought last.
    w-c: {ansible_host: 192.0.2.32}
near:
  hosts:
    w-a:
    w-b:
"""
VARIABLES = """---
cluster_shared_dir: /srv/trainer
cluster_uid: 6006
trainer_run: {program: 'trainer.examples.digits:Digits', run: digits, steps: 30}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_site(tmp_path / "mine")


def make_site(place: Path) -> Path:
    (place / "group_vars").mkdir(parents=True)
    (place / "hosts.yml").write_text(HOSTS)
    (place / "group_vars/all.yml").write_text(VARIABLES)
    return place


@pytest.fixture
def hosts(place: Path) -> Any:
    return hosts_of(place)


def hosts_of(place: Path, kind: type[Hosts] = Hosts) -> Any:
    """The hosts of a site, on which its run trains."""
    found = kind(load_inventory(str(place)), run_status=fake_hosts.status("training", 20))
    found.set_all(file_state="enabled", **fake_hosts.UP)
    return found


def cluster(hosts: Hosts) -> Cluster:
    return Cluster(hosts.inventory, hosts)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is written to the shared path, by its name there, instead of writing it."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(Cluster, "_write_shared", lambda self, name, record: found.update({name: record}))
    return found


def tasks(place: Path) -> dict[str, tuple[str, str]]:
    return {task.name: (task.host, task.address) for task in load_inventory(str(place)).tasks}


def test_a_host_that_leaves_the_middle_moves_no_number(place: Path, hosts: Hosts, console: Console) -> None:
    before = tasks(place)
    drain(cluster(hosts), console, "w-a", "sold")
    remove_host(cluster(hosts), console, "w-a", "sold")
    assert tasks(place) == {name: each for name, each in before.items() if each[0] != "w-a"}
    text = (place / "hosts.yml").read_text()
    assert "w-a" not in text
    assert "# Bought last.\n    w-c: {worker_index: 2, ansible_host: 192.0.2.32}" in text
    assert "    w-b:\n      worker_index: 1\n      ansible_host: 192.0.2.31\n" in text
    (backup,) = place.parent.glob("mine.hosts.yml.before-*")
    assert backup.read_text() == HOSTS
    assert hosts.recorded == {}
    assert hosts.leavers == set()
    inventory = load_inventory(str(place))
    remove_host(Cluster(inventory, hosts), console, "w-a")  # typed twice
    assert "has no host w-a with a task: it is removed already" in fake_hosts.printed(console)


def test_the_coordinators_host_keeps_who_left_and_forgets_who_came(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    asked: list[tuple[str, str]] = []
    run = hosts.run

    def note(scripts: Any, *more: Any) -> Any:
        asked.extend((host, script) for host, script in scripts.items() if REMOVED in script)
        return run(scripts, *more)

    monkeypatch.setattr(hosts, "run", note)
    for name in ("w-a", "w-b"):
        drain(cluster(hosts), console, name)
    remove_host(cluster(hosts), console, "w-a", plan_only=True)
    assert asked == []
    remove_host(cluster(hosts), console, "w-a")
    [(host, script)] = asked
    assert (host, script.split()[-2]) == ("head", "w-a")
    asked.clear()
    replace_host(cluster(hosts), console, "w-b", "w-d", "192.0.2.99")
    (_, forgotten), (host, noted) = asked
    assert f"rm -f {REMOVED}/w-d" in forgotten
    assert (host, noted.split()[-2]) == ("head", "w-b")


def test_a_removal_that_is_not_kept_is_said_and_done_all_the_same(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    run = hosts.run

    def refuse(scripts: Any, *more: Any) -> Any:
        full = {host: Answer(stderr="No space left\n", code=2) for host, each in scripts.items() if REMOVED in each}
        return run(scripts, *more) | full

    for name in ("w-a", "w-b"):
        drain(cluster(hosts), console, name)
    monkeypatch.setattr(hosts, "run", refuse)
    remove_host(cluster(hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-b", "w-d", "192.0.2.99")
    found = re.findall(r"head does not keep that (\S+) was taken out \((.*)\)", fake_hosts.printed(console))
    assert found == [("w-a", "No space left"), ("w-b", "No space left")]


def test_an_inventory_is_never_half_written(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(cluster(hosts), console, "w-a", "sold")
    (place / "hosts.yml").chmod(0o640)
    before, write = (place / "hosts.yml").read_text(), Path.write_bytes

    def end(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        os._exit(9)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "write_bytes", end)
        remove_host(cluster(hosts), console, "w-a", "sold")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (place / "hosts.yml").read_text() == before
    remove_host(cluster(hosts), console, "w-a", "sold")
    assert "w-a" not in (place / "hosts.yml").read_text()
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []
    assert (place / "hosts.yml").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("written", [0, 1], ids=["the backup", "the file"])
def test_an_inventory_that_cant_be_written_is_whole_and_changed_by_hand(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    drain(cluster(hosts), console, "w-a")
    before = (place / "hosts.yml").read_text()
    fail = fake_hosts.raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    copy = shutil.copy2
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil,
            "copy2",
            lambda source, to: copy(source, to) if Path(source).name == "hosts.yml" and written else fail(),
        )
        patch.setattr(Path, "write_bytes", fail)
        remove_host(cluster(hosts), console, "w-a")
    said = fake_hosts.printed(console)
    assert f"change {place} by hand (it can't be written: [Errno 28] No space left on device)" in said
    assert "remove the host w-a from each group" in said
    assert (place / "hosts.yml").read_text() == before
    assert [path.name for path in place.parent.glob("*.before-*")] == []
    remove_host(cluster(hosts), console, "w-a")
    assert "w-a" not in (place / "hosts.yml").read_text()


@pytest.mark.parametrize("shut", ["mine", "mine/hosts.yml"])
def test_a_plan_says_that_an_inventory_may_only_be_read(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, shut: str
) -> None:
    access = os.access  # of root, whom no mode stops
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place.parent / shut and access(path, mode))
    drain(cluster(hosts), console, "w-a")
    before = (place / "hosts.yml").read_text()
    remove_host(cluster(hosts), console, "w-a", plan_only=True)
    why = f"{place}/hosts.yml can't be written"
    assert f"{place} is to be changed by hand: {why}" in fake_hosts.printed(console)
    remove_host(cluster(hosts), console, "w-a")
    assert f"change {place} by hand ({why}):" in fake_hosts.printed(console)
    assert (place / "hosts.yml").read_text() == before


def test_the_last_of_a_group_leaves_the_others_as_they_are(place: Path, hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "ps-b")
    remove_host(cluster(hosts), console, "ps-b")
    text = HOSTS.replace("    ps-b:\n      ansible_host: 192.0.2.21\n", "")
    assert (place / "hosts.yml").read_text() == text


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("w-a", "worker-0 on w-a runs: fab drain w-a first"),
        ("head", "head has the coordinator, and the training stands still without it"),
    ],
)
def test_a_host_that_takes_part_is_not_removed(
    place: Path, hosts: Hosts, console: Console, host: str, message: str
) -> None:
    with pytest.raises(OperatorMistake, match=message):
        remove_host(cluster(hosts), console, host)
    assert (place / "hosts.yml").read_text() == HOSTS
    assert hosts.lines == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("W-A", "no host 'W-A' with a task. Did you mean w-a?"),
        ("192.0.2.30", "192.0.2.30 is the address of w-a. Did you mean w-a?"),
        ("worker-0", "worker-0 is a task, on w-a. Did you mean w-a?"),
    ],
)
def test_a_host_by_another_name_is_not_removed_already(hosts: Hosts, console: Console, name: str, why: str) -> None:
    with pytest.raises(OperatorMistake, match=re.escape(why)):
        remove_host(cluster(hosts), console, name)


def test_a_name_that_no_host_has_is_said_with_what_is_like_it(hosts: Hosts, console: Console) -> None:
    remove_host(cluster(hosts), console, "w-aa")
    assert "removed already, or never had one. Did you mean w-a? It has: head, ps-a" in fake_hosts.printed(console)


def test_a_dead_host_is_removed(place: Path, hosts: Hosts, console: Console) -> None:
    hosts.unreachable["w-c"] = "no route"
    remove_host(cluster(hosts), console, "w-c")
    assert "w-c does not answer, and was not cleaned" in fake_hosts.printed(console)
    assert "worker-2" not in tasks(place)


def test_a_host_is_not_removed_beside_a_start(place: Path, hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-a")
    hosts.held = Answer("taken by a site.yml of ann@laptop since 10:41:07 UTC")
    with pytest.raises(OperatorMistake, match=r"this cluster is taken by a site.yml of ann@laptop"):
        remove_host(cluster(hosts), console, "w-a")
    with pytest.raises(OperatorMistake, match="this cluster is taken by"):
        replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99", plan_only=True)
    assert (place / "hosts.yml").read_text() == HOSTS


def test_a_plan_changes_nothing(place: Path, hosts: Hosts, console: Console) -> None:
    console.json_out = io.StringIO()
    drain(cluster(hosts), console, "w-a")
    remove_host(cluster(hosts), console, "w-a", plan_only=True)
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99", plan_only=True)
    with pytest.raises(OperatorMistake, match="w-b stays: worker-1 on w-b runs"):
        remove_host(cluster(hosts), console, "w-b", plan_only=True)
    assert (place / "hosts.yml").read_text() == HOSTS
    assert "refused worker-1 on w-b runs: fab drain w-b first" in fake_hosts.printed(console)
    assert isinstance(console.json_out, io.StringIO)
    assert re.findall(r'"next": "([^"]+)"', console.json_out.getvalue()) == [
        "fab undrain w-a",
        "fab remove-host w-a",
        "fab replace-host w-a w-x --address 192.0.2.99",
        "fab hosts",
    ]


def test_a_new_host_takes_the_place_and_the_number(
    place: Path, hosts: Hosts, console: Console, written: dict[str, Any]
) -> None:
    before = tasks(place)
    drain(cluster(hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert tasks(place) == {**before, "worker-0": ("w-x", "192.0.2.99")}
    assert (place / "hosts.yml").read_text() == HOSTS.replace("w-a", "w-x").replace("192.0.2.30", "192.0.2.99")
    assert written == {"replaced.json": {"worker-0": ["192.0.2.30:2400", "w-a"]}}  # the old one's tasks stay out
    with pytest.raises(OperatorMistake, match="has a host 'w-b' already"):
        replace_host(Cluster(load_inventory(str(place)), hosts), console, "w-x", "w-b")


def test_with_encryption_the_address_that_counts_is_the_tunnels(
    place: Path, hosts: Hosts, console: Console, written: dict[str, Any]
) -> None:
    (place / "group_vars/all.yml").write_text(f"{VARIABLES}cluster_encryption: true\n")
    hosts.inventory = load_inventory(str(place))
    drain(cluster(hosts), console, "w-a")
    before = tasks(place)["worker-0"][1]
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert (place / "hosts.yml").read_text() == HOSTS.replace("w-a", "w-x").replace("192.0.2.30", "192.0.2.99")
    assert written == {"replaced.json": {"worker-0": [f"[{before}]:2400", "w-a"]}}


def test_machines_that_were_replaced_before_stay_out_where_only_the_trainer_may_look(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    known = {"ps-0": ["192.0.2.20:2300"]}

    def read(self: Cluster, script: str, trouble: str) -> Answer:
        root = f"root() {{ echo {shlex.quote(json.dumps(known))}; }}; "
        done = subprocess.run(["sh", "-c", root + script], capture_output=True, text=True, check=True)
        return Answer(done.stdout)

    monkeypatch.setattr(Cluster, "on_shared", read)
    cluster(hosts).replace_tasks({"worker-0": ({"w-a", "192.0.2.30:2400"}, {"w-x", "192.0.2.99:2400"})})
    assert written == {"replaced.json": {**known, "worker-0": ["192.0.2.30:2400", "w-a"]}}


EVALUATOR = "evaluator:\n  hosts:\n    helper: {ansible_host: 192.0.2.40}\n"


@pytest.mark.parametrize(
    ("old", "address", "kept_out"),
    [
        ("helper", "192.0.2.99", {"evaluator-0": ["helper"]}),
        ("w-a", "192.0.2.30", {"worker-0": ["w-a"]}),
        ("head", "192.0.2.99", {"chief-0": ["192.0.2.10:2222", "head"]}),
    ],
)
def test_a_dead_machine_stays_out_by_its_name_also_without_an_address_of_its_own(
    place: Path,
    hosts: Hosts,
    console: Console,
    written: dict[str, Any],
    old: str,
    address: str,
    kept_out: dict[str, list[str]],
) -> None:
    place = elsewhere(place)
    (place / "hosts.yml").write_text(HOSTS + EVALUATOR)
    hosts.unreachable[old] = "no route"
    there = read_again(place, hosts)
    hosts.__post_init__()  # with the evaluator's unit
    replace_host(there, console, old, "new", address)
    assert written == {"replaced.json": kept_out}
    same = address == "192.0.2.30"
    assert ("new gets the address of w-a: keep w-a off this network" in fake_hosts.printed(console)) is same
    assert "keep it off" not in fake_hosts.printed(console)


def test_a_machine_that_is_replaced_by_the_one_before_is_taken_back(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    monkeypatch.setattr(Cluster, "on_shared", lambda *_: Answer(json.dumps(written.get("replaced.json", {}))))
    hosts.unreachable["w-a"] = hosts.unreachable["w-x"] = "no route"
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    replace_host(read_again(place, hosts), console, "w-x", "w-a", "192.0.2.30")
    assert written == {"replaced.json": {"worker-0": ["192.0.2.99:2400", "w-x"]}}


@pytest.mark.parametrize(
    ("old", "variables", "kept_off"),
    [
        ("w-a", "cluster_shared_dir: ''\n", "until site.yml has run"),
        ("head", "cluster_shared_dir: ''\n", "until site.yml has run"),
        ("head", "cluster_shared_dir: ''\nfirewall_closes: none\n", "for good"),
        ("head", "firewall_closes: none\n", None),
        ("w-a", "", None),
    ],
)
def test_where_no_path_says_that_a_machine_is_replaced_the_verb_does(
    place: Path, hosts: Hosts, console: Console, old: str, variables: str, kept_off: str | None
) -> None:
    place = elsewhere(place)
    kept = VARIABLES if "shared" not in variables else VARIABLES.replace("cluster_shared_dir: /srv/trainer\n", "")
    (place / "group_vars/all.yml").write_text(kept + variables)
    hosts.unreachable[old] = "no route"
    replace_host(read_again(place, hosts), console, old, "new", "192.0.2.99", plan_only=True)
    found = re.findall(rf"nothing on {old} will say that it is replaced: keep it off (.*)", fake_hosts.printed(console))
    assert found == ([kept_off] if kept_off else [])


def test_the_dead_server_of_the_shared_path_is_kept_off_by_the_operator(
    place: Path, hosts: Hosts, console: Console
) -> None:
    place = elsewhere(place)
    (place / "hosts.yml").write_text(f"{HOSTS}nfs_server:\n  hosts:\n    head:\n")
    hosts.unreachable["head"] = "no route"
    replace_host(read_again(place, hosts), console, "head", "new", "192.0.2.99", plan_only=True)
    assert "nothing on head will say that it is replaced: keep it off until site.yml" in fake_hosts.printed(console)


def test_what_can_t_be_changed_by_lines_is_printed(place: Path, hosts: Hosts, console: Console) -> None:
    text = HOSTS.replace("    w-a:\n    w-b:\n", "    {w-a: , w-b: }\n").replace("  hosts:\n    {w-a", "  hosts: {w-a")
    (place / "hosts.yml").write_text(text)
    drain(cluster(hosts), console, "w-a")
    remove_host(cluster(hosts), console, "w-a")
    assert (place / "hosts.yml").read_text() == text
    assert "by hand (line 23 has several hosts in braces):\n  remove the host w-a" in fake_hosts.printed(console)
    assert "give w-b worker_index: 1" in fake_hosts.printed(console)
    assert list(place.parent.glob("*before*")) == []


def test_a_host_that_is_replaced_by_hand_stays_out_too(
    place: Path, hosts: Hosts, console: Console, written: dict[str, Any]
) -> None:
    (place / "more.ini").write_text("[others]\n")
    drain(cluster(hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert "more.ini is no YAML file):\n  write w-x instead of w-a" in fake_hosts.printed(console)
    assert written == {"replaced.json": {"worker-0": ["192.0.2.30:2400", "w-a"]}}


def elsewhere(place: Path) -> Path:
    """Copy an inventory to where Ansible has looked for nothing yet: it remembers which hosts have no file."""
    return shutil.copytree(place, place.parent / "other/mine")


def read_again(place: Path, hosts: Hosts) -> Cluster:
    hosts.inventory = load_inventory(str(place))
    return cluster(hosts)


def problems(place: Path) -> list[str]:
    return [str(each) for each in find_problems(read_source(str(place), lenient=True)) if "'near'" not in str(each)]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["w-a.yml", "w-a.json", "w-a/more.yml", "w-a"])
def test_a_hosts_own_variables_go_to_the_new_host_or_with_the_old_one(
    place: Path, hosts: Hosts, console: Console, name: str
) -> None:
    place = elsewhere(place)
    own = place / "host_vars" / name
    own.parent.mkdir(parents=True)
    own.write_text('{"ansible_user": "anna"}\n')
    drain(read_again(place, hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert load_inventory(str(place)).variables["w-x"]["ansible_user"] == "anna"
    assert problems(place) == []
    hosts.inventory = load_inventory(str(place))
    hosts.unreachable["w-x"] = "no route"
    remove_host(cluster(hosts), console, "w-x")
    assert "w-x" not in load_inventory(str(place)).variables
    assert problems(place) == []
    assert len(list(place.parent.glob("mine.w-x*.before-*"))) == 1


@pytest.mark.usefixtures("written")
def test_an_address_among_a_hosts_own_variables_is_replaced(place: Path, hosts: Hosts, console: Console) -> None:
    place = elsewhere(place)
    (place / "hosts.yml").write_text(HOSTS.replace("    w-a:\n      ansible_host: 192.0.2.30\n", "    w-a:\n"))
    (place / "host_vars").mkdir()
    (place / "host_vars/w-a.yml").write_text("# Ours.\nansible_host: 192.0.2.30  # in the cellar\n")
    drain(read_again(place, hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert tasks(place)["worker-0"] == ("w-x", "192.0.2.99")
    assert (place / "host_vars/w-x.yml").read_text() == "# Ours.\nansible_host: 192.0.2.99  # in the cellar\n"


@pytest.mark.parametrize(
    ("new", "address", "message"),
    [
        ("w x", "192.0.2.99", "can't have this name"),
        ("w[1:2]", "192.0.2.99", "can't have this name"),
        ("w-x", "192.0.2 .99", "expected an address"),
        ("w-x", "999.1.1.1", "it is no IPv4 address"),
        ("w-x", "192.0.2.31", "have the same address 192.0.2.31"),
        ("w-x", "fd00::1", "expected one family for all hosts"),
        ("w-x", "::1", "which means each host itself"),
    ],
)
def test_a_new_host_that_would_be_wrong_is_refused_before_the_old_one_is_cleaned(
    place: Path, hosts: Hosts, console: Console, new: str, address: str, message: str
) -> None:
    drain(cluster(hosts), console, "w-a")
    done = list(hosts.done)
    with pytest.raises(OperatorMistake, match=message):
        replace_host(cluster(hosts), console, "w-a", new, address)
    assert (hosts.done, (place / "hosts.yml").read_text()) == (done, HOSTS)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("new", ["7", "no", "2026-03-02"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(
    place: Path, hosts: Hosts, console: Console, new: str
) -> None:
    drain(cluster(hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", new, "192.0.2.99")
    assert tasks(place)["worker-0"] == (new, "192.0.2.99")


def test_the_ends_of_lines_stay(place: Path, hosts: Hosts, console: Console) -> None:
    (place / "hosts.yml").write_bytes(HOSTS.replace("\n", "\r\n").encode())
    drain(cluster(hosts), console, "ps-b")
    remove_host(cluster(hosts), console, "ps-b")
    text = HOSTS.replace("    ps-b:\n      ansible_host: 192.0.2.21\n", "")
    assert (place / "hosts.yml").read_bytes() == text.replace("\n", "\r\n").encode()


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("near:\n  hosts:\n    w-a:\n    w-b:", "near:\n  hosts:\n    w-[a:b]:", "not be the expected ones"),
        ("192.0.2.30\n", "192.0.2.30\n      worker_port: &port 2401\n", "lines are used by others"),
    ],
)
def test_what_is_written_for_several_hosts_is_changed_by_hand(
    place: Path, hosts: Hosts, console: Console, was: str, now: str, why: str
) -> None:
    text = HOSTS.replace(was, now)
    (place / "hosts.yml").write_text(text.replace("192.0.2.31\n", "192.0.2.31\n      worker_port: *port\n")
                                     if "&port" in text else text)  # fmt: skip
    text = (place / "hosts.yml").read_text()
    drain(read_again(place, hosts), console, "w-a")
    remove_host(cluster(hosts), console, "w-a")
    assert (place / "hosts.yml").read_text() == text
    assert "by hand" in fake_hosts.printed(console)
    assert why in fake_hosts.printed(console)


def test_a_plan_says_what_is_to_be_changed_by_hand(place: Path, hosts: Hosts, console: Console) -> None:
    (place / "more.ini").write_text("[others]\n")
    drain(cluster(hosts), console, "w-a")
    remove_host(cluster(hosts), console, "w-a", plan_only=True)
    assert "more.ini is no YAML file" in fake_hosts.printed(console)
    assert "with a backup" not in fake_hosts.printed(console)


def test_the_host_of_the_shared_path_is_not_removed(place: Path, hosts: Hosts, console: Console) -> None:
    (place / "hosts.yml").write_text(f"{HOSTS}nfs_server:\n  hosts:\n    w-b:\n")
    drain(read_again(place, hosts), console, "w-b")
    with pytest.raises(OperatorMistake, match="w-b stays: it serves the shared path, with all runs"):
        remove_host(cluster(hosts), console, "w-b")
    replace_host(cluster(hosts), console, "w-b", "w-x", plan_only=True)
    what = "runs, queue and history stay on the disk of w-b: bring all of /srv/trainer to w-x before site.yml"
    assert what in fake_hosts.printed(console)


def test_a_dead_coordinators_host_without_a_shared_path_is_replaced(
    place: Path, hosts: Hosts, console: Console
) -> None:
    (place / "group_vars/all.yml").write_text(VARIABLES.replace("/srv/trainer", "''"))
    hosts.unreachable["head"] = "no route"
    replace_host(read_again(place, hosts), console, "head", "head-2", "192.0.2.99")
    assert tasks(place)["chief-0"] == ("head-2", "192.0.2.99")
    assert "bring all of /var/lib/trainer/local to head-2 before site.yml" in fake_hosts.printed(console)
    assert "Take head out of the inventories of other checkouts too" in fake_hosts.printed(console)


@pytest.mark.usefixtures("written")
def test_a_coordinators_host_that_was_replaced_keeps_it_for_checkouts_that_ask_it(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a name of its own the cluster would be the same one to them."""
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "fleet.verbs.remove_host.note_removal", lambda _, chief, name: noted.append((chief, name)) or ""
    )
    hosts.set_all(active="inactive", sub="dead", file_state="disabled")
    replace_host(read_again(place, hosts), console, "head", "head-2", "192.0.2.99")
    assert noted == [("head", "head")]


@pytest.mark.usefixtures("written")
def test_a_dead_coordinators_host_that_an_update_had_set_aside_is_drained_no_more(
    hosts: Hosts, console: Console
) -> None:
    set_aside(cluster(hosts), console, "head", None, "update-hosts")
    assert hosts.recorded.keys() == {"head"}
    hosts.unreachable["head"] = "no route"
    replace_host(cluster(hosts), console, "head", "head-2", "192.0.2.99")
    assert hosts.recorded == {}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["", "recommender"])
def test_a_new_coordinators_host_says_how_the_others_are_taken_over(
    place: Path, hosts: Hosts, console: Console, name: str
) -> None:
    """They have noted the address of the old one, where the inventory has no name for the cluster."""
    (place / "group_vars/all.yml").write_text(VARIABLES + (f"cluster_name: {name}\n" if name else ""))
    hosts.unreachable["head"] = "no route"
    replace_host(read_again(place, hosts), console, "head", "head-2", "192.0.2.99", plan_only=True)
    assert ("site.yml -e cluster_takes_over=192.0.2.10`" in fake_hosts.printed(console)) is (not name)
    console.json_out = io.StringIO()
    replace_host(cluster(hosts), console, "head", "head-2", "192.0.2.99")
    takes_over = "" if name else " -e cluster_takes_over=192.0.2.10"
    assert json.loads(console.json_out.getvalue())["next"] == f"ansible-playbook site.yml{takes_over}"


@pytest.mark.parametrize(
    ("is_dead", "cost"),
    [(False, "a checkpoint that is saved first"), (True, "steps since the newest checkpoint are lost")],
)
def test_a_plan_promises_no_save_by_a_dead_coordinator(
    place: Path, hosts: Hosts, console: Console, is_dead: bool, cost: str
) -> None:
    if is_dead:
        hosts.unreachable["head"] = "no route"
    with contextlib.nullcontext() if is_dead else pytest.raises(OperatorMistake, match="the coordinator runs there"):
        replace_host(read_again(place, hosts), console, "head", "head-2", "192.0.2.99", plan_only=True)
    assert cost in fake_hosts.printed(console)


@pytest.mark.parametrize("plan_only", [True, False])
def test_without_the_coordinators_host_no_other_is_taken_away(
    place: Path, hosts: Hosts, console: Console, plan_only: bool
) -> None:
    drain(cluster(hosts), console, "w-a")
    hosts.unreachable["head"] = "no route"
    before = (place / "hosts.yml").read_text(), list(hosts.done)
    why = r"head is unreachable: no route\nIt has to let the tasks of w-a go.*fab replace-host head NEW"
    with pytest.raises(HostsUnreachable, match=why):
        remove_host(cluster(hosts), console, "w-a", plan_only=plan_only)
    with pytest.raises(HostsUnreachable, match=why):
        replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99", plan_only=plan_only)
    assert ((place / "hosts.yml").read_text(), hosts.done) == before


@pytest.mark.usefixtures("written")
def test_a_vault_whose_password_was_typed_is_read_again(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = elsewhere(place)
    (place / "host_vars").mkdir()
    vault = VaultLib([("default", VaultSecret(b"open"))])
    (place / "host_vars/w-a.yml").write_bytes(vault.encrypt(b"trainer_secrets: {store: abcdef}\n"))
    monkeypatch.setattr("fleet.site.vault._ask", lambda: "open")
    hosts.inventory = load_inventory(str(place), ask_vault_pass=True)
    monkeypatch.setattr("fleet.site.vault._ask", None)
    drain(cluster(hosts), console, "w-a")
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert "w-x:" in (place / "hosts.yml").read_text()


def test_a_replacement_that_was_broken_off_goes_on_and_may_be_typed_twice(
    place: Path, hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    drain(cluster(hosts), console, "w-a")
    with monkeypatch.context() as patch:
        patch.setattr("fleet.verbs.remove_host._change", fake_hosts.raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert written == {"replaced.json": {"worker-0": ["192.0.2.30:2400", "w-a"]}}  # it stays out if it comes back
    replace_host(cluster(hosts), console, "w-a", "w-x", "192.0.2.99")
    assert tasks(place)["worker-0"] == ("w-x", "192.0.2.99")
    replace_host(read_again(place, hosts), console, "w-a", "w-x", "192.0.2.99")
    assert fake_hosts.printed(console).endswith("has w-x, and no w-a: it is replaced already, or was never listed\n")


@pytest.mark.parametrize("serves", [True, False])
def test_a_host_that_leaves_serves_no_tensorboard(tmp_path: Path, serves: bool) -> None:
    """Left running, it would fail for ever without its environment, and `site.yml` on it when the host is back."""
    unit = tmp_path / "etc/systemd/system/tensorboard.service"
    (tmp_path / "opt/trainer").mkdir(parents=True)
    unit.parent.mkdir(parents=True)
    if serves:
        unit.write_text("[Service]\n")
    stand_in = put_program(tmp_path / "bin/systemctl", f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n')
    script = CLEAN.replace("/etc/", f"{tmp_path}/etc/").replace("/opt/", f"{tmp_path}/opt/")
    subprocess.run(["sh", "-c", script], env={"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}, check=True)
    assert ("disable --now --quiet tensorboard.service" in (tmp_path / "asked").read_text()) is serves
    assert not unit.exists()
    assert not (tmp_path / "opt/trainer").exists()
