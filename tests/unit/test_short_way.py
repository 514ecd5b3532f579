"""A start after an edit: fab ships by itself where hosts are as they should be, and Ansible's way where not."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_release
import jinja2
import pytest
import reserved_ports
import yaml
from ansible.template import trust_as_template

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.output.tables import ProgressLine
from fleet.places import KIT
from fleet.rollout import trial
from fleet.rollout.desired_state import UnknownTask
from fleet.rollout.release import STAGE, Shipment, read_release, sign_release
from fleet.rollout.roles import Role
from fleet.rollout.short_way import ShortWay, prove_beside
from fleet.rollout.trial import TrialRun
from fleet.site.inventory import Inventory, load_inventory
from fleet.verbs.start import StartRequest, start_cluster
from tests.unit.fake_hosts import UP, Clock, FakeHosts, make_inventory, printed, raises, status, train
from tests.unit.stand_ins import put_program
from trainer.run.release import kit_of

# What stands below a directory of the test's own, instead of in the machine.
PLACES = (
    "/opt/trainer", "/etc/trainer", "/etc/systemd/system", "/etc/sysctl.d",
    "/proc/sys/net/ipv4/ip_local_reserved_ports", "/usr/local/sbin/psfleet-check-release", "/run/psfleet-agent",
    "/run/psfleet-parked", "/run/psfleet-cooled",
)  # fmt: skip
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SYSTEMCTL = """#!/bin/sh
case "$1 $2" in
"show --value")
  if grep -q "Id=$4" "$CALLS.show"; then echo active
  elif [ -e "$CALLS" ] && grep -q "start --no-block $4" "$CALLS"; then echo activating
  else echo inactive; fi
  exit ;;
