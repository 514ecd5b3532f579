"""What `fab render slurm` prints, run by Debian's Slurm on three hosts: a worker is killed, and a host loses its power.

The hosts have Python and the trainer from `site.yml`; of psfleet nothing else takes part. Their packet filter is open
meanwhile, as Slurm's own ports have to be.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import answer, wait_until
from tests.lost_hosts import give_power, pull_plug, restored

from .conftest import copy_inventory, fab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # tests/managers/test_slurm.py has one node
NODES = ("head", "worker-0", "worker-1")
SHARED = "/srv/trainer/slurm"
RUN = f"{SHARED}/runs/batch"
AS_USER = "setpriv --reuid=trainer --regid=trainer --init-groups env HOME=/var/lib/trainer"
# A container has no cgroups to give away. Slurm waits until a job's credentials have expired before it runs it again.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15
StateSaveLocation=/var/lib/slurm/lab
SlurmdSpoolDir=/var/lib/slurm/lab-node
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=20
ReturnToService=2
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
INSTALL = """
set -e
cp --no-clobber /etc/hosts /etc/hosts.before-slurm
printf '127.0.0.1 localhost\\n{hosts}\\n' >/etc/hosts
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends {packages} >/dev/null
mkdir -p /var/lib/slurm/lab
printf '{configuration}' >/etc/slurm/slurm.conf
systemctl stop munge
rm -f /etc/munge/munge.key
printf '{key}' >/etc/munge/munge.key
chown munge: /etc/munge/munge.key
chmod 0400 /etc/munge/munge.key
systemctl restart munge {services}
echo ready
"""
OPEN = "nft delete table inet psfleet 2>/dev/null; true"
REMOVE = """
systemctl stop slurmctld slurmd munge
DEBIAN_FRONTEND=noninteractive apt-get purge --yes --auto-remove slurmctld slurmd slurm-client munge >/dev/null
rm -rf /etc/slurm /var/lib/slurm /var/log/slurm /etc/munge /var/lib/munge /var/log/munge
userdel slurm; userdel munge
mv /etc/hosts.before-slurm /etc/hosts
systemctl restart psfleet-firewall
"""


class Slurm:
    """Slurm on the lab's hosts; jobs are the tasks' user's."""

    def __init__(self, lab: dict[str, Any]) -> None:
        self.lab = lab

    def call(self, command: str) -> str:
        with self.lab["head"].sudo():
            done = self.lab["head"].run(f"cd {SHARED} && {AS_USER} {command}")
        assert done.rc == 0, f"{command}: {done.stdout}{done.stderr}"
        return str(done.stdout.strip())

    def job(self, number: str) -> dict[str, str]:
        shown = self.call(f"scontrol --oneliner show job {number}")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, number: str, state: str, seconds: float) -> dict[str, str]:
        def reached() -> dict[str, str]:
            found = self.job(number)
            return found if found["JobState"] == state else {}

        found: dict[str, str] = wait_until(reached, seconds, f"job {number} is {state}")
        return found

    def status(self) -> dict[str, Any]:
        """Return the run's status; empty while there is none."""
        text = answer(self.lab["head"], f"cat {RUN}/status.json")
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in answer(self.lab["head"], f"cat {RUN}/events.jsonl").splitlines()]

    def trains_to(self, step: int, seconds: float = 600) -> None:
        def trained() -> bool:
            found = self.status()
            return found.get("state") == "training" and (found.get("step") or 0) >= step and not found["without"]

        wait_until(trained, seconds, f"step {step} with all members: {self.status()}")


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's inventory with one ps and without an evaluator; what is rendered has its tasks, and no host."""
    settings = {"program": "trainer.examples.digits:Digits", "steps": 1_000_000, "checkpoint_seconds": 10}
    copy = copy_inventory(tmp_path_factory.mktemp("slurm") / "lab", settings)
    groups = yaml.safe_load((copy / "hosts.yml").read_text())
    groups |= {"ps": {"hosts": {"ps-0": groups["ps"]["hosts"]["ps-0"]}}, "evaluator": {"hosts": None}}
    (copy / "hosts.yml").write_text(yaml.safe_dump(groups, sort_keys=False))
    return copy


