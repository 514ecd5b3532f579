"""What a coordinator waits for besides its members: a shared path that is full, and the chief's export."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import STOPPED, TRY_AGAIN, Stopped
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.tasks import coordinator, waits
from trainer.telemetry.outlets.systemd import Notifier


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    before = signal.getsignal(signal.SIGTERM)
    yield Config(program="mine:One", shared_dir=str(tmp_path), steps=10)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("stopped", "code"), [(False, TRY_AGAIN), (True, STOPPED)])
def test_a_coordinator_that_can_not_write_its_lease_holds_the_next_one_back(
    config: Config, monkeypatch: pytest.MonkeyPatch, stopped: bool, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if stopped:
            raise Stopped

    slept: list[float] = []
    monkeypatch.setattr(coordinator.Lease, "acquire", refuse)
    monkeypatch.setattr("trainer.tasks.coordinator.time.sleep", sleep)
    cluster = ClusterConfig({"chief": ["localhost:1"]}, "chief", 0)
    assert coordinator.run_coordinator(config.replace(strategy="one_device"), cluster, Notifier()) == code
    assert slept == [coordinator.STORAGE_PAUSE_SECONDS]


def test_a_member_in_step_waits_for_the_chiefs_export(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, now = RunDirectory(config.shared_dir, config.run), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 300
        if now[0] > config.saving_timeout_seconds - 600:
            directory.set_state(RunState.FINISHED, 10, asked=10)

    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    waits.wait_for_the_end(directory, config, 10, StopRequest())
    assert waits.END_SECONDS < now[0] < config.saving_timeout_seconds