show*) exec cat "$CALLS.show" ;;
esac
echo "systemctl $*" >>"$CALLS"
"""
SYSTEMD_RUN = """#!/bin/sh
echo "systemd-run $*" >>"$CALLS"
cat >/dev/null
echo "proven: release $(basename "$PWD")"
[ ! -e "$CALLS.refuse" ] || { echo "error: program slow:Slwo: slow has no 'Slwo'" >&2; exit "$(cat "$CALLS.refuse")"; }
"""


class Rooted(FakeHosts):
    """Hosts that are directories: fleet/hosts/agent.py runs in each."""

    def __init__(self, inventory: Inventory, place: Path) -> None:
        super().__init__(inventory, run_status=status("new", None))
        self.place = place
        self.connections: list[str] = []
        for host in inventory.hosts:
            for name in ("bin", "run"):
                (place / host / name).mkdir(parents=True, exist_ok=True)
            (place / host / "calls.show").touch()
            for name, text in (("systemctl", SYSTEMCTL), ("systemd-run", SYSTEMD_RUN)):
                put_program(place / host / "bin" / name, text)

    def run(
        self, scripts: Mapping[str, str], timeout: float = 30, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        self.connections += scripts
        answers = super().run(
            {host: each for host, each in scripts.items() if host not in (data or {}) or "@units" in each}
        )
        for host, asked in (data or {}).items():
            if host in self.unreachable:
                answers[host] = Answer(unreachable=self.unreachable[host])
                continue
            answer = self.agent(host, asked)
            known = answers.get(host, Answer())
            answers[host] = replace(known, stdout=f"@look\n{answer}\n{known.stdout}" if known.stdout else answer)
        self.release = self.releases(self.inventory.chief.host)
        return {host: answers[host] for host in scripts}

    def _before(self, host: str, script: str) -> Answer:
        return Answer()

    def agent(self, host: str, asked: bytes) -> str:
        root, text = self.place / host, asked.decode()
        for place in PLACES:
            text = text.replace(place, f"{root}{place}")
        receive = (
            "import json,sys; a=json.load(sys.stdin); exec(a.pop('agent'), {'__name__':'psfleet_agent','asked':a})"
        )
        environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "CALLS": str(root / "calls")}
        done = subprocess.run(
            [sys.executable, "-c", receive], input=text, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.replace(str(root), "")

    def releases(self, host: str) -> str:
        return (self.place / host / "opt/trainer/current").readlink().name

    def calls(self, host: str) -> list[str]:
        path = self.place / host / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def proofs(self) -> list[str]:
        return [host for host in self.inventory.hosts for call in self.calls(host) if call.startswith("systemd-run")]


def install(hosts: Rooted) -> None:
    """Bring hosts where site.yml brings them."""
    release, files = read_release(hosts.inventory)
    environment = release["environments"][PYTHON]["name"]
    archive, signature, signers = sign_release(files, release["id"], hosts.place.parent / "cache", "", [])
    packed = hosts.place / "archive.tar.gz"
    packed.write_bytes(archive)
    for host in hosts.inventory.hosts:
        root = hosts.place / host
        put(
            root,
            "/usr/local/sbin/psfleet-check-release",
            (KIT / "roles/release/files/psfleet-check-release").read_text(),
        )
        program = root / "usr/local/sbin/psfleet-check-release"
        program.chmod(0o755)
        there = host_release.Release(root / "opt/trainer", release["id"], program, False)
        there.stage(packed, signature, signers, environment)
        there.switch()
        site = root / f"opt/trainer/envs/{environment}/lib/python{PYTHON}/site-packages"
        put(root, f"/opt/trainer/envs/{environment}/bin/python", "")
        (root / f"opt/trainer/envs/{environment}/bin/python").chmod(0o755)
        put(root, f"/{(site / 'a-1.dist-info/RECORD').relative_to(root)}", "")
        wanted = Role(hosts.inventory, host, "trainer", "training.yml").desired_state("main", {})
        for path, (mode, content) in wanted.files.items():
            if content == "directory":
                (root / path[1:]).mkdir(parents=True, exist_ok=True)
            else:
                put(root, path, wanted.texts[path])
            (root / path[1:]).chmod(int(mode, 8))
        ports = next(each["arguments"]["ports"] for each in wanted.checks if each["module"] == "reserved_ports")
        kernel, text = reserved_ports.plan("", "", ports)
        put(root, "/etc/sysctl.d/99-psfleet-ports.conf", text)
        put(root, "/proc/sys/net/ipv4/ip_local_reserved_ports", kernel)


def put(root: Path, path: str, text: str) -> None:
    (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
    (root / path[1:]).write_text(text)


def hosts_in(place: Path) -> Rooted:
    more = {
        "release_program": str(place / "program"),
        "release_lock": str(place / "cpu"),
        "release_cache": str(place / "cache"),
        "firewall_closes": "none",
        "cluster_uid": 6006,
    }
    inventory = make_inventory()
    inventory = replace(inventory, variables={host: {**each, **more} for host, each in inventory.variables.items()})
    return Rooted(inventory, place / "hosts")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    put(place, "/program/slow.py", "class Slow: ...\n")
    put(place, f"/cpu-{PYTHON}.txt", "a==1\n")
    install(hosts_in(place))
    return place


@pytest.fixture
def hosts(tmp_path: Path, installed: Path) -> Rooted:
    shutil.copytree(installed, tmp_path, symlinks=True, dirs_exist_ok=True)
    hosts = hosts_in(tmp_path)
    hosts.tick = train()
    return hosts


@pytest.fixture
def program(hosts: Rooted) -> Path:
    return hosts.place.parent / "program/slow.py"


@pytest.fixture
def console(hosts: Rooted) -> Console:
    clock, refuse = Clock(hosts=hosts), raises(AssertionError("this is Ansible's way"))
    return Console(io.StringIO(), clock, clock.sleep, ship=refuse, check_program=lambda *_: None)


def start(hosts: Rooted, console: Console, **more: Any) -> str:
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", detach=True, **more))
    return printed(console)


def test_an_edited_program_is_shipped_without_ansible(hosts: Rooted, console: Console, program: Path) -> None:
    before = hosts.releases("head")
    program.write_text("class Slow:\n    edited = True\n")
    output = start(hosts, console)
    assert "way     fab by itself: all but code, settings and choice is as it should be" in output
    now = {hosts.releases(host) for host in hosts.inventory.hosts}
    assert len(now) == 1
    assert before not in now
    for host in hosts.inventory.hosts:
        there = hosts.place / host / "opt/trainer/current"
        assert (there / "slow.py").read_text() == program.read_text()
        assert (there / "trainer/__main__.py").read_bytes() == (KIT / "trainer/__main__.py").read_bytes()
        assert "systemctl try-restart tensorboard*.service" not in hosts.calls(host)  # it runs the kit alone
    # What the kit is has been proven there, and the program is proven by the chief's host for all with its environment.
    assert hosts.proofs() == ["head"]
    assert "shipped to 3 of 3 hosts (code)" in output


def test_idle_tasks_import_while_the_program_is_proven(
    hosts: Rooted, console: Console, program: Path, runs: Callable[[str], None]
) -> None:
    runs("worker-1")
    program.write_text("class Slow:\n    edited = True\n")
    start(hosts, console)
    calls = hosts.calls("head")
    assert calls[0] == "systemctl start --no-block trainer@chief-0.service"
    assert calls[1].startswith("systemd-run")
    assert "--nice=0 " in calls[1]  # who starts waits for it
    begun = {path.name for host in hosts.inventory.hosts for path in (hosts.place / host / "run").glob("*/trainer@*")}
    servers = {task.unit for task in hosts.inventory.tasks if task.job in ("chief", "ps", "worker")}
    assert begun == servers - {"trainer@worker-1.service"}
    assert hosts.cooled == []


EARLY = "systemctl start --no-block trainer@chief-0.service"


def test_the_chief_imports_while_a_start_is_planned_and_ends_where_nothing_is_left_to_do(
    hosts: Rooted, console: Console
) -> None:
    hosts.tick = lambda _: None
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "It was finished before" in printed(console)
    assert hosts.calls("head") == [EARLY]
    assert hosts.cooled == ["chief-0"]


def test_the_chief_ends_where_a_start_is_refused_or_left(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OperatorMistake, KeyboardInterrupt):
        monkeypatch.setattr("fleet.verbs.start.make_plan", raises(error))
        with pytest.raises(error):
            start(hosts, console)
    assert hosts.calls("head")[0] == EARLY
    assert "chief-0" in hosts.cooled


def test_what_imports_ends_where_a_start_is_left_before_its_first_act(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.hosts.history.Trail.begin", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        start(hosts, console)
    assert hosts.calls("head")[0] == EARLY
    assert "chief-0" in hosts.cooled


def test_the_chief_ends_where_its_answer_is_lost(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Cluster, "cool", lambda _, tasks, start: ended.extend(task.name for task in tasks))
    hosts.unreachable["head"] = "the connection was lost"
    with pytest.raises(HostsUnreachable):
        start(hosts, console)
    assert ended == ["chief-0"]


def test_a_chief_that_runs_is_no_chief_that_begins(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch, runs: Callable[[str], None]
) -> None:
    runs("chief-0")
    monkeypatch.setattr("fleet.verbs.start.make_plan", lambda *_: refuse())
    with pytest.raises(OperatorMistake):
        start(hosts, console)
    assert EARLY not in hosts.calls("head")
    assert hosts.cooled == []


def refuse() -> Any:
    raise OperatorMistake("for the test")


def test_a_plan_alone_begins_and_packs_nothing(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("release_archive.pack", lambda _: refuse())
    start(hosts, console, plan_only=True)
    assert EARLY not in hosts.calls("head")
    assert hosts.cooled == []


def test_tasks_of_another_kit_do_not_begin_before_the_switch(
    hosts: Rooted, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may train at once, and with what was chosen before."""
    monkeypatch.setattr(
        "fleet.rollout.short_way.kit_of", lambda lines: frozenset([*kit_of(lines), "an edited file of the kit"])
    )
    start(hosts, console)
    assert not [call for host in hosts.inventory.hosts for call in hosts.calls(host) if "--no-block" in call]


