"""A search beside its choosing, which needs Optuna (tests/training/test_search.py): its file, its records, its end."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster as FleetCluster
from fleet.planning import decision
from fleet.planning.plan import size_of
from fleet.site.sweep_file import read_sweep_file
from fleet.verbs.sweep import choose_sweep
from tests.unit import test_second_day as second_day
from tests.unit.test_evaluator import write_checkpoint
from tests.unit.test_sweep import sigterm
from trainer.check import read_settings
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.search_space import SearchSpace
from trainer.core.signals import StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.selections import queue_changes, search
from trainer.run.selections.queue import Queue
from trainer.run.selections.search import Search
from trainer.run.selections.selection import apply_selection, selected_sweep
from trainer.run.selections.sweep import Point, Sweep
from trainer.run.upkeep import delete_run
from trainer.tasks import server, sweep
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.queue import describe_queue, read_queue
from trainer.telemetry.sweep import describe_sweep, read_sweep

__all__ = ["sigterm"]
FILE = """
program: a:B
program_args: {dropout: 0.4}
search: optuna
trials: 3
metric: loss
parameters:
  rate: {low: 1e-4, high: 1, log: true}
  units: {low: 8, high: 64, step: 8}
  layers: {choices: [[64], [64, 64]]}
"""
CHIEF = ClusterConfig({"chief": ["localhost:1"], "worker": ["localhost:2"]}, "chief", 0)
FIRST = {"dropout": 0.4, "rate": 0.01, "units": 32, "layers": [64]}


def selection(path: Path, attempt: int = 1) -> dict[str, Any]:
    file = path / "s.yml"
    file.write_text(FILE)
    asked = read_sweep_file(file)
    asked["sweep"]["attempt"] = attempt
    return asked


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A search of three points whose chooser is the number of those before."""
    write_record(tmp_path / "selection.json", selection(tmp_path))
    monkeypatch.setattr(search, "choose", lambda space, trials: {**space.first(), "rate": len(trials) / 10})
    return Config(program="a:B", shared_dir=str(tmp_path), steps=10)


def selected(config: Config) -> Search:
    found = selected_sweep(apply_selection(config))
    assert isinstance(found, Search)
    return found


def evaluate(config: Config, run: str, **metrics: float) -> None:
    write_record(RunDirectory(config.shared_dir, run).evaluation, {"step": 10, "metrics": metrics})


def end(config: Config, run: str) -> None:
    write_checkpoint(RunDirectory(config.shared_dir, run), 10)
    evaluate(config, run, loss=0.5)
    selected(config).end_point(run, RunState.FINISHED)


