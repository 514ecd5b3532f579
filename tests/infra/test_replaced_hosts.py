"""Machines change for good beside a training: a dead one is replaced, one is removed, the coordinator's host moves.

A new machine is the old one by a second name and address. One training is under way in all of these.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import answer, wait_until
from tests.lost_hosts import inside, pull_plug

from .conftest import fab, play, status, wait_for_progress
from .test_planned_reboot import crashes, events
from .test_second_day import Training, done, edit

pytestmark = pytest.mark.slow  # tests/unit/test_remove_host.py and test_runs_verbs.py say it of pretended hosts
LATER = 100  # is added to the last number of a host's address
USED = "du --summarize --block-size=1 --total /opt/trainer/releases /opt/trainer/envs | tail -n 1 | cut -f 1"


@dataclass
class Site:
    """An inventory that verbs change, and the machines that have a second address."""

    inventory: Path
    addresses: dict[str, str]

    def hosts(self, group: str) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load((self.inventory / "hosts.yml").read_text())[group]["hosts"]
        return found

    def second_address(self, machine: str) -> str:
        """Have a machine of the lab speak from another address; it answers at both."""
        first = ipaddress.ip_interface(f"{self.addresses[machine]}/24")
        second = str(first.ip + LATER)
        inside(machine, "ip", "address", "add", f"{second}/24", "dev", "eth0")
        inside(machine, "ip", "route", "replace", str(first.network), "dev", "eth0", "src", second)
        return second

    def first_addresses(self) -> None:
        for machine, address in self.addresses.items():
            first = ipaddress.ip_interface(f"{address}/24")
            route = f"ip route replace {first.network} dev eth0 src {first.ip}"
            inside(machine, "sh", "-c", f"{route}; ip address del {first.ip + LATER}/24 dev eth0 2>/dev/null; true")


@pytest.fixture(scope="module")
def site(lab: dict[str, Any], long_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    mine = shutil.copytree(long_run, tmp_path_factory.mktemp("replaced") / "lab")
    hosts = yaml.safe_load((mine / "hosts.yml").read_text()).values()
    listed = {name: values for group in hosts for name, values in (group["hosts"] or {}).items() if values}
    made = Site(mine, {name: values["ansible_host"] for name, values in listed.items()})
    yield made
    fab("stop-cluster", inventory=mine)
    made.first_addresses()
    answer(lab["head"], "rm -f /srv/trainer/replaced.json")
    moved = str(ipaddress.ip_address(made.addresses["head"]) + LATER)
    back = play(
        "site.yml", "-e", f"cluster_takes_over={moved}", "-e", "cluster_brings_back=worker-1", inventory=long_run
    )
    assert back.code == 0, back.failed
    done("start-cluster", "--detach", inventory=long_run)


@pytest.fixture
def training(lab: dict[str, Any], site: Site) -> Training:
    wait_until(lambda: status(lab)["without"] == {}, 120, "all members take part")
    wait_for_progress(lab)
    return Training(lab)


def check_site(lab: dict[str, Any], site: Site, training: Training, *options: str) -> None:
    """Run site.yml, whose restarts of all tasks must lose no step."""
    begun, before = time.monotonic(), crashes()
    made = play("site.yml", *options, inventory=site.inventory)
    assert made.code == 0, made.failed
    print(f"site.yml: {time.monotonic() - begun:.1f} s")
    wait_until(lambda: status(lab)["without"] == {}, 180, "all members take part")
    wait_for_progress(lab)
    new = events()[training.past :]
    assert [each for each in new if each["event"] == "failed" or each.get("steps_lost")] == []
    assert crashes() == before
    print([each for each in new if each["event"] in ("saved", "restored", "attached", "training")][-4:])


def test_a_dead_worker_is_replaced_and_stays_out_when_it_is_back(training: Training, lab, site) -> None:
    """Three minutes: the number of the dead one is the new one's, and nothing that it trained is lost."""
    pull_plug("worker-1")
    wait_until(lambda: "worker-1" in status(lab)["without"], 60, "the training goes on without worker-1")
    address = str(ipaddress.ip_address(site.addresses["worker-1"]) + LATER)
    words = ("replace-host", "worker-1", "spare", "--address", address, "--json")
    before = (site.inventory / "hosts.yml").read_text()
    assert json.loads(done(*words, "--plan", inventory=site.inventory))["outcome"] == "planned"
    assert (site.inventory / "hosts.yml").read_text() == before
    begun = time.monotonic()
    assert json.loads(done(*words, "--reason", "it is dead", inventory=site.inventory))["outcome"] == "done"
    print(f"replace-host worker-1: {time.monotonic() - begun:.1f} s")
    assert json.loads(done(*words, inventory=site.inventory))["outcome"] == "nothing to do"
    assert list(site.hosts("worker")) == ["worker-0", "spare"]
    subprocess.run(["lxc-start", "--name", "psfleet-worker-1"], check=True)
    refused = "journalctl --boot --unit=trainer@worker-1 --grep='another machine has the place' || true"
    wait_until(lambda: "worker-1 was replaced" in answer(lab["worker-1"], refused), 120, "the old one is kept out")
    assert "worker-1" in status(lab)["without"]
    wait_for_progress(lab)
    site.second_address("worker-1")
    check_site(lab, site, training)
    assert status(lab)["workers"]["worker-1"]["steps"] > 0


