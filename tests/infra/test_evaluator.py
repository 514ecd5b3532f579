"""Hosts of group evaluator while the cluster trains."""

import pytest

from .conftest import check_task

testinfra_hosts = ["ansible://evaluator"]
pytestmark = pytest.mark.usefixtures("long_run", "_as_root")


def test_task_runs_as_the_inventory_says(host, truth):
    check_task(host, truth, "evaluator")
