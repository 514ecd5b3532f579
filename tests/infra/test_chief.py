"""Hosts of group chief while the cluster trains."""

import pytest

from .conftest import check_task

testinfra_hosts = ["ansible://chief"]
pytestmark = pytest.mark.usefixtures("long_run", "_as_root")


def test_task_runs_as_the_inventory_says(host, truth):
    check_task(host, truth, "chief")


def test_run_settings_are_as_the_inventory_says(host):
    settings = host.file("/etc/trainer/run.json")
    assert '"program": "slow:Slow"' in settings.content_string
    assert '"shared_dir": "/srv/trainer"' in settings.content_string


def test_unit_tells_its_progress(host):
    text = host.check_output("systemctl show --value --property=StatusText trainer@chief-0")
    assert "step" in text
