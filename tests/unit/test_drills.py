"""Drills: what is measured from samples, what is judged, what is refused, and what a fault takes for proof."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.drills import runner, soak
from fleet.drills.catalogue import BY_CHANCE, CATALOGUE, DOZEN
from fleet.drills.drill import Drill, Findings
from fleet.drills.faults import Fault, Freeze, Kill, one
from fleet.drills.host_faults import Cut, Damage, PowerOff
from fleet.drills.recovery import Traffic, read_traffic, recovers
from fleet.drills.soak import Injection, Round, RoundOutcome, RoundPhase, SoakTest, judge, rounds, went_back_too_far
from fleet.drills.testbed import (
    DrillFailed,
    Process,
    RunSample,
    Testbed,
    read_checkpoints,
    read_processes,
    read_sample,
    show_units,
)
from fleet.drills.watch import FaultWatch, longest_pause, lowest_step, new_steps, steps_lost
from fleet.drills.ways import WayFault
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts import history
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.ssh import Answer
from fleet.hosts.units import Unit
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.topology import Task
from tests.unit.fake_hosts import ScriptedHosts
from tests.unit.stand_ins import put_program
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
OTHER_WAYS = ("address-doubled", "ps-unreached")
TASKS = [
    Task("chief", 0, "head", "192.0.2.10", 2222, server=False),
    Task("ps", 0, "head", "192.0.2.10", 2300, server=True),
    Task("ps", 1, "store", "192.0.2.20", 2300, server=True),
    Task("worker", 0, "store", "192.0.2.20", 2400, server=True),
    Task("worker", 1, "far", "192.0.2.30", 2400, server=True),
]
RUNS = Process("a1", "active", "running", "success", 0, 100)
SITE = {"drills_destructive": True, "drill_power_off": "off {host}", "drill_power_on": "on {host}"}


def inventory(**site: Any) -> Inventory:
    hosts = {name: Host(name, f"192.0.2.{name}") for name in dict.fromkeys(task.host for task in TASKS)}
    variables = {name: {"cluster_shared_dir": "/srv/t", **site} for name in hosts}
    return Inventory("test", {}, hosts, TASKS, variables)


def make_testbed(hosts: ScriptedHosts, **site: Any) -> Testbed:
    time = iter(range(10_000))
    console = Console(out=io.StringIO(), clock=lambda: float(next(time)), sleep=lambda _: None)
    made = Testbed(Cluster(inventory(**site), hosts), console)
    made.run = "drill-1"
    return made


def sample(at: float, step: int | None, state: str = "training") -> RunSample:
    return RunSample(at, at, RUNS, state, step, "", {}, ())


def named(name: str) -> Drill:
    return next(each for each in CATALOGUE if each.name == name)


def test_no_drill_is_begun_while_a_start_is_at_work() -> None:
    hosts = ScriptedHosts({"flock": "taken by a start of ann@laptop since 10:41:07 UTC"})
    with pytest.raises(OperatorMistake, match="this cluster is taken by a start of ann@laptop"):
        runner.drill(Cluster(inventory(), hosts), Console(out=io.StringIO()), ["worker"])
    ((host, script),) = hosts.scripts
    assert host == "head"
    assert "a drill of " in script


class Loses(ScriptedHosts):
    """Hosts of which the chief's has lost the connection that keeps starts away."""

    def is_holding(self) -> bool:
        return False


def as_left(**changes: str | Answer) -> dict[str, str | Answer]:
    """What hosts answer where nobody was there but the drills."""
    units = "".join(f"Id=trainer@{task.name}.service\nActiveState=active\n\n" for task in TASKS if task.host == "head")
    settings = '{"run": "drill-1"}'
    selection = f"@now\n1\n@units\n{units}@selection\n{changes.get('selection', settings)}\n"
    return {
        "flock": changes.get("lock", "held"),
        "@selection": changes.get("head", selection),
        "cat /etc/trainer/run.json": changes.get("settings", settings),
    }


def drilled(hosts: ScriptedHosts) -> Testbed:
    """The testbed after a drill's run."""
    made = make_testbed(hosts)
    made._before, made._settings = Observation(selection={"run": "big"}), dict.fromkeys(made.inventory.hosts, "{}")
    made._write_settings(dict.fromkeys(made.inventory.hosts, '{"run": "drill-1"}'))
    return made


@pytest.mark.parametrize("answers", [as_left(), as_left(head=Answer(unreachable="no answer"))])
def test_a_lock_that_is_lost_is_taken_again_and_the_drills_go_on(answers: dict[str, str | Answer]) -> None:
    hosts = Loses(answers)
    made = drilled(hosts)
    made.keep()
    [lock] = [script for _, script in hosts.scripts if "flock" in script and "a drill of " in script]
    assert "rm -f /run/psfleet-stopped" not in lock  # a stop that came meanwhile counts
    assert made._before is not None


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (as_left(lock="taken by a start of ann@laptop since 10:41:07 UTC"), "taken by a start of ann@laptop"),
        (as_left(selection='{"run": "ann-3"}'), "the run 'ann-3' was selected in the place of 'drill-1'"),
        (as_left(settings='{"run": "ann-3"}'), "/etc/trainer/run.json of head was changed"),
    ],
)
def test_drills_end_and_give_nothing_back_where_another_came_in_between(
    answers: dict[str, str | Answer], why: str
) -> None:
    hosts = Loses(answers)
    made = drilled(hosts)
    with pytest.raises(ClusterTrouble, match=why) as raised:
        made.keep()
    assert "fab start-cluster --run big" in str(raised.value)
    asked = len(hosts.scripts)
    made.keep()
    made.give_back()
    assert len(hosts.scripts) == asked


