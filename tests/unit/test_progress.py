"""What is reported is written by a thread of its own: a shared path that hangs stops no other thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.core.settings.config import Config
from trainer.core.states import Phase, RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.telemetry import progress as metrics
from trainer.telemetry.history import read_lines
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress, Writer
from trainer.telemetry.status import Status, read_status


class Board:
    """In place of TensorBoard's writer, which needs TensorFlow."""

    def __init__(self, directory: Path) -> None:
        self.steps: list[int] = []
        self.faults: list[tuple[int, float]] = []
        self.pages: list[tuple[int, str, str]] = []

    def write(self, step: int, values: dict[str, float], at: float) -> None:
        if "faults" in values:
            self.faults.append((step, values["faults"]))
        else:
            self.steps.append(step)

    def write_text(self, step: int, name: str, markdown: str, at: float | None = None) -> None:
        self.pages.append((step, name, markdown))


class Systemd(Notifier):
    def __init__(self) -> None:
        super().__init__()
        self.line = ""

    def status(self, status: str) -> None:
        self.line = status


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "a")


@pytest.fixture
def begin(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Progress]:
    monkeypatch.setattr(metrics, "EventWriter", Board)
    config = Config(program="mine:One", run="a", steps=100, shared_dir=str(directory.path.parents[1]))
    return lambda leads=True, waits=False: Progress(config, directory, Systemd(), leads, waits)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A shared path that hangs until the event is set."""
    healed = threading.Event()
    write = Status.write

    def hang(status: Status, directory: RunDirectory) -> None:
        assert healed.wait(30)
        write(status, directory)

    monkeypatch.setattr(Status, "write", hang)
    return healed


def test_hanging_path_stops_no_training_and_the_newest_is_written_when_it_is_back(
    begin: Callable[..., Progress], directory: RunDirectory, hanging: threading.Event
) -> None:
    progress = begin()
    began = time.monotonic()
    for step in range(1, 51):
        progress.trained(step, 10.0, {"loss": 1.0})
    progress.events.write("ps-lost", task="ps-0")
    progress.close(0.2)
    assert time.monotonic() - began < 20  # the path hangs for 30
    assert progress._notifier.line.startswith("new a: step 50 of 100")  # type: ignore[attr-defined]
    assert not directory.status.exists()
    hanging.set()
    progress.close(10)
    assert read_status(directory).step == 50
    assert progress._board.steps == list(range(1, 51))  # type: ignore[union-attr]
    assert [event["event"] for event in read_status(directory).events] == ["started", "ps-lost"]


def test_numbers_that_become_nan_are_said_once(
    begin: Callable[..., Progress], directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    progress = begin()
    numbers = [1.0, math.nan, math.nan, 0.5, math.inf]
    for step, loss in enumerate(numbers, start=1):
        progress.trained(step, 10.0, {"loss": loss, "accuracy": 0.5})
    progress.close(10)
    messages = [event["message"] for event in read_status(directory).events if event["event"] == "not-finite"]
    assert [message.split(".")[0] for message in messages] == ["at step 2: loss nan", "at step 5: loss inf"]
    assert "--from RUN@STEP" in messages[0]
    assert caplog.text.count("not finite") == 2


def test_status_is_written_once_for_all_that_came_while_it_waited(
    begin: Callable[..., Progress], hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int | None] = []
    hang = Status.write
    monkeypatch.setattr(Status, "write", lambda status, to: (written.append(status.step), hang(status, to)))
    progress = begin()
    for step in range(1, 51):
        progress.checkpointed(f"ckpt-{step}", step)
    hanging.set()
    progress.close(10)
    assert len(written) <= 2
    assert written[-1] == 50


def test_what_does_not_fit_into_the_queue_is_lost_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    taken, healed, done = threading.Event(), threading.Event(), []
    writer = Writer(limit=3)
    writer.post(lambda: (taken.set(), healed.wait()))
    assert taken.wait(60)
    assert [writer.post(lambda number=number: done.append(number)) for number in range(6)] == [True] * 3 + [False] * 3
    assert caplog.text.count("does not take what is reported") == 1
    healed.set()
    writer.close(10)
    assert done == [0, 1, 2]
    assert writer.post(lambda: done.append(9))
    writer.close(10)
    assert done[-1] == 9


def test_report_that_fails_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    writer = Writer()
    writer.post(lambda: 1 // 0)
    writer.post(lambda: done.append(1))
    writer.close(10)
    assert done == [1]
    assert "a report is lost" in caplog.text


def test_member_that_does_not_lead_writes_nothing(begin: Callable[..., Progress], directory: RunDirectory) -> None:
    progress = begin(leads=False)
    progress.enter(RunState.TRAINING)
    progress.trained(5, 1.0, {})
    progress.events.write("started")
    progress.enter(RunState.FINISHED)
    progress.close()
    assert not directory.path.exists()


def test_who_waits_for_the_lease_writes_nothing_and_takes_up_what_its_holder_left(
    begin: Callable[..., Progress], directory: RunDirectory
) -> None:
    holder, second = begin(), begin(waits=True)
    second.enter(RunState.WAITING, "host-1 holds the run")
    second.events.write("failed")
    second.close()
    assert second._notifier.line == "waiting a: host-1 holds the run"  # type: ignore[attr-defined]
    holder.trained(70, 1.0, {})
    holder.close()
    assert read_status(directory).step == 70
    second.begin()
    assert second.status.step == 70
    assert second.ledger.restored(50) == 20
    second.enter(RunState.TRAINING)
    second.close()
    assert read_status(directory).state == "training"
    assert [event["event"] for event in read_status(directory).events] == ["started", "started"]


def test_the_first_step_is_shown_at_once(begin: Callable[..., Progress], directory: RunDirectory) -> None:
    progress = begin()
    progress.enter(RunState.TRAINING)
    progress.advanced(1)
    progress.close()
    assert (read_status(directory).state, read_status(directory).step) == ("training", 1)


def test_ledger_goes_from_process_to_process_and_is_told_at_the_end(
    begin: Callable[..., Progress], directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = begin()
    first.phase(Phase.TRAINING)
    time.sleep(0.1)
    first.trained(50, 10.0, {})
    first.close()
    record: dict[str, Any] = read_record(directory.status) or {}
    assert (record["phase"], record["ledger"]["ended"]) == ("training", False)
    assert record["ledger"]["productive"] >= 0.1
    assert "events" not in record

    second = begin()
    assert second.ledger.restored(30) == 20
    second.enter(RunState.FINISHED)
    second.close()
    ledger = read_status(directory).ledger or {}
    assert ledger["productive"] == record["ledger"]["productive"]
    assert ledger["ended"]
    assert "goodput" in caplog.text


def test_a_worker_that_was_removed_leaves_the_status(begin: Callable[..., Progress], directory: RunDirectory) -> None:
    first = begin()
    first.trained(30, 10.0, {}, {"worker-0": 10, "worker-1": 10, "worker-2": 10}, seconds=3.0)
    first.close(10)
    second = begin(waits=True)
    second.begin({"ps-0", "worker-0", "worker-2", "chief-0"})
    second.trained(50, 10.0, {}, {"worker-0": 10, "worker-2": 10}, seconds=2.0)
    second.close(10)
    assert {task: each["steps"] for task, each in read_status(directory).workers.items()} == {
        "worker-0": 20,
        "worker-2": 20,
    }


def test_each_workers_steps_are_added_up_over_all_processes(
    begin: Callable[..., Progress], directory: RunDirectory
) -> None:
    first = begin()
    first.enter(RunState.TRAINING)
    first.trained(30, 6.0, {}, {"worker-0": 20, "worker-10": 0, "worker-2": 10}, 5.0)
    first.close()
    assert list(read_status(directory).workers.items()) == [
        ("worker-0", {"steps": 20, "steps_per_second": 4.0}),
        ("worker-2", {"steps": 10, "steps_per_second": 2.0}),
        ("worker-10", {"steps": 0, "steps_per_second": 0.0}),
    ]
    second = begin()
    assert second.status.workers["worker-0"] == {"steps": 20, "steps_per_second": None}
    second.trained(40, 6.0, {}, {"worker-0": 10}, 5.0)
    assert second.status.workers["worker-0"] == {"steps": 30, "steps_per_second": 2.0}
    assert second.status.workers["worker-2"] == {"steps": 10, "steps_per_second": 0.0}
    second.enter(RunState.STOPPED)
    assert second.status.workers["worker-0"] == {"steps": 30, "steps_per_second": None}


def test_tensorboard_has_the_settings_and_the_faults(begin: Callable[..., Progress], directory: RunDirectory) -> None:
    progress = begin()
    progress.events.write("lease-taken", message="from head")  # before there is a curve
    progress.trained(10, 1.0, {})
    progress.events.write("checkpoint-saved", message="step 10")
    progress.events.write("ps-lost", task="ps-0", host="192.0.2.1:2300", message="its process\nhas ended")
    progress.enter(RunState.TRAINING)
    progress.close()
    board: Any = progress._board
    assert board.faults == [(0, 0), (0, 1), (10, 1), (10, 2)]
    (_, _, settings), lease, lost = board.pages
    assert "| `steps` | `100` |" in settings
    assert "notify" not in settings
    assert (lease[:2], lost[:2]) == ((0, "faults"), (10, "faults"))
    assert lost[2].startswith("    20")
    assert lost[2].endswith("  ps-lost  ps-0 on 192.0.2.1:2300  its process has ended")
    assert begin().status.faults == 2


def test_the_size_of_a_step_is_in_the_history_once(begin: Callable[..., Progress], directory: RunDirectory) -> None:
    progress = begin()
    progress.trained(10, 5.0, {"loss": 1.0})
    progress.counters.step_examples = 32
    for step in (20, 30):
        progress.trained(step, 5.0, {"loss": 1.0})
    progress.close()
    assert [line["batch"] for line in read_lines(directory.history) if "batch" in line] == [32]
