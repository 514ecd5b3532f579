"""What `fab doctor` finds has a real cause here: a file system, a process, a unit, a file of the run.

`tests/infra/test_runs.py` causes more on hosts; `test_doctor.py` makes up what the hosts say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_look
import pytest

from fleet.doctor import probe
from fleet.doctor.cluster import judge_look
from fleet.doctor.examination import Examination, examine
from fleet.doctor.finding import Finding
from fleet.doctor.hosts import LITTLE_BYTES, LITTLE_FILES, RUN_BYTES, judge_hosts
from fleet.hosts.cluster import Cluster, Observation
from fleet.hosts.run import Run
from fleet.hosts.ssh import Answer, SshHosts
from fleet.rollout.release import read_release
from fleet.site.inventory import Host
from fleet.verbs.doctor import judge_gpus, judge_ways
from fleet.verbs.ways import read as read_ways
from tests.unit import fake_hosts, test_doctor, test_run_look, test_short_way
from tests.unit.stand_ins import put_program
from tests.unit.test_doctor import INVENTORY, judge
from trainer.cluster.reach.ways import status_of
from trainer.run.directory import RunDirectory
from trainer.telemetry.status import Status

ROOT = Path(__file__).parents[2]
PARTS = ("release", "files", "firewall")
ALONE = ["unshare", "--user", "--map-root-user"]
# With mounts of its own: a small file system, one that may only be read, and a machine without memory.
MOUNTS = """
mount -t tmpfs -o size=100k,nr_inodes=50 tmpfs "$1/small" && mount -t tmpfs -o ro tmpfs "$1/fixed" || exit 77
mount --bind "$1/meminfo" /proc/meminfo || exit 77
shift
exec "$@"
"""
LOOK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import host_pace
from fleet.doctor import probe
from fleet.doctor.cluster import judge_control
place = Path(sys.argv[1])
small, fixed = str(place / "small"), str(place / "fixed")
host_pace.DISK, host_pace.AS_TRAINER = fixed, ()
facts = {**host_pace.measure(fixed, 1), "room": {small: probe.room(small)}, "memory": probe.memory()}
control = [asdict(each) for each in judge_control(Path(small), None, [])]
print(json.dumps({"facts": facts, "control": control}))
"""
# With a network of its own, which has two addresses of a host and no route beyond; packets to ps-0 leave from another.
NETWORK = """
ip link set lo up && ip address add 192.0.2.30/32 dev lo && ip address add 192.0.2.31/32 dev lo || exit 77
ip route add 192.0.2.20/32 dev lo src 192.0.2.31 || exit 77
exec "$@"
"""
ROUTES = """
import json, subprocess, sys
import host_look
members = {"far": "192.0.2.30", "store": "192.0.2.20", "head": "198.51.100.10"}
ways = [sys.executable, "-m", "trainer", "ways", "--json", "--source", "worker-1", "chief-0=198.51.100.10:2222"]
problems, notes = host_look.way_problems("far", members)
print(json.dumps({"problems": problems, "notes": notes}), flush=True)
subprocess.run(ways)
"""
SYSTEMCTL = """#!/bin/sh
case "$*" in
*--state=failed*) echo "psfleet-firewall.service loaded failed failed The packet filter" ;;
*LimitNOFILE*) echo 1024 ;;
show-environment) echo "LANG=C"; echo "http_proxy=http://127.0.0.1:{port}" ;;
esac
"""


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def only(found: list[Finding], part: str) -> Finding:
    (one,) = [each for each in found if each.part == part]
    return one


def facts(**changes: Any) -> dict[str, Any]:
    return test_doctor.facts(**changes)


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Have a process with mounts of its own look at them."""
    place = tmp_path_factory.mktemp("mounts")
    for name in ("small", "fixed"):
        (place / name).mkdir()
    (place / "meminfo").write_text("MemTotal:        8388608 kB\nMemAvailable:      102400 kB\n")
    command = [*ALONE, "--mount", "sh", "-c", MOUNTS, "sh", str(place), sys.executable, "-c", LOOK, str(place)]
    found: dict[str, Any] = json.loads(say_alone(command))
    return found


def say_alone(command: list[str]) -> str:
    """Return what a process says in namespaces of its own."""
    paths = [ROOT, ROOT / "roles/host_check/library"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no unshare")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip(f"no namespaces of its own can be had here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def parted() -> list[str]:
    """What a host without the right routes finds: of host_look, and of each task's ways."""
    command = [*ALONE, "--net", "sh", "-c", NETWORK, "sh", sys.executable, "-c", ROUTES]
    return say_alone(command).splitlines()


def test_a_small_file_system_and_one_with_few_files_left_are_found(looked: dict[str, Any]) -> None:
    found = judge(facts(room=looked["facts"]["room"]))
    assert [(each.level, each.part) for each in found] == [("error", "room"), ("warning", "room")]
    assert "has 0 MB free of 0.0 GB" in found[0].what
    assert "more files" in found[1].what