class Keeps(ScriptedHosts):
    """Hosts of which the chief's keeps starts away."""

    def is_holding(self) -> bool:
        return True


def test_drills_end_where_the_cluster_is_stopped_meanwhile_and_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, gone_through = Keeps(as_left()), list[str]()
    made = drilled(hosts)
    ran = {task.name: Unit(task.unit, active="active", file_state="enabled") for task in TASKS}
    made._before = Observation(selection={"run": "big"}, units=ran)
    monkeypatch.setattr(runner, "taken", lambda *_, **_more: contextlib.nullcontext(made))

    def stopped(_: Testbed, each: Drill, **_more: bool) -> Findings:
        gone_through.append(each.name)
        hosts.answers["@selection"] = f"@stopped\na stop-cluster of bob@desk at 10:41:07 UTC\n{as_left()['@selection']}"
        return Findings()

    monkeypatch.setattr(runner, "_go_through", stopped)
    with pytest.raises(ClusterTrouble, match="a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile"):
        runner.drill(made.cluster, made.console, ["worker", "ps"])
    assert gone_through == ["worker"]
    hosts.scripts.clear()
    with pytest.raises(ClusterTrouble, match="a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile"):
        made.give_back()
    scripts = [script for _, script in hosts.scripts]
    assert not any("systemctl start --no-block" in script for script in scripts)
    assert "systemctl disable" in scripts[-1]


@pytest.mark.parametrize("problems", [[], ["it was not noticed"]])
def test_the_history_has_which_drills_were_done_why_and_what_came_of_them(
    monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    lines: list[Mapping[str, Any]] = []
    monkeypatch.setattr(history, "append", lambda _, line, settings: lines.append(line))
    for name in ("take_over", "go_on", "keep", "give_back"):
        monkeypatch.setattr(Testbed, name, lambda _: None)
    monkeypatch.setattr(
        runner, "_go_through", lambda _, each, skips: Findings(problems=problems if each.name == "worker" else [])
    )
    cluster, console = Cluster(inventory(), ScriptedHosts({"flock": "held"})), Console(out=io.StringIO())
    with pytest.raises(ClusterTrouble) if problems else contextlib.nullcontext():
        runner.drill(cluster, console, ["worker", "ps"], reason="a new switch")
    begun, ended = lines
    assert [(line["verb"], line["reason"], line["drills"]) for line in lines] == [
        ("drill", "a new switch", ["worker", "ps"])
    ] * 2
    assert (begun["outcome"], ended["outcome"]) == ("begun", "failed" if problems else "done")
    assert ended.get("message") == ("1 of 2 drills failed: worker" if problems else None)


def test_faults_by_chance_leave_their_reason_and_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Mapping[str, Any]] = []
    monkeypatch.setattr(history, "append", lambda _, line, settings: lines.append(line))
    for name in ("take_over", "keep", "give_back"):
        monkeypatch.setattr(Testbed, name, lambda _: None)
    monkeypatch.setattr(runner, "rounds", lambda *_: iter(()))
    monkeypatch.setattr(SoakTest, "go_on_until", lambda *_: ["a stall of 200 s"])
    monkeypatch.setattr(SoakTest, "summary", lambda *_: "")
    cluster = Cluster(inventory(), ScriptedHosts({"flock": "held"}))
    with pytest.raises(ClusterTrouble, match="1 promises were not kept, seed 4711"):
        runner.soak(cluster, Console(out=io.StringIO()), 4711, reason="a new switch")
    assert [(line["outcome"], line["reason"], line["seed"]) for line in lines] == [
        ("begun", "a new switch", 4711),
        ("failed", "a new switch", 4711),
    ]


def test_names_are_unique_and_the_dozen_are_drills() -> None:
    names = [each.name for each in CATALOGUE]
    assert len(set(names)) == len(names)
    assert len(DOZEN) == 12
    assert set(DOZEN) <= set(names)


def test_every_freeze_cut_and_power_off_has_its_long_step() -> None:
    names = {each.name for each in CATALOGUE}
    # Of the data service nobody is a member that a heartbeat could miss.
    members = {each.name for each in CATALOGUE if not {"data", "data 2"} & set(each.needs)}
    silent = {name for name in members if name.endswith(("-frozen", "-cut", "-off")) and "-unit-" not in name}
    assert len(silent) == 7
    assert {f"{name}-long-step" for name in silent} <= names
    assert named("worker-cut-long-step").long_step