@pytest.fixture
def runs(hosts: Rooted) -> Iterator[Callable[[str], None]]:
    """Have a task run: a supervisor with a child, in the release that is current on its host."""
    began: list[subprocess.Popen[bytes]] = []

    def run(name: str) -> None:
        task = hosts.inventory.task(name)
        command = ["sh", "-c", "sleep 300 & wait"]
        place = (hosts.place / task.host / "opt/trainer/current").resolve()
        began.append(subprocess.Popen(command, cwd=place, process_group=0))
        with (hosts.place / task.host / "calls.show").open("a") as listing:
            listing.write(f"Id={task.unit}\nMainPID={began[-1].pid}\n\n")
        hosts.set(name, **UP)

    time.sleep(0.05)  # files are older than what starts now
    yield run
    for process in began:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_tasks_that_run_are_parked_and_go_on_in_the_new_release(
    hosts: Rooted, console: Console, program: Path, runs: Callable[[str], None]
) -> None:
    running = ("chief-0", "ps-0", "worker-0")
    for name in running:
        runs(name)
    program.write_text("class Slow:\n    edited = True\n")
    output = start(hosts, console)
    done = [line for line in hosts.done if line.split()[-1] in running and not line.startswith("tell")]
    assert done[0] == "park chief-0"  # it saves while the servers run
    # The others may take minutes to end, and a task that starts meanwhile must know which release it is to have.
    released = hosts.releases("head")
    assert hosts.done.index(f"tell {released}") < hosts.done.index("park ps-0")
    # Here its child stays, and it is asked twice.
    assert set(done) == {f"{verb} {name}" for name in running for verb in ("park", "go on")}
    assert not [line for line in hosts.done if line.startswith("stop")]
    assert "started chief-0, ps-0, " in output  # as what starts from nothing


