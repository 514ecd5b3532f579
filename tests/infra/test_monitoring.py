"""Prometheus and Alertmanager on the hosts: who is asked, who may ask them, and what faults make them say."""

import http.server
import json
import shlex
import subprocess
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.hosts import wait_until
from tests.receiver import receiver

from .conftest import copy_inventory, fab, give_group, play, reboot, wait_for_progress
from .test_firewall import MEMBERS, knock, reaches

RUN = "infra-watched"
LAB = "10.0.3.1"  # this machine on the hosts' bridge
# Short enough for a test; roles/prometheus/defaults/main.yml has those of a site.
THRESHOLDS = {
    "prometheus_no_step_seconds": 20,
    "prometheus_away_seconds": 10,
    "prometheus_down_seconds": 15,
    "prometheus_checkpoint_seconds": 60,
    "prometheus_save_failure_seconds": 60,
}
PROMETHEUS, ALERTMANAGER, NODE_EXPORTER, METRICS = 9090, 9093, 9100, (2700, 2701)
PACKAGES = "prometheus prometheus-alertmanager prometheus-node-exporter"
ASIDE = "/run/psfleet-watched"
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
UNDRILLED = {"PsfleetGoodputLow"}  # the run of a drill may have it by right

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def webhook():
    """A receiver on this machine: its port, and what it was told, as (status, alert)."""
    heard = []
    with http.server.ThreadingHTTPServer((LAB, 0), receiver(heard)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, heard
        server.shutdown()


@pytest.fixture(scope="module")
def inventory(tmp_path_factory, webhook):
    run = {"program": "slow:Slow", "run": RUN, "steps": 1_000_000, "checkpoint_seconds": 5}
    receivers = [{"name": "team", "webhook_configs": [{"url": f"http://{LAB}:{webhook[0]}/"}]}]
    copy = copy_inventory(
        tmp_path_factory.mktemp("watched") / "lab",
        run,
        "tests/infra/programs",
        alertmanager_receivers=receivers,
        **THRESHOLDS,
    )
    give_group(copy, "prometheus", ["head"])
    give_group(copy, "alertmanager", ["head"])
    return copy


@pytest.fixture(scope="module")
def first(lab, inventory):
    """The first `site.yml` with the groups; afterwards the hosts are as without them."""
    yield play("site.yml", inventory=inventory)
    fab("stop-cluster", inventory=inventory)
    for host in lab.values():
        with host.sudo():
            host.run(f"DEBIAN_FRONTEND=noninteractive apt-get purge --yes {PACKAGES}")
            host.run("rm -rf /etc/systemd/system/prometheus*.service.d /etc/prometheus /var/lib/prometheus")
            host.run("systemctl daemon-reload")
    back = play("site.yml")
    assert back.code == 0, back.failed


@pytest.fixture(scope="module")
def watched(lab, first, inventory):
    """A training that is watched."""
    assert first.code == 0, first.failed
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{RUN} /srv/trainer/runs/{RUN}-failed")
    start(inventory)
    wait_for_progress(lab)
    wait_until(lambda: not firing(lab), 180, "no alert of the start is left")
    return inventory


def start(inventory, *more, verb="start-cluster"):
    started = fab(verb, "--detach", *(more or ("--run", RUN)), inventory=inventory)
    assert started.returncode == 0, started.stdout + started.stderr


def ask(lab, port, path):
    """What Prometheus or Alertmanager answers who is logged in on its host; None where it does not answer."""
    try:
        done = lab["head"].run(f"python3 -c {shlex.quote(ASK)} {shlex.quote(f'http://10.0.3.10:{port}{path}')}")
    except RuntimeError:  # the host does not answer
        return None
    return json.loads(done.stdout) if done.rc == 0 else None


def query(lab, expression, at=None):
    """The value of an expression that has one."""
    asked = {"query": expression} | ({"time": at} if at else {})
    found = (ask(lab, PROMETHEUS, f"/api/v1/query?{urllib.parse.urlencode(asked)}") or {"data": {"result": []}})[
        "data"
    ]["result"]
    return float(found[0]["value"][1]) if found else None


def firing(lab):
    """The alerts that Alertmanager has now, each with whom it is of."""
    alerts = ask(lab, ALERTMANAGER, "/api/v2/alerts")
    if alerts is None:
        return {("no answer", "")}
    return {
        (labels["alertname"], labels.get("member") or labels.get("task") or labels.get("host", ""))
        for labels in (alert["labels"] for alert in alerts)
        if labels["alertname"] not in UNDRILLED
    }


class Fault:
    """Waits for alerts of a fault, and for their end; prints a row of docs/observing.md for each."""

    def __init__(self, lab, what):
        self.lab, self.what, self.fired = lab, what, {}
        self.began = time.monotonic()

    def fires(self, *alerts, seconds=240):
        def all_are_there():
            for alert in firing(self.lab) & set(alerts):
                self.fired.setdefault(alert, time.monotonic() - self.began)
            return set(alerts) == set(self.fired)

        wait_until(all_are_there, seconds, f"{alerts} after {self.what}; there are {firing(self.lab)}")

    def clears(self, seconds=300):
        ended, cleared = time.monotonic(), {}

        def none_is_left():
            for alert in set(self.fired) - firing(self.lab):
                cleared.setdefault(alert, time.monotonic() - ended)
            return set(cleared) == set(self.fired)

        wait_until(none_is_left, seconds, f"{set(self.fired)} end after {self.what}")
        self.tell(cleared)

    def tell(self, cleared=()):
        for (name, whose), after in self.fired.items():
            ended = f"{cleared[name, whose]:.0f}" if cleared else ""
            print(f"\n| {self.what} | `{name}` {whose} | {after:.0f} | {ended} |", flush=True)


def test_a_second_site_changes_nothing(first, inventory):
    assert first.code == 0, first.failed
    again = play("site.yml", inventory=inventory)
    assert (again.code, again.changed) == (0, []), again.failed


def test_every_task_and_host_is_scraped(lab, watched):
    def targets():
        found = (ask(lab, PROMETHEUS, "/api/v1/targets") or {"data": {"activeTargets": []}})["data"]["activeTargets"]
        return {
            (target["scrapePool"], target["labels"].get("task") or target["labels"]["host"]): target["health"]
            for target in found
        }

    tasks = ("chief-0", "evaluator-0", "ps-0", "ps-1", "worker-0", "worker-1")
    expected = {("trainer", task) for task in tasks} | {("node", host) for host in lab}
    expected |= {("prometheus", "head"), ("alertmanager", "head")}
    wait_until(lambda: set(targets().values()) == {"up"}, 60, f"all targets are up: {targets()}")
    assert set(targets()) == expected


def test_the_runs_numbers_arrive(lab, watched):
    wait_until(lambda: (query(lab, "rate(psfleet_steps_total[1m])") or 0) > 1, 120, "a rate of steps")
    assert query(lab, "psfleet:run_wanted") == 1
    assert query(lab, 'count(psfleet_member_state{state="training"}==1)') == 4
    assert query(lab, "psfleet_checkpoint_timestamp_seconds") > time.time() - 60
    wait_until(lambda: query(lab, "psfleet_evaluation_step"), 120, "an evaluation")
    assert query(lab, 'count(process_resident_memory_bytes{task!=""})') == 6


def test_a_stranger_reaches_none_of_it(lab, watched):
    ports = (PROMETHEUS, ALERTMANAGER, NODE_EXPORTER, *METRICS)
    address = {host: value.check_output("hostname --all-ip-addresses").split()[0] for host, value in lab.items()}
    with ThreadPoolExecutor() as pool:
        for host in MEMBERS:
            found = dict(zip(ports, pool.map(partial(knock, address[host]), ports), strict=True))
            assert found == dict.fromkeys(ports, "silent"), host
    for port in (*ports, 2701):
        assert not reaches(lab["worker-0"], address["head"], port), port
        assert not reaches(lab["head"], address["head"], port, "nobody"), port
    assert reaches(lab["head"], address["worker-0"], NODE_EXPORTER)
    assert reaches(lab["head"], address["worker-0"], METRICS[0])


def test_what_is_kept_is_bounded(lab, watched):
    flags = ask(lab, PROMETHEUS, "/api/v1/status/flags")["data"]
    assert (flags["storage.tsdb.retention.time"], flags["storage.tsdb.retention.size"]) == ("30d", "4GiB")


def test_a_drill_that_kills_the_coordinator_again_and_again(lab, watched):
    """Fires only: it clears when the first end is 15 minutes old."""
    fab("stop-cluster", inventory=watched)
    drilled = fab("drill", "coordinator-5", "--bounds-factor=3", inventory=watched)
    assert drilled.returncode == 0, drilled.stdout + drilled.stderr
    fault = Fault(lab, "`fab drill coordinator-5`, from its end on")
    start(watched)
    fault.fires(("PsfleetRestartsInARow", "chief-0"))
    fault.tell()
    wait_for_progress(lab)


def test_a_checkpoint_that_cannot_be_saved(lab, watched):
    path = f"/srv/trainer/runs/{RUN}"
    # Made read-only elsewhere first, as the drill does: what reaches the tasks' own view is one mount, with its flags.
    command = f"mkdir -p {ASIDE} && mount --bind {path} {ASIDE} && mount -o remount,bind,ro {ASIDE}"
    command += f" && mount --bind {ASIDE} {path}"
    for host in lab.values():
        with host.sudo():
            host.run_expect([0], command)
    fault = Fault(lab, "`path-read-only`: the run's directory")
    try:
        fault.fires(("PsfleetCheckpointSaveFailed", ""))
    finally:
        for host in lab.values():
            with host.sudo():
                host.run(f"umount --lazy {path}; umount --lazy {ASIDE}")
    fault.clears()


def test_workers_that_are_away(lab, watched, webhook):
    for name in ("worker-0", "worker-1"):
        with lab[name].sudo():
            lab[name].run_expect([0], f"systemctl stop trainer@{name}")
    fault = Fault(lab, "`systemctl stop` of both workers")
    try:
        fault.fires(
            ("PsfleetMemberAway", "worker-0"),
            ("PsfleetMemberAway", "worker-1"),
            ("PsfleetTargetDown", "worker-1"),
            ("PsfleetNoStep", ""),
            ("PsfleetCheckpointOld", ""),
            seconds=360,
        )
    finally:
        for name in ("worker-0", "worker-1"):
            with lab[name].sudo():
                lab[name].run_expect([0], f"systemctl start --no-block trainer@{name}")
    fault.clears()
    heard = webhook[1]
    for alert in ("PsfleetMemberAway", "PsfleetNoStep"):
        wait_until(lambda alert=alert: {("firing", alert), ("resolved", alert)} <= set(heard), 120, f"{heard}")


def test_a_host_that_loses_its_power(lab, watched):
    subprocess.run(["lxc-stop", "--kill", "--name", "psfleet-worker-1"], check=True)
    fault = Fault(lab, "`worker-off`: a worker's host loses its power")
    try:
        fault.fires(("PsfleetHostAway", "worker-1"), ("PsfleetMemberAway", "worker-1"))
        alerts = ask(lab, ALERTMANAGER, "/api/v2/alerts")
        down = [alert for alert in alerts if alert["labels"]["alertname"] == "PsfleetTargetDown"]
        assert all(alert["status"]["state"] == "suppressed" for alert in down), "the host's alert says it already"
    finally:
        subprocess.run(["lxc-start", "--name", "psfleet-worker-1"], check=True)
    fault.clears()


def test_a_run_that_fails(lab, watched):
    start(watched, "--run", f"{RUN}-failed", "--program", "slow:Breaking", verb="restart-cluster")
    fault = Fault(lab, "a program that trains for twenty seconds and raises, from its first step on")
    fault.fires(("PsfleetRunFailed", "head"))
    start(watched, "--run", RUN, "--program", "slow:Slow")
    fault.clears()
    wait_for_progress(lab)


def test_a_reboot_of_the_monitoring_host_keeps_what_was_told(lab, watched):
    at = time.time()
    before = query(lab, "psfleet_steps_total", at)
    assert before
    reboot(lab["head"])
    wait_until(lambda: query(lab, "psfleet_steps_total"), 180, "Prometheus asks again")
    assert query(lab, "psfleet_steps_total", at) == before
    wait_until(lambda: query(lab, "min(up)") == 1, 120, "all targets are up again")
    wait_until(lambda: not firing(lab), 1000, "no alert is left")
