"""Who takes part, changed while a training runs: it never fails, loses no step, and no other task restarts.

One training of two workers and two ps is under way in all of these.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import ROOT, answer, wait_until
from tests.lost_hosts import inside
from tests.pauses import longest_pause

from .conftest import LONG_RUN, fab, play, reboot, status, units, wait_for_progress
from .test_planned_reboot import FAULTS, events


@dataclass
class Training:
    """What befell the training since this was made."""

    lab: dict[str, Any]
    units: dict[str, str] = field(default_factory=dict)
    past: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.units, self.past, self.step = units(self.lab), len(events()), status(self.lab)["step"]

    def check(self, *restarted: str, slow_saves: bool = False) -> list[dict[str, Any]]:
        """Refuse a fault, a lost step and a task that restarted beside those; returns the events.

        With `slow_saves` one that takes longer than the next save waits for is no fault: hosts boot beside it.
        """
        new = events()[self.past :]
        faults = FAULTS - {"save-failed"} if slow_saves else FAULTS
        assert [event for event in new if event["event"] in faults or event.get("steps_lost")] == []
        wait_for_progress(self.lab)
        assert status(self.lab)["step"] > self.step
        now = units(self.lab)
        assert {task for task, before in self.units.items() if now.get(task) != before} <= set(restarted)
        return new


@pytest.fixture
def training(lab: dict[str, Any], long_run: Path) -> Iterator[Training]:
    wait_until(lambda: status(lab)["without"] == {}, 120, "all members take part")
    wait_for_progress(lab)
    yield Training(lab)
    for host in ("worker-1", "ps-1"):
        assert fab("undrain", host, inventory=long_run).returncode == 0


def done(*words: str, inventory: Path) -> str:
    ended = fab(*words, inventory=inventory)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def seen(inventory: Path) -> dict[str, dict[str, Any]]:
    return {row["host"]: row for row in json.loads(done("hosts", "--json", inventory=inventory))["hosts"]}


@pytest.mark.slow
def test_a_drained_worker_stays_out_until_it_is_undrained(training: Training, lab, long_run) -> None:
    """About a minute."""
    done("ok-to-stop", "worker-1", inventory=long_run)
    begun = time.monotonic()
    done("drain", "worker-1", "--reason", "a new disk", inventory=long_run)
    print(f"drain worker-1: {time.monotonic() - begun:.1f} s")
    row = seen(long_run)["worker-1"]
    assert (row["state"], row["why"]) == ("drained", "a new disk")
    assert "drained" in done("status", inventory=long_run)
    # Neither a start by hand nor fab brings it back.
    answer(lab["worker-1"], "systemctl start trainer@worker-1")
    assert "without worker-1 on worker-1: drained" in done("start-cluster", "--detach", inventory=long_run)
    assert answer(lab["worker-1"], "systemctl is-active trainer@worker-1") == "inactive"
    begun = time.monotonic()
    done("undrain", "worker-1", inventory=long_run)
    print(f"undrain worker-1: {time.monotonic() - begun:.1f} s")
    names = [event["event"] for event in training.check("worker-1") if event.get("task") == "worker-1"]
    assert names == ["member-left", "member-back"]
    assert status(lab)["without"] == {}


def test_a_drained_ps_has_its_variables_elsewhere_and_no_step_is_lost(training: Training, lab, long_run) -> None:
    """About a minute."""
    refused = fab("ok-to-stop", "ps-1", inventory=long_run)
    assert refused.returncode == 1
    assert "Nothing is lost after: fab drain ps-1" in refused.stderr
    begun = time.monotonic()
    done("drain", "ps-1", "--reason", "a new disk", inventory=long_run)
    print(f"drain ps-1: {time.monotonic() - begun:.1f} s")
    assert list(status(lab)["without"]) == ["ps-1"]
    row = seen(long_run)["ps-1"]
    assert (row["state"], row["why"]) == ("drained", "a new disk")
    answer(lab["ps-1"], "systemctl start trainer@ps-1")  # a start by hand does not bring it back
    assert answer(lab["ps-1"], "systemctl is-active trainer@ps-1") == "inactive"
    done("ok-to-stop", "ps-1", inventory=long_run)
    last = fab("drain", "ps-0", inventory=long_run)
    assert last.returncode == 2
    assert "0 of 2 ps tasks would be left" in last.stderr
    begun = time.monotonic()
    done("undrain", "ps-1", inventory=long_run)
    print(f"undrain ps-1: {time.monotonic() - begun:.1f} s")
    wait_until(lambda: status(lab)["without"] == {}, 120, "ps-1 takes part")
    found = training.check("ps-1")
    formed = [event["message"] for event in found if event["event"] == "formed"]
    assert [message[:12] for message in formed] == ["without ps-1", "all members"]
    print([event for event in found if event["event"] in ("recovering", "restored", "training")])


@pytest.mark.slow
def test_a_drain_survives_reboots_and_site_yml(training: Training, lab, long_run) -> None:
    """Two minutes and more."""
    done("drain", "worker-1", inventory=long_run)
    reboot(lab["worker-1"])
    changed = play("site.yml", inventory=long_run)
    assert not any(stats["changed"] for stats in changed.stats.values()), changed.changed
    assert answer(lab["worker-1"], "systemctl is-active trainer@worker-1") == "inactive"
    assert seen(long_run)["worker-1"]["state"] == "drained"
    done("undrain", "worker-1", inventory=long_run)
    training.check("worker-1")


# A package in version 1 is installed, and its version 2, which asks for a reboot, is offered by a folder of the host.
OUTDATED = r"""
set -e
mkdir -p /srv/lab-debs/DEBIAN && cd /srv/lab-debs
for version in 1 2; do
    {
        echo Package: lab-update; echo Version: $version; echo Architecture: all
        echo 'Maintainer: the lab <root@localhost>'; echo 'Description: a package with an update'
    } >DEBIAN/control
    printf '#!/bin/sh\n[ -z "$2" ] || touch /run/reboot-required\n' >DEBIAN/postinst
    chmod 755 DEBIAN/postinst
    mkdir made && cp -r DEBIAN made && dpkg-deb --root-owner-group --build made lab-update-$version.deb && rm -r made