def test_whatever_cuts_reboots_fills_or_powers_off_is_destructive() -> None:
    marked = {each.name.removesuffix("-long-step") for each in CATALOGUE if each.destructive}
    off = {"worker-off", "ps-off", "data-off"}
    ways = {each.name for each in CATALOGUE if isinstance(each.fault, WayFault)}
    assert ways == {*(f"way-{what}" for what in ("lost", "port", "large", "syn", "loss", "late")), *OTHER_WAYS}
    assert marked == {"worker-cut", "ps-cut", *off, *ways, "reboot", "path-full", "path-read-only"}


def test_page_names_every_drill() -> None:
    page = (ROOT / "docs" / "drills.md").read_text(encoding="utf-8")
    assert [each.name for each in CATALOGUE if f"`{each.name.removesuffix('-long-step')}`" not in page] == []


def test_sample_reads_the_unit_the_status_the_files_and_the_events() -> None:
    text = """@clock
1000.5
@unit
Id=trainer@chief-0.service
InvocationID=ab
ActiveState=active
SubState=running
Result=success
ExecMainStatus=0
MainPID=7
NRestarts=2
StatusText=training drill-1: step 120 of 1000000, 40 steps/s
@status
{"state": "training", "message": ""}

@files
checkpoint
ckpt-100.manifest.json
ckpt-100.data-00000-of-00002
@events
{"time": 998.5, "event": "restored"}
{"time": 99"""
    seen = read_sample(text, at=50.0)
    assert (seen.state, seen.step, seen.checkpoints, seen.coordinator.invocation) == ("training", 120, [100], "ab")
    assert [event["event"] for event in seen.events] == ["restored"]
    assert seen.happened_at(seen.events[0]) == 48.0


def test_checkpoints_with_a_manifest_count() -> None:
    assert read_checkpoints(["ckpt-9.index", "ckpt-9.manifest.json", "ckpt-20.index", "ckpt-30.index.bad"]) == [9]


def test_processes_are_read_by_task() -> None:
    found = read_processes("Id=trainer@ps-0.service\nInvocationID=x\nMainPID=0\n\nId=trainer@ps-1.service\nMainPID=5")
    assert (found["ps-0"].invocation, found["ps-1"].pid) == ("x", 5)


def test_the_task_is_the_child_of_a_unit_that_supervises() -> None:
    alone, supervised = read_processes("Id=a\nMainPID=5\nChild=\n\nId=b\nMainPID=5\nChild=7").values()
    assert (alone.pid, alone.pids) == (5, [5])
    assert (supervised.pid, supervised.pids) == (7, [5, 7])
    assert replace(supervised, child=8).succeeds(supervised)  # forked again, in the same unit
    assert not supervised.succeeds(replace(supervised, child=0))  # its first child, as an evaluator's
    assert replace(supervised, invocation="y").succeeds(replace(supervised, child=0))


def test_a_units_child_is_found_by_its_shell_script(tmp_path: Path) -> None:
    sleep = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    try:
        # As `systemctl show` answers, for a unit with a child and for one without a process.
        answer = 'echo "Id=$3\nMainPID=$pid\nResult=success"'
        put_program(
            tmp_path / "systemctl", f"#!/bin/sh\ncase $3 in *ps-1*) pid={sleep.pid};; *) pid=0;; esac\n{answer}\n"
        )
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

        def child() -> int:
            command = ["sh", "-c", show_units(TASKS[1:3])]
            shown = read_processes(subprocess.run(command, env=environment, capture_output=True, text=True).stdout)
            assert list(shown) == ["ps-0", "ps-1"]
            assert (shown["ps-0"].pids, shown["ps-1"].main) == ([], sleep.pid)
            return shown["ps-1"].child

        until(child)
        assert Path(f"/proc/{child()}/comm").read_text() == "sleep\n"
    finally:
        subprocess.run(["pkill", "--parent", str(sleep.pid)])
        sleep.wait()


def test_steps_that_are_trained_again_are_new_and_the_way_back_is_none() -> None:
    seen = [sample(0, 100), sample(1, 110), sample(2, None, "waiting"), sample(9, 60), sample(10, 70)]
    assert new_steps(seen) == [1, 10]
    assert longest_pause(0.5, seen) == 9
    assert steps_lost(seen) == 50
    assert lowest_step(seen) == 60


def test_findings_beyond_a_bound_fail() -> None:
    drill = replace(named("worker"), detected=5, paused=10)
    good = Findings(proof="gone", detected=0.4, paused=1.0, lost=0)
    runner.judge(good, drill)
    assert good.problems == []
    late = Findings(proof="gone", detected=6.0, paused=11.0)
    runner.judge(late, drill)
    assert len(late.problems) == 2
    unseen = Findings(proof="gone", detected=None, paused=1.0)
    runner.judge(unseen, drill)
    assert unseen.problems == ["it was not noticed"]
    assert runner.describe(late, drill)[0].startswith("FAIL  worker: noticed 6 s (bound 5 s); paused 11 s")


