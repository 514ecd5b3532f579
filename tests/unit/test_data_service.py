"""What a task of the data service does besides TensorFlow's server: its journal, its end, and who waits for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.cluster import probe
from trainer.cluster.probe import SERVICE_METHODS
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import Stopped, UserError
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import LeaseHeld
from trainer.run.records import write_record
from trainer.run.selections.selection import selection_path
from trainer.tasks import data_service, waits
from trainer.tasks.data_service import Journal, serves
from trainer.tasks.server import ending


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        program="a:B", run="one", shared_dir=str(tmp_path), steps=10, input="service", input_sharding="dynamic"
    )


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(data_service.time, "sleep", waited.append)
    return waited


def leave_a_file(journal: Journal) -> Path:
    left = journal.path / data_service.WRITTEN / "journal_0"
    left.parent.mkdir()
    left.write_text("")
    return left


def test_a_journal_is_kept_for_its_run_and_no_other(config: Config) -> None:
    Journal(config).prepare()
    left = leave_a_file(Journal(config))
    Journal(config).prepare()
    assert left.exists()
    Journal(config.replace(run="two")).prepare()
    assert not left.exists()


def test_a_journal_that_can_not_be_removed_becomes_no_other_runs(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(config).prepare()
    leave_a_file(Journal(config))
    other = Journal(config.replace(run="two"))

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="Input/output error"):
            other.prepare()
    assert not other._is_own()


def test_a_dispatcher_that_serves_the_next_run_too_keeps_its_journal_at_a_restart(config: Config) -> None:
    Journal(config).prepare()
    left = leave_a_file(Journal(config))
    Journal(config.replace(run="two")).claim()
    Journal(config.replace(run="two")).prepare()
    assert left.exists()


def test_a_second_dispatcher_leaves_the_firsts_journal_alone(config: Config) -> None:
    first = Journal(config)
    lease = first.acquire_lease(10.0, lambda message: None)
    first.prepare()
    left = leave_a_file(first)
    with pytest.raises(LeaseHeld, match=rf"the data service of {config.shared_dir} has a dispatcher already: process"):
        Journal(config.replace(run="two")).acquire_lease(10.0, lambda message: lease.held())
    assert left.exists()
    lease.release()
    Journal(config.replace(run="two")).acquire_lease(10.0, lambda message: None).release()


def test_a_sweeps_points_share_a_journal(config: Config) -> None:
    write_record(selection_path(config), {"sweep": {"name": "s", "attempt": 1, "points": [{}, {}]}})
    Journal(config.replace(run="s-1")).prepare()
    left = leave_a_file(Journal(config))
    Journal(config.replace(run="s-2")).prepare()
    assert left.exists()
    Journal(config.replace(run="other")).prepare()
    assert not left.exists()


def test_another_journal_has_another_name_and_waits_until_it_is_seen(config: Config, slept: list[float]) -> None:
    journal = Journal(config)
    journal.prepare()
    first = journal.name()
    assert first
    assert slept == []  # another one can't be known
    leave_a_file(journal)
    Journal(config).prepare()
    Journal(config.replace(run="two")).claim()
    assert (journal.name(), slept) == (first, [])
    Journal(config.replace(run="three")).prepare()
    second = journal.name()
    Journal(config.replace(run="three")).prepare()  # what was begun is gone, or nothing was written
    assert len({first, second, journal.name()}) == 3
    assert slept == [data_service.SEEN_SECONDS] * 2


def test_a_data_worker_ends_with_its_journal(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(Exception):
        pass

    def leave(code: int) -> None:
        assert code == 75
        raise Left

    names = iter(["one", None, "one", "two"])
    journal = SimpleNamespace(name=lambda: next(names))
    monkeypatch.setattr(data_service.os, "_exit", leave)
    with pytest.raises(Left):
        data_service.follow_journal(journal, "one")  # type: ignore[arg-type]
    assert list(names) == []


def test_what_can_not_be_read_is_kept_aside(config: Config) -> None:
    journal = Journal(config)
    journal.prepare()
    leave_a_file(journal)
    journal.set_aside()
    assert list(journal.path.iterdir()) == []
    assert (journal.path.with_name("journal.bad") / data_service.WRITTEN).exists()
    leave_a_file(journal)
    journal.set_aside()  # once more


def test_it_ends_with_a_run_that_it_reads_for(config: Config) -> None:
    alone = config.replace(strategy="one_device")
    assert ending("data-0", "localhost:1", lambda: alone, serves) == (None, "")
    RunDirectory(config.shared_dir, config.run).set_state(RunState.FINISHED, 10, asked=10)
    assert ending("data-0", "localhost:1", lambda: alone, serves) == (0, "run one finished at step 10")
    local = config.replace(input="local", input_sharding="program")
    assert ending("data-0", "localhost:1", lambda: local, serves) == (None, "")


SERVED = ClusterConfig({"chief": ["h:1"]}, "chief", 0, {"dispatcher": ["h:2"], "data": ["a:3", "b:3"]})


class Recorder:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def enter(self, state: RunState, message: str) -> None:
        self.messages.append(message)


@pytest.mark.parametrize(
    ("coming", "missing"),
    [(["a:3", "h:2"], "dispatcher-0 (h:2), data-1 (b:3)"), (["h:2", "b:3"], "data-0 (a:3), data-1 (b:3)")],
)
def test_a_coordinator_waits_for_the_dispatcher_and_one_data_worker(
    config: Config, monkeypatch: pytest.MonkeyPatch, coming: list[str], missing: str
) -> None:
    there: set[str] = set()
    log = Recorder()

    def answers(address: str, *, method: str) -> bool:
        assert method == SERVICE_METHODS["dispatcher" if address == "h:2" else "data"]
        return address in there

    monkeypatch.setattr(probe, "answers", answers)
    monkeypatch.setattr(waits.time, "sleep", lambda _: there.add(coming.pop(0)))
    waits.wait_for_data_service(config, SERVED, StopRequest(), log)  # type: ignore[arg-type]
    assert log.messages == [
        "no answer from dispatcher-0 (h:2), data-0 (a:3), data-1 (b:3)",
        f"no answer from {missing}",
    ]
    there.clear()
    stopped = StopRequest()
    stopped.received = True
    with pytest.raises(Stopped):
        waits.wait_for_data_service(config, SERVED, stopped, log)  # type: ignore[arg-type]


def test_a_user_may_limit_the_wait_for_the_data_service(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "answers", lambda address, method: address == "h:2")
    limited = config.replace(member_wait_timeout_seconds=0.01, ps_grace_seconds=0)
    expected = r"\(member_wait_timeout_seconds\) for the data service, and no answer from data-0 \(a:3\), data-1"
    with pytest.raises(UserError, match=expected):
        waits.wait_for_data_service(limited, SERVED, StopRequest(), Recorder())  # type: ignore[arg-type]