def test_a_file_asks_for_a_search(tmp_path: Path) -> None:
    asked = selection(tmp_path)
    assert (asked["program"], asked["sweep"]["name"], size_of(asked["sweep"])) == ("a:B", "s", 3)
    again = decision.choose_sweep(asked, asked, True, {"attempt": 1}, {})
    assert (again.selection, again.write) == (asked, False)


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("search: optuna", "search: hyperopt", "search is 'hyperopt': expected optuna"),
        ("search: optuna", "grid: {a: [1]}", "trials is of a search: add search: optuna"),
        ("search: optuna", "search: optuna\ngrid: {a: [1]}", "it has a search and grid: make two files of it"),
        ("search: optuna", "search: optuna\npoints: []", "it has a search and points: make two files of it"),
        ("search: optuna", "search: optuna\ntrails: 3", "unknown key 'trails'; the keys are name, program, "),
        ("trials: 3", "", "a search needs trials: how many points it trains"),
        ("trials: 3", "trials: 0", "trials is 0: expected a whole number of at least 1"),
        ("trials: 3", "trials: true", "trials is True: expected a whole number"),
        ("trials: 3", "trials: 2000", "trials is 2,000, and 1,000 is the most"),
        ("metric: loss", "", "a search needs metric: a metric of the evaluation"),
        ("metric: loss", "metric: 1", "metric is 1: expected the name of a metric"),
        ("metric: loss", "metric: loss\ndirection: down", "direction is 'down': expected minimize or maximize"),
        ("metric: loss", "metric: loss\npruner: hyperband", "pruner is 'hyperband': expected median or none"),
        ("metric: loss", "metric: loss\nseed: -1", "seed is -1: expected a whole number of at least 0"),
        ("low: 1e-4", "low: small", "low of rate is 'small': expected a number"),
        ("high: 1, log", "high: .inf, log", "high of rate is inf: expected a number"),
        ("low: 1e-4, high: 1,", "low: 1,", "high of rate is None: expected a number"),
        ("low: 1e-4", "low: 1", "rate goes from low 1 to high 1: expected a low that is smaller than high"),
        ("low: 1e-4", "low: 0", "low of rate is 0: with log: true expected more than 0"),
        ("log: true", "log: 2", "log of rate is 2: expected true or false"),
        ("log: true", "log: true, step: 0.1", "rate has log: true and a step: expected one of them"),
        ("log: true", "base: 2", "parameter rate has the unknown key 'base'; the keys are low, high, log, step"),
        ("step: 8", "step: 60", "step of units is 60: expected more than 0, and at most 56"),
        ("choices: [[64], [64, 64]]", "choices: []", "choices of layers is []: expected a list of values"),
        ("choices: [[64], [64, 64]]", "choices: [1, 1]", "choices of layers has 1 twice: name each value once"),
        ("choices: [[64], [64, 64]]", "choices: [1], low: 1", "parameter layers is"),
        ("choices: [[64], [64, 64]]", "choices: [2026-01-01]", "layers has the date 2026-01-01"),
        ("  rate: {", "  a-b: {", "'a-b' can't name a parameter"),
        ("dropout: 0.4", "rate: 0.4", "rate is in program_args and in parameters: leave one of them out"),
    ],
)
def test_a_wrong_search_is_refused(tmp_path: Path, was: str, becomes: str, message: str) -> None:
    (tmp_path / "s.yml").write_text(FILE.replace(was, becomes))
    with pytest.raises(OperatorMistake) as caught:
        read_sweep_file(tmp_path / "s.yml")
    assert message in str(caught.value)


def test_a_search_without_parameters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yml").write_text(FILE[: FILE.index("parameters")])
    with pytest.raises(OperatorMistake, match=r"parameters is None: expected \{low: 1e-4"):
        read_sweep_file(tmp_path / "s.yml")


def test_the_first_point_is_the_middle_and_the_next_are_written_as_they_are_chosen(config: Config) -> None:
    assert apply_selection(config).program_args == FIRST
    selected(config).begin("s-1")
    for number in (1, 2, 3):
        run = f"s-{number}"
        assert apply_selection(config).run == run
        assert [point.run for point in selected(config).to_prove()] == [run]
        end(config, run)
        # Until the next one is chosen, none ends its work: no server, and no evaluator.
        assert selected(config).is_over() == (number == 3)
        assert (selected(config).unevaluated() is None) == (number == 3)
        assert server.ending("ps-0", "localhost:1", lambda: apply_selection(config))[0] == (0 if number == 3 else None)
        chosen = selected(config).choose()
        assert (chosen and chosen.program_args) == ({**FIRST, "rate": number / 10} if number < 3 else None)
    record = read_record(selected(config).record)
    assert record is not None
    assert record["ends"]["s-2"]["value"] == 0.5
    write_record(RunDirectory(config.shared_dir, "s-2").status, {"run": "s-2", "run_dir": "", "state": "finished"})
    lines = describe_sweep(read_sweep(config)).splitlines()
    assert lines[0] == "sweep s: over"
    assert lines[3].split("finished")[0].strip() == "dropout=0.4, rate=0.1, units=32, layers=[64]"


def test_the_table_counts_points_that_are_still_to_be_chosen(config: Config) -> None:
    end(config, "s-1")
    summary = read_sweep(config)
    assert (summary["over"], summary["evaluated"], summary["size"]) == (False, False, 3)
    assert describe_sweep(summary).startswith("sweep s: 1 of 3 points have ended")


def test_a_search_that_is_not_over_is_not_called_so_once_another_run_is_chosen(config: Config) -> None:
    end(config, "s-1")
    selection_file = Path(config.shared_dir) / "selection.json"
    asked = read_record(selection_file) or {}
    write_record(selection_file, {"run": "other"})
    summary = read_sweep(config, "s")
    assert (summary["over"], summary["evaluated"], summary["size"]) == (False, True, 3)
    assert describe_sweep(summary).startswith("sweep s: 1 of 3 points have ended")
    write_record(selection_file, asked)
    for run in ("s-2", "s-3"):
        assert selected(config).choose() is not None
        end(config, run)
    write_record(selection_file, {"run": "other"})
    assert read_sweep(config, "s")["over"]