def test_a_factor_loosens_the_bounds() -> None:
    late = Findings(proof="gone", detected=6.0, paused=11.0)
    runner.judge(late, replace(named("worker"), detected=5, paused=10).with_bounds_times(1.5))
    assert late.problems == []
    assert named("evaluator").with_bounds_times(2).detected is None


@pytest.mark.parametrize("factor", [0.5, 0.0, float("nan"), float("inf")])
def test_a_bounds_factor_that_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(OperatorMistake, match=f"--bounds-factor {factor:g}.*from 1 on"):
        runner.drill(Cluster(inventory(), ScriptedHosts()), Console(out=io.StringIO()), ["worker"], factor=factor)


def test_a_host_that_says_half_of_it_is_named() -> None:
    with pytest.raises(ClusterTrouble, match="head: systemd does not say how chief-0 is"):
        make_testbed(ScriptedHosts({"date": "@clock\n12.5\n@unit\n@status\n@files\n@events\n"})).sample()


def test_hosts_that_are_asked_for_must_answer() -> None:
    hosts = ScriptedHosts({"show": Answer(unreachable="no answer")})
    assert make_testbed(hosts).processes() == {}
    with pytest.raises(HostsUnreachable):
        make_testbed(hosts).processes(["far"])


@pytest.mark.parametrize(
    ("name", "site", "message"),
    [
        ("worker-cut", {}, "drills_destructive: true"),
        ("worker-off", {"drills_destructive": True}, "drill_power_off and drill_power_on is missing"),
        ("evaluator", {}, "the inventory has 0 evaluator"),
        ("worker", {"cluster_shared_dir": ""}, "the hosts share none"),
    ],
)
def test_what_the_inventory_does_not_permit_is_refused_with_the_fix(name: str, site: Any, message: str) -> None:
    assert message in (runner.why_not_allowed(named(name), inventory(**site)) or "")
    hosts = ScriptedHosts()
    with pytest.raises(OperatorMistake, match=re.escape(message)):
        runner.drill(Cluster(inventory(**site), hosts), Console(out=io.StringIO()), [name])
    assert hosts.scripts == []


def test_a_permitted_drill_is_not_refused() -> None:
    refused = {each.name: runner.why_not_allowed(each, inventory(**SITE)) for each in CATALOGUE}
    lacking = "data data-all data-frozen data-unit data-off dispatcher dispatcher-frozen evaluator evaluator-absent"
    assert [name for name, why in refused.items() if why] == lacking.split()
    assert refused["data"].startswith(
        "the inventory has 0 data; it needs 2. Its group has tasks with trainer_run: {input"
    )


@pytest.mark.parametrize(
    ("host", "address", "beside_a_ps"), [("far", "192.0.2.30", False), ("store", "192.0.2.20", True)]
)
def test_a_data_workers_host_loses_no_power_with_a_ps_on_it(host: str, address: str, beside_a_ps: bool) -> None:
    data = [
        Task("data", 0, "head", "192.0.2.10", 2600, server=True),
        Task("data", 1, host, address, 2600, server=True),
    ]
    made = replace(inventory(**SITE), tasks=[*TASKS, *data])
    message = "the host of data-1, store, has a ps too, so that this would be the drill ps-off"
    assert runner.why_not_allowed(named("data-off"), made) == (message if beside_a_ps else None)
    assert runner.why_not_allowed(named("data"), made) is None


@pytest.mark.parametrize("words", [[], ["no-such"]])
def test_a_wrong_name_is_a_mistake_that_lists_the_drills(words: list[str]) -> None:
    with pytest.raises(OperatorMistake, match="fab drill --list"):
        runner.choose(words, everything=False)


UNITS = "Id=trainer@worker-1.service\nInvocationID=x\nActiveState=active\nSubState=running\nMainPID=41\n"


def test_a_fault_that_did_not_happen_stops_the_drill() -> None:
    hosts = ScriptedHosts({"systemctl show": UNITS, "kill": Answer(stderr="process 41 lives on", code=1)})
    with pytest.raises(DrillFailed, match="lives on"):
        Kill(one("worker")).inject(make_testbed(hosts))
    with pytest.raises(DrillFailed, match="the fault on far"):
        Freeze(one("worker")).inject(make_testbed(hosts))


def test_a_fault_hits_the_task_or_the_whole_unit() -> None:
    both = UNITS.replace("MainPID=41", "MainPID=41\nChild=42")
    for fault, proof in (
        (Kill(one("worker")), "worker-1's process 42 gone"),
        (Kill(one("worker"), part="unit"), "worker-1's processes 41 and 42 gone"),
        (Freeze(one("worker")), "worker-1's process 42 stopped"),
        (Freeze(one("worker"), part="unit"), "worker-1's processes 41 and 42 stopped"),
    ):
        hosts = ScriptedHosts({"systemctl show": both})
        assert fault.inject(make_testbed(hosts)) == proof
        killed = re.findall(r"kill -\w+ ([\d ]+)", hosts.scripts[-1][1])
        assert [int(pid) for pids in killed for pid in pids.split()] == [int(pid) for pid in re.findall(r"4\d", proof)]