done
dpkg --install lab-update-1.deb
{
    cat DEBIAN/control; echo Filename: ./lab-update-2.deb; echo Size: $(stat --format=%s lab-update-2.deb)
    echo SHA256: $(sha256sum lab-update-2.deb | cut -d' ' -f1)
} >Packages
echo 'deb [trusted=yes] file:/srv/lab-debs ./' >/etc/apt/sources.list.d/lab-debs.list
"""
AS_BEFORE = "rm -rf /srv/lab-debs /etc/apt/sources.list.d/lab-debs.list; dpkg --purge lab-update; apt-get update"


@pytest.fixture
def outdated(lab: dict[str, Any]) -> Iterator[list[str]]:
    hosts = ["ps-1", "worker-1"]
    for host in hosts:
        answer(lab[host], OUTDATED)
    yield hosts
    for host in hosts:
        answer(lab[host], AS_BEFORE)


@pytest.mark.slow
def test_hosts_are_updated_while_the_others_train(training: Training, lab, long_run, outdated) -> None:
    """Five minutes: a ps's host and a worker's, each with a reboot."""
    names = ",".join(outdated)
    booted = "stat --format=%Y /proc/1"
    before = {host: answer(lab[host], booted) for host in outdated}
    planned = json.loads(done("update-hosts", names, "--plan", "--json", inventory=long_run))
    assert [row["host"] for row in planned["hosts"]] == outdated
    updated = json.loads(done("update-hosts", names, "--json", "--reason", "monthly", inventory=long_run))
    print(updated)
    for row in updated["hosts"]:
        assert ("lab-update 1 -> 2" in row["updates"], row["rebooted"], row["outcome"]) == (True, True, "updated")
        assert answer(lab[row["host"]], "dpkg-query --show --showformat='${Version}' lab-update") == "2"
        assert answer(lab[row["host"]], booted) != before[row["host"]]
        assert seen(long_run)[row["host"]]["state"] == "ready"
    found = training.check(*outdated, slow_saves=True)
    assert [event["message"][:12] for event in found if event["event"] == "formed"] == ["without ps-1", "all members"]
    assert "nothing" in json.loads(done("update-hosts", names, "--json", inventory=long_run))["outcome"]


# A kernel without an NFS server can't serve: while this one is down, what anyone writes on the path is held up.
HELD_SECONDS = 15
SERVER = f"""
cat >/etc/systemd/system/nfs-server.service <<'UNIT'
[Unit]
RequiresMountsFor=/srv/trainer
[Service]
ExecStartPre=/usr/bin/sleep {HELD_SECONDS}
ExecStartPre=-/usr/sbin/fsfreeze --unfreeze /srv/trainer
ExecStart=/usr/bin/sleep infinity
ExecStopPost=/usr/sbin/fsfreeze --freeze /srv/trainer
[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload && systemctl enable --now nfs-server
"""
NO_SERVER = "systemctl disable nfs-server; rm /etc/systemd/system/nfs-server.service; systemctl daemon-reload"


@pytest.fixture
def server(training: Training, lab: dict[str, Any], long_run: Path, tmp_path: Path) -> Iterator[Path]:
    """Have worker-1, which is drained, serve the shared path instead; gives an inventory that says so."""
    done("drain", "worker-1", inventory=long_run)
    served = shutil.copytree(long_run, tmp_path / "served")
    hosts = yaml.safe_load((served / "hosts.yml").read_text())
    hosts["nfs_server"]["hosts"] = {"worker-1": hosts["worker"]["hosts"].pop("worker-1")}
    (served / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    answer(lab["worker-1"], SERVER)
    yield served
    subprocess.run(["fsfreeze", "--unfreeze", ROOT / ".lab/shared"], capture_output=True, check=False)
    answer(lab["worker-1"], f"{NO_SERVER}; systemctl kill --signal=KILL nfs-server; fsfreeze --unfreeze /srv/trainer")


@contextmanager
def longest_write() -> Iterator[list[float]]:
    """Write on the shared path again and again; adds how long the slowest took, once all is written."""
    found: list[float] = []
    ended = threading.Event()

    def write() -> None:
        times = []
        while not ended.wait(0.2):
            begun = time.monotonic()
            (ROOT / ".lab/shared/written").write_text("x")
            times.append(time.monotonic() - begun)
        found.append(max(times))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield found
    finally:
        ended.set()
        writer.join(60)
        (ROOT / ".lab/shared/written").unlink()


@pytest.mark.slow
def test_a_server_of_the_shared_path_reboots_and_the_training_waits_or_goes_on(
    training: Training, lab, long_run, server
) -> None:
    """Two minutes."""
    booted = "stat --format=%Y /proc/1"
    before = answer(lab["worker-1"], booted)
    named = ("update-hosts", "worker-1", "--reboot", "only")
    planned = json.loads(done(*named, "--plan", "--json", inventory=server))
    assert planned["hosts"][0]["cost"]["pause"] == "of what reads or writes the shared path, until it is back"
    with longest_write() as seconds:
        updated = json.loads(done(*named, "--json", inventory=server))
    print(updated, seconds)
    assert [(row["outcome"], row["rebooted"]) for row in updated["hosts"]] == [("updated", True)]
    assert answer(lab["worker-1"], booted) != before
    assert seconds[0] >= HELD_SECONDS
    done("undrain", "worker-1", inventory=long_run)
    training.check("worker-1", slow_saves=True)


@pytest.mark.slow
def test_another_clusters_host_is_refused_beside_its_training(training: Training, long_run, tmp_path) -> None:
    """Half a minute: a second inventory has worker-1 alone, as a cluster of its own."""
    other = shutil.copytree(long_run, tmp_path / "other")
    address = yaml.safe_load((other / "hosts.yml").read_text())["worker"]["hosts"]["worker-1"]
    groups = {group: {"hosts": {"worker-1": address}} for group in ("chief", "ps", "worker")}
    (other / "hosts.yml").write_text(yaml.safe_dump(groups))
    refused = play("site.yml", inventory=other)
    assert [host for host, message in refused.failed if "worker-1': it belongs to the cluster" in message] == [
        "worker-1"
    ]
    assert refused.changed == []
    for words in (("start-cluster", "--detach"), ("update-hosts", "--reboot", "always")):
        assert "it belongs to the cluster" in fab(*words, inventory=other).stderr
    training.check()


@pytest.mark.slow
def test_advice_says_what_the_training_waits_for(training: Training, long_run) -> None:
    """A minute. The program's input is slow on purpose, and all hosts show one machine's processors."""
    advised = json.loads(done("advise", "--minutes", "0.7", "--json", inventory=long_run))["advice"]
    print(advised)
    assert {"input", "other"} & {each["part"] for each in advised}
    training.check()


def edit(long_run: Path, place: Path, more: str) -> Path:
    """Return a copy of the inventory with another run setting, and a program with some lines more."""
    programs, edited = place / "programs", place / "lab"
    shutil.copytree(ROOT / "tests/infra/programs", programs)
    (programs / "slow.py").write_text((programs / "slow.py").read_text() + more)
    shutil.copytree(long_run, edited)
    variables = edited / "group_vars/all.yml"
    values = yaml.safe_load(variables.read_text())
    run = values["trainer_run"] | {"log_seconds": 3}
    variables.write_text(yaml.safe_dump(values | {"release_program": str(programs), "trainer_run": run}))
    return edited


def state_of(lab: dict[str, Any]) -> list[str]:
    """Return what a canary must leave on each host as it was, and what it must not leave there."""
    look = "readlink /opt/trainer/current; cat /etc/trainer/run.json; ls /var/cache"
    pids = "systemctl show --property=MainPID 'trainer@*' psfleet-canary; pgrep -f 'trainer [l]ocal' || true"
    return [answer(host, f"{look}; {pids}") for host in lab.values()]


def test_a_canary_trains_on_from_a_copy_and_touches_nothing_else(training: Training, lab, long_run, tmp_path) -> None:
    """Half a minute; what it has staged makes the next start quick."""
    edited = edit(long_run, tmp_path, "# a canary\n")
    before = state_of(lab)
    begun = time.monotonic()
    tried = json.loads(done("canary", "worker-1", "--steps", "8", "--json", "--reason", "tried", inventory=edited))
    print(f"canary: {time.monotonic() - begun:.1f} s\n{tried}")
    assert (tried["outcome"], tried["trial"]["step"]) == ("passed", tried["trial"]["checkpoint"] + 8)
    assert tried["plan"]["files"] == {"program": ["slow.py"]}
    assert tried["next"].startswith("fab start-cluster --detach")
    assert state_of(lab) == before
    assert answer(lab["worker-1"], f"ls /opt/trainer/releases/{tried['plan']['release']}/slow.py")
    assert fab("canary", "worker-1", "--plan", inventory=long_run).stdout.startswith("the hosts have release")
    training.check()


@pytest.mark.slow
def test_a_canary_whose_program_raises_fails_and_touches_nothing(training: Training, lab, long_run, tmp_path) -> None:
    """Half a minute."""
    raising = "\n\nclass Slow(Slow):\n    def train_dataset(self, context):\n        raise ValueError('no such file')\n"
    edited = edit(long_run, tmp_path, raising)
    before = state_of(lab), answer(lab["worker-1"], "ls /opt/trainer/releases")
    failed = fab("canary", "worker-1", "--steps", "8", inventory=edited)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "the canary failed on worker-1: " in failed.stderr
    assert "slow.py" in failed.stderr
    assert "ValueError: no such file" in failed.stderr
    assert (state_of(lab), answer(lab["worker-1"], "ls /opt/trainer/releases")) == before
    training.check()


@pytest.mark.slow
def test_a_rollback_brings_the_earlier_release_and_settings(training: Training, lab, long_run, tmp_path) -> None:
    """Half a minute; no process restarts but the supervisors' children."""
    edited = edit(long_run, tmp_path, "# edited\n")
    before = answer(lab["head"], "readlink /opt/trainer/current; cat /etc/trainer/run.json")
    done("start-cluster", "--detach", inventory=edited)
    assert answer(lab["head"], "readlink /opt/trainer/current; cat /etc/trainer/run.json") != before
    begun = time.monotonic()
    output = done("rollback", "--reason", "a test", inventory=long_run)
    print(f"rollback: {time.monotonic() - begun:.1f} s\n{output}")
    assert "setting  log_seconds: 3 -> 1" in output
    assert {answer(host, "readlink /opt/trainer/current; cat /etc/trainer/run.json") for host in lab.values()} == {
        before
    }
    training.check()
    assert "way     fab by itself" in done("start-cluster", "--detach", inventory=long_run)
    training.check()
    assert {("rollback", "done", "a test"), ("start-cluster", "done", None)} <= acts(long_run)


def pause(since: float, until: float) -> float:
    """The longest time in which no step ended, as the coordinator has noted each."""
    history = inside("head", "cat", f"/srv/trainer/runs/{LONG_RUN}/history.jsonl")
    return longest_pause(history.splitlines(), since, until)


def change(inventory: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a file of a copied inventory."""
    values = yaml.safe_load((inventory / name).read_text())
    edit(values)
    (inventory / name).write_text(yaml.safe_dump(values, sort_keys=False))


# What a worker that joins may cost the others, and by how much a machine with other work may take longer.
MOST_PAUSE, BUSY = 0.5, 2


@pytest.mark.slow
def test_members_that_are_added_join_the_training(training: Training, lab, long_run, tmp_path) -> None:
    """Five minutes: a worker more on worker-1, then a ps more on ps-1, and back to as many as before."""
    more = shutil.copytree(long_run, tmp_path / "lab")
    # So that the history has each step.
    change(more, "group_vars/all.yml", lambda values: values["trainer_run"].update(log_seconds=0.05))
    done("start-cluster", "--detach", inventory=more)
    wait_for_progress(lab)
    training = Training(lab)
    change(more, "hosts.yml", lambda groups: groups["worker"]["hosts"]["worker-1"].update(worker_tasks=2))
    assert play("site.yml", inventory=more).failed == []
    begun = time.monotonic()
    training.check()
    assert not any(stats["changed"] for stats in play("site.yml", inventory=more).stats.values())
    assert "join    worker-2 within seconds" in done("start-cluster", "--plan", inventory=more)
    print(f"looked at in {time.monotonic() - begun:.1f} s")
    before = time.time()
    time.sleep(20)
    begun = time.time()
    usual = pause(before, begun)
    done("start-cluster", "--detach", inventory=more)
    started = time.time()
    waited_for = "status(lab)['workers'] has worker-2"
    wait_until(lambda: status(lab)["workers"].get("worker-2", {}).get("steps"), 60, waited_for)
    told = time.time()
    longest = pause(begun, told)
    print(f"start: {started - begun:.1f} s, worker-2's first steps told {told - started:.1f} s after it")
    print(f"the longest time without a step: {longest:.1f} s while it joined, {usual:.1f} s before")
    assert longest <= BUSY * (usual + MOST_PAUSE)
    change(more, "hosts.yml", lambda groups: groups["ps"]["hosts"]["ps-1"].update(ps_tasks=2))
    assert play("site.yml", inventory=more).failed == []
    assert "join    ps-2 at the next save" in done("start-cluster", "--plan", inventory=more)
    begun = time.time()
    done("start-cluster", "--detach", inventory=more)
    wait_until(lambda: "formed" in [event["event"] for event in events()[training.past :]], 60, "ps-2 is taken in")
    wait_until(lambda: status(lab)["without"] == {}, 60, "all members take part")
    found = training.check("worker-2", "ps-2")
    print(f"the longest time without a step: {pause(begun, time.time()):.1f} s while ps-2 joined")
    assert [event for event in found if event["event"] == "started"] == []  # the coordinator's process went on
    kinds = [(event["event"], event.get("task")) for event in found]
    assert ("member-joined", "worker-2") in kinds
    print([event for event in found if event["event"] in ("recovering", "attached", "restored", "training")])
    # Fewer members are another cluster: all tasks restart once.
    assert play("site.yml", inventory=long_run).failed == []
    wait_until(lambda: status(lab)["without"] == {}, 120, "all members take part")
    assert [event for event in events()[training.past :] if event.get("steps_lost")] == []


def test_the_history_has_each_act(long_run) -> None:
    assert {("drain", "done", "a new disk"), ("canary", "done", "tried"), ("undrain", "done", None)} <= acts(long_run)


def acts(inventory: Path) -> set[tuple[str, str, str | None]]:
    """Return what the history of the last half hour has: the verb, the outcome and the reason of each act."""
    found = json.loads(done("history", "--json", "--since", "30 min", "--lines", "100", inventory=inventory))
    assert found["damaged"] == 0
    return {(act["verb"], act["outcome"], act.get("reason")) for act in found["history"]}
