"""When the side-car evaluator waits, ends or restarts; none of it needs TensorFlow."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from trainer.core.failures import UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.states import RunState
from trainer.process.supervisor import NEEDED
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.retention import Retention
from trainer.tasks import evaluator
from trainer.tasks.evaluator import last_evaluated, run_evaluator
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.status import describe, read_status

pytestmark = pytest.mark.timeout(30)


class Heard(Notifier):
    def __init__(self, restarts: int = 0, lack: str = "") -> None:
        super().__init__(restarts=restarts, lack=lack)
        self.was_ready = False

    def ready(self, status: str) -> None:
        self.was_ready = True


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(program="mine:One", run="a", steps=10, shared_dir=str(tmp_path), evaluate_poll_seconds=0.01)


def write_checkpoint(directory: RunDirectory, step: int) -> None:
    directory.checkpoints.mkdir(parents=True, exist_ok=True)
    for ending in ("index", "data-00000-of-00001"):
        (directory.checkpoints / f"ckpt-{step}.{ending}").touch()
    directory.catalogue.write_manifest(step, epoch=1, tensorflow="2.21.0")


def test_is_ready_before_there_is_a_run_and_follows_the_selection(config: Config) -> None:
    heard = Heard()
    chosen = iter([config, config, config.replace(run="b")])
    assert run_evaluator(config, heard, lambda: next(chosen)) == 75
    assert heard.was_ready
    assert next(chosen, None) is None


def test_settings_that_cannot_be_read_meanwhile_are_no_choice(config: Config) -> None:
    answers = iter([ConfigError("run.json is not JSON"), config.replace(run="b")])

    def selected() -> Config:
        answer = next(answers)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    assert run_evaluator(config, Heard(), selected) == 75
    assert next(answers, None) is None


def test_ends_when_the_finished_run_is_evaluated(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    write_record(directory.evaluation, {"step": 10, "metrics": {}})
    directory.set_state(RunState.FINISHED, 10)
    assert run_evaluator(config, Heard(), lambda: config) == 0


@pytest.mark.parametrize(("page", "wanted"), [(None, True), (-60, True), (60, False)])
def test_the_page_of_a_finished_run_has_its_last_evaluation_and_is_then_left(
    config: Config, tmp_path: Path, page: int | None, wanted: bool
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    write_record(directory.evaluation, {"step": 10, "metrics": {}})
    directory.set_state(RunState.FINISHED, 10)
    if page is not None:
        evaluated = directory.evaluation.stat().st_mtime
        directory.report.write_text("before")
        os.utime(directory.report, (evaluated + page, evaluated + page))
    assert run_evaluator(config, Heard(), lambda: config) == 0
    assert (directory.report.read_text() != "before") == wanted


@pytest.mark.parametrize("before", [None, {"step": 4, "metrics": {"loss": 0.5}, "saved": 7}])
def test_an_evaluation_that_fails_is_told_and_stays_owed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any] | None
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    directory.set_state(RunState.FINISHED, 10)
    if before:
        write_record(directory.evaluation, before)
    trouble = UserError("Mine.eval_dataset never ends")

    def load(watched: evaluator.WatchedRun) -> None:
        write_checkpoint(directory, 12)  # meanwhile
        raised(trouble)

    monkeypatch.setattr(evaluator.WatchedRun, "_load", load)
    assert run_evaluator(config, Heard(), lambda: config) == 78
    status = read_status(directory)
    assert status.message == "not evaluated: step 10: Mine.eval_dataset never ends"
    assert status.evaluation == (before and {"step": 4, "metrics": {"loss": 0.5}})
    assert ("evaluation  loss 0.5 (step 4)" in describe(status)) == bool(before)
    assert "Mine.eval_dataset never ends" in directory.report.read_text()
    assert last_evaluated(directory) == ((4, 7) if before else (-1, None))


def raised(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize("evaluation", ["inline", "distributed", "exact", "none"])
def test_has_nothing_to_do_when_it_is_not_the_one_that_evaluates(config: Config, evaluation: str) -> None:
    heard = Heard()
    assert run_evaluator(config.replace(evaluation=evaluation), heard, lambda: config) == 0
    # systemd takes a task that ends before it was ready for a failed one.
    assert heard.was_ready


def test_one_that_only_waits_ends_once_there_is_something_to_evaluate(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")

    def selected() -> Config:
        write_checkpoint(directory, 10)
        return config

    assert run_evaluator(config, Heard(), selected, only_wait=True) == NEEDED
    assert "tensorflow" not in sys.modules
    write_record(directory.evaluation, {"step": 10, "metrics": {}})
    directory.set_state(RunState.FINISHED, 10)
    assert run_evaluator(config, Heard(), selected, only_wait=True) == 0


def test_a_model_too_large_for_this_host_is_refused_before_there_is_a_checkpoint(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunDirectory(tmp_path, "a").set_state(RunState.TRAINING, 0, model_bytes=2**60)
    assert run_evaluator(config, Heard(), lambda: config, only_wait=True) == 78
    assert "2147483648.0 GiB of variables" in caplog.text
    assert "take evaluation: distributed" in caplog.text


def test_a_model_that_fits_is_waited_for(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    directory.set_state(RunState.TRAINING, 0, model_bytes=2**20)

    def selected() -> Config:
        write_checkpoint(directory, 10)
        return config

    assert run_evaluator(config, Heard(), selected, only_wait=True) == NEEDED


class Fake:
    """Evaluates what it is told to, and fails where it is told to."""

    unreadable: tuple[int, ...] = ()
    asked: list[int]

    def __init__(self, program: object, directory: RunDirectory, best_metric: str, counters: object) -> None: ...

    def evaluate(self, step: int, saved: int | None = None) -> bool:
        self.asked.append(step)
        return step not in self.unreadable


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(evaluator, "load_tensorflow", object)
    monkeypatch.setattr(evaluator, "load_program", lambda name, arguments: object())
    monkeypatch.setattr(evaluator, "Evaluator", Fake)
    monkeypatch.setattr(Fake, "asked", [], raising=False)
    return Fake


def test_a_stop_ends_it_whatever_the_program_does_with_signals(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(RunDirectory(tmp_path, "a"), 5)
    monkeypatch.setattr(evaluator, "load_program", lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_evaluator(config, Heard(), lambda: config.replace(run="b") if fake.asked else config) == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_saved_again_under_its_step_is_evaluated_again(
    config: Config, tmp_path: Path, fake: type[Fake]
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 5)

    def selected() -> Config:
        if len(fake.asked) == 1:
            os.utime(directory.catalogue.manifest(5), ns=(1, 1))
            return config
        return config.replace(run="b")

    assert run_evaluator(config, Heard(), selected) == 75
    assert fake.asked == [5, 5]


def test_one_that_was_restarted_knows_a_checkpoint_that_was_saved_again_meanwhile(
    config: Config, tmp_path: Path, fake: type[Fake]
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    write_record(directory.evaluation, {"step": 10, "metrics": {}, "saved": directory.catalogue.saved_at(10)})
    directory.set_state(RunState.FINISHED, 10)
    assert run_evaluator(config, Heard(), lambda: config) == 0
    assert fake.asked == []
    os.utime(directory.catalogue.manifest(10), ns=(1, 1))
    assert run_evaluator(config, Heard(), lambda: config) == 0
    assert fake.asked == [10]


def test_an_evaluation_that_hangs_is_left_to_the_watchdog(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(RunDirectory(tmp_path, "a"), 5)
    heard, signs = Heard(), []
    monkeypatch.setattr(heard, "watch", lambda alive: signs.append(alive))

    def evaluate(self: Fake, step: int, saved: int | None = None) -> bool:
        signs.append(signs[0]())
        time.sleep(0.3)
        signs.append(signs[0]())
        return True

    monkeypatch.setattr(fake, "evaluate", evaluate)
    config = config.replace(evaluating_timeout_seconds=0.2)
    assert run_evaluator(config, heard, lambda: config.replace(run="b")) == 75
    assert signs[1:] == [True, False]
    assert signs[0]()


def test_a_program_that_says_exit_is_the_users_error(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(RunDirectory(tmp_path, "a"), 5)
    kinds = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "OpError")
    errors = SimpleNamespace(**dict.fromkeys(kinds, KeyError))
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(errors=errors))
    monkeypatch.setattr(fake, "evaluate", lambda *arguments: sys.exit(0))
    assert run_evaluator(config, Heard(), lambda: config) == 78


class Killed(BaseException):
    """As a process ends that calls os._exit."""


def test_a_program_that_ends_its_process_is_given_up_after_as_many_as_a_coordinators(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> NoReturn:
        write_checkpoint(directory, 5 + next(steps))  # the training goes on
        raise Killed

    config, directory, steps = config.replace(max_restarts_without_step=2), RunDirectory(tmp_path, "a"), iter(range(99))
    write_checkpoint(directory, 4)
    monkeypatch.setattr(evaluator, "load_program", load)
    for restarts in (0, 1, 0, 1, 2):  # the operator's start begins the count again
        with pytest.raises(Killed):
            run_evaluator(config, Heard(restarts), lambda: config)
    assert run_evaluator(config, Heard(3), lambda: config) == 78
    message = read_status(directory).message
    assert re.search(
        r"3 processes have ended .* max_restarts_without_step is 2; .* os\._exit.* training goes on", message
    )
    with pytest.raises(Killed):
        run_evaluator(config, Heard(), lambda: config)


def test_an_evaluation_that_succeeds_begins_the_count_of_its_processes_again(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(self: Fake, step: int, saved: int | None = None) -> bool:
        ends.append(step)
        if len(ends) % 2:
            raise Killed
        write_checkpoint(directory, step + 1)
        return True

    config, directory = config.replace(max_restarts_without_step=1), RunDirectory(tmp_path, "a")
    ends: list[int] = []
    write_checkpoint(directory, 4)
    monkeypatch.setattr(fake, "evaluate", evaluate)
    for restarts in range(5):
        with pytest.raises(Killed):
            run_evaluator(config, Heard(restarts), lambda: config)
    assert ends == [4, 4, 5, 5, 6, 6, 7, 7, 8]


def test_memory_that_ran_out_for_each_evaluation_is_named(config: Config, tmp_path: Path, fake: type[Fake]) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 4)
    write_record(directory.evaluating, {"step": 4, "tries": 3})
    config = config.replace(max_restarts_without_step=2)
    assert run_evaluator(config, Heard(3, "out of memory, limit 2.0 GiB: take smaller batches"), lambda: config) == 78
    assert "out of memory, limit 2.0 GiB: take smaller batches. The training" in read_status(directory).message


def test_a_checkpoint_that_cannot_be_read_is_tried_again_but_not_for_ever(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    directory.set_state(RunState.FINISHED, 10)
    monkeypatch.setattr(fake, "unreadable", (10,))
    assert run_evaluator(config, Heard(), lambda: config) == 0
    assert fake.asked == [10] * 3


def test_a_search_that_waits_for_its_points_evaluation_hears_that_the_last_checkpoint_cannot_be_read(
    config: Config, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"rate": {"low": 0.0, "high": 1.0}}
    search = {"trials": 2, "metric": "loss", "parameters": parameters}
    sweep = {"name": "a", "attempt": 1, "points": [], "search": search}
    write_record(tmp_path / "selection.json", {"sweep": sweep})
    directory = RunDirectory(tmp_path, "a-1")
    write_checkpoint(directory, 10)
    directory.set_state(RunState.FINISHED, 10)
    monkeypatch.setattr(fake, "unreadable", (10,))
    looks = iter(range(20))

    def selected() -> Config:
        return config.replace(run="a-1" if next(looks) < 10 else "b")

    assert run_evaluator(config.replace(run="a-1"), Heard(), selected) == 75
    assert "can't be read" in str(read_record(directory.evaluation))


def test_one_that_is_behind_takes_the_newest_and_leaves_out_those_between(
    config: Config, tmp_path: Path, fake: type[Fake]
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 1)

    def selected() -> Config:
        if len(fake.asked) == 1:
            for step in (2, 3, 4):
                write_checkpoint(directory, step)
            directory.catalogue.prune(Retention(3))
            return config
        return config.replace(run="b")

    assert run_evaluator(config, Heard(), selected) == 75
    assert fake.asked == [1, 4]


def test_what_has_no_manifest_yet_is_not_looked_at(config: Config, tmp_path: Path, fake: type[Fake]) -> None:
    directory = RunDirectory(tmp_path, "a")
    for step in (5, 6):
        write_checkpoint(directory, step)
    directory.catalogue.manifest(6).unlink()
    assert run_evaluator(config, Heard(), lambda: config.replace(run="b")) == 75
    assert fake.asked == [5]


def test_a_record_of_evaluations_that_is_damaged_costs_one_evaluation(
    config: Config, tmp_path: Path, fake: type[Fake]
) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    directory.evaluation.write_text("{")
    directory.set_state(RunState.FINISHED, 10)
    assert run_evaluator(config, Heard(), lambda: config) == 0
    assert fake.asked == [10]


def test_goes_on_when_the_run_is_to_be_longer(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    write_checkpoint(directory, 10)
    write_record(directory.evaluation, {"step": 10, "metrics": {}})
    directory.set_state(RunState.FINISHED, 10)
    longer = config.replace(steps=20)
    assert run_evaluator(longer, Heard(), lambda: longer.replace(run="b")) == 75


def test_a_program_that_cannot_be_loaded_is_the_users_error(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "load_tensorflow", object)
    write_checkpoint(RunDirectory(tmp_path, "a"), 10)
    assert run_evaluator(config.replace(program="nowhere_at_all:One"), Heard(), lambda: config) == 78