def test_a_victim_without_a_process_stops_the_drill() -> None:
    with pytest.raises(DrillFailed, match="worker-1 on far has no process"):
        Kill(one("worker")).inject(make_testbed(ScriptedHosts({"systemctl show": UNITS.replace("41", "0")})))


def test_a_cut_needs_a_dropped_packet_for_proof() -> None:
    dropped = "chain in { counter packets 3 bytes 9 drop }\nchain out { counter packets 4 bytes 9 drop }"
    assert Cut(one("worker")).inject(make_testbed(ScriptedHosts({"nft list": dropped}))) == "far dropped 7 packets"
    with pytest.raises(DrillFailed, match="far drops a packet"):
        Cut(one("worker")).inject(make_testbed(ScriptedHosts({"nft list": "counter packets 0 bytes 0 drop"})))


def test_victims_are_not_on_the_coordinators_host() -> None:
    made = make_testbed(ScriptedHosts())
    assert [made.victim(job).name for job in ("ps", "worker", "chief")] == ["ps-1", "worker-1", "chief-0"]


def test_power_goes_off_by_the_sites_own_command(tmp_path: Path) -> None:
    site = {"drill_power_off": f"echo {{host}} {{address}} > {tmp_path}/off", "drill_power_on": "false"}
    made = make_testbed(ScriptedHosts({"true": Answer(unreachable="no answer")}), **site)
    assert PowerOff(one("worker")).inject(made) == "far is unreachable"
    assert (tmp_path / "off").read_text() == "far 192.0.2.far\n"
    with pytest.raises(DrillFailed, match="`false` ended with 1"):
        PowerOff(one("worker")).revert(made)


def test_damage_finds_the_newest_checkpoint_by_its_step(tmp_path: Path) -> None:
    for name in ("ckpt-9", "ckpt-100"):
        (tmp_path / f"{name}.index").write_text("0123456789")
        (tmp_path / f"{name}.manifest.json").write_text("{}")
    (tmp_path / "ckpt-300.index").write_text("no manifest")
    units = "\n".join(UNITS.replace("worker-1", task) for task in ("chief-0", "ps-1"))
    hosts = ScriptedHosts({"systemctl show": units})
    made = make_testbed(hosts)
    made.run = "x"
    Damage('echo "$newest"').inject(made)
    script = next(script for _, script in hosts.scripts if "newest" in script).replace(
        made.checkpoint_dir, str(tmp_path)
    )
    # As sudo does it: without the environment.
    harmless = 'root() { shift 5; env -i PATH="$PATH" "$@"; };' + script.replace("root kill", ": kill")
    done = subprocess.run(["sh", "-c", harmless], capture_output=True, text=True)
    assert done.stdout == "ckpt-100\n", done.stderr


def test_traffic_is_counted_of_one_process_and_of_its_partners_only() -> None:
    text = """0 0 10.0.3.31:2400 10.0.3.20:5555 users:(("python",pid=41,fd=9))
\t cubic bytes_sent:1 bytes_acked:1 bytes_received:100 segs_out:1
0 0 [::ffff:10.0.3.31]:6666 [::ffff:10.0.3.21]:2300 users:(("python",pid=41,fd=10))
\t cubic bytes_received:20
0 0 10.0.3.31:2400 10.0.3.10:7777 users:(("python",pid=41,fd=11))
\t cubic bytes_received:3
0 0 10.0.3.31:22 10.0.3.20:7777 users:(("sshd",pid=9,fd=11))
\t cubic bytes_received:4
"""
    assert read_traffic(text, 41, {"10.0.3.20", "10.0.3.21"}) == 120


class Simulated(Testbed):
    """A cluster that trains ten steps a second, saves each hundred, and recovers in its own way from a lost ps."""

    def __init__(self, after: float, back_to: int, restarted: tuple[str, ...]) -> None:
        self.now, self.injected, self.reverted = 100.0, 1e9, 0.0
        self.after, self.back_to, self.again = after, back_to, restarted
        console = Console(out=io.StringIO(), clock=lambda: self.now, sleep=self.sleep)
        super().__init__(Cluster(inventory(), ScriptedHosts()), console)
        self.run = "drill-1"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def train(self, program: str, settings: Mapping[str, Any], wait: bool = True) -> None:
        pass

    def takes_part(self) -> bool:
        return True

    def sample(self) -> RunSample:
        recovered = self.injected + self.after
        if self.now < self.injected:
            step, events = int(self.now * 10), []
        elif self.now < recovered:
            step, events = int(self.injected * 10), [{"time": self.injected + 0.5, "event": "ps-lost"}]
        else:
            step = self.back_to + int((self.now - recovered) * 10)
            events = [{"time": self.injected + 0.5, "event": "ps-lost"}]
        chief = self.processes()["chief-0"]
        return RunSample(self.now, self.now, chief, "training", step, "", {}, (900, 1000), events)

    def processes(self, hosts: Any = None, away: Any = ()) -> dict[str, Process]:
        again = self.again if self.now >= self.injected + self.after / 2 else ()
        return {task.name: replace(RUNS, invocation="b2" if task.name in again else "a1") for task in TASKS}


