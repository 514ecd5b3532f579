"""site.yml itself: run again, in check mode, and refused."""

import ipaddress
import os
import subprocess

import pytest
import yaml

from tests.hosts import ROOT
from tests.lost_hosts import inside

from .conftest import copy_inventory, play


# The coordinator's host has every role that the others have.
@pytest.mark.parametrize("limit", ["head", pytest.param("all", marks=pytest.mark.slow)])
def test_check_mode_on_converged_hosts_reports_no_change(limit):
    checked = play("site.yml", "--check", "--diff", "--limit", limit)
    assert checked.code == 0, checked.failed
    assert checked.changed == []


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(("--tags", "trainer,tensorboard"), marks=pytest.mark.slow),
        ("--start-at-task", "trainer : Install the unit"),
        pytest.param(("--tags", "release"), marks=pytest.mark.slow),
    ],
)
def test_a_part_of_the_playbook_runs_by_itself(lab, part):
    ran = play("site.yml", *part)
    assert (ran.code, ran.changed) == (0, []), ran.failed
    assert all(ran.stats[host]["ok"] >= 4 for host in lab), ran.stats


@pytest.mark.slow  # tests/unit/test_site_phases.py says it without a lab
def test_a_host_that_is_in_no_group_of_ours_gets_nothing(tmp_path, lab):
    copy = copy_inventory(
        tmp_path / "lab",
        yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())["trainer_run"],
        cluster_own_groups=["bastions"],
    )
    hosts = yaml.safe_load((copy / "hosts.yml").read_text())
    # Nobody answers there: a host that asks fails.
    hosts["bastions"] = {"hosts": {"bastion": {"ansible_host": "10.0.3.254"}}}
    (copy / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    ran = play("site.yml", inventory=copy)
    assert (ran.code, ran.changed) == (0, []), ran.failed
    assert set(ran.stats) - {"localhost"} == set(lab)


@pytest.fixture
def fresh_host(tmp_path, truth):
    """An inventory of one machine that was just made and carries every job."""
    address = ipaddress.ip_address(truth["_meta"]["hostvars"]["head"]["ansible_host"]) + 80
    jobs = ("chief", "ps", "worker", "evaluator", "tensorboard")
    groups = {job: {"hosts": {"fresh": {"ansible_host": str(address)}}} for job in jobs}
    variables = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables))
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    environment = os.environ | {"PSFLEET_INVENTORY": str(tmp_path), "PSFLEET_HARDENED": ""}
    subprocess.run(["vagrant", "up", "fresh"], cwd=ROOT, env=environment, check=True, capture_output=True)
    yield tmp_path
    subprocess.run(
        ["vagrant", "destroy", "--force", "fresh"], cwd=ROOT, env=environment, check=True, capture_output=True
    )


def test_check_mode_on_a_fresh_machine_tells_what_would_change(fresh_host):
    checked = play("site.yml", "--check", "--diff", inventory=fresh_host)
    assert checked.code == 0, checked.failed
    changed = {task for _, task in checked.changed}
    assert {"Create the user of the training tasks", "Make the release's directory", "Install the unit"} <= changed
    assert {"Write the table", "Write the run settings"} <= changed  # into directories that are yet to be made


def site(inventory):
    command = ["ansible-playbook", "--inventory", inventory, "site.yml"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_wrong_inventory_is_refused_before_any_host_is_touched(tmp_path):
    inventory = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    inventory["all"] = {"vars": yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())}
    inventory["ps"]["hosts"] = {}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = site(tmp_path / "hosts.yml")
    assert done.returncode != 0
    assert "group ps is empty; the strategy parameter_server needs at least one ps" in done.stdout
    assert "Gathering Facts" not in done.stdout


@pytest.mark.parametrize(
    ("empty", "message"),
    [("", "the inventory has no hosts"), ("---\n{}\n", "Completely failed to parse inventory source")],
)
def test_an_empty_inventory_is_refused(tmp_path, empty, message):
    (tmp_path / "hosts.yml").write_text(empty)
    done = site(tmp_path / "hosts.yml")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.fixture
def start_under_way():
    """Another operator's lock on the chief's host."""
    script = "echo a start of ann@laptop >/run/psfleet-start; echo $$; exec sleep 300"
    command = ["lxc-attach", "--name", "psfleet-head", "--clear-env", "--", "flock", "/run/psfleet-start", "sh", "-c"]
    with subprocess.Popen([*command, script], stdout=subprocess.PIPE, text=True) as other:
        process = other.stdout.readline().strip()
        yield
        inside("head", "kill", process)


def test_site_yml_is_refused_beside_a_start(lab, start_under_way):
    refused = play("site.yml")
    assert (refused.code, refused.changed, set(refused.stats)) == (2, [], {"localhost"})
    assert "this cluster is taken by a start of ann@laptop" in str(refused.failed)
