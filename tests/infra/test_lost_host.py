"""Hosts that vanish while site.yml runs cost themselves. `make site-drills` has each phase, and a whole run after."""

import pytest

from tests.lost_hosts import RETRY, inside, lose, restored, site

PHASE = "Install the release and its Python environment"
TASKS = ["Make the release's directory", "Unpack the code", "Install the environment"]


@pytest.mark.slow
def test_hosts_that_vanish_are_finished_later(lab):
    lose(lab, TASKS, PHASE, ["ps-1", "worker-0", "worker-1"])


@pytest.fixture
def chief_is_away(lab):
    with restored("head"):
        yield
    RETRY.unlink(missing_ok=True)


@pytest.mark.slow
def test_without_the_chief_s_host_nothing_is_switched(lab, chief_is_away):
    before = {host: inside(host, "readlink", "/opt/trainer/current") for host in lab}
    run = site(cut={(PHASE, "Build the release on the control machine"): "head"})
    assert (run.code, run.lost) == (4, ["head"]), run.output
    assert "the chief's host head is lost" in run.output
    assert {host: inside(host, "readlink", "/opt/trainer/current") for host in lab} == before
    assert RETRY.read_text().split() == sorted(lab)
