"""Hosts of group ps while the cluster trains."""

import pytest

from tests.hosts import name_of
from trainer.core.runtime import PS_ENVIRONMENT

from .conftest import check_task, children

testinfra_hosts = ["ansible://ps"]
pytestmark = pytest.mark.usefixtures("long_run", "_as_root")


def test_task_runs_as_the_inventory_says(host, truth):
    check_task(host, truth, "ps")


def test_its_process_has_large_pages_for_tables(host, truth):
    child, _ = children(host)[f"ps-{truth['ps']['hosts'].index(name_of(host))}"]
    (setting,) = PS_ENVIRONMENT.items()
    assert "=".join(setting) in host.check_output(f"tr '\\0' '\\n' </proc/{child}/environ").splitlines()
