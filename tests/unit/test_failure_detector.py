"""What the guard makes of what the heartbeat hears, and how a cluster is formed of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from trainer.cluster import failure_detector as guard
from trainer.cluster import formation
from trainer.cluster.deadlines import Phases
from trainer.cluster.failure_detector import FailureDetector
from trainer.cluster.formation import form
from trainer.cluster.spec import Cluster
from trainer.config import Config
from trainer.failures import UserError

FORMATION = {"worker-0": "w0", "worker-1": "w1", "ps-0": "p0"}
CLUSTER = Cluster({"chief": ["h:1"], "worker": ["a:1", "b:1"], "ps": ["c:1"]}, "chief", 0)


class Hears:
    """A heartbeat that hears what a test says."""

    hurry = False
    on_beat: Any = None

    def __init__(self, **members: str) -> None:
        self.members = {task.replace("_", "-"): identity for task, identity in members.items()}
        self.quiet: dict[str, float] = {}
        self.shut: list[str] = []
        self.over: dict[str, tuple[str, float]] = {}
        self.long_there: set[str] = set()

    def identities(self, since: float = 0.0) -> dict[str, str]:
        return dict(self.members)

    def silent(self) -> dict[str, float]:
        return self.quiet

    def closed(self) -> list[str]:
        return self.shut

    def ended(self) -> dict[str, tuple[str, float]]:
        return self.over

    def steady(self, seconds: float) -> set[str]:
        return self.long_there

    def heard(self, since: float) -> bool:
        return True


@pytest.fixture
def heartbeat() -> Hears:
    return Hears(worker_0="w0", worker_1="w1", ps_0="p0")


@pytest.fixture
def said() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def watching(heartbeat: Hears, said: list[tuple[Any, ...]]) -> FailureDetector:
    found = FailureDetector(
        heartbeat,  # type: ignore[arg-type]
        Phases({"training": 100.0}),
        lambda event, message, tasks: said.append((event, tasks)),
        lambda event, task, message: said.append((event, task)),
    )
    found.formed(FORMATION, unfit={"worker-2": "old"})
    return found


def test_nothing_is_said_of_members_that_answer(watching: FailureDetector, said: list[tuple[Any, ...]]) -> None:
    watching.look()
    assert said == []
    assert watching.workers_alive()


def test_only_a_member_that_is_watched_is_given_up(
    watching: FailureDetector, heartbeat: Hears, said: list[tuple[Any, ...]]
) -> None:
    heartbeat.quiet = {"worker-2": 99.0}
    watching.look()
    assert said == []
    heartbeat.quiet = {"worker-1": 16.0}
    watching.look()
    assert said == [("member-silent", ["worker-1"])]


def test_a_worker_that_is_replaced_is_told_twice_and_then_watched(
    watching: FailureDetector, heartbeat: Hears, said: list[tuple[Any, ...]]
) -> None:
    del heartbeat.members["worker-1"]
    heartbeat.shut = ["worker-1"]
    watching.look()
    watching.look()
    assert said == [("member-lost", "worker-1")]
    heartbeat.shut, heartbeat.members["worker-1"] = [], "new"
    watching.look()
    assert said[1:] == [("member-back", "worker-1")]
    assert watching.formation()["worker-1"] == "new"
    assert watching.hurt
    watching.formed(FORMATION)
    assert not watching.hurt


@pytest.mark.parametrize("now", [None, "new"])
def test_a_worker_whose_host_was_reset_is_given_up_though_it_is_up_again(
    watching: FailureDetector, heartbeat: Hears, said: list[tuple[Any, ...]], now: str | None
) -> None:
    heartbeat.over = {"worker-1": ("w1", 12.0), "worker-0": ("older", 12.0), "ps-0": ("p0", 12.0)}
    if now:
        heartbeat.members["worker-1"] = now
    else:
        del heartbeat.members["worker-1"]
        heartbeat.shut = ["worker-1"]
    watching.look()
    assert [what for what in said if what[0] == "member-silent"] == [("member-silent", ["worker-1"])]


def test_a_worker_that_left_one_question_open_before_it_ended_is_not_given_up(
    watching: FailureDetector, heartbeat: Hears, said: list[tuple[Any, ...]]
) -> None:
    heartbeat.over = {"worker-1": ("w1", 3.0)}
    heartbeat.members["worker-1"] = "new"
    watching.look()
    assert said == [("member-lost", "worker-1"), ("member-back", "worker-1")]


def test_a_lost_ps_is_given_up_when_tensorflow_does_not_say_so(
    watching: FailureDetector, heartbeat: Hears, said: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.members["ps-0"] = "another process"
    watching.look()
    assert said == [("ps-lost", "ps-0")]
    assert watching.lost_servers() == ["ps-0"]
    monkeypatch.setattr(guard, "REPORT_SECONDS", -1.0)
    watching.look()
    assert said[1:] == [("recovering", ["ps-0"])]


def test_a_phase_beyond_its_deadline_is_given_up(heartbeat: Hears, said: list[tuple[Any, ...]]) -> None:
    phases = Phases({"training": 0.0001})
    late = FailureDetector(heartbeat, phases, lambda event, message, tasks: said.append((event, message)))  # type: ignore[arg-type]
    late.look()
    assert said == []
    phases.enter("training")
    while not phases.overdue():
        pass
    late.look()
    assert said[0][0] == "phase-overdue"
    assert "training_timeout_seconds is 0.0001" in said[0][1]


def test_a_member_comes_back_as_another_process(watching: FailureDetector, heartbeat: Hears) -> None:
    heartbeat.members["worker-2"], heartbeat.long_there = "old", {"worker-0", "worker-2"}
    assert watching.returned() == []
    heartbeat.members["worker-2"] = "new"
    assert watching.returned() == ["worker-2"]
    watching.formed({})
    assert watching.returned() == []


def take(heartbeat: Hears, unfit: dict[str, str], asked: list[Any], **settings: Any) -> dict[str, str]:
    def restart(processes: dict[str, str]) -> None:
        asked.append(dict(processes))
        if settings.get("heeded", True):
            heartbeat.members |= {task: f"new {task}" for task in processes}

    config = Config.from_dict({"program": "p:P", "member_wait_timeout_seconds": settings.get("waiting", 0.0)})
    return form(config, CLUSTER, heartbeat, unfit, set(), restart, lambda missing: None)  # type: ignore[arg-type]


def test_unfit_processes_are_replaced_first(heartbeat: Hears) -> None:
    asked: list[Any] = []
    members = take(heartbeat, {"ps-0": "p0", "worker-1": "older"}, asked)
    assert asked == [{"ps-0": "p0"}]
    assert members == {"worker-0": "w0", "worker-1": "w1", "ps-0": "new ps-0"}


def test_an_unfit_process_that_does_not_heed_is_used(heartbeat: Hears, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formation, "HEED_SECONDS", 0.3)
    assert take(heartbeat, {"ps-0": "p0"}, [], heeded=False) == FORMATION


def test_a_ps_that_was_asked_before_has_the_time_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was asked has gone by now, and takes longer to be back than the others are waited for."""
    heartbeat = Hears(worker_0="w0", worker_1="w1", ps_1="p1")
    cluster = Cluster({**CLUSTER.jobs, "ps": ["c:1", "d:1"]}, "chief", 0)
    config = Config.from_dict({"program": "p:P", "ps_wait_seconds": 0.1})

    def take(comes_after: float) -> set[str]:
        began = time.monotonic()

        def come(missing: dict[str, str]) -> None:
            if time.monotonic() - began > comes_after:
                heartbeat.members["ps-0"] = "new"

        asked = {"ps-0": "p0"}
        return set(form(config, cluster, heartbeat, asked, (), lambda processes: None, come, asked))  # type: ignore[arg-type]

    assert take(comes_after=0.5) == {"worker-0", "worker-1", "ps-0", "ps-1"}
    del heartbeat.members["ps-0"]
    monkeypatch.setattr(formation, "RETURN_SECONDS", 0.2)
    assert take(comes_after=1e6) == {"worker-0", "worker-1", "ps-1"}


def test_the_limit_of_waiting_names_who_is_missing() -> None:
    with pytest.raises(UserError, match=r"member_wait_timeout_seconds\) for worker-1 \(b:1\), ps-0 \(c:1\)"):
        take(Hears(worker_0="w0"), {}, [], waiting=0.2)