def test_what_a_start_that_died_has_parked_goes_on_with_the_next(
    hosts: Rooted, console: Console, runs: Callable[[str], None]
) -> None:
    for name in ("ps-0", "worker-0"):
        runs(name)
        hosts.set(name, status_text="parked: waits")
    output = start(hosts, console)
    assert "  start   chief-0, ps-0, " in output
    assert {"go on ps-0", "go on worker-0"} <= set(hosts.done)


def test_tasks_whose_own_files_changed_are_stopped(
    hosts: Rooted, console: Console, program: Path, runs: Callable[[str], None]
) -> None:
    for name in ("ps-0", "worker-0"):
        runs(name)
    time.sleep(0.05)
    os.utime(hosts.place / hosts.inventory.task("ps-0").host / "etc/trainer/ps-0.env")
    program.write_text("class Slow:\n    edited = True\n")
    start(hosts, console)
    assert {"stop ps-0", "start ps-0", "stop worker-0", "start worker-0"} <= set(hosts.done)
    assert not [line for line in hosts.done if line.startswith(("park", "go on"))]


def test_a_restart_is_of_new_processes(hosts: Rooted, console: Console, runs: Callable[[str], None]) -> None:
    runs("chief-0")
    start(hosts, console, restart=True)
    assert {"stop chief-0", "start chief-0"} <= set(hosts.done)
    assert not [line for line in hosts.done if line.startswith("park")]