def test_a_disk_that_may_only_be_read_is_found(looked: dict[str, Any]) -> None:
    found = only(judge(facts(**{key: looked["facts"][key] for key in ("disk_pace", "disk_why")})), "disk")
    assert found.level == "error"
    assert found.what.startswith("a test file can't be written to /var/tmp: ")
    assert "Read-only file system" in found.what


def test_a_shared_path_that_may_only_be_read_is_found(looked: dict[str, Any]) -> None:
    found = only(judge(facts(shared=looked["facts"]["shared"])), "shared path")
    assert found.level == "error"
    assert "Read-only file system" in found.what


def test_memory_that_is_used_up_is_found(looked: dict[str, Any]) -> None:
    found = only(judge(facts(memory=looked["facts"]["memory"])), "memory")
    assert (found.level, found.what) == ("warning", "100 MiB of memory are left of 8.0 GiB")


def test_a_full_disk_of_the_control_machine_is_found(looked: dict[str, Any]) -> None:
    (found,) = [each for each in looked["control"] if each["part"] == "room"]
    assert found["what"].startswith("0.0 GB are free")


def test_a_host_without_a_route_and_one_whose_packets_leave_from_another_address_are_found(parted: list[str]) -> None:
    found = judge_look(INVENTORY, Examination(Observation(), ways={"far": json.loads(parted[0])}), None)
    assert [(each.level, each.where, each.part) for each in found] == [("error", "far", "addresses and routes")] * 2
    what = "\n".join(each.what for each in found)
    assert re.search(r"198\.51\.100\.10.*(unreachable|[Nn]o route)", what), what
    assert re.search(r"leave .*192\.0\.2\.31", what), what
    assert sorted(each.fix.partition(" ")[0] for each in found) == ["Look:", "Name"]


def test_a_way_between_tasks_that_is_broken_is_found(parted: list[str]) -> None:
    """By `fab doctor` itself, and by the coordinator in the run's status."""
    hosts = fake_hosts.FakeHosts(INVENTORY)
    hosts.run = lambda scripts, *_: {host: Answer(parted[1] if host == "far" else "") for host in scripts}  # type: ignore[method-assign]
    found = judge_ways(Cluster(INVENTORY, hosts), Examination(Observation()))
    (broken,) = [each for each in found if each.where == "worker-1"]
    assert (broken.level, broken.part) == ("error", "addresses and routes")
    assert re.search("chief-0 at 198.51.100.10:2222.*nreachable", broken.what), broken.what
    ways = status_of(read_ways(Answer(parted[1])))
    run = Run("digits", "p:P", state="training", step=5, ways=ways)
    (found,) = judge_look(INVENTORY, Examination(Observation(run=run)), None)
    assert (found.level, found.where, found.fix) == ("error", "run digits", "fab ways")


class Machine(fake_hosts.FakeHosts):
    """A host of the group gpu that is this machine, of which another driver is expected than any machine has."""

    def run(self, scripts: Mapping[str, str], *_: Any, **__: Any) -> dict[str, Answer]:
        assert all("psfleet-gpu-check --json" in script for script in scripts.values())
        expected = {"driver": "1.0", "gpus": 1, "devices": ["0"]}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(expected))
            file.flush()
            command = [sys.executable, "-m", "trainer.gpu_check", "--json", "--expected", file.name]
            said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return dict.fromkeys(scripts, Answer(said.stdout, said.stderr, said.returncode))


def test_a_host_whose_driver_is_not_there_is_found() -> None:
    found = judge_gpus(Cluster(INVENTORY, Machine(INVENTORY)), ["far"])
    assert {(each.level, each.where, each.part) for each in found} == {("error", "far", "GPU")}
    assert re.match(r"no NVIDIA kernel module is loaded|the loaded module is .*; site\.yml pinned 1\.0", found[0].what)


installed = test_short_way.installed
rooted = test_short_way.hosts


