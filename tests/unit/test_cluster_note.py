"""A host belongs to one cluster: the note that it keeps, and who refuses it to another inventory."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster_note
import pytest
import yaml
from host_look import noted

from fleet.actions.console import Console
from fleet.doctor.hosts import judge_hosts
from fleet.drills.runner import drill
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CLEAN
from fleet.hosts.ssh import Answer
from fleet.site.cluster_note import NOTE, cluster_name, cluster_problems, former_names
from fleet.site.filters import FILTERS
from fleet.verbs.canary import CanaryRequest, canary
from fleet.verbs.drain import drain, undrain
from fleet.verbs.export import export_run
from fleet.verbs.hosts import show_hosts
from fleet.verbs.ok_to_stop import ok_to_stop
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from tests.unit import fake_hosts
from tests.unit import test_remove_host as removals
from tests.unit import test_second_day as second_day
from tests.unit.stand_ins import result_of

ROOT = Path(__file__).parents[2]
GROUPS = {"chief": ["a"], "worker": ["b", "c"]}
HOSTVARS: dict[str, dict[str, Any]] = {name: {"ansible_host": f"192.0.2.1{n}"} for n, name in enumerate("abc")}
THEIRS = {"name": "198.51.100.7", "since": 1780000000, "who": "ana@desk"}


def test_a_cluster_is_known_by_its_coordinators_address() -> None:
    assert cluster_name(GROUPS, HOSTVARS) == "192.0.2.10"
    inner = HOSTVARS | {"a": {"ansible_host": "192.0.2.10", "cluster_address": "10.0.0.1", "cluster_encryption": True}}
    assert cluster_name(GROUPS, inner) == "10.0.0.1"  # the tunnel is another address, of the same cluster
    named = {host: {**each, "cluster_name": "recommender"} for host, each in HOSTVARS.items()}
    assert cluster_name({"chief": ["b"]}, named) == "recommender"


def test_hosts_that_are_renamed_or_added_stay_of_their_cluster() -> None:
    name = cluster_name(GROUPS, HOSTVARS)
    moved = {"head": HOSTVARS["a"], "gpu-1": HOSTVARS["b"], "new": {"ansible_host": "192.0.2.99"}}
    after = cluster_name({"chief": ["head"], "worker": ["gpu-1", "new"]}, moved)
    assert cluster_problems({"name": name}, "gpu-1", after) == []


@pytest.mark.parametrize("more", [{"cluster_name": "recommender"}, {"cluster_address": "10.0.0.1"}])
def test_a_cluster_that_gets_a_name_or_an_inner_address_later_keeps_its_hosts(more: dict[str, str]) -> None:
    later = {host: {**each, **more} for host, each in HOSTVARS.items()}
    name, former = cluster_name(GROUPS, later), former_names(GROUPS, later)
    assert cluster_problems({"name": "192.0.2.10"}, "c", name, former) == []
    assert len(cluster_problems(THEIRS, "c", name, former)) == 1


def test_a_host_of_another_cluster_is_refused_with_whose_it_is_and_the_way_to_have_it() -> None:
    (problem,) = cluster_problems(THEIRS, "c", "192.0.2.10")
    since = time.strftime("%Y-%m-%d", time.localtime(THEIRS["since"]))
    assert f"host 'c': it belongs to the cluster 198.51.100.7 since {since}" in problem
    assert "(site.yml of ana@desk), and this inventory is the cluster 192.0.2.10" in problem
    assert "-e cluster_takes_over=198.51.100.7" in problem
    assert cluster_problems(THEIRS, "c", "192.0.2.10", takes_over=["198.51.100.7"]) == []
    assert len(cluster_problems(THEIRS, "c", "192.0.2.10", takes_over=["203.0.113.1"])) == 1


@pytest.mark.parametrize("note", [None, {}, [], "x", {"name": ""}, {"since": 1}])
def test_a_host_without_a_note_is_free(note: Any) -> None:
    assert cluster_problems(note, "c", "192.0.2.10") == []


def keep(file: Path, name: str, check: bool = False, **more: Any) -> dict[str, Any]:
    return result_of(cluster_note, check, **{"name": name, "who": "ben@lab", "file": str(file), **more})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "psfleet/cluster.json"


def test_the_first_cluster_that_comes_is_noted_and_stays(file: Path) -> None:
    assert keep(file, "one", check=True)["changed"] is True
    assert not file.exists()
    assert keep(file, "one")["changed"] is True
    first = noted(file)
    assert (first["name"], first["who"]) == ("one", "ben@lab")
    assert first["since"] == pytest.approx(time.time(), abs=60)
    assert keep(file, "one", who="cleo@desk") == {"changed": False, "warnings": []}
    assert noted(file) == first
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)


def test_another_cluster_takes_a_host_only_where_it_names_the_one_that_has_it(file: Path) -> None:
    keep(file, "one")
    for takes_over in ([], ["three"]):
        refused = keep(file, "two", takes_over=takes_over)
        assert refused["failed"]
        assert "it belongs to the cluster one; expected two" in refused["msg"]
    assert noted(file)["name"] == "one"
    assert keep(file, "two", takes_over=["one"])["changed"] is True
    assert noted(file)["name"] == "two"


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_note_is_written_again(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert noted(file) == {}
    assert keep(file, "one")["changed"] is True
    assert noted(file)["name"] == "one"


def test_site_yml_leaves_such_a_host_out_before_it_is_changed() -> None:
    """The refusal is rendered as the role has it, from what the module would register."""
    refusal = yaml.safe_load((ROOT / "roles/host_check/tasks/main.yml").read_text())[-1]
    assert refusal["ansible.builtin.assert"]["that"] == "__host_check_problems | length == 0"
    text = refusal["vars"]["__host_check_problems"]
    for takes_over, found in (([], 2), (["198.51.100.7"], 1)):
        seen = {"cluster": THEIRS, "problems": ["its clock"]}
        known = {"inventory_hostname": "c", "host_check_cluster": "192.0.2.10", "host_check_takes_over": takes_over}
        assert len(render(text, {"__host_check_seen": seen, **known})) == found


def test_reset_yml_refuses_such_a_host_before_it_stops_anything() -> None:
    plays = yaml.safe_load((ROOT / "ansible/reset.yml").read_text())
    refusing = next(n for n, play in enumerate(plays) if "host_check" in json.dumps(play))
    stopping = next(n for n, play in enumerate(plays) if "systemctl stop" in json.dumps(play))
    assert refusing < stopping
    reached = {group for play in plays[refusing + 1 :] for group in play.get("hosts", "").split(":")}
    asked = set(plays[refusing]["hosts"].split(":"))
    assert {group for group in reached if not group.startswith("!")} - asked <= {"localhost", ""}
    refusal = yaml.safe_load((ROOT / "roles/host_check/tasks/belongs.yml").read_text())[-1]
    known = {"inventory_hostname": "c", "host_check_cluster": "192.0.2.10", "host_check_takes_over": []}
    text = refusal["vars"]["__host_check_foreign"]
    assert len(render(text, {"__host_check_seen": {"cluster": THEIRS}, **known})) == 1
    assert render(text, {"__host_check_seen": {"cluster": {}}, **known}) == []


def test_a_cluster_that_was_known_by_its_chiefs_name_keeps_its_hosts() -> None:
    before = cluster_name({"chief": ["head"]}, {"head": {}})
    later = {"head": {"ansible_host": "192.0.2.10"}}
    former = former_names({"chief": ["head"]}, later)
    assert cluster_problems({"name": before}, "head", cluster_name({"chief": ["head"]}, later), former) == []


def render(text: str, known: dict[str, Any]) -> Any:
    from jinja2.nativetypes import NativeEnvironment

    environment = NativeEnvironment()
    environment.filters |= FILTERS
    return environment.from_string(text).render(known)


class Foreign(second_day.Hosts):
    """Hosts, some of which say that they belong to another cluster."""

    def _look(self, host: str, script: str) -> Answer:
        assert NOTE in script
        note = json.dumps(THEIRS) if host in self.theirs else ""
        return Answer("\n".join([super()._look(host, script).stdout, "@cluster", note]))

    theirs: frozenset[str] = frozenset()


@pytest.fixture
def hosts() -> Foreign:
    known = second_day.make_hosts()
    return Foreign(**{name: getattr(known, name) for name in known.__dataclass_fields__})


VERBS: dict[str, Callable[[Cluster, Console], object]] = {
    "drain": lambda cluster, console: drain(cluster, console, "w-b"),
    "undrain": lambda cluster, console: undrain(cluster, console, "w-b"),
    "canary": lambda cluster, console: canary(cluster, console, CanaryRequest("w-b")),
    "drill": lambda cluster, console: drill(cluster, console, ["worker"]),
    "export": lambda cluster, console: export_run(cluster, console, "digits"),
    "ok-to-stop": lambda cluster, console: ok_to_stop(cluster, console, ["w-b"]),
    "rollback": lambda cluster, console: rollback(cluster, console),
    "start-cluster": lambda cluster, console: start_cluster(cluster, console, StartRequest()),
    "status": lambda cluster, console: show_status(cluster, console),
    "update-hosts": lambda cluster, console: update_hosts(cluster, console, UpdateRequest()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_fab_refuses_a_host_of_another_cluster(
    hosts: Foreign, console: Console, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.verbs.start._check", lambda *_: None)
    monkeypatch.setattr("fleet.rollout.short_way.ShortWay.questions", lambda *_, **__: {})
    monkeypatch.setattr(Console, "build", lambda *_: "abc", raising=False)
    where = "head" if verb == "export" else "w-b"  # where the runs are
    hosts.theirs = frozenset({where})
    with pytest.raises(OperatorMistake, match=rf"host '{where}': it belongs to the cluster 198\.51\.100\.7 since"):
        VERBS[verb](Cluster(hosts.inventory, hosts), console)
    assert [line for line in hosts.lines if json.loads(line)["outcome"] == "begun"] == []


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("new", [None, "gpu-9"])
def test_a_host_that_another_cluster_took_leaves_the_inventory_and_is_not_touched(
    tmp_path: Path, plan: bool, new: str | None
) -> None:
    """As where site.yml has refused the machine that was to replace another."""
    place = removals.make_site(tmp_path / "mine")
    hosts = removals.hosts_of(place, Foreign)  # also the other cluster's unit runs, which has the same name
    hosts.theirs, scripts = frozenset({"w-b"}), list[str]()
    answer, console = hosts._answer, fake_hosts.console_of(hosts)
    hosts._answer = lambda host, script: (  # type: ignore[method-assign]
        scripts.append(script) if host == "w-b" else None,
        answer(host, script),
    )[1]
    if new:
        replace_host(Cluster(hosts.inventory, hosts), console, "w-b", new, "192.0.2.99", plan_only=plan)
    else:
        remove_host(Cluster(hosts.inventory, hosts), console, "w-b", plan_only=plan)
    written = (place / "hosts.yml").read_text()
    assert ("w-b:" in written) is plan
    assert ("gpu-9:" in written) is (new is not None and not plan)
    assert all("@units" in script for script in scripts)  # it was only looked at
    where = "the old host" if new else "the host"
    said = f"nothing on {where}: it belongs to another cluster" if plan else "w-b belongs to another cluster, and was"
    assert said in fake_hosts.printed(console)


def test_another_clusters_coordinator_is_replaced_by_nothing(hosts: Foreign, console: Console) -> None:
    hosts.theirs = frozenset({hosts.inventory.chief.host})
    for old in (hosts.inventory.chief.host, "w-b"):
        with pytest.raises(OperatorMistake, match="it belongs to the cluster"):
            replace_host(Cluster(hosts.inventory, hosts), console, old, "gpu-9", "192.0.2.99")
    assert hosts.lines == []


def test_another_clusters_coordinator_is_not_stopped(hosts: Foreign, console: Console) -> None:
    hosts.theirs = frozenset({hosts.inventory.chief.host})
    with pytest.raises(OperatorMistake, match="it belongs to the cluster"):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert hosts.units[hosts.inventory.chief.name].active == "active"


def test_a_stop_that_is_refused_keeps_another_clusters_operator_from_no_start(
    hosts: Foreign, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.theirs = frozenset({hosts.inventory.chief.host})
    noted: list[str] = []
    monkeypatch.setattr("fleet.actions.exclusive.note_stop", lambda _, chief: noted.append(chief))
    with pytest.raises(OperatorMistake, match="it belongs to the cluster"):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert noted == []
    hosts.theirs = frozenset()
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert noted == [hosts.inventory.chief.host]


def test_a_stop_leaves_another_clusters_tasks_alone(hosts: Foreign, console: Console) -> None:
    hosts.theirs = frozenset({"w-b"})
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert (hosts.units["worker-1"].active, hosts.units["worker-0"].active) == ("active", "inactive")
    assert "left alone: host 'w-b': it belongs to the cluster 198.51.100.7" in fake_hosts.printed(console)


def test_a_host_that_was_removed_is_free_for_another_cluster() -> None:
    assert f"rm -rf /opt/trainer {NOTE}" in CLEAN.splitlines()


def test_the_table_of_hosts_calls_no_host_of_another_cluster_ready(hosts: Foreign, console: Console) -> None:
    """Its tasks and units have the same names."""
    hosts.theirs = frozenset({"w-b"})
    console.json_out = io.StringIO()
    show_hosts(Cluster(hosts.inventory, hosts), console)
    rows = {row["host"]: row for row in json.loads(console.json_out.getvalue())["hosts"]}
    assert (rows["w-a"]["state"], rows["w-b"]["state"]) == ("ready", "away")
    assert re.fullmatch(
        r"it belongs to the cluster 198\.51\.100\.7 since .* \(site.yml of ana@desk\)", rows["w-b"]["why"]
    )


def test_doctor_names_a_host_of_another_cluster(hosts: Foreign) -> None:
    hosts.theirs = frozenset({"w-b"})
    seen = Cluster(hosts.inventory, hosts).observe(new_is_enough=True)
    (found,) = judge_hosts(hosts.inventory, seen, {})
    assert (found.level, found.where, found.part) == ("error", "w-b", "cluster")
    assert "198.51.100.7" in found.what
