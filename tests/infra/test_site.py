"""site.yml itself: run again, in check mode, and refused."""

import subprocess

import pytest
import yaml

from .conftest import ROOT, play, units


def test_second_run_changes_nothing(lab):
    before = units(lab)
    again = play("site.yml")
    assert again.code == 0, again.failed
    assert again.changed == []
    assert {host: stats["changed"] for host, stats in again.stats.items() if stats["changed"]} == {}
    assert units(lab) == before


def test_check_mode_on_a_converged_lab_reports_no_change():
    checked = play("site.yml", "--check", "--diff")
    assert checked.code == 0, checked.failed
    assert checked.changed == []


def test_a_wrong_inventory_is_refused_before_any_host_is_touched(tmp_path):
    inventory = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    inventory["all"] = {"vars": yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())}
    inventory["ps"]["hosts"] = {}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = subprocess.run(
        ["ansible-playbook", "--inventory", tmp_path / "hosts.yml", "site.yml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "group ps is empty; the strategy parameter_server needs at least one ps" in done.stdout
    assert "Gathering Facts" not in done.stdout


@pytest.mark.parametrize("empty", ["", "---\n{}\n"])
def test_an_empty_inventory_is_refused(tmp_path, empty):
    (tmp_path / "hosts.yml").write_text(empty)
    done = subprocess.run(
        ["ansible-playbook", "--inventory", tmp_path / "hosts.yml", "site.yml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "the inventory has no hosts" in done.stdout
