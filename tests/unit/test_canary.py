"""A canary: what it tries, how it judges, and that nothing but its own trial is touched, on pretended hosts."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.rollout import trial
from fleet.rollout.release import Shipment, ShipmentResult
from fleet.rollout.trial import TrialRun, TrialState
from fleet.verbs import canary as subject
from fleet.verbs.canary import CanaryRequest, canary
from tests.unit import fake_hosts
from tests.unit import test_second_day as day
from trainer.command_line import parse
from trainer.core.settings.config import Config, read_assignments

GIVEN = {"run": "digits", "steps": 1000, "checkpoint_seconds": 5, "notify_webhook": "https://192.0.2.1/x", "seed": 7}
TRIED = {"workers": {"worker-0": {}, "worker-1": {}}, "step": 35, "state": "finished"}


def make_trial(steps: int = 20) -> TrialRun:
    settings = trial.settings_of(GIVEN, "sums:Sums", {"rate": 0.5}, 15, steps)
    return TrialRun("new", "digits", 15, "/srv/trainer", settings, 2**31, 60.0)


def seen(losses: Sequence[float] = (0.5, 0.4), **more: Any) -> TrialState:
    steps = [(25 + 10 * number, loss) for number, loss in enumerate(losses)]
    values = {"over": True, "result": "success", "status": TRIED, "losses": steps, "speeds": [6.0, 8.0]}
    return TrialState(**{**values, **more})  # type: ignore[arg-type]


def test_a_trial_has_the_settings_of_the_training_and_bothers_nobody() -> None:
    found = make_trial().settings
    assert (found["steps"], found["evaluation"], found["export"]) == (35, "inline", False)
    assert (found["shared_dir"], found["notify_webhook"], found["seed"]) == (trial.PLACE, "", 7)
    with pytest.raises(OperatorMistake, match="epoch_steps"):
        trial.settings_of({**GIVEN, "epoch_steps": -1}, "sums:Sums", {}, 15, 20)


def test_the_trainer_reads_the_settings_of_a_trial_from_its_flags() -> None:
    settings = make_trial().settings | {"dynamic_tables": {"items": {"capacity": 9}}, "initial_weights": ""}
    options = vars(parse(["local", *trial.flags_of(settings)]))
    options["program_args"] = read_assignments(options["program_args"])
    keys = [key for key in Config.from_dict(settings).as_dict() if key in options]
    assert {key: options[key] for key in keys} == {key: settings[key] for key in keys}
    assert settings.keys() <= {*keys}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (seen(), None),
        (seen([0.5, 9.0, 0.5]), None),  # one peak
        (seen([3.0, 4.0]), "its loss is 3.5 in the middle, and 2 is the most"),
        (seen([0.5, math.nan]), "its loss at step 35 is nan"),
        (seen(evaluation={"metrics": {"loss": "NaN"}}), "the evaluation's loss is nan"),
        (seen(losses=[]), "it reported no loss"),
        (seen(status={"step": 30}), "it ended at step 30, and not at step 35"),
        (replace(seen(), losses=[(5, 0.5)]), "it did not go on from the checkpoint of step 15"),
        (seen(result="timeout"), "it was not through in 1 min: it has step 35 of 35"),
        (seen(result="oom-kill"), "it needs more memory than the 2.0 GiB"),
        (seen(code=78, status={"state": "failed", "message": "no such column"}), "no such column"),
        (seen(code=78, status={}, log=["x", "error: no such run", "chief-0 | error: y"]), "no such run"),
        (seen(code=1, status={}, log=["chief-0 | Traceback"]), "Traceback"),
    ],
)
def test_a_trial_is_judged(found: TrialState, problem: str | None) -> None:
    problems = trial.judge(make_trial(), found, 2.0)
    assert bool(problems) == bool(problem)
    assert "".join(problems).startswith(problem or "")


@pytest.mark.parametrize(
    ("live", "factor", "most"),
    [
        ([1.0, 0.8, 1.2], 2.0, 2.4),
        ([0.0, 0.0], 2.0, 1e-6),
        ([-5.0, -3.0], 2.0, 0.0),
        ([9.0] * 30 + [1.0] * 20, 1.5, 1.5),  # what it has learnt since counts
        ([1.0, math.nan], 2.0, 2.0),
        ([], 2.0, None),
    ],
)
def test_the_live_run_says_how_great_a_loss_may_be(live: list[float], factor: float, most: float | None) -> None:
    assert trial.most_loss(live, factor) == pytest.approx(most)


def test_what_a_host_says_of_a_trial_is_read() -> None:
    lines = [{"step": 25, "speed": 6.0, "values": {"loss": "NaN"}}, {"ledger": {}}, {"step": 35, "values": {}}]
    history = "\n".join([*map(json.dumps, lines), '{"step": 3'])
    unit = "ActiveState=active\nSubState=exited\nResult=success\nExecMainStatus=0"
    found = trial.read(f"@unit\n{unit}\n@status\n{json.dumps(TRIED)}\n@history\n{history}\n@log\nall is well")
    assert (found.over, found.code, found.step, list(found.log)) == (True, 0, 35, ["all is well"])
    assert [step for step, _ in found.losses] == [25]
    assert found.speed == 3.0
    assert not trial.read("@unit\nActiveState=active\nSubState=running").over


@dataclass
class Hosts(day.Hosts):
    """Hosts of which one has a trial."""

    trial: list[Answer] = field(default_factory=list)
    """What its looks find, one after the other."""

    def _answer(self, host: str, script: str) -> Answer:
        if "echo @unit;" in script:
            return self.trial.pop(0) if len(self.trial) > 1 else self.trial[0]
        if trial.END in script:
            self.done.append(f"end on {host}")
            return Answer()
        if "rm -rf /opt/trainer/releases/new" in script:
            self.done.append(f"remove new on {host}")
            return Answer()
        if "history.jsonl" in script and "/runs/" in script:
            return Answer(json.dumps({"step": 10, "values": {"loss": 0.5}}))
        return super()._answer(host, script)


class Short:
    """The short way, where all is as it should be."""

    def __init__(self, cluster: Cluster) -> None:
        self.hosts: Any = cluster.hosts

    def questions(self) -> dict[str, Any]:
        return {}

    def judge(self, answers: Any, hosts: Sequence[str]) -> dict[str, str]:
        return {}

    def differences(self, host: str) -> dict[str, list[str]]:
        return {"program": ["sums.py"]}

    def stage_alone(self, host: str, shipment: Shipment, display: Any) -> ShipmentResult:
        self.hosts.done.append(f"stage {shipment.release} on {host}")
        return ShipmentResult({}, {})


def tried(losses: Sequence[float], code: int = 0, **status: Any) -> Answer:
    unit = (
        f"@unit\nActiveState={'failed' if code else 'active'}\nSubState=exited\nResult=success\nExecMainStatus={code}"
    )
    lines = [
        json.dumps({"step": 16 + number, "speed": 4, "values": {"loss": loss}}) for number, loss in enumerate(losses)
    ]
    record = json.dumps({**TRIED, **status})
    return Answer("\n".join([unit, "@status", record, "@history", *lines, "@log"]))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return make_hosts(monkeypatch)


def make_hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Hosts on which a run trains at step 20, saved at 15, and a canary passes."""
    made = day.make_hosts()
    found = Hosts(made.inventory, units=made.units, run_status=made.run_status, checkpoints=made.checkpoints)
    found.trial = [Answer("@unit\nActiveState=active\nSubState=running"), tried([0.5, 0.4])]

    def act(self: Cluster, asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        found.done += [f"{step['name']} on {host}" for host, each in asked.items() for step in each["steps"]]
        return {host: {"steps": {"begin": {"rc": 0}}} for host in asked}

    monkeypatch.setattr(Cluster, "act", act)
    monkeypatch.setattr(subject, "ShortWay", Short)
    monkeypatch.setattr(subject, "settings_of", lambda cluster: {"steps": 30, "run": "digits"})
    monkeypatch.setattr(trial, "command_of", lambda *_: ["begin"])
    return found


def console_of(hosts: Hosts) -> Console:
    return fake_hosts.console_of(hosts, "new", json_out=io.StringIO())


def lines_of(hosts: Hosts) -> list[tuple[str, str]]:
    return [(line["verb"], line["outcome"]) for line in map(json.loads, hosts.lines)]


TRIAL = ["stage new on w-b", "end on w-b", "begin on w-b", "end on w-b"]


def test_a_canary_that_passes_touches_one_host_and_no_task(hosts: Hosts) -> None:
    console = console_of(hosts)
    canary(day.cluster(hosts), console, CanaryRequest("w-b", 20, reason="faster"))
    assert hosts.done == TRIAL
    assert "Switch all of them: fab start-cluster --detach --reason faster" in fake_hosts.printed(console)
    assert lines_of(hosts) == [("canary", "begun"), ("canary", "done")]
    assert json.loads(hosts.lines[-1])["hosts"] == ["w-b"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(tried([3.0]), "its loss is 3"), (tried([], 78, state="failed", message="no such column"), "no such column")],
)
def test_a_canary_that_fails_leaves_all_as_it_was(hosts: Hosts, answer: Answer, problem: str) -> None:
    hosts.trial = [answer]
    with pytest.raises(ClusterTrouble, match=problem):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    assert hosts.done == [*TRIAL, "remove new on w-b"]
    assert lines_of(hosts)[-1] == ("canary", "failed")