def test_a_point_that_has_begun_stays_when_the_ranges_grow(config: Config, tmp_path: Path) -> None:
    asked = selection(tmp_path)
    asked["sweep"]["search"]["parameters"]["rate"]["low"] = 1e-6
    selected(config).begin("s-1")
    write_record(tmp_path / "selection.json", asked)
    assert apply_selection(config).program_args == FIRST
    end(config, "s-1")
    chosen = selected(config).choose()
    assert chosen is not None
    assert chosen.program_args == {**FIRST, "rate": 0.1}


def test_points_of_another_search_of_that_name_are_refused(config: Config, tmp_path: Path) -> None:
    end(config, "s-1")
    asked = selection(tmp_path)
    asked["sweep"]["search"]["parameters"]["rate"]["low"] = 0.1
    write_record(tmp_path / "selection.json", asked)
    with pytest.raises(ConfigError, match=r"s-1 of .*s\.json has other parameters .*: give the sweep another name"):
        apply_selection(config)


@pytest.mark.parametrize("lacks", ["optuna", "evaluation"])
def test_what_can_not_search_is_refused_as_the_release_is_proven(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str
) -> None:
    class Options:
        part, selection, settings = "run", None, str(tmp_path / "settings.json")

    own = {
        "program": "a:B",
        "shared_dir": config.shared_dir,
        "evaluation": "none" if lacks == "evaluation" else "inline",
    }
    write_record(tmp_path / "settings.json", own)
    if lacks == "optuna":
        monkeypatch.setitem(sys.modules, "optuna", None)
    message = "needs the Python package optuna" if lacks == "optuna" else "goes by loss, and evaluation is none"
    with pytest.raises(ConfigError, match=message):
        read_settings(Options(), {})  # type: ignore[arg-type]


def test_a_search_that_lost_optuna_is_over_and_says_why(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "optuna", None)
    end(config, "s-1")
    assert selected(config).choose() is None
    assert selected(config).is_over()
    assert "s-1: search: optuna needs the Python package optuna" in describe_sweep(read_sweep(config))
    write_record(Path(config.shared_dir) / "selection.json", selection(Path(config.shared_dir), attempt=2))
    assert not selected(config).is_over()
    assert selected(config).choose() is None  # of the new attempt, too
    assert selected(config).is_over()


def test_an_end_that_a_member_writes_keeps_the_points_that_were_chosen_meanwhile(config: Config) -> None:
    end(config, "s-1")
    late = selected(config)
    assert selected(config).choose() is not None
    late.end_point("s-1", RunState.FAILED, "of a member")
    assert [point.run for point in selected(config).points] == ["s-1", "s-2"]