def test_another_release_and_files_that_were_edited_are_found(rooted: test_short_way.Rooted) -> None:
    """The hosts are directories, on which fleet/hosts/agent.py looks; the coordinator's says which release all have."""
    cluster, rooted.release = Cluster(rooted.inventory, rooted), rooted.releases("head")

    def look() -> list[tuple[str, str, str, str]]:
        here = read_release(rooted.inventory)[0]["id"]
        found = judge_look(rooted.inventory, examine(cluster), here)
        return [(each.level, each.where, each.part, each.what) for each in found if each.part in PARTS]

    assert look() == []
    (rooted.place.parent / "program/slow.py").write_text("class Slow:\n    edited = True\n")
    test_short_way.spoil("/etc/trainer/ps-0.env")(rooted.place / "store")
    test_short_way.spoil("/etc/systemd/system/psfleet-firewall.service")(rooted.place / "far")
    found = {(level, where, part): what for level, where, part, what in look()}
    assert {("warning", host, "release") for host in rooted.inventory.hosts} <= found.keys()
    assert "/etc/trainer/ps-0.env differs" in found["error", "store", "files"]
    assert "psfleet-firewall.service exists" in found["error", "far", "firewall"]


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host with a failed unit, no clock, a drop-in and a dead proxy has systemctl say."""
    texts = {"systemctl": SYSTEMCTL.replace("{port}", str(closed_port())), "systemd-detect-virt": "#!/bin/sh\nexit 1\n"}
    for name, text in texts.items():
        put_program(tmp_path / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("systemctl")
def test_what_systemd_says_is_found() -> None:
    units = ["trainer@ps-0.service"]
    found = judge(facts(units=probe.units(), limits=probe.limits(units), proxies=probe.proxies()))
    assert only(found, "units").what == "psfleet-firewall.service has failed"
    assert only(found, "clock").what == "no service keeps its clock"
    assert "trainer@ps-0.service may open 1,024 files" in only(found, "limits").what
    assert "Connection refused" in only(found, "proxies").what


def test_a_file_that_the_tasks_user_cant_read_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--") if os.geteuid() == 0 else ()
    monkeypatch.setattr(probe, "AS_TRAINER", nobody)
    (tmp_path / "run.json").touch(mode=0o000)
    names = [str(tmp_path / "run.json"), "/etc/passwd", "/nowhere"]
    found = only(judge(facts(unreadable=probe.unreadable(names))), "umask")
    assert f"the user trainer can't read {tmp_path}/run.json" in found.what


def test_site_yml_wants_the_room_below_which_doctor_warns() -> None:
    assert host_look.ENVIRONMENT == (LITTLE_BYTES, LITTLE_FILES)
    assert host_look.SMALL[0] == RUN_BYTES


def test_a_process_at_a_tasks_port_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        tasks = [replace(task, port=port) if task.name == "ps-0" else task for task in INVENTORY.tasks]
        known = facts(listeners=host_look.listeners([port]))
        found = only(judge_hosts(replace(INVENTORY, tasks=tasks), Observation(), known), "ports")
        variables = {host: {**has, "tensorboard_port": port} for host, has in INVENTORY.variables.items()}
        inventory = replace(INVENTORY, groups={"tensorboard": ["store"]}, variables=variables)
        board = only(judge_hosts(inventory, Observation(), known), "ports")
    assert f"port {port} of ps-0 is taken by" in found.what
    assert f"(process {os.getpid()}" in found.what
    assert f"port {port} of tensorboard is taken by" in board.what
    assert board.fix.endswith("or another tensorboard_port in the inventory")


@pytest.mark.parametrize(
    ("script", "what"),
    [(None, "its check is not installed"), ("echo 'it is not mounted' >&2; exit 1", "it is not mounted")],
)
def test_a_check_of_the_path_that_fails_is_found(
    tmp_path: Path,
    script: str | None,
    what: str,
) -> None:
    path = tmp_path / "check"
    if script is not None:
        put_program(path, f"#!/bin/sh\n{script}\n")
    assert only(judge(facts(path=probe.check_path(str(path)))), "shared path").what == what


def test_a_host_whose_ssh_is_closed_is_found() -> None:
    host = Host("store", "127.0.0.1", port=closed_port())
    hosts = SshHosts({"store": host})
    try:
        why = hosts.run({"store": "true"})["store"].unreachable
    finally:
        hosts.close()
    assert why
    inventory = replace(INVENTORY, hosts={**INVENTORY.hosts, "store": host})
    found = only(judge_hosts(inventory, Observation(unreachable={"store": why}), {}), "SSH")
    assert (found.level, found.fix) == ("error", f"ssh -v -p {host.port} 127.0.0.1")


hosts = test_run_look.hosts


@pytest.mark.parametrize(
    ("state", "ago", "what"),
    [
        ("failed", 0, "it failed: no column price"),
        ("training", 3600, "its status says that it trains, and is 1 h old"),
        ("training", 0, ""),
    ],
)
def test_a_run_is_judged_by_its_files(hosts: test_run_look.Shell, state: str, ago: int, what: str) -> None:
    directory = RunDirectory(hosts.place / "srv", "digits")
    status = Status("digits", str(directory.path), "p:P", state=state, step=12, message="no column price")  # type: ignore[arg-type]
    status.write(directory)
    hosts.now = time.time() + ago
    seen = Cluster(hosts.inventory, hosts).observe(["head"])  # type: ignore[arg-type]
    found = [each for each in judge_look(hosts.inventory, Examination(seen), "abc123") if each.where == "run digits"]
    assert [each.what[: len(what)] for each in found] == ([what] if what else [])
