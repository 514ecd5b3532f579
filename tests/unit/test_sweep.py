"""A sweep's points: which one is next, what becomes of each, and who ends when."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.errors import OperatorMistake
from fleet.hosts.run import Run
from fleet.planning import decision
from fleet.site.sweep_file import read_sweep_file
from tests.unit.test_evaluator import write_checkpoint
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, USER_ERROR, Stopped, UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.signals import MAKE_ROOM, StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.run.selections.selection import apply_selection, selected_sweep
from trainer.run.selections.sweep import Point, Sweep
from trainer.tasks import evaluator, server, sweep
from trainer.tasks.sweep import train_point
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.sweep import describe_sweep, read_sweep

POINTS = [{"rate": 0.1}, {"rate": 0.2}, {"rate": 0.3}]
CHIEF = ClusterConfig({"chief": ["localhost:1"], "worker": ["localhost:2"]}, "chief", 0)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, MAKE_ROOM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def select(shared: Path, attempt: int = 1, **more: Any) -> dict[str, Any]:
    selection = {"program_args": {"units": 8}, **more, "sweep": {"name": "s", "attempt": attempt, "points": POINTS}}
    write_record(shared / "selection.json", selection)
    return selection


@pytest.fixture
def config(tmp_path: Path) -> Config:
    select(tmp_path)
    return Config(program="mine:One", shared_dir=str(tmp_path), steps=10, program_args={"rate": 9, "depth": 2})


def present(config: Config, evaluates: bool = False) -> str:
    return apply_selection(config, evaluates=evaluates).run


def end(config: Config, run: str, state: RunState) -> None:
    sweep = selected_sweep(config.replace(run=run))
    assert sweep is not None
    sweep.end_point(run, state, "why" if state is RunState.FAILED else "")


def save(config: Config, run: str, step: int) -> RunDirectory:
    directory = RunDirectory(config.shared_dir, run)
    write_checkpoint(directory, step)
    return directory


def test_each_point_is_a_run_with_its_parameters_over_the_common_ones(config: Config) -> None:
    first = apply_selection(config)
    assert (first.run, first.program, first.program_args) == ("s-1", "mine:One", {"rate": 0.1, "depth": 2, "units": 8})
    select(Path(config.shared_dir), program="mine:Two")
    assert apply_selection(config).program_args == {"rate": 0.1, "units": 8}


def test_the_next_point_is_the_first_that_has_not_ended_and_after_the_last_it_stays(config: Config) -> None:
    for run, state, then in (
        ("s-1", RunState.FINISHED, "s-2"),
        ("s-2", RunState.FAILED, "s-3"),
        ("s-3", RunState.FINISHED, "s-3"),
    ):
        assert present(config) == run
        end(config, run, state)
        assert present(config) == then
    over = selected_sweep(config.replace(run="s-1"))
    assert over is not None
    assert over.present() is None


def test_another_attempt_tries_what_failed_and_leaves_what_is_finished(config: Config) -> None:
    for run, state in (("s-1", RunState.FINISHED), ("s-2", RunState.FAILED), ("s-3", RunState.FINISHED)):
        end(config, run, state)
    write_record(RunDirectory(config.shared_dir, "s-2").status, {"run": "s-2", "run_dir": "", "state": "failed"})
    select(Path(config.shared_dir), attempt=2)
    assert present(config) == "s-2"
    assert [point["state"] for point in read_sweep(config)["points"]] == ["finished", "new", "finished"]
    end(config, "s-2", RunState.FAILED)
    sweep = selected_sweep(config.replace(run="s-2"))
    assert sweep is not None
    assert sweep.present() is None


def test_who_evaluates_is_behind_until_the_last_checkpoint_of_each_point_is_evaluated(config: Config) -> None:
    first = save(config, "s-1", 10)
    end(config, "s-1", RunState.FINISHED)
    assert (present(config), present(config, evaluates=True)) == ("s-2", "s-1")
    write_record(first.evaluation, {"step": 10, "metrics": {}})
    assert present(config, evaluates=True) == "s-2"
    end(config, "s-2", RunState.FAILED)  # before there was a checkpoint
    assert present(config, evaluates=True) == "s-3"


def test_a_point_with_nothing_left_to_evaluate_is_looked_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("s-1", "s-2"):
        write_record(save(config, run, 10).evaluation, {"step": 10, "metrics": {}})
        end(config, run, RunState.FINISHED)
    assert present(config, evaluates=True) == "s-3"
    looked: list[str] = []
    owes = Sweep.owes

    def look(self: Sweep, point: Point) -> bool:
        looked.append(point.run)
        return owes(self, point)

    monkeypatch.setattr(Sweep, "owes", look)
    assert present(config, evaluates=True) == "s-3"
    assert looked == []
    end(config, "s-2", RunState.FINISHED)  # it was trained again
    assert present(config, evaluates=True) == "s-3"
    assert looked == ["s-2"]


def test_later_points_begin_with_the_settings_that_the_sweep_began_with(config: Config) -> None:
    asked = {"program_args": {"units": 8}, "sweep": {"name": "s", "points": POINTS}}
    choice = decision.choose_sweep(asked, {}, False, None, config.as_dict())
    write_record(Path(config.shared_dir) / "selection.json", dict(choice.selection))
    later = config.replace(program="mine:Other", program_args={"depth": 9, "width": 4}, steps=20)
    chosen = apply_selection(later)
    assert (chosen.program, chosen.steps) == ("mine:One", 20)
    assert chosen.program_args == {"rate": 0.1, "depth": 2, "units": 8}
    assert not decision.choose_sweep(asked, choice.selection, True, {"attempt": 1}, later.as_dict()).write


def test_parameters_that_the_settings_get_later_are_not_for_later_points(config: Config) -> None:
    asked = {"sweep": {"name": "s", "points": POINTS}}
    choice = decision.choose_sweep(asked, {}, False, None, {"program": config.program})
    write_record(Path(config.shared_dir) / "selection.json", dict(choice.selection))
    assert apply_selection(config.replace(program_args={"depth": 9})).program_args == {"rate": 0.1}


def test_a_point_whose_record_is_damaged_is_the_present_one_and_fails_by_itself(config: Config) -> None:
    directory = RunDirectory(config.shared_dir, "s-1")
    directory.path.mkdir(parents=True)
    directory.settings.write_text("{")
    chosen = apply_selection(config)
    assert (chosen.run, chosen.program_args) == ("s-1", {"rate": 0.1, "depth": 2, "units": 8})
    with pytest.raises(UserError, match=r"s-1/run.json is not JSON.*remove the file"):
        directory.claim(chosen)


def test_a_run_beside_the_sweep_is_not_of_it(config: Config) -> None:
    assert selected_sweep(config.replace(run="other")) is None
    assert selected_sweep(config.replace(run="s-4")) is None
    write_record(Path(config.shared_dir) / "selection.json", {"run": "s-1"})
    assert selected_sweep(config.replace(run="s-1")) is None


@pytest.mark.parametrize("text", [{}, [], {"name": "s", "attempt": 1, "points": []}, {"name": "../s", "attempt": 1}])
def test_a_selection_without_a_sweep_in_it_is_refused_with_its_file(config: Config, text: Any) -> None:
    write_record(Path(config.shared_dir) / "selection.json", {"sweep": text})
    with pytest.raises(ConfigError, match=r"selection.json: sweep: "):
        apply_selection(config)


@pytest.mark.parametrize(
    ("ended", "code", "job", "exit_code", "state"),
    [
        (0, FINISHED, "chief", TRY_AGAIN, "finished"),
        (0, USER_ERROR, "chief", TRY_AGAIN, "failed"),
        (0, TRY_AGAIN, "chief", TRY_AGAIN, None),
        (0, STOPPED, "chief", STOPPED, None),
        (2, FINISHED, "chief", FINISHED, "finished"),
        (2, USER_ERROR, "chief", FINISHED, "failed"),
        (0, FINISHED, "worker", TRY_AGAIN, None),
        (0, USER_ERROR, "worker", TRY_AGAIN, "failed"),
        (2, FINISHED, "worker", TRY_AGAIN, None),
    ],
)
def test_a_coordinator_writes_down_what_became_of_its_point_and_asks_for_the_next_process(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    ended: int,
    code: int,
    job: str,
    exit_code: int,
    state: str | None,
) -> None:
    for run in ("s-1", "s-2")[:ended]:
        end(config, run, RunState.FINISHED)
    monkeypatch.setattr(sweep, "run_coordinator", lambda *_, **more: code if more["keeps_servers"]() else -1)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0)
    chosen = apply_selection(config)
    cluster = ClusterConfig(CHIEF.jobs, job, 0)
    assert train_point(chosen, cluster, Notifier()) == exit_code
    selected = selected_sweep(chosen)
    assert selected is not None
    assert selected.ends().get(chosen.run, {}).get("state") == state


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_as_a_point_ends_stops_the_sweep(config: Config, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    def run(*_: object, stopping: StopRequest, **__: object) -> int:
        if not late:
            stopping.received = True  # in the export, which is not broken off
            return FINISHED
        raise Stopped  # when all but the coordinator's last words is done

    monkeypatch.setattr(sweep, "run_coordinator", run)
    assert train_point(apply_selection(config), CHIEF, Notifier()) == STOPPED
    assert present(config) == ("s-1" if late else "s-2")


def test_a_shared_path_that_takes_no_record_is_tried_again_and_not_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    slept: list[float] = []
    own, plain = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:  # threads that other tests have left sleep too
        slept.append(seconds) if threading.get_ident() == own else plain(seconds)

    monkeypatch.setattr(sweep, "run_coordinator", lambda *_, **__: FINISHED)
    monkeypatch.setattr(Sweep, "end_point", refuse)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert train_point(apply_selection(config), CHIEF, Notifier()) == TRY_AGAIN
    assert slept == [sweep.PATIENCE_SECONDS]


def test_a_coordinator_of_a_sweep_that_is_over_trains_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("s-1", "s-2", "s-3"):
        end(config, run, RunState.FAILED)
    monkeypatch.setattr(sweep, "run_coordinator", lambda *_, **__: -1)
    assert train_point(apply_selection(config), CHIEF, Notifier()) == FINISHED


def test_servers_that_see_no_record_are_ended_with_the_sweep_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(sweep, "run_coordinator", lambda *_, **__: FINISHED)
    monkeypatch.setattr(sweep, "shut_down_servers", lambda servers, seconds: ended.append(servers))
    for run in ("s-1", "s-2", "s-3"):
        assert ended == []
        chosen = apply_selection(config).replace(local_run_dir=True)
        assert chosen.run == run
        train_point(chosen, CHIEF, Notifier())
    assert ended == [CHIEF.servers]


def test_a_coordinator_without_a_sweep_ends_as_it_does(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(Path(config.shared_dir) / "selection.json", {"run": "s-1"})
    monkeypatch.setattr(sweep, "run_coordinator", lambda *_, **more: -1 if more["keeps_servers"]() else USER_ERROR)
    assert train_point(apply_selection(config), CHIEF, Notifier()) == USER_ERROR


def test_servers_outlive_the_points_and_end_with_the_sweep(config: Config) -> None:
    def ending() -> tuple[int | None, str]:
        return server.ending("ps-0", "localhost:1", lambda: apply_selection(config))

    RunDirectory(config.shared_dir, "s-1").set_state(RunState.FINISHED, 10, asked=10)
    assert ending() == (None, "")
    for run in ("s-1", "s-2"):
        end(config, run, RunState.FINISHED)
    RunDirectory(config.shared_dir, "s-3").set_state(RunState.FINISHED, 10, asked=10)
    assert ending() == (None, "")
    end(config, "s-3", RunState.FAILED)
    assert ending() == (FINISHED, "sweep s is over")


def test_the_evaluator_goes_from_point_to_point_and_ends_with_the_last(config: Config) -> None:
    def evaluate(run: str) -> int:
        chosen = apply_selection(config, evaluates=True).replace(run=run)
        return evaluator.run_evaluator(chosen, Notifier(), lambda: apply_selection(config, evaluates=True))

    first = save(config, "s-1", 10)
    write_record(first.evaluation, {"step": 10, "metrics": {}})
    first.set_state(RunState.FINISHED, 10, asked=10)
    end(config, "s-1", RunState.FINISHED)
    assert evaluate("s-1") == TRY_AGAIN
    for run in ("s-2", "s-3"):
        end(config, run, RunState.FAILED)
    assert evaluate("s-3") == FINISHED


def test_one_that_can_not_be_evaluated_does_not_keep_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, arguments: object) -> Any:
        raise ValueError("no test images")

    monkeypatch.setattr(evaluator, "load_tensorflow", object)
    monkeypatch.setattr(evaluator, "load_program", refuse)
    directory = save(config, "s-1", 10)
    chosen = apply_selection(config, evaluates=True)
    assert evaluator.run_evaluator(chosen, Notifier(), lambda: chosen) == TRY_AGAIN
    assert "no test images" in json.loads(directory.evaluation.read_text())["failed"]
    end(config, "s-1", RunState.FINISHED)
    assert present(config, evaluates=True) == "s-2"


def test_a_last_checkpoint_that_can_not_be_read_does_not_keep_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable:
        def __init__(self, *_: object) -> None:
            pass

        def evaluate(self, *_: object) -> bool:
            return False

    monkeypatch.setattr(evaluator, "load_tensorflow", object)
    monkeypatch.setattr(evaluator, "load_program", lambda *_: None)
    monkeypatch.setattr(evaluator, "Evaluator", Unreadable)
    save(config, "s-1", 10)
    end(config, "s-1", RunState.FINISHED)
    chosen = apply_selection(config, evaluates=True).replace(evaluate_poll_seconds=0.001)
    again = lambda: apply_selection(config, evaluates=True)  # noqa: E731
    assert evaluator.run_evaluator(chosen, Notifier(), again) == TRY_AGAIN
    assert present(config, evaluates=True) == "s-2"
    assert "s-1: not evaluated: the last checkpoint, of step 10, can't be read" in describe_sweep(read_sweep(config))


def test_an_evaluation_that_ends_its_process_does_not_keep_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As the process ends that a watchdog or the kernel kills."""

    def hang(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(evaluator, "load_tensorflow", hang)
    directory = save(config, "s-1", 10)
    end(config, "s-1", RunState.FINISHED)
    again = lambda: apply_selection(config, evaluates=True)  # noqa: E731
    for _ in range(evaluator.TRIES):
        with pytest.raises(Killed):
            evaluator.run_evaluator(again(), Notifier(), again)
    assert evaluator.run_evaluator(again(), Notifier(), again) == TRY_AGAIN
    assert present(config, evaluates=True) == "s-2"
    assert "3 processes have ended while they evaluated step 10" in directory.evaluation.read_text()


def test_trouble_that_the_evaluator_outlives_is_no_try(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(evaluator, "load_tensorflow", fail)
    directory = save(config, "s-1", 10)
    again = lambda: apply_selection(config, evaluates=True)  # noqa: E731
    for _ in range(evaluator.TRIES + 1):
        assert evaluator.run_evaluator(again(), Notifier(), again) == TRY_AGAIN
    assert not directory.evaluation.exists()
    assert not directory.evaluating.exists()


def test_the_table_says_what_became_of_each_point(config: Config) -> None:
    directory = RunDirectory(config.shared_dir, "s-1")
    record = {"run": "s-1", "run_dir": "", "state": "finished", "step": 10, "steps": 10, "ledger": {"goodput": 0.5}}
    write_record(directory.status, record)
    write_record(directory.evaluation, {"step": 10, "metrics": {"loss": 0.25}})
    end(config, "s-1", RunState.FINISHED)
    end(config, "s-2", RunState.FAILED)
    lines = describe_sweep(read_sweep(config)).splitlines()
    assert lines[0] == "sweep s: 2 of 3 points have ended, 1 failed"
    assert lines[2].split() == ["units=8,", "rate=0.1", "finished", "loss", "0.25", "10/10", "50.0", "%", "s-1"]
    assert lines[3].split() == ["units=8,", "rate=0.2", "failed", "-", "-", "-", "s-2"]
    assert lines[4].split() == ["units=8,", "rate=0.3", "new", "-", "-", "-", "s-3"]
    assert lines[5] == "s-2 failed: why"
    # Also when something else was selected since.
    (Path(config.shared_dir) / "selection.json").unlink()
    assert describe_sweep(read_sweep(config, "s")).splitlines()[1:] == lines[1:]
    with pytest.raises(ConfigError, match="there is no sweep t in"):
        read_sweep(config, "t")
    write_record(directory.status, {**record, "message": "its model is not exported: why"})
    assert "\ns-1: its model is not exported: why\n" in describe_sweep(read_sweep(config, "s"))
    (Path(config.shared_dir) / "sweeps" / "s.json").write_text("{")
    with pytest.raises(ConfigError, match=r"s\.json is no record of a sweep .*: remove it"):
        read_sweep(config, "s")


def sweep_file(path: Path, text: str, name: str = "rates.yml") -> dict[str, Any]:
    (path / name).write_text(text)
    return read_sweep_file(path / name)


def test_a_file_has_a_grid_and_points(tmp_path: Path) -> None:
    text = "program: a:B\nprogram_args: {units: 8}\ngrid:\n  rate: [1e-3, 0.1]\n  layers: [[64], [64, 64]]\n"
    asked = sweep_file(tmp_path, text + "points:\n- {rate: 0.5}\n")
    assert (asked["program"], asked["program_args"], asked["sweep"]["name"]) == ("a:B", {"units": 8}, "rates")
    assert asked["sweep"]["points"] == [
        {"rate": 0.001, "layers": [64]},
        {"rate": 0.001, "layers": [64, 64]},
        {"rate": 0.1, "layers": [64]},
        {"rate": 0.1, "layers": [64, 64]},
        {"rate": 0.5},
    ]


def test_a_grid_may_be_longer_than_one_points_parameters(tmp_path: Path) -> None:
    names = [letter * 1500 for letter in "abcdefgh"]
    assert len(sweep_file(tmp_path, f"grid: {{name: {json.dumps(names)}}}")["sweep"]["points"]) == 8


def test_true_is_another_value_than_1(tmp_path: Path) -> None:
    assert len(sweep_file(tmp_path, "grid: {a: [1, true]}")["sweep"]["points"]) == 2


# Seven lines that stand for ten million values.
MULTIPLIED = "\n".join(
    ["", "  a: &a0 [x]", *(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8))]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected a mapping of `grid`"),
        ("name: a", "expected a mapping of `grid`"),
        ("grids: {}", "unknown key 'grids'; the keys are name, program, program_args, grid, points"),
        ("grid: {rate: 0.1}", "expected a list of values for each name"),
        ("grid: {rate: []}", "expected a list of values for each name"),
        ("grid: {a-b: [1]}", "'a-b' can't name a parameter"),
        ("points: [1]", "expected a list of mappings"),
        ("points: [{rate: .nan}]", "rate is nan: expected what JSON can say"),
        (f"program_args: {{a: {'x' * 6000}}}\npoints: [{{b: {'y' * 6000}}}]", "characters long, and 10,000 is the"),
        ("points: [{day: 2026-01-01}]", "expected what JSON can say"),
        ("name: a/b\npoints: [{}]", "name is 'a/b'"),
        ("program: digits\npoints: [{}]", "program is 'digits': expected package.module:Name"),
        ("grid: {rate: [1]}\npoints: [{rate: 1}]", 'the point {"rate": 1} stands twice'),
        ("a: [", "is no YAML"),
        (f"grid: {{a: {5000 * '['}{5000 * ']'}}}", "can't be read"),
        (f"grid: {{a: [{5000 * '9'}]}}", "can't be read"),
        ("grid: {day: [2026-13-45]}", "can't be read: month must be in 1..12"),
        (f"grid: {MULTIPLIED}", "can't be read: it has more than 20000 values"),
        (f"grid: {{a: [1]}} # {1_000_000 * 'x'}", "it has more than 1,000,000 characters"),
        ("grid: {a: [!!binary eA==]}", "expected what JSON can say"),
        ("grid: {a: !!set {x, y}}", "expected a list of values for each name"),
        (f"points: {json.dumps([{'a': letter * 9000} for letter in 'abcdef'])}", "characters long, and 50,000 is the"),
        (f"grid: {{a: {list(range(100))}, b: {list(range(100))}}}", "10,000 points, and 1,000 is the most"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OperatorMistake) as caught:
        sweep_file(tmp_path, text)
    assert message in str(caught.value)
    assert "rates.yml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match=r"nowhere.yml' can't be read: No such file or directory\. Name"):
        read_sweep_file(tmp_path / "nowhere.yml")


def test_a_sweep_that_runs_is_looked_on_at_and_another_is_the_next_attempt() -> None:
    asked = {"sweep": {"name": "s", "points": POINTS}}
    first = decision.choose_sweep(asked, {}, False, None, {})
    assert (first.selection["sweep"]["attempt"], first.write, first.new) == (1, True, True)
    assert Sweep.from_selection(first.selection, "/").points[2].run == "s-3"
    known = {"attempt": 1}
    again = decision.choose_sweep(asked, first.selection, True, known, {})
    assert (again.selection, again.write, again.new) == (first.selection, False, False)
    assert decision.choose_sweep(asked, first.selection, False, known, {}).selection["sweep"]["attempt"] == 2
    longer = {"sweep": {"name": "s", "points": [*POINTS, {"rate": 1}]}}
    assert decision.choose_sweep(longer, first.selection, True, known, {}).new


def test_a_start_without_a_name_goes_on_with_the_sweep() -> None:
    selection = {"sweep": {"name": "s", "attempt": 1, "points": POINTS}}
    choice = decision.choose(None, None, selection, Run("s-2", program="p:P"), "default")
    assert (choice.selection, choice.write, choice.new) == (selection, False, False)


@pytest.mark.parametrize("text", ["{{ lookup('pipe', 'id') }}", "{% if %}", "{# a #}"])
def test_what_ansible_would_read_as_a_template_is_refused(text: str) -> None:
    decision.reject_templates({"a": {"b": {"c": [{}]}}})
    with pytest.raises(OperatorMistake, match="would read as a template"):
        decision.reject_templates({"sweep": {"points": [{"a": [text]}]}})


def test_parameters_beside_a_sweep_need_a_run_of_their_own() -> None:
    selection = {"sweep": {"name": "s", "attempt": 1, "points": POINTS}}
    with pytest.raises(OperatorMistake, match="the sweep s is selected"):
        decision.choose(None, None, selection, None, program_args={"rate": 1})
    assert decision.choose("b", None, selection, None, program_args={"rate": 1}).selection == {
        "run": "b",
        "program_args": {"rate": 1},
    }