@pytest.fixture(scope="module")
def slurm(lab: dict[str, Any], truth: dict[str, Any]) -> Iterator[Slurm]:
    """Slurm on three hosts whose own cluster is stopped; in the end they have none."""
    fab("stop-cluster")
    addresses = {name: truth["_meta"]["hostvars"][name]["ansible_host"] for name in NODES}
    hosts = "\\n".join(f"{address} {name}" for name, address in addresses.items())
    configuration = CONFIGURATION.format(nodes=",".join(NODES)).replace("\n", "\\n")
    key = os.urandom(64).hex()
    try:
        scripts = [
            INSTALL.format(
                hosts=hosts,
                configuration=configuration,
                key=key,
                packages="munge slurm-client slurmd" + " slurmctld" * (name == "head"),
                services="slurmd" + " slurmctld" * (name == "head"),
            )
            for name in NODES
        ]
        machines = [lab[name] for name in NODES]
        with ThreadPoolExecutor() as pool:
            assert [said[-5:] for said in pool.map(answer, machines, scripts)] == ["ready"] * len(NODES)
            list(pool.map(answer, machines, [OPEN] * len(NODES)))
        answer(lab["head"], f"install -d -o trainer -g trainer {SHARED}")
        cluster = Slurm(lab)
        idle = "sinfo --noheader --Node --format=%T"
        wait_until(lambda: cluster.call(idle).split() == ["idle"] * len(NODES), 60, "all nodes are idle")
        yield cluster
        cluster.call("scancel --user=trainer")
        wait_until(lambda: not cluster.call("squeue --noheader"), 90, "no job is left")
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(answer, [lab[name] for name in NODES], [REMOVE] * len(NODES)))
        answer(lab["head"], f"rm -rf {SHARED}")


@pytest.fixture(scope="module")
def job(slurm: Slurm, inventory: Path) -> str:
    """The number of a job that trains on all nodes."""
    python = "/opt/trainer/current/env/bin/python"
    words = ("render", "slurm", "--run", "batch", "--shared-dir", SHARED, "--python", python)
    rendered = fab(*words, inventory=inventory)
    assert rendered.returncode == 0, rendered.stderr
    with slurm.lab["head"].sudo():
        slurm.lab["head"].run_expect([0], f"cat >{SHARED}/batch.sh <<'BATCH'\n{rendered.stdout}\nBATCH")
    submitted = "sbatch --parsable --nodes=3 --export=ALL,PYTHONPATH=/opt/trainer/current batch.sh"
    number = slurm.call(submitted)
    begun = time.monotonic()
    slurm.trains_to(20)
    wait_until(lambda: slurm.status().get("checkpoint"), 120, "a checkpoint")
    print(f"step 20 and a checkpoint after {time.monotonic() - begun:.1f} s")
    return number


def test_the_tasks_are_on_several_nodes(slurm: Slurm, job: str) -> None:
    cluster = json.loads(answer(slurm.lab["head"], f"cat {SHARED}/slurm-{job}/cluster.json"))
    assert {name: len(members) for name, members in cluster.items()} == {"chief": 1, "worker": 2, "ps": 1}
    nodes = {member.split(":")[0] for members in cluster.values() for member in members}
    assert nodes == set(NODES)
    assert set(slurm.status()["workers"]) == {"worker-0", "worker-1"}


def test_a_killed_worker_is_started_again_and_nothing_else_is(slurm: Slurm, job: str) -> None:
    before, past = slurm.status()["step"], len(slurm.events())
    where = json.loads(answer(slurm.lab["head"], f"cat {SHARED}/slurm-{job}/cluster.json"))["worker"][1].split(":")[0]
    answer(slurm.lab[where], "pkill -KILL -f '[-]-job-name worker --task-index 1'")
    begun = time.monotonic()
    back = ("member-back", "worker-1")
    wait_until(lambda: back in [kind(each) for each in slurm.events()[past:]], 180, "worker-1 takes part again")
    print(f"worker-1 is back after {time.monotonic() - begun:.1f} s")
    slurm.trains_to(before + 20)
    new = slurm.events()[past:]
    assert ("member-lost", "worker-1") in [kind(each) for each in new]
    assert [each for each in new if each["event"] in ("started", "failed", "ps-lost") or each.get("steps_lost")] == []
    assert (slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == ("RUNNING", "0")


def test_a_job_whose_host_has_lost_its_power_goes_on_when_it_is_back(slurm: Slurm, job: str) -> None:
    """Slurm ends the job, queues it again, and waits for as many processors as it had."""
    lost, past = "worker-1", len(slurm.events())
    assert lost in answer(slurm.lab["head"], f"cat {SHARED}/slurm-{job}/nodes").split()
    with restored(lost):
        pull_plug(lost)
        begun = time.monotonic()
        slurm.wait(job, "PENDING", 180)
        print(f"queued again after {time.monotonic() - begun:.1f} s")
        give_power(lost)
    answer(slurm.lab[lost], OPEN)
    slurm.wait(job, "RUNNING", 180)
    begun = time.monotonic()
    wait_until(lambda: "restored" in [each["event"] for each in slurm.events()[past:]], 600, "the run is restored")
    new = slurm.events()[past:]
    restored_to = next(int(each["message"].split()[1]) for each in new if each["event"] == "restored")
    slurm.trains_to(restored_to + 20)
    print(f"trains again {time.monotonic() - begun:.1f} s after its second start: {new}")
    assert restored_to > 0
    assert slurm.job(job)["Restarts"] != "0"


def kind(event: dict[str, Any]) -> tuple[str, str | None]:
    return event["event"], event.get("task")
