"""The lab works a queue off: a run that trains already, one that fails, one with a limit, and then it is idle."""

import json
import time

import pytest

from tests.hosts import wait_until

from .conftest import copy_inventory, fab, status

pytestmark = pytest.mark.slow  # tests/training/test_queue.py says it of local processes
NAME = f"infra-queue-{int(time.time())}"
# The second run is to fail in its turn: the proof would refuse it when it is added.
SITE = {"release_build_proof": False}


@pytest.fixture(scope="module")
def queued(lab, tmp_path_factory):
    """Work a queue off that begins with a run at work; gives its inventory, and what `queue-add` said."""
    settings = {"program": "trainer.examples.digits:Digits", "steps": 15000, "checkpoint_steps": 5000}
    inventory = copy_inventory(tmp_path_factory.mktemp("queue") / "lab", settings, **SITE)
    started = fab("start-cluster", "--run", f"{NAME}-a", "--detach", inventory=inventory)
    assert started.returncode == 0, started.stdout + started.stderr
    added = [
        add(inventory, "b", "--set", "dropout=1.5", "--reason", "to see it fail"),
        add(inventory, "c", "--steps", "1000000", "--minutes", "1.5"),
        add(inventory, "d", "--set", "dropout=0.3", "--priority", "5"),
    ]
    assert add(inventory, "f")["ahead"][-1] == f"{NAME}-c"
    for words in (("queue-move", f"{NAME}-f", "--first"), ("queue-remove", f"{NAME}-f", "--reason", "no need")):
        done = fab(*words, inventory=inventory)
        assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: all(queue_of(inventory).get(key) for key in ("over", "evaluated")), 900, "the end of the queue")
    yield inventory, added
    fab("stop-cluster", inventory=inventory)
    with lab["head"].sudo():
        files = " ".join(f"/srv/trainer/{name}" for name in (f"runs/{NAME}-*", "sweeps/queue", "queue.json"))
        lab["head"].run_expect([0], f"rm -rf {files} /srv/trainer/selection.json")


def add(inventory, name, *flags):
    done = fab("queue-add", f"{NAME}-{name}", *flags, "--json", inventory=inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def queue_of(inventory):
    asked = fab("queue", "--json", inventory=inventory)
    return json.loads(asked.stdout)["queue"] if asked.returncode == 0 else {}


def worked_off(inventory):
    return [entry for entry in queue_of(inventory)["entries"] if entry["state"] != "removed"]


def test_what_trained_was_not_interrupted_and_went_first(queued):
    inventory, added = queued
    assert [each["outcome"] for each in added] == ["done"] * 3
    assert added[0]["ahead"] == [f"{NAME}-a"]
    known = queue_of(inventory)["entries"]
    assert [(each["name"], each["points"][0]["step"]) for each in known if each["state"] == "removed"] == [
        (f"{NAME}-f", None)
    ]
    entries = worked_off(inventory)
    assert [entry["name"] for entry in entries] == [f"{NAME}-{name}" for name in "adbc"]
    states = [(entry["state"], entry["points"][0]["step"]) for entry in entries[:2]]
    assert states == [("finished", 15000), ("finished", 15000)]


def test_a_failure_and_a_limit_hold_nothing_up(queued):
    failed, limited = worked_off(queued[0])[2:]
    assert failed["state"] == "failed"
    assert "Invalid value 1.5 received for `rate`" in failed["message"]
    assert (limited["state"], limited["message"]) == ("stopped", "its limit of 1.5 min is used up")
    assert limited["points"][0]["step"] == limited["points"][0]["evaluated_step"] > 0


def test_the_cluster_is_idle_and_says_so(lab, queued):
    for name, host in lab.items():
        with host.sudo():
            wait_until(lambda host=host: not running(host), 60, f"the tasks of {name} end")
    assert "nothing is left to train" in fab("queue", inventory=queued[0]).stdout
    history = json.loads(fab("history", "--verb", "queue-add", "--json", inventory=queued[0]).stdout)["history"]
    assert [act.get("reason") for act in history[-4:]] == ["to see it fail", None, None, None]


def test_an_idle_cluster_begins_with_what_is_added(lab, queued):
    assert add(queued[0], "e")["started"]
    wait_until(lambda: status(lab).get("run") == f"{NAME}-e", 120, "the run that was added begins")
    wait_until(lambda: queue_of(queued[0]).get("over"), 600, "its end")


def running(host):
    return host.check_output("systemctl list-units --no-legend --plain --state=running 'trainer@*'")