class InjectedFault(Fault):
    def inject(self, testbed: Testbed) -> str:
        assert isinstance(testbed, Simulated)
        testbed.injected = testbed.now
        return "injected"

    def hits(self, testbed: Testbed) -> list[Task]:
        return [testbed.victim("ps")]

    def revert(self, testbed: Testbed) -> None:
        assert isinstance(testbed, Simulated)
        testbed.reverted = testbed.now


@pytest.fixture
def _takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traffic, "grows", lambda self: self._testbed.takes_part())


def rehearsed(after: float = 8.0, back_to: int = 1000, restarted: tuple[str, ...] = ("ps-1",)) -> Findings:
    drill = replace(named("ps"), fault=InjectedFault(), detected=5, paused=20)
    found = recovers(Simulated(after, back_to, restarted), drill)
    runner.judge(found, drill)
    return found


@pytest.mark.usefixtures("_takes_part")
def test_a_recovery_is_measured_and_passes() -> None:
    found = rehearsed()
    assert found.problems == []
    assert found.detected == pytest.approx(0.5)
    assert found.paused == pytest.approx(8.0, abs=1.0)
    assert (found.restarted, found.lost) == (["ps-1"], 0)


@pytest.mark.usefixtures("_takes_part")
def test_what_others_must_end_is_taken_back_only_after_the_recovery() -> None:
    testbed = Simulated(8.0, 1000, ("ps-1",))
    recovers(testbed, replace(named("ps-frozen"), fault=InjectedFault()))
    assert testbed.reverted >= testbed.injected + testbed.after


class Boots(Simulated):
    """One host answers only when it is `up`, and the time goes on when the others have answered."""

    def __init__(self) -> None:
        super().__init__(8.0, 1000, ("ps-1", "worker-0"))
        self.up = threading.Event()
        self.up.set()
        self.asked: Mapping[str, Future[Any]] = {}

    def sleep(self, seconds: float) -> None:
        wait([answer for host, answer in self.asked.items() if host != "store" or self.up.is_set()])
        super().sleep(seconds)

    def processes(self, hosts: Any = None, away: Any = ()) -> dict[str, Process]:
        if "store" not in away:
            assert self.up.wait(30), "the watcher itself waits for the host that boots"
        units = super().processes()
        return {task.name: units[task.name] for task in TASKS if task.host not in away}

    def sample(self) -> RunSample:
        units = super().processes()
        return RunSample(self.now, self.now, units["chief-0"], "training", int(self.now * 10), "", {}, (900, 1000))


def test_a_host_that_boots_holds_up_neither_the_steps_nor_the_other_hosts_units() -> None:
    testbed = Boots()
    watch = FaultWatch(testbed)
    watch.begin()
    testbed.asked = watch._asked
    testbed.up.clear()
    testbed.injected, testbed.after, testbed.again = testbed.now, 1.0, ("ps-1", "worker-1")
    watch.until(lambda: False, 11.0)
    assert longest_pause(watch.begun, watch.samples) < 1.0
    assert watch.restarted() == ["worker-1"]
    testbed.up.set()
    assert watch.until(lambda: watch.run_again(["ps-1", "worker-1"]), 5.0)


class Leave(InjectedFault):
    lasts = 30.0
    takes_away = True


class TakesIn(Simulated):
    def takes_part(self) -> bool:
        return bool(self.reverted) and self.now > self.reverted + 7.0


class SaysSomethingAndGoes(Simulated):
    """What was under way comes once more."""

    looks = 0

    def takes_part(self) -> bool:
        self.looks += 1
        return self.looks < 3


class RestartsAtTheReturn(TakesIn):
    def processes(self, hosts: Any = None, away: Any = ()) -> dict[str, Process]:
        found = super().processes(hosts, away)
        if self.reverted:
            found["worker-0"] = replace(RUNS, invocation="c3")
        return found


@pytest.mark.usefixtures("_takes_part")
@pytest.mark.parametrize(
    ("cluster", "problems"),
    [
        (TakesIn, []),
        (SaysSomethingAndGoes, ["ps-1 takes no part"]),
        (RestartsAtTheReturn, ["worker-0 was restarted when ps-1 came back"]),
    ],
)
def test_who_comes_back_may_disturb_nobody(cluster: type[Simulated], problems: list[str]) -> None:
    drill = replace(named("ps-cut"), fault=Leave(), may_too=("worker",))
    assert recovers(cluster(8.0, 1000, ()), drill).problems == problems


@pytest.mark.usefixtures("_takes_part")
@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"after": 25.0}, "no step for 2"),
        ({"back_to": 900}, "it went back to step 90"),
        ({"restarted": ("ps-1", "worker-0")}, "worker-0 was restarted, and should have gone on"),
        ({"restarted": ()}, "ps-1 was not restarted"),
    ],
)
def test_what_goes_wrong_is_said(seen: dict[str, Any], problem: str) -> None:
    assert any(problem in text for text in rehearsed(**seen).problems), rehearsed(**seen).problems


