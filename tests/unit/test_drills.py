"""Drills: what is measured from samples, what is judged, what is refused, and what a fault takes for proof."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.cluster import Cluster
from fleet.drills import rehearsal, scenes
from fleet.drills.catalogue import CATALOGUE, DOZEN, Drill
from fleet.drills.faults import Cut, Damage, Fault, Freeze, Kill, PowerOff, one
from fleet.drills.scenes import Findings, read_traffic, recovers
from fleet.drills.stage import DrillFailed, Process, Sample, Stage, read_checkpoints, read_processes, read_sample
from fleet.drills.watch import longest_pause, lowest_step, new_steps, steps_lost
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.inventory import Host, Inventory, Task
from fleet.ssh import Answer
from fleet.verbs import Desk

ROOT = Path(__file__).resolve().parents[2]
TASKS = [
    Task("chief", 0, "head", "192.0.2.10", 2222, server=False),
    Task("ps", 0, "head", "192.0.2.10", 2300, server=True),
    Task("ps", 1, "store", "192.0.2.20", 2300, server=True),
    Task("worker", 0, "store", "192.0.2.20", 2400, server=True),
    Task("worker", 1, "far", "192.0.2.30", 2400, server=True),
]
RUNS = Process("a1", "active", "running", "success", 0, 100, 0)


class Pretence:
    """Hosts that answer a script by the first pattern that it contains."""

    def __init__(self, answers: Mapping[str, str | Answer] | None = None) -> None:
        self.answers = dict(answers or {})
        self.scripts: list[tuple[str, str]] = []

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        self.scripts += scripts.items()
        return {host: self._answer(script) for host, script in scripts.items()}

    def _answer(self, script: str) -> Answer:
        found = next((answer for pattern, answer in self.answers.items() if pattern in script), "")
        return found if isinstance(found, Answer) else Answer(found)

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def inventory(**site: Any) -> Inventory:
    hosts = {name: Host(name, f"192.0.2.{name}") for name in dict.fromkeys(task.host for task in TASKS)}
    variables = {name: {"cluster_shared_dir": "/srv/t", **site} for name in hosts}
    return Inventory("test", {}, hosts, TASKS, variables)


def stage(hosts: Pretence, **site: Any) -> Stage:
    time = iter(range(10_000))
    desk = Desk(out=io.StringIO(), clock=lambda: float(next(time)), sleep=lambda _: None)
    made = Stage(Cluster(inventory(**site), hosts), desk)
    made.run = "drill-1"
    return made


def sample(at: float, step: int | None, state: str = "training") -> Sample:
    return Sample(at, at, RUNS, state, step, "", {}, ())


def named(name: str) -> Drill:
    return next(each for each in CATALOGUE if each.name == name)


def test_names_are_unique_and_the_dozen_are_drills() -> None:
    names = [each.name for each in CATALOGUE]
    assert len(set(names)) == len(names)
    assert len(DOZEN) == 12
    assert set(DOZEN) <= set(names)


def test_every_freeze_cut_and_power_off_has_its_long_step() -> None:
    names = {each.name for each in CATALOGUE}
    silent = {name for name in names if name.endswith(("-frozen", "-cut", "-off"))}
    assert len(silent) == 7
    assert {f"{name}-long-step" for name in silent} <= names
    assert named("worker-cut-long-step").long_step


def test_whatever_cuts_reboots_fills_or_powers_off_is_destructive() -> None:
    marked = {each.name.removesuffix("-long-step") for each in CATALOGUE if each.destructive}
    assert marked == {"worker-cut", "ps-cut", "worker-off", "ps-off", "reboot", "path-full", "path-read-only"}


def test_page_names_every_drill() -> None:
    page = (ROOT / "docs" / "drills.md").read_text(encoding="utf-8")
    assert [each.name for each in CATALOGUE if f"`{each.name.removesuffix('-long-step')}`" not in page] == []


def test_sample_reads_the_unit_the_status_the_files_and_the_events() -> None:
    text = "\n".join(
        [
            "1000.5",
            "@unit",
            "Id=trainer@chief-0.service",
            "InvocationID=ab",
            "ActiveState=active",
            "SubState=running",
            "Result=success",
            "ExecMainStatus=0",
            "MainPID=7",
            "NRestarts=2",
            "StatusText=training drill-1: step 120 of 1000000, 40 steps/s",
            "@status",
            json.dumps({"state": "training", "message": ""}),
            "",
            "@files",
            "checkpoint",
            "ckpt-100.index",
            "ckpt-100.data-00000-of-00002",
            "@events",
            json.dumps({"time": 998.5, "event": "restored"}),
            '{"time": 99',
        ]
    )
    seen = read_sample(text, at=50.0)
    assert (seen.state, seen.step, seen.checkpoints, seen.coordinator.invocation) == ("training", 120, [100], "ab")
    assert [event["event"] for event in seen.events] == ["restored"]
    assert seen.happened_at(seen.events[0]) == 48.0


def test_checkpoints_with_a_manifest_count_where_there_are_any() -> None:
    assert read_checkpoints(["ckpt-9.index", "ckpt-20.index"]) == [9, 20]
    assert read_checkpoints(["ckpt-9.index", "ckpt-9.manifest.json", "ckpt-20.index", "ckpt-30.index.bad"]) == [9]


def test_processes_are_read_by_task() -> None:
    found = read_processes("Id=trainer@ps-0.service\nInvocationID=x\nMainPID=0\n\nId=trainer@ps-1.service\nMainPID=5")
    assert (found["ps-0"].invocation, found["ps-1"].pid) == ("x", 5)


def test_steps_that_are_trained_again_are_new_and_the_way_back_is_none() -> None:
    seen = [sample(0, 100), sample(1, 110), sample(2, None, "waiting"), sample(9, 60), sample(10, 70)]
    assert new_steps(seen) == [1, 10]
    assert longest_pause(0.5, seen) == 9
    assert steps_lost(seen) == 50
    assert lowest_step(seen) == 60


def test_findings_beyond_a_bound_fail() -> None:
    drill = replace(named("worker"), detected=5, paused=10)
    good = Findings(proof="gone", detected=0.4, paused=1.0, lost=0)
    rehearsal.judge(good, drill)
    assert good.problems == []
    late = Findings(proof="gone", detected=6.0, paused=11.0)
    rehearsal.judge(late, drill)
    assert len(late.problems) == 2
    unseen = Findings(proof="gone", detected=None, paused=1.0)
    rehearsal.judge(unseen, drill)
    assert unseen.problems == ["nobody noticed"]
    assert rehearsal.describe(late, drill)[0].startswith("FAIL  worker: noticed 6 s (bound 5 s); paused 11 s")


def test_slack_loosens_the_bounds() -> None:
    late = Findings(proof="gone", detected=6.0, paused=11.0)
    rehearsal.judge(late, replace(named("worker"), detected=5, paused=10).with_slack(1.5))
    assert late.problems == []
    assert named("evaluator").with_slack(2).detected is None


@pytest.mark.parametrize("slack", [0.5, 0.0, float("nan"), float("inf")])
def test_a_slack_that_is_no_factor_is_refused(slack: float) -> None:
    with pytest.raises(OperatorMistake, match=f"--slack {slack:g}.*from 1 on"):
        rehearsal.drill(Cluster(inventory(), Pretence()), Desk(out=io.StringIO()), ["worker"], slack=slack)


def test_a_host_that_says_half_of_it_is_named() -> None:
    with pytest.raises(ClusterTrouble, match="head: systemd does not say how chief-0 is"):
        stage(Pretence({"date": "12.5\n@unit\n@status\n@files\n@events\n"})).look()


def test_hosts_that_are_asked_for_must_answer() -> None:
    hosts = Pretence({"show": Answer(unreachable="no answer")})
    assert stage(hosts).processes() == {}
    with pytest.raises(HostsUnreachable):
        stage(hosts).processes(["far"])


@pytest.mark.parametrize(
    ("name", "site", "said"),
    [
        ("worker-cut", {}, "drills_destructive: true"),
        ("worker-off", {"drills_destructive": True}, "drill_power_off and drill_power_on is missing"),
        ("evaluator", {}, "the inventory has 0 evaluator"),
        ("worker", {"cluster_shared_dir": ""}, "the hosts share none"),
    ],
)
def test_what_the_inventory_does_not_permit_is_refused_with_the_mend(name: str, site: Any, said: str) -> None:
    assert said in (rehearsal.refuse(named(name), inventory(**site)) or "")
    hosts = Pretence()
    with pytest.raises(OperatorMistake, match=re.escape(said)):
        rehearsal.drill(Cluster(inventory(**site), hosts), Desk(out=io.StringIO()), [name])
    assert hosts.scripts == []


def test_a_permitted_drill_is_not_refused() -> None:
    site = {"drills_destructive": True, "drill_power_off": "off {host}", "drill_power_on": "on {host}"}
    assert [each.name for each in CATALOGUE if rehearsal.refuse(each, inventory(**site))] == [
        "evaluator",
        "evaluator-absent",
    ]


@pytest.mark.parametrize("words", [[], ["no-such"]])
def test_a_wrong_name_is_a_mistake_that_lists_the_drills(words: list[str]) -> None:
    with pytest.raises(OperatorMistake, match="fab drill --list"):
        rehearsal.choose(words, everything=False)


UNITS = "Id=trainer@worker-1.service\nInvocationID=x\nActiveState=active\nSubState=running\nMainPID=41\n"


def test_a_fault_that_did_not_happen_stops_the_drill() -> None:
    hosts = Pretence({"systemctl show": UNITS, "kill": Answer(stderr="process 41 lives on", code=1)})
    with pytest.raises(DrillFailed, match="lives on"):
        Kill(one("worker")).strike(stage(hosts))
    with pytest.raises(DrillFailed, match="the fault on far"):
        Freeze(one("worker")).strike(stage(hosts))


def test_a_victim_without_a_process_stops_the_drill() -> None:
    with pytest.raises(DrillFailed, match="worker-1 on far has no process"):
        Kill(one("worker")).strike(stage(Pretence({"systemctl show": UNITS.replace("41", "0")})))


def test_a_cut_needs_a_dropped_packet_for_proof() -> None:
    dropped = "chain in { counter packets 3 bytes 9 drop }\nchain out { counter packets 4 bytes 9 drop }"
    assert Cut("worker").strike(stage(Pretence({"nft list": dropped}))) == "far dropped 7 packets"
    with pytest.raises(DrillFailed, match="far drops a packet"):
        Cut("worker").strike(stage(Pretence({"nft list": "counter packets 0 bytes 0 drop"})))


def test_victims_are_not_on_the_coordinators_host() -> None:
    made = stage(Pretence())
    assert [made.victim(job).name for job in ("ps", "worker", "chief")] == ["ps-1", "worker-1", "chief-0"]


def test_power_goes_off_by_the_sites_own_command(tmp_path: Path) -> None:
    site = {"drill_power_off": f"echo {{host}} {{address}} > {tmp_path}/off", "drill_power_on": "false"}
    made = stage(Pretence({"true": Answer(unreachable="no answer")}), **site)
    assert PowerOff("worker").strike(made) == "far is unreachable"
    assert (tmp_path / "off").read_text() == "far 192.0.2.far\n"
    with pytest.raises(DrillFailed, match="`false` ended with 1"):
        PowerOff("worker").heal(made)


def test_damage_finds_the_newest_checkpoint_by_its_step(tmp_path: Path) -> None:
    for name in ("ckpt-9", "ckpt-100"):
        (tmp_path / f"{name}.index").write_text("0123456789")
        (tmp_path / f"{name}.manifest.json").write_text("{}")
    (tmp_path / "ckpt-300.index").write_text("no manifest")
    hosts = Pretence({"systemctl show": UNITS.replace("worker-1", "chief-0")})
    made = stage(hosts)
    made.run = "x"
    Damage('echo "$newest"').strike(made)
    script = hosts.scripts[-1][1].replace(made.checkpoint_dir, str(tmp_path))
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


class Simulated(Stage):
    """A cluster that trains ten steps a second, saves each hundred, and recovers in its own way from a lost ps."""

    def __init__(self, after: float, back_to: int, restarted: tuple[str, ...]) -> None:
        self.now, self.struck, self.healed = 100.0, 1e9, 0.0
        self.after, self.back_to, self.anew = after, back_to, restarted
        desk = Desk(out=io.StringIO(), clock=lambda: self.now, sleep=self.sleep)
        super().__init__(Cluster(inventory(), Pretence()), desk)
        self.run = "drill-1"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def train(self, program: str, settings: Mapping[str, Any], wait: bool = True) -> None:
        pass

    def look(self) -> Sample:
        recovered = self.struck + self.after
        if self.now < self.struck:
            step, events = int(self.now * 10), []
        elif self.now < recovered:
            step, events = int(self.struck * 10), [{"time": self.struck + 0.5, "event": "ps-lost"}]
        else:
            step = self.back_to + int((self.now - recovered) * 10)
            events = [{"time": self.struck + 0.5, "event": "ps-lost"}]
        chief = self.processes()["chief-0"]
        return Sample(self.now, self.now, chief, "training", step, "", {}, (900, 1000), events)

    def processes(self, hosts: Any = None, away: Any = ()) -> dict[str, Process]:
        anew = self.anew if self.now >= self.struck + self.after / 2 else ()
        return {task.name: replace(RUNS, invocation="b2" if task.name in anew else "a1") for task in TASKS}


class Strike(Fault):
    def strike(self, stage: Stage) -> str:
        assert isinstance(stage, Simulated)
        stage.struck = stage.now
        return "struck"

    def hits(self, stage: Stage) -> list[Task]:
        return [stage.victim("ps")]

    def heal(self, stage: Stage) -> None:
        assert isinstance(stage, Simulated)
        stage.healed = stage.now


@pytest.fixture
def _takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "_is_used", lambda stage, task: True)


def rehearsed(after: float = 8.0, back_to: int = 1000, restarted: tuple[str, ...] = ("ps-1",)) -> Findings:
    drill = replace(named("ps"), detected=5, paused=20)
    found = recovers(Strike())(Simulated(after, back_to, restarted), drill)
    rehearsal.judge(found, drill)
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
    stage = Simulated(8.0, 1000, ("ps-1",))
    recovers(Strike())(stage, named("ps-frozen"))
    assert stage.healed >= stage.struck + stage.after


class Leave(Strike):
    lasts = 30.0
    takes_away = True


class TakesIn(Simulated):
    def look(self) -> Sample:
        sample = super().look()
        if not self.healed or self.now < self.healed + 7.0:
            return sample
        return replace(sample, events=[*sample.events, {"time": self.healed + 7.0, **FORMED}])


FORMED = {"event": "formed", "message": "all members"}


class RestartsAtTheReturn(TakesIn):
    def processes(self, hosts: Any = None, away: Any = ()) -> dict[str, Process]:
        found = super().processes(hosts, away)
        if self.healed:
            found["worker-0"] = replace(RUNS, invocation="c3")
        return found


@pytest.mark.usefixtures("_takes_part")
@pytest.mark.parametrize(
    ("cluster", "problems"),
    [
        (TakesIn, []),
        (Simulated, ["ps-1 was not taken in again"]),
        (RestartsAtTheReturn, ["worker-0 was started anew when ps-1 came back"]),
    ],
)
def test_who_comes_back_may_disturb_nobody(cluster: type[Simulated], problems: list[str]) -> None:
    drill = replace(named("ps-cut"), may_too=("worker",))
    assert recovers(Leave())(cluster(8.0, 1000, ()), drill).problems == problems


@pytest.mark.usefixtures("_takes_part")
@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"after": 25.0}, "no step for 2"),
        ({"back_to": 900}, "it went back to step 90"),
        ({"restarted": ("ps-1", "worker-0")}, "worker-0 was started anew, and should have gone on"),
        ({"restarted": ()}, "ps-1 was not started anew"),
    ],
)
def test_what_goes_wrong_is_said(seen: dict[str, Any], problem: str) -> None:
    assert any(problem in said for said in rehearsed(**seen).problems), rehearsed(**seen).problems