def test_a_start_that_fails_after_the_switch_puts_back_what_was_parked(
    hosts: Rooted, console: Console, program: Path, runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs("chief-0")
    monkeypatch.setattr("fleet.verbs.start.select_and_observe", raises(ClusterTrouble("no")))
    program.write_text("class Slow:\n    edited = True\n")
    with pytest.raises(ClusterTrouble, match="no"):
        start(hosts, console)
    assert hosts.done[0] == "park chief-0"
    assert "stop chief-0" in hosts.done


def test_a_kit_that_is_new_is_proven_on_each_host(hosts: Rooted, console: Console) -> None:
    release = hosts.releases("far")
    for host in hosts.inventory.hosts:
        sums = hosts.place / host / "opt/trainer/current/SHA256SUMS"
        sums.write_text(sums.read_text().replace("  trainer/__main__.py", "  trainer/__other__.py"))
        (sums.parent / "trainer/__main__.py").rename(sums.parent / "trainer/__other__.py")
    (hosts.place / "far/opt/trainer/current").unlink()
    (hosts.place / "far/opt/trainer/releases" / release).rename(hosts.place / "far/opt/trainer/releases/old")
    (hosts.place / "far/opt/trainer/current").symlink_to("releases/old")
    sums = hosts.place / "far/opt/trainer/current/SHA256SUMS"
    sums.write_text(sums.read_text().replace(f"release {release}", "release old"))
    start(hosts, console)
    assert hosts.proofs() == ["head", "far"]
    assert "systemctl try-restart tensorboard*.service" in hosts.calls("far")


def test_a_start_with_nothing_new_proves_and_switches_nothing(hosts: Rooted, console: Console) -> None:
    start(hosts, console)
    assert not [call for host in hosts.inventory.hosts for call in hosts.calls(host) if "tensorboard" in call]
    assert hosts.proofs() == ["head"]


def test_settings_are_written_by_fab_too(hosts: Rooted, console: Console) -> None:
    for each in hosts.inventory.variables.values():
        each["trainer_run"]["steps"] = 31  # type: ignore[index]
    start(hosts, console)
    for host in hosts.inventory.hosts:
        settings = hosts.place / host / "etc/trainer/run.json"
        assert json.loads(settings.read_text())["steps"] == 31
        assert settings.stat().st_mode & 0o777 == 0o644


def test_what_proves_wrong_changes_nothing(hosts: Rooted, console: Console, program: Path) -> None:
    before = hosts.releases("head")
    program.write_text("class Slow:\n    edited = True\n")
    (hosts.place / "head/calls.refuse").write_text("78")
    with pytest.raises(OperatorMistake, match=r"host 'head': program slow:Slwo: slow has no 'Slwo'$"):
        start(hosts, console)
    assert {hosts.releases(host) for host in hosts.inventory.hosts} == {before}
    assert sorted(hosts.cooled) == sorted(task.name for task in hosts.inventory.tasks)
    (hosts.place / "head/calls.refuse").write_text("75")
    with pytest.raises(ClusterTrouble, match=r"host 'head': release \w+ does not work here: program slow:Slwo"):
        start(hosts, console)


def test_a_run_for_the_queue_is_proven_beside_what_runs_with_the_release_of_the_hosts(hosts: Rooted) -> None:
    before, cluster = hosts.releases("head"), Cluster(hosts.inventory, hosts)
    chosen = {"run": "next", "program": "slow:Slow", "program_args": {"rate": 0.1}}
    prove_beside(cluster, before, chosen, ProgressLine(io.StringIO()))
    (call,) = [call for call in hosts.calls("head") if call.startswith("systemd-run")]
    assert hosts.proofs() == ["head"]
    assert f"/opt/trainer/releases/{before}/env/bin/python -m trainer check run --settings -" in call
    assert f"--selection {json.dumps(chosen)}" in call
    assert call.endswith("--build")
    assert "--nice=19 " in call
    assert hosts.releases("head") == before
    (hosts.place / "head/calls.refuse").write_text("78")
    with pytest.raises(OperatorMistake, match=r"host 'head': program slow:Slwo: slow has no 'Slwo'$"):
        prove_beside(cluster, before, chosen, ProgressLine(io.StringIO()))


def test_a_canary_is_staged_on_one_host_and_starts_nothing_there(hosts: Rooted, program: Path) -> None:
    before, cluster = hosts.releases("far"), Cluster(hosts.inventory, hosts)
    program.write_text("class Slow:\n    edited = True\n")
    short, release = ShortWay(cluster), read_release(hosts.inventory)[0]["id"]
    assert short.judge(cluster.observe(looks=short.questions()).looks, ["far"]) == {}
    assert short.differences("far") == {"program": ["slow.py"]}
    short.stage_alone("far", Shipment(hosts.inventory, STAGE, release, {}), ProgressLine(io.StringIO()))
    places = {host: hosts.place / host / f"opt/trainer/releases/{release}" for host in hosts.inventory.hosts}
    assert [host for host, place in places.items() if place.exists()] == ["far"]
    assert (places["far"] / "slow.py").read_text() == program.read_text()
    assert {hosts.releases(host) for host in hosts.inventory.hosts} == {before}
    assert hosts.calls("far") == []  # its idle task does not import
    settings = trial.settings_of({"run": "digits"}, "slow:Slow", {}, 5, 20)
    words = trial.command_of(TrialRun(release, "digits", 5, "/srv/x", settings, 2**30, 60), hosts.inventory, "far")
    assert {"--property=ProtectSystem=strict", "--setenv=CUDA_VISIBLE_DEVICES=-1"} <= {*words}
    assert not [word for word in words if "TF_CONFIG" in word]


def test_an_upgrade_rests_after_its_canary_and_after_each_phase_and_goes_on_from_there(
    hosts: Rooted, console: Console, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the switch all hosts run what they ran; what is staged is not staged again."""
    before, cluster, act = hosts.releases("head"), Cluster(hosts.inventory, hosts), Cluster.act
    program.write_text("class Slow:\n    edited = True\n")
    release = read_release(hosts.inventory)[0]["id"]
    short = ShortWay(cluster)
    short.judge(cluster.observe(looks=short.questions()).looks, ["far"])
    short.stage_alone("far", Shipment(hosts.inventory, STAGE, release, {}), ProgressLine(io.StringIO()))

    def staged() -> dict[str, int]:
        files = {host: hosts.place / host / f"opt/trainer/releases/{release}/slow.py" for host in hosts.inventory.hosts}
        return {host: file.stat().st_ino for host, file in files.items() if file.exists()}

    def leave(cluster: Cluster, each: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        if any(step["name"] == "switch" for step in each["far"].get("steps", ())):
            raise AssertionError("it was left before")
        found = act(cluster, each, seconds)
        if hosts.proofs():
            raise KeyboardInterrupt
        return found

    of_canary = staged()
    assert of_canary.keys() == {"far"}
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "act", leave)
        with pytest.raises(KeyboardInterrupt):
            start(hosts, console)
    paused = staged()
    assert paused.keys() == {*hosts.inventory.hosts}
    assert {hosts.releases(host) for host in hosts.inventory.hosts} == {before}
    assert [each for each in hosts.done if each.split()[0] in ("park", "stop", "start")] == []
    start(hosts, console)
    assert {hosts.releases(host) for host in hosts.inventory.hosts} == {release}
    assert staged() == paused == {**paused, **of_canary}


def test_a_switch_that_is_left_has_ended_before_anything_is_put_back(
    hosts: Rooted, console: Console, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, Any]] = []
    act = Cluster.act

    def leave(cluster: Cluster, each: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        asked.append(each["far"])
        if any(step["name"] == "switch" for step in each["far"].get("steps", ())):
            raise KeyboardInterrupt
        return act(cluster, each, seconds)

    monkeypatch.setattr(Cluster, "act", leave)
    program.write_text("class Slow:\n    edited = True\n")
    with pytest.raises(KeyboardInterrupt):
        start(hosts, console)
    assert asked[-1] == {"alone": True}
    assert "the start is broken off: what was there before is put back" in printed(console)


def test_a_signature_that_does_not_fit_is_refused_before_the_switch(
    hosts: Rooted, console: Console, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hosts.releases("head")
    program.write_text("class Slow:\n    edited = True\n")
    files = read_release(replace(hosts.inventory))[1]
    archive, signature, signers = sign_release(files, "x", hosts.place / "other", "", [])
    signed = archive, signature.replace("A", "B"), signers
    monkeypatch.setattr("fleet.rollout.short_way.sign_release", lambda *_: signed)
    with pytest.raises(ClusterTrouble, match="it is signed by none of those in"):
        start(hosts, console)
    assert {hosts.releases(host) for host in hosts.inventory.hosts} == {before}


def spoil(path: str, text: str = "another", mode: int = 0o644) -> Any:
    def change(root: Path) -> None:
        put(root, path, text)
        (root / path[1:]).chmod(mode)

    return change


def shut(path: str) -> Any:
    return lambda root: (root / path[1:]).chmod(0o700)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (spoil("/etc/systemd/system/trainer@.service"), "/etc/systemd/system/trainer@.service differs"),
        (spoil("/etc/trainer/ps-0.env"), "/etc/trainer/ps-0.env differs"),
        (shut("/etc/trainer"), "/etc/trainer differs"),
        (spoil("/etc/trainer/worker-7.env"), "/etc/trainer/worker-7.env is of a task that is no longer there"),
        (spoil("/etc/systemd/system/trainer@ps-0.service.d/psfleet-task.conf"), "psfleet-task.conf differs"),
        (spoil("/etc/trainer/secrets/KEY"), "its secrets are not those of the inventory"),
        (spoil("/etc/trainer/secrets-coming/KEY"), "its secrets are not those of the inventory"),
        (spoil("/etc/sysctl.d/99-psfleet-ports.conf"), "the tasks' ports are not kept from other connections"),
        (spoil("/usr/local/sbin/psfleet-check-release", mode=0o755), "psfleet-check-release differs"),
        (spoil("/etc/systemd/system/psfleet-firewall.service"), "psfleet-firewall.service exists"),
        (spoil("/etc/systemd/system/psfleet-wireguard.service"), "psfleet-wireguard.service exists"),
        (spoil("/opt/trainer/current/slow.py"), "did NOT match. `ansible-playbook site.yml` fixes it"),
        (spoil(f"/opt/trainer/current/locks/cpu-{PYTHON}.txt"), f"locks/cpu-{PYTHON}.txt differs"),
    ],
)
def test_whatever_else_differs_on_a_host_is_ansibles(
    change: Any, why: str, hosts: Rooted, console: Console, program: Path
) -> None:
    change(hosts.place / "store")
    program.write_text("class Slow:\n    edited = True\n")
    with pytest.raises(AssertionError, match="this is Ansible's way"):
        start(hosts, console)
    (line,) = [line for line in printed(console).splitlines() if line.startswith("  way ")]
    assert line.startswith("  way     by Ansible: store: ")
    assert line.endswith(why)


def test_an_environment_that_is_damaged_or_of_another_lock_is_ansibles(
    hosts: Rooted, console: Console, tmp_path: Path
) -> None:
    (record,) = (hosts.place / "far/opt/trainer/envs").glob("*/lib/*/*/a-1.dist-info/RECORD")
    record.unlink()
    with pytest.raises(AssertionError, match="this is Ansible's way"):
        start(hosts, console)
    assert "by Ansible: far: its Python environment is not as it was installed" in printed(console)
    record.touch()
    (tmp_path / f"cpu-{PYTHON}.txt").write_text("a==2\n")
    with pytest.raises(AssertionError, match="this is Ansible's way"):
        start(hosts, console)
    assert "by Ansible: head: its environment is cpu-" in printed(console)


def test_the_plan_says_which_way_it_goes_and_what_changes(hosts: Rooted, console: Console, program: Path) -> None:
    program.write_text("class Slow:\n    edited = True\n")
    for each in hosts.inventory.variables.values():
        each["trainer_run"]["steps"] = 31  # type: ignore[index]
    output = start(hosts, console, plan_only=True)
    assert "  change  Switch to the release: head, store, far\n" in output
    assert "  change  Write the run settings: head, store, far\n" in output
    assert hosts.proofs() == []


def test_a_start_after_an_edit_takes_few_scripts_a_host(
    hosts: Rooted, console: Console, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that is typed most: no ansible-playbook (the console refuses it), one connection and this many
    scripts.
    """
    program.write_text("class Slow:\n    edited = True\n")
    first, run = [], Rooted.run
    monkeypatch.setattr(Rooted, "run", lambda *given, **more: first.append(given[1]) or run(*given, **more))
    start(hosts, console)
    assert "trainer status" not in first[0]["head"]  # a run that has told something is known by its files
    # Look, stage, remember, switch, look at what is ready, start; then one while a step is waited for, and one for the
    # table. What the chief's host writes for all (release, choice, two lines of history) goes with these. It waits for
    # news of the run itself; the stand-in has none at once.
    waits = sum("sleep 0.1" in scripts.get("head", "") for scripts in first)
    assert waits
    assert (hosts.connections.count("far"), hosts.connections.count("head") - waits) == (8, 8)


def test_a_task_that_nobody_here_knows_is_refused(monkeypatch: pytest.MonkeyPatch, hosts: Rooted) -> None:
    role = Role(hosts.inventory, "head", "trainer", "training.yml")
    with pytest.raises(UnknownTask, match="roles/trainer: only Ansible can do 'Read which tasks are to come back'"):
        role.desired_state("take_back", {})


def test_a_text_is_compiled_once_for_all_hosts(hosts: Rooted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a start takes the control machine twice as long for each host."""

    def look(host: str) -> None:
        for role, tasks in (("trainer", "main"), ("trainer", "secrets")):
            Role(hosts.inventory, host, role, "training.yml").desired_state(tasks, {})

    def generate(*given: Any, **more: Any) -> Any:
        made.append(given[1])
        return compile_text(*given, **more)

    look("head")
    made: list[Any] = []
    compile_text = jinja2.Environment._generate
    monkeypatch.setattr(jinja2.Environment, "_generate", generate)
    look("head")
    assert made == []
    role, text = Role(hosts.inventory, "head", "trainer", "training.yml"), "{% if true %}\na\n{% endif %}\n"
    rendered = [
        role._render(trust_as_template(text), {}, overrides={"trim_blocks": trim}) for trim in (True, False, True)
    ]
    assert rendered == ["a\n", "\na\n", "a\n"]  # another syntax is another code
    assert len(made) == 2


FACTS = {
    "first": False,
    "ssh_ports": [22, 2022],
    "login_uid": 1000,
    "scraper_uid": None,
    "name_servers": ["192.0.2.53"],
    "resolved": {},
    "peers": [],
    "vpn": {},
    "listening": [],
    "others": [],
    "nft": "/usr/sbin/nft",
}


def test_files_are_what_ansible_writes(tmp_path: Path) -> None:
    """Each file of the roles, as fab makes it and as ansible-playbook does."""
    inventory = load_inventory("inventory/gpu-example")
    plays, made = [], {}
    for host in [inventory.chief.host]:
        for place in ("etc/systemd/system", "usr/local/sbin"):
            (tmp_path / host / place).mkdir(parents=True)
        for role, tasks in (("trainer", "main"), ("firewall", "close")):
            wanted = Role(inventory, host, role, "training.yml").desired_state(tasks, {"__firewall_facts": FACTS})
            made |= {(host, path): text for path, text in wanted.texts.items()}
            (play,) = [
                play
                for play in yaml.safe_load((KIT / "ansible/training.yml").read_text())
                if [each["role"] for each in play.get("roles", ())] == [role]
            ]
            found = yaml.safe_load((KIT / f"roles/{role}/tasks/{tasks}.yml").read_text())
            plays.append(
                {
                    "hosts": host,
                    "connection": "local",
                    "gather_facts": False,
                    "vars_files": [f"{KIT}/roles/{role}/{kind}/main.yml" for kind in ("defaults", "vars")],
                    "vars": {**play["vars"], **play["roles"][0]["vars"], "__firewall_facts": FACTS},
                    "tasks": [to_place(task, tmp_path / host, role) for task in flat(found)],
                }
            )
    playbook = tmp_path / "write.yml"
    playbook.write_text(yaml.safe_dump(plays))
    command = [
        "ansible-playbook",
        "--inventory",
        "inventory/gpu-example",
        playbook,
        "--extra-vars",
        "__firewall_closes=all",
    ]
    done = subprocess.run(command, cwd=KIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(made) > 12
    assert {key: (tmp_path / key[0] / key[1][1:]).read_text() for key in made} == made


def flat(tasks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield from flat(task.get("block", ()))
        if "write_files" in task:
            yield from apart(task)
        elif set(task) & {"ansible.builtin.template", "ansible.builtin.copy", "ansible.builtin.file"}:
            yield task


def apart(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Have a task of Ansible's own for each of the files."""
    shared = {name: task[name] for name in ("name", "loop") if name in task}
    for each in task["write_files"].get("directories", ()):
        given = each if isinstance(each, dict) else {"path": each}
        yield {**shared, "ansible.builtin.file": {"state": "directory", "mode": "0755", **given}}
    for each in task["write_files"]["files"]:
        module = "template" if each.get("src", "").endswith(".j2") else "copy"
        given = {key: value for key, value in each.items() if key != "vars"}
        yield {**shared, f"ansible.builtin.{module}": given, "vars": each.get("vars", {})}


def to_place(task: dict[str, Any], place: Path, role: str) -> dict[str, Any]:
    """Have a task of a role write below a directory."""
    (module,) = (name for name in task if name.startswith("ansible.builtin."))
    arguments = dict(task[module])
    arguments.pop("validate", None)
    for name in ("dest", "path"):
        if name in arguments:
            arguments[name] = f"{place}{arguments[name]}"
    if "src" in arguments:
        folder = "templates" if module.endswith("template") else "files"
        arguments["src"] = f"{KIT}/roles/{role}/{folder}/{arguments['src']}"
    return {"name": task["name"], module: arguments} | {name: task[name] for name in ("loop", "vars") if name in task}


def test_each_task_knows_its_host_by_the_inventorys_name(hosts: Rooted) -> None:
    """Where another machine has its place, and maybe its address (docs/decisions/0237)."""
    for task in hosts.inventory.tasks:
        wanted = Role(hosts.inventory, task.host, "trainer", "training.yml").desired_state("main", {})
        text = wanted.texts[f"/etc/trainer/{task.name}.env"]
        assert [line for line in text.splitlines() if line.startswith("TRAINER_HOST=")] == [f"TRAINER_HOST={task.host}"]