MANY = 2000


def by_chance(seed: int, number: int = MANY) -> list[Round]:
    drills = [
        each for each in CATALOGUE if each.name in BY_CHANCE and not runner.why_not_allowed(each, inventory(**SITE))
    ]
    return list(islice(rounds(seed, make_testbed(ScriptedHosts(), **SITE), drills), number))


def test_a_seed_decides_on_every_fault() -> None:
    texts = [str(each) for each in by_chance(7)]
    assert texts == [str(each) for each in by_chance(7)]
    assert texts[:20] != [str(each) for each in by_chance(8, 20)]


def test_every_fault_comes_at_every_task_that_it_may_hit_and_at_every_moment() -> None:
    seen = {
        (injection.drill.name, injection.task and injection.task.name)
        for each in by_chance(1)
        for injection in each.injections
    }
    assert {name for name, _ in seen} == set(BY_CHANCE) - {"evaluator"}
    assert {task for name, task in seen if name == "ps-frozen"} == {"ps-0", "ps-1"}
    assert {task for name, task in seen if name == "data-truncated"} == {"ps-0", "ps-1"}  # the one that is killed
    # What cuts off or powers off spares the coordinator's host, on which ps-0 is.
    assert {task for name, task in seen if name == "ps-cut"} == {"ps-1"}
    assert {each.phase for each in by_chance(1)} == set(RoundPhase)
    assert {len(each.injections) for each in by_chance(1)} == {1, 2}


def test_two_faults_at_once_leave_each_other_alone_unless_both_kill() -> None:
    together = [each.injections for each in by_chance(1) if len(each.injections) == 2]
    same = [(one, other) for one, other in together if one.task and other.task and one.task.host == other.task.host]
    assert same
    assert all(isinstance(injection.fault, Kill) for injections in same for injection in injections)
    assert {injections[0].after == injections[1].after for injections in together} == {True, False}


def test_a_fault_by_chance_hits_the_task_that_was_drawn() -> None:
    drill, made = named("ps-frozen"), make_testbed(ScriptedHosts())
    assert Injection(drill, TASKS[1], 0.0, 10.0).fault.hits(made) == [TASKS[1]]
    assert Injection(drill, TASKS[1], 0.0, 10.0).fault.lasts == 0
    cut, full = Injection(named("worker-cut"), TASKS[2], 0.0, 10.0), Injection(named("path-full"), None, 0.0, 10.0)
    assert cut.fault.hits(made) == [TASKS[2], TASKS[3]]  # all of its host
    assert full.fault.hits(made) == []
    for ps in made.tasks("ps"):
        assert Injection(named("data-truncated"), ps, 0.0, 10.0).fault.aims(made) == [made.chief, ps]
    assert (cut.fault.lasts, full.fault.lasts) == (10, 10)


def test_the_bound_of_a_round_is_that_of_its_drills_one_after_the_other() -> None:
    kill = Injection(replace(named("ps"), paused=40), TASKS[1], 1.0, 10.0)
    cut = Injection(replace(named("worker-cut"), paused=60), TASKS[4], 2.0, 120.0)
    slow = Injection(replace(named("coordinator-slow"), paused=90), TASKS[0], 1.0, 60.0)
    assert Round(1, RoundPhase.TRAINING, (kill,)).bound(2) == 80
    assert Round(1, RoundPhase.TRAINING, (cut,)).bound(1) == 60  # training goes on meanwhile
    assert Round(1, RoundPhase.TRAINING, (kill, cut)).bound(2) == 200 + 120  # the ps may need the worker's host
    assert Round(1, RoundPhase.START, (kill,)).bound(1) == 40 + 90
    assert Round(1, RoundPhase.TRAINING, (slow,)).bound(1) == 90 + 60


@pytest.mark.parametrize(
    ("steps", "checkpoints", "damaged", "problem"),
    [
        ([100, 110, 105, 120], (100,), (), None),
        ([100, 110, 95], (90, 100), (), "it went back to step 95, before the checkpoint 100"),
        ([100, 110, 95], (90, 100), (100,), None),
        ([100, 110, 80], (90, 100), (100,), "it went back to step 80, before the checkpoint 90"),
        ([100, 100, 104], (105,), (), None),  # the status is told a little later than the checkpoint is there
    ],
)
def test_steps_go_back_to_the_newest_whole_checkpoint_at_most(
    steps: list[int], checkpoints: tuple[int, ...], damaged: tuple[int, ...], problem: str | None
) -> None:
    seen = [replace(sample(at, step), checkpoints=checkpoints) for at, step in enumerate(steps)]
    assert went_back_too_far(seen, damaged) == problem