def test_a_point_is_judged_only_once_the_evaluation_is_in_its_history(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    monkeypatch.setattr(search, "is_behind", lambda space, trials, present: judged.append(1) or True)
    evaluate(config, "s-1", loss=0.5)
    assert selected(config).why_to_end("s-1") is None
    assert judged == []
    directory = RunDirectory(config.shared_dir, "s-1")
    directory.evaluations.write_text('{"step": 10, "values": {"loss": 0.5}}\n')
    assert "stopped early: loss 0.5 at step 10" in str(selected(config).why_to_end("s-1"))


def test_a_search_that_nobody_would_evaluate_is_refused(tmp_path: Path) -> None:
    hosts = second_day.make_hosts()
    inventory = hosts.inventory
    tasks = [task for task in inventory.tasks if task.job != "evaluator"]
    cluster = FleetCluster(replace(inventory, tasks=tasks), hosts)
    with pytest.raises(OperatorMistake, match="evaluation is sidecar without an evaluator"):
        choose_sweep(cluster, cluster.observe(new_is_enough=True), selection(tmp_path))


def test_a_failed_evaluation_is_a_failed_point_and_none_at_all_ends_the_search(config: Config) -> None:
    write_record(RunDirectory(config.shared_dir, "s-1").evaluation, {"step": 10, "metrics": {}, "failed": "why"})
    selected(config).end_point("s-1", RunState.FINISHED)
    assert selected(config).ends()["s-1"]["message"] == "its evaluation failed: why"
    assert selected(config).choose() is not None
    selected(config).end_point("s-2", RunState.FINISHED)
    assert selected(config).ends()["s-2"]["state"] == "failed"
    assert selected(config).is_over()


@pytest.mark.parametrize("evaluated", ["in time", "too late", "stopped"])
def test_a_points_end_waits_for_its_evaluation(config: Config, monkeypatch: pytest.MonkeyPatch, evaluated: str) -> None:
    asked = apply_selection(config).replace(evaluating_timeout_seconds=0.05 if evaluated == "too late" else 60.0)
    slept: list[float] = []

    def run(*_: object, stopping: StopRequest, **__: object) -> int:
        write_checkpoint(RunDirectory(config.shared_dir, "s-1"), 10)
        write_record(RunDirectory(config.shared_dir, "s-1").evaluation, {"step": 5, "metrics": {"loss": 0.9}})
        stopping.received = evaluated == "stopped"
        return FINISHED

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if evaluated == "in time":
            evaluate(config, "s-1", loss=0.25)

    monkeypatch.setattr(sweep, "run_coordinator", run)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    code = sweep.train_point(asked, CHIEF, Notifier())
    ends = selected(config).ends()
    if evaluated == "stopped":
        assert (code, ends) == (STOPPED, {})
        return
    assert code == TRY_AGAIN
    assert slept[0] == sweep.POLL_SECONDS
    assert (ends["s-1"]["step"], ends["s-1"]["value"]) == ((10, 0.25) if evaluated == "in time" else (5, 0.9))
    assert apply_selection(config).run == "s-2"


def test_a_coordinator_that_finds_no_choice_written_makes_it_and_a_member_waits(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(config, "s-1")
    member, codes = ClusterConfig(CHIEF.jobs, "worker", 0), list[int]()

    def sleep(_: float) -> None:
        assert selected(config).present() is None
        codes.append(sweep.train_point(apply_selection(config), CHIEF, Notifier()))

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert sweep.train_point(apply_selection(config), member, Notifier()) == TRY_AGAIN
    assert codes == [TRY_AGAIN]
    assert apply_selection(config).run == "s-2"


@pytest.mark.parametrize("then", ["chosen", "stopped", "another"])
def test_a_member_waits_in_its_process_while_the_chief_waits_for_the_evaluation(
    config: Config, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    directory, slept = RunDirectory(config.shared_dir, "s-1"), list[float]()

    def run(*_: object, **__: object) -> int:
        directory.set_state(RunState.FINISHED, 10, asked=config.steps)
        return FINISHED

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3 and then == "chosen":
            end(config, "s-1")  # which takes the chief long
        elif len(slept) == 3 and then == "another":
            write_record(Path(config.shared_dir) / "selection.json", {"run": "other"})
        elif len(slept) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(slept) == 5:
            assert selected(config).choose() is not None

    monkeypatch.setattr(sweep, "run_coordinator", run)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    code = sweep.train_point(apply_selection(config), ClusterConfig(CHIEF.jobs, "worker", 0), Notifier())
    assert (code, len(slept)) == {"chosen": (TRY_AGAIN, 5), "stopped": (STOPPED, 3), "another": (TRY_AGAIN, 3)}[then]


def in_queue(config: Config) -> Queue:
    found = selected_sweep(apply_selection(config))
    assert isinstance(found, Queue)
    return found


def add(config: Config, name: str, **more: Any) -> dict[str, Any]:
    return queue_changes.add(config, {"name": name, "owner": "anna", **more}, plan=False)


def add_search(config: Config, tmp_path: Path, **more: Any) -> dict[str, Any]:
    asked = selection(tmp_path)
    searched = {"search": asked["sweep"]["search"], "program_args": asked["program_args"], "program": "a:B"}
    return add(config, "s", **searched, **more)


def end_in_queue(config: Config, run: str, state: RunState = RunState.FINISHED) -> None:
    write_checkpoint(RunDirectory(config.shared_dir, run), 10)
    evaluate(config, run, loss=0.5)
    in_queue(config).end_point(run, state)


@pytest.fixture
def queued(config: Config, tmp_path: Path) -> Config:
    """The search waits in the queue, and a run behind it."""
    add_search(config, tmp_path)
    assert add(config, "last")["ahead"] == ["s"]
    return config


def test_a_search_in_the_queue_chooses_all_its_points_before_the_next_run_begins(queued: Config) -> None:
    for number in (1, 2, 3):
        run = f"s-{number}"
        assert apply_selection(queued).run == run
        in_queue(queued).begin(run)
        assert in_queue(queued).to_prove()[0].run == run
        end_in_queue(queued, run)
        found = in_queue(queued)
        entries = read_queue(queued)["entries"]
        entry = next(entry for entry in entries if entry["name"] == "s")
        assert (len(entry["points"]), entry["size"], entry["over"]) == (number, 3, number == 3)
        if number < 3:  # the coordinator alone chooses: meanwhile nothing else begins, and nobody ends
            assert (found.present(), found.is_over(), apply_selection(queued).run) == (None, False, run)
            waits_for = found.unevaluated()
            assert waits_for is not None
            assert waits_for.run == run
            chosen = found.choose()
            assert chosen is not None
            assert chosen.program_args == {**FIRST, "rate": number / 10}
    assert in_queue(queued).choose() is None
    assert apply_selection(queued).run == "last"
    assert "finished  3 of 3 points" in describe_queue(read_queue(queued))
    record = read_record(Path(queued.shared_dir) / "sweeps/s.json") or {}
    assert {run: each["value"] for run, each in record["ends"].items()} == dict.fromkeys(("s-1", "s-2", "s-3"), 0.5)
    end_in_queue(queued, "last")
    assert in_queue(queued).is_over()
    assert in_queue(queued).unevaluated() is None


def test_a_point_that_the_search_stops_early_ends_no_search_in_the_queue(queued: Config) -> None:
    end_in_queue(queued, "s-1", RunState.STOPPED)
    assert in_queue(queued).ends()["s-1"]["state"] == "pruned"
    assert in_queue(queued).choose() is not None
    assert apply_selection(queued).run == "s-2"


@pytest.mark.parametrize("how", ["removed", "limit"])
def test_a_search_that_is_given_up_ends_and_goes_on_where_it_is_added_again(
    config: Config, tmp_path: Path, how: str
) -> None:
    add_search(config, tmp_path, seconds=60)
    add(config, "last")
    end_in_queue(config, "s-1")
    assert in_queue(config).choose() is not None
    in_queue(config).begin("s-2")
    if how == "removed":
        queue_changes.remove(config, "s", "bob", stop=True, plan=False)
    else:
        write_record(RunDirectory(config.shared_dir, "s-2").status, {"ledger": {"elapsed": 61}})
    why = in_queue(config).why_to_end("s-2")
    assert why == ("taken out of the queue by bob" if how == "removed" else "its limit of 1 min is used up")
    evaluate(config, "s-2", loss=0.4)
    in_queue(config).end_point("s-2", RunState.STOPPED, why)
    present = in_queue(config).present()
    assert present is not None
    assert present.run == "last"
    assert add_search(config, tmp_path)["ahead"] == ["last"]
    assert queue_changes.move(config, "s", "first", plan=False)["order"] == ["s", "last"]
    assert apply_selection(config).run == "s-2"  # what had ended stays so
    entry = next(entry for entry in read_queue(config)["entries"] if entry["name"] == "s")
    assert (entry["state"], entry["over"]) == ("queued", False)


def test_a_search_in_the_queue_keeps_the_points_by_which_it_chooses(queued: Config) -> None:
    end_in_queue(queued, "s-1")
    with pytest.raises(
        UserError, match="s-1 is not removed: it is selected; take it out of the queue: fab queue-remove s"
    ):
        delete_run(queued, "s-1", plan=False)
    queue_changes.remove(queued, "s", "bob", stop=True, plan=False)
    assert delete_run(queued, "s-1", plan=False)["outcome"] == "done"


def test_a_search_that_is_taken_out_before_its_next_point_is_chosen_has_ended(queued: Config) -> None:
    end_in_queue(queued, "s-1")
    queue_changes.remove(queued, "s", "bob", stop=True, plan=False)
    assert in_queue(queued).choose() is None
    assert apply_selection(queued).run == "last"
    end_in_queue(queued, "last")
    assert in_queue(queued).is_over()


def test_a_search_with_earlier_points_waits_as_any_other(config: Config, tmp_path: Path) -> None:
    """All that it has chosen have ended, and its next one is not chosen."""
    add_search(config, tmp_path)
    end_in_queue(config, "s-1")
    queue_changes.remove(config, "s", "bob", stop=True, plan=False)
    add(config, "last")
    assert add_search(config, tmp_path)["ahead"] == ["last"]
    assert queue_changes.move(config, "s", "first", plan=False)["order"] == ["s", "last"]
    assert queue_changes.remove(config, "s", "bob", stop=False, plan=False)["outcome"] == "done"


def test_a_search_that_trains_becomes_the_first_of_the_queue_and_tries_nothing_again(config: Config) -> None:
    selected(config).begin("s-1")
    selected(config).end_point("s-1", RunState.FAILED, "why")
    assert selected(config).choose() is not None
    RunDirectory(config.shared_dir, "s-2").set_state(RunState.TRAINING, 5)
    assert add(config, "last")["ahead"] == ["s"]
    assert in_queue(config).entries[0].record["points"] == []  # for an earlier release, which refuses it then
    assert apply_selection(config).run == "s-2"
    end_in_queue(config, "s-2")
    assert in_queue(config).choose() is not None
    end_in_queue(config, "s-3")
    assert apply_selection(config).run == "last"
    assert add(config, "other")["ahead"] == ["last"]


def test_a_run_that_a_waiting_search_may_choose_is_another_ones_no_more(queued: Config) -> None:
    with pytest.raises(UserError, match="run s-3 is part of s, which waits in the queue: choose another name"):
        add(queued, "s-3")
    assert add(queued, "s-4")["outcome"] == "done"


def test_a_search_that_can_not_choose_holds_up_no_other_run(queued: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("Optuna can't choose the next point: why")

    monkeypatch.setattr(search, "choose", refuse)
    end_in_queue(queued, "s-1")
    assert in_queue(queued).choose() is None
    assert apply_selection(queued).run == "last"
    assert "Optuna can't choose the next point: why" in describe_queue(read_queue(queued))


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_search_whose_record_another_sweep_has_written_holds_up_no_other_run(queued: Config, has_ended: bool) -> None:
    for number in (1, 2, 3) if has_ended else (1,):
        in_queue(queued).begin(f"s-{number}")
        end_in_queue(queued, f"s-{number}")
        in_queue(queued).choose()
    foreign = Sweep("s", [Point("s-1", {"units": 8})], 9, Path(queued.shared_dir))
    foreign.end_point("s-1", RunState.FINISHED)
    assert apply_selection(queued).run == "last"
    assert "s-1 of " in str(in_queue(queued).why_to_end("s-1"))
    in_queue(queued).end_point("s-1", RunState.STOPPED)  # as one that was trained meanwhile
    assert (read_record(foreign.record) or {})["points"] == [{"run": "s-1", "program_args": {"units": 8}}]
    assert re.search(r"^s failed: sweep: s-1 of \S+ has other parameters", describe_queue(read_queue(queued)), re.M)
    end_in_queue(queued, "last")
    assert (in_queue(queued).is_over(), in_queue(queued).unevaluated()) == (True, None)


def test_a_search_is_refused_where_its_record_is_another_sweeps(config: Config, tmp_path: Path) -> None:
    Sweep("s", [Point("s-1", {"units": 8})], 9, tmp_path).end_point("s-1", RunState.FINISHED)
    with pytest.raises(ConfigError, match=r"^sweep: s-1 of \S+ has other parameters.*: give the sweep another name"):
        add_search(config, tmp_path)


@pytest.mark.parametrize("lacks", ["optuna", "evaluation"])
def test_a_queue_with_a_search_is_proven_as_a_search_is(
    queued: Config, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "optuna":
        monkeypatch.setitem(sys.modules, "optuna", None)
    evaluation = "none" if lacks == "evaluation" else "inline"
    with pytest.raises(ConfigError, match="needs the Python package" if lacks == "optuna" else "evaluation is none"):
        in_queue(queued).check_settings(queued.replace(evaluation=evaluation))
    queue_changes.remove(queued, "s", "bob", stop=False, plan=False)
    in_queue(queued).check_settings(queued.replace(evaluation=evaluation))


def test_ranges_of_whole_numbers_have_whole_middles() -> None:
    parameters = {"a": {"low": 1, "high": 4}, "b": {"low": 1.0, "high": 4}, "c": {"low": 1, "high": 1000, "log": True}}
    space = SearchSpace.from_record({"trials": 1, "metric": "loss", "parameters": parameters})
    assert space.first() == {"a": 2, "b": 2.5, "c": 31}
    assert not space.holds({"a": 2.5, "b": 2.5, "c": 31})
    assert not space.holds({"a": 2, "b": 2.5})