def test_a_removed_host_is_missed_by_nobody(training: Training, lab, site) -> None:
    """Two minutes: nothing restarts until the next site.yml, and that loses no step."""
    host = list(site.hosts("worker"))[-1]
    done("drain", host, "--reason", "sold", inventory=site.inventory)
    assert json.loads(done("remove-host", host, "--plan", "--json", inventory=site.inventory))["outcome"] == "planned"
    assert host in site.hosts("worker")
    begun = time.monotonic()
    removed = json.loads(done("remove-host", host, "--json", "--reason", "sold", inventory=site.inventory))
    print(f"remove-host {host}: {time.monotonic() - begun:.1f} s")
    assert removed["outcome"] == "done"
    assert removed["next"].startswith("ansible-playbook site.yml")
    again = json.loads(done("remove-host", host, "--json", inventory=site.inventory))
    assert again["outcome"] == "nothing to do"
    assert list(site.hosts("worker")) == ["worker-0"]
    left = "ls -d /opt/trainer /etc/trainer 2>/dev/null; pgrep --full '[t]rainer@|-m [t]rainer'; true"
    with lab["worker-1"].sudo():
        assert lab["worker-1"].run_expect([0], left).stdout == ""
    training.check("worker-1")
    check_site(lab, site, training)
    assert list(status(lab)["workers"]) == ["worker-0"]


def test_prune_frees_what_it_says_and_nothing_that_runs(training: Training, lab, site, tmp_path) -> None:
    """A minute: three starts make releases; supervisors may hold the first, and the newest two stay."""
    for number in range(3):
        inventory = edit(site.inventory, tmp_path / str(number), f"# release {number}\n")
        done("start-cluster", "--detach", inventory=inventory)
    machines = [lab[name] for name in ("head", "ps-0", "ps-1", "worker-0", "worker-1")[: 3 + len(site.hosts("worker"))]]
    current = [answer(host, "readlink -e /opt/trainer/current") for host in machines]
    used = [int(answer(host, USED)) for host in machines]
    running = Training(lab)
    words = ("prune", "--keep", "1", "--only", "releases", "--json")
    planned = json.loads(done(*words, "--plan", inventory=inventory))
    assert (planned["outcome"], planned["bytes"] > 0) == ("planned", True)
    assert [int(answer(host, USED)) for host in machines] == used
    pruned = json.loads(done(*words, "--yes", "--reason", "room", inventory=inventory))
    print(f"prune: {pruned['bytes']} bytes, {pruned['releases']['removed']}")
    assert pruned["releases"] == planned["releases"]
    assert sum(used) - sum(int(answer(host, USED)) for host in machines) == pruned["bytes"]
    assert [answer(host, "readlink -e /opt/trainer/current") for host in machines] == current
    gone = "ls -l /proc/[0-9]*/cwd 2>/dev/null | grep -c '/opt/trainer.*deleted'"
    assert {answer(host, gone) for host in machines} == {"0"}
    assert json.loads(done(*words, "--yes", inventory=inventory))["releases"]["removed"] == []
    assert json.loads(done("rollback", "--plan", "--json", inventory=inventory))["outcome"] == "planned"
    running.check()


def test_the_coordinators_host_is_replaced_and_the_run_goes_on(training: Training, lab, site) -> None:
    """Three minutes: the shared path is another machine's, so that the new one goes on from the saved step."""
    address = str(ipaddress.ip_address(site.addresses["head"]) + LATER)
    words = ("replace-host", "head", "head-1", "--address", address, "--json")
    refused = fab(*words, inventory=site.inventory)
    assert (refused.returncode, "`fab stop-cluster` first" in refused.stderr) == (2, True), refused.stderr
    done("stop-cluster", "--reason", "a new head", inventory=site.inventory)
    saved = status(lab)["step"]
    site.second_address("head")
    begun = time.monotonic()
    replaced = json.loads(done(*words, "--reason", "a new head", inventory=site.inventory))
    print(f"replace-host head: {time.monotonic() - begun:.1f} s")
    takes_over = f"-e cluster_takes_over={site.addresses['head']}"
    assert takes_over in replaced["next"]
    made = play("site.yml", *takes_over.split(), inventory=site.inventory)
    assert made.code == 0, made.failed
    done("start-cluster", "--detach", inventory=site.inventory)
    new = events()[training.past :]
    assert [each for each in new if each.get("steps_lost")] == []
    assert [each["message"] for each in new if each["event"] == "restored"] == [f"step {saved}"]
    wait_for_progress(lab)
    acts = json.loads(done("history", "--verb", "replace-host", "--json", inventory=site.inventory))["history"]
    assert (acts[-1]["outcome"], acts[-1]["reason"], acts[-1]["hosts"]) == ("done", "a new head", ["head", "head-1"])