@pytest.mark.parametrize(
    ("outcome", "last", "processes", "problems"),
    [
        (RoundOutcome(paused=30), sample(9, 120), {"ps-0": RUNS}, []),
        (RoundOutcome(paused=31), sample(9, 120), {"ps-0": RUNS}, ["no step for 31 s, and 30 s is the bound"]),
        (RoundOutcome(), sample(9, None, "failed"), {}, ["the run has failed: "]),
        (
            RoundOutcome(),
            sample(9, 120),
            {"ps-0": replace(RUNS, active="failed", sub="failed", exit_status=78)},
            ["ps-0 is failed (failed), success, exit status 78"],
        ),
        (
            RoundOutcome(),
            replace(sample(9, 90), checkpoints=(90, 100)),
            {},
            ["it went back to step 90, before the checkpoint 100"],
        ),
        (RoundOutcome(proofs=["ckpt-100.data-00000-of-00002 truncated, chief-0 killed"]), sample(9, 90), {}, []),
    ],
)
def test_a_round_is_held_against_what_is_promised(
    outcome: RoundOutcome, last: RunSample, processes: dict[str, Process], problems: list[str]
) -> None:
    before = replace(sample(0, 110), checkpoints=(90, 100))
    judge(outcome, [before, last], processes, bound=30)
    assert outcome.problems == problems
    assert outcome.over == any("failed" in problem for problem in problems)


def test_chance_without_a_fault_is_refused() -> None:
    hosts = ScriptedHosts()
    with pytest.raises(OperatorMistake, match=r"worker: .*the hosts share none"):
        runner.soak(Cluster(inventory(cluster_shared_dir=""), hosts), Console(out=io.StringIO()))
    assert hosts.scripts == []


class Ends(Simulated):
    """A cluster that can be stopped at the end, and says then what it saved."""

    def stop_all(self) -> None:
        self.stopped = True

    def configure(self, program: str, settings: Mapping[str, Any]) -> None:
        self.stopped = False

    stopped = False

    def sample(self) -> RunSample:
        sample = super().sample()
        return replace(sample, state="stopped", status={"state": "stopped", "step": 1000}) if self.stopped else sample


class Interrupted(InjectedFault):
    def inject(self, testbed: Testbed) -> str:
        super().inject(testbed)
        raise KeyboardInterrupt


def soaked(made: Ends, fault: Fault | None = None, paused: float = 20.0, count: int = 1) -> list[str]:
    injection = Injection(replace(named("ps"), fault=fault or InjectedFault(), paused=paused), None, 1.0, 10.0)
    coming = (Round(number, RoundPhase.TRAINING, (injection,)) for number in range(1, count + 1))
    return SoakTest(made, seed=1, factor=1.0).go_on_until(made.now + 3600, coming)


@pytest.fixture
def _all_used(monkeypatch: pytest.MonkeyPatch, _takes_part: None) -> None:
    monkeypatch.setattr(soak, "tensors_that_equal", lambda testbed, since: 3)


@pytest.mark.usefixtures("_all_used")
def test_a_soak_whose_promises_are_kept_ends_well() -> None:
    made = Ends(8.0, 1000, ("ps-1",))
    assert soaked(made) == []
    assert made.reverted >= made.injected + made.after


@pytest.mark.usefixtures("_all_used")
@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (Ends(25.0, 1000, ("ps-1",)), "round 1: no step for 2"),
        (Ends(8.0, 900, ("ps-1",)), "round 1: it went back to step 90"),
        (Ends(1e6, 1000, ("ps-1",)), "round 1: it doesn't train as a whole again"),
    ],
)
def test_a_soak_says_which_promise_was_not_kept_in_which_round(made: Ends, problem: str) -> None:
    found = soaked(made, count=2)
    assert any(text.startswith(problem) for text in found), found
    output = made.console.out.getvalue()  # type: ignore[attr-defined]
    assert "FAIL    1  while it trains, after 1 s: ps" in output
    assert ("  2  while it trains" in output) == (made.after < 1e6)  # a run that doesn't train can't be asked any more


@pytest.mark.usefixtures("_all_used")
@pytest.mark.parametrize(
    ("status", "equal", "problem"),
    [
        ({"state": "stopped", "step": 1003}, 3, "asked to stop, its state is stopped at step 1003"),
        ({"state": "training", "step": 1000}, 3, "asked to stop, its state is training"),
        ({"state": "stopped", "step": 1000}, 0, "nothing says that the tables at the end are the checkpoint's"),
    ],
)
def test_a_soak_ends_with_tables_that_equal_its_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], equal: int, problem: str
) -> None:
    monkeypatch.setattr(soak, "tensors_that_equal", lambda testbed, since: equal)
    made = Ends(8.0, 1000, ("ps-1",))
    sample = made.sample
    monkeypatch.setattr(made, "sample", lambda: replace(sample(), status=status) if made.stopped else sample())
    (text,) = soaked(made)
    assert text.startswith(problem)


@pytest.mark.usefixtures("_all_used")
def test_an_interrupted_soak_takes_its_fault_back() -> None:
    made = Ends(8.0, 1000, ("ps-1",))
    with pytest.raises(KeyboardInterrupt):
        soaked(made, Interrupted())
    assert made.reverted
