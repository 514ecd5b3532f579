"""What a run tells of its training, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.run.directory import RunDirectory
from trainer.training.loop.account import Account
from trainer.training.loop.progress_meter import ProgressMeter


class Recorder:
    """Stands for all that hears of a training, and notes in which order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.leads = True
        self.ledger = self.events = self.status = self

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: self.calls.append((name, *arguments))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def account(recorder: Recorder, tmp_path: Path) -> Account:
    context: Any = SimpleNamespace(progress=recorder, phases=recorder, directory=RunDirectory(tmp_path, "mine"))
    return Account(context, ProgressMeter(10.0, ["worker-0"]), 0.0)


def test_the_first_step_is_told_once(account: Account, recorder: Recorder) -> None:
    assert account.reach(0) == 0
    assert "advanced" not in recorder.names()
    assert account.reach(8) == 0
    assert account.reach(16) == 8
    assert recorder.names().count("advanced") == 1
    assert ("advanced", 8) in recorder.calls


def test_numbers_are_shown_where_a_step_has_ended_since_and_read_then_alone(
    account: Account, recorder: Recorder
) -> None:
    reads: list[int] = []

    def read() -> dict[str, float]:
        reads.append(account.step)
        return {"loss": 0.5}

    account.begin()
    assert not account.show(read)
    account.reach(8)
    assert account.show(read)
    assert not account.show(read)
    assert reads == [8]
    assert account.values == {"loss": 0.5}
    assert recorder.names().count("trained") == 2  # the ledger's, of each step, is one of them


def test_a_checkpoint_behind_the_training_does_not_take_the_step_back(account: Account, recorder: Recorder) -> None:
    account.reach(20)
    account.checkpointed(16)
    account.checkpointed(24)
    assert [call[-1] for call in recorder.calls if call[0] == "checkpointed"] == [20, 24]