def test_a_release_that_was_there_stays_where_its_canary_fails(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.trial = [tried([3.0])]
    monkeypatch.setattr(subject, "_list_releases", lambda *_: ["old", "new"])
    with pytest.raises(ClusterTrouble):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    assert hosts.done == TRIAL


def test_a_canary_that_is_left_ends_its_trial(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "read", fake_hosts.raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    assert hosts.done == TRIAL
    assert lines_of(hosts)[-1] == ("canary", "left")


def test_a_host_that_answers_and_says_nothing_of_the_trial_is_not_asked_for_ever(hosts: Hosts) -> None:
    hosts.trial = [Answer("@unit\n", "sudo: a password is required", 1)]
    with pytest.raises(HostsUnreachable, match="it says nothing of the trial: sudo: a password is required"):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    assert hosts.done == [*TRIAL, "remove new on w-b"]


def test_a_plan_does_nothing(hosts: Hosts) -> None:
    console = console_of(hosts)
    canary(day.cluster(hosts), console, CanaryRequest("w-b", 20, plan_only=True))
    assert (hosts.done, hosts.lines, hosts.holds) == ([], [], [])
    assert "20 steps of a copy of run digits from step 15" in fake_hosts.printed(console)


def test_a_canary_without_memory_or_a_checkpoint_is_refused(hosts: Hosts) -> None:
    hosts.available = 2**20  # KiB
    with pytest.raises(OperatorMistake, match=r"0\.8 GiB of memory for it, and 1\.0 are needed: fab drain w-b first"):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    hosts.checkpoints = Answer("[]")
    with pytest.raises(OperatorMistake, match=r"no checkpoint to go on from.* Wait until run digits has"):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    hosts.run_status = {**hosts.run_status, "state": "stopped"}
    with pytest.raises(OperatorMistake, match=r"no checkpoint to go on from.* Begin: fab start-cluster"):
        canary(day.cluster(hosts), console_of(hosts), CanaryRequest("w-b", 20))
    assert hosts.done == []


def test_a_trial_has_an_end_and_what_is_left_over_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Role:
        values: Mapping[str, Any] = {
            "__release_sandbox": ["ProtectSystem=strict"],
            "release_writable": ["/data/cache"],
            "release_secrets": ["key"],
            "__release_check_environment": {"TF_CONFIG": "{}", "CUDA_VISIBLE_DEVICES": "-1"},
        }

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def value(self, name: str) -> Any:
            return self.values[name]

    monkeypatch.setattr(trial, "Role", Role)
    words = trial.command_of(make_trial(), fake_hosts.make_inventory(), "far")
    properties = {word.removeprefix("--property=") for word in words if word.startswith("--property=")}
    assert {"RuntimeMaxSec=60", "CPUWeight=10", "OOMScoreAdjust=1000", f"MemoryMax={2**31}"} <= properties
    assert {"ProtectSystem=strict", "LoadCredential=key:/etc/trainer/secrets-coming/key"} <= properties
    assert [word for word in words if word.startswith("--setenv=")] == ["--setenv=CUDA_VISIBLE_DEVICES=-1"]
    assert "--run=canary" in words
    assert 'begin --run "$$3" --from "$$2@$$4"' in " ".join(words)
