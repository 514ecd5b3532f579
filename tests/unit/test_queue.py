"""The queue: who goes first, what becomes of each run, what operators change meanwhile, and who ends when."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_sweep import CHIEF, save, sigterm
from tests.waiting import until
from trainer.__main__ import main
from trainer.core.failures import FINISHED, STOPPED, TRY_AGAIN, USER_ERROR, Stopped, UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.signals import end_when_asked
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.selections.queue import Queue, QueueEntry
from trainer.run.selections.queue_changes import add, move, remove
from trainer.run.selections.selection import apply_selection, selected_sweep
from trainer.run.upkeep import delete_run
from trainer.tasks import server, sweep
from trainer.tasks.sweep import train_point
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.queue import describe_queue, read_queue

__all__ = ["sigterm"]
SWEEP: dict[str, Any] = {
    "name": "s",
    "program": "mine:Two",
    "program_args": {"units": 8},
    "points": [{"rate": 0.1}, {"rate": 0.2}],
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(program="mine:One", shared_dir=str(tmp_path), steps=10, program_args={"depth": 2}, run="main")


def ask(config: Config, name: str, **more: Any) -> dict[str, Any]:
    return add(config, {"name": name, "owner": "anna", **more}, plan=False)


def present(config: Config, evaluates: bool = False) -> str:
    return apply_selection(config, evaluates=evaluates).run


def queue(config: Config) -> Queue:
    return Queue.read(config.shared_dir)


def end(config: Config, run: str, state: RunState = RunState.FINISHED) -> None:
    queue(config).end_point(run, state, "why" if state is not RunState.FINISHED else "")


def names(config: Config) -> list[str]:
    return [entry.name for entry in queue(config).entries]


def test_runs_are_trained_by_priority_and_then_as_they_were_added(config: Config) -> None:
    ask(config, "a")
    ask(config, "b")
    assert ask(config, "urgent", priority=5)["ahead"] == []
    assert ask(config, "c", priority=5)["ahead"] == ["urgent"]
    order = []
    for _ in range(4):
        order.append(present(config))
        end(config, order[-1])
    assert order == ["urgent", "c", "a", "b"]
    assert queue(config).present() is None
    assert present(config) == "b"  # the last one stays


def test_what_has_begun_is_held_up_by_no_priority(config: Config) -> None:
    ask(config, "a")
    queue(config).begin("a")
    ask(config, "urgent", priority=5)
    assert present(config) == "a"
    end(config, "a")
    assert present(config) == "urgent"


def test_a_failed_run_does_not_hold_up_the_next_and_may_be_added_again(config: Config) -> None:
    ask(config, "a")
    ask(config, "b")
    end(config, "a", RunState.FAILED)
    assert present(config) == "b"
    assert ask(config, "a")["ahead"] == ["b"]
    end(config, "b")
    assert present(config) == "a"
    end(config, "a")
    assert queue(config).present() is None


def test_a_sweep_is_one_entry_whose_points_go_together(config: Config) -> None:
    ask(config, **SWEEP)
    queue(config).begin("s-1")
    ask(config, "urgent", priority=5)
    first = apply_selection(config)
    assert (first.run, first.program, first.program_args) == ("s-1", "mine:Two", {"units": 8, "rate": 0.1})
    end(config, "s-1", RunState.FAILED)
    assert present(config) == "s-2"
    end(config, "s-2")
    assert present(config) == "urgent"
    record = read_record(Path(config.shared_dir) / "sweeps" / "s.json") or {}
    assert {run: end["state"] for run, end in record["ends"].items()} == {"s-1": "failed", "s-2": "finished"}


def test_a_run_has_its_own_program_parameters_and_settings_and_the_others_as_they_were(config: Config) -> None:
    ask(config, "a", program="mine:Two", program_args={"rate": 0.5}, settings={"steps": 99, "seed": 7})
    ask(config, "b")
    found = apply_selection(config.replace(program_args={"depth": 9}))
    assert (found.program, found.program_args, found.steps, found.seed) == ("mine:Two", {"rate": 0.5}, 99, 7)
    end(config, "a")
    found = apply_selection(config.replace(program_args={"depth": 9}))
    assert (found.program, found.program_args, found.steps, found.seed) == ("mine:One", {"depth": 2}, 10, None)


def test_typed_twice_it_is_there_once_and_another_of_that_name_is_refused(config: Config) -> None:
    assert ask(config, "a", priority=2)["outcome"] == "done"
    assert ask(config, "a", owner="bob")["outcome"] == "there already"
    assert names(config) == ["a"]
    with pytest.raises(UserError, match="a waits in the queue with other settings: take it out first"):
        ask(config, "a", program_args={"rate": 1})
    ask(config, **SWEEP)
    with pytest.raises(UserError, match="run s-1 is part of s, which waits"):
        ask(config, "s-1")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"settings": {"strategy": "mirrored"}}, "strategy is no setting that a run in the queue can have of its own"),
        ({"settings": {"steps": 0}}, "steps: must be at least 1, not 0"),
        ({"name": "../x"}, "a name, an attempt, a priority or a limit is wrong"),
        ({"priority": "high"}, "invalid literal"),
        ({"seconds": -1}, "a limit is wrong"),
    ],
)
def test_what_can_not_be_trained_is_refused_when_it_is_added(config: Config, more: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ask(config, **{"name": "a", **more})
    assert not (Path(config.shared_dir) / "queue.json").exists()


def test_what_trains_as_the_queue_begins_is_its_first_entry(config: Config) -> None:
    write_record(Path(config.shared_dir) / "selection.json", {"run": "mine", "program": "mine:Two"})
    RunDirectory(config.shared_dir, "mine").set_state(RunState.TRAINING, 5)
    assert ask(config, "next", priority=9)["ahead"] == ["mine"]
    assert read_record(Path(config.shared_dir) / "selection.json") == {"queue": {}}
    found = apply_selection(config)
    assert (found.run, found.program) == ("mine", "mine:Two")
    end(config, "mine")
    assert present(config) == "next"


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.FAILED, None])
def test_a_selected_run_that_has_ended_or_never_began_is_none_of_it(config: Config, state: RunState | None) -> None:
    write_record(Path(config.shared_dir) / "selection.json", {"run": "mine"})
    if state:
        RunDirectory(config.shared_dir, "mine").set_state(state, 5)
    ask(config, "next")
    assert names(config) == ["next"]


def test_the_run_that_trains_may_be_added_itself(config: Config) -> None:
    RunDirectory(config.shared_dir, "main").set_state(RunState.TRAINING, 5)
    ask(config, "main")
    ask(config, "next", priority=9)
    assert names(config) == ["main", "next"]


@pytest.mark.parametrize(
    ("to", "order"),
    [
        ("first", ["c", "urgent", "a", "b"]),
        ("last", ["urgent", "a", "b", "c"]),
        ("before:b", ["urgent", "a", "c", "b"]),
        ("priority:9", ["c", "urgent", "a", "b"]),
    ],
)
def test_one_that_waits_is_moved(config: Config, to: str, order: list[str]) -> None:
    for name in ("a", "c", "b"):
        ask(config, name)
    ask(config, "urgent", priority=5)
    assert move(config, "c", to, plan=True)["order"] == order
    assert names(config) == ["urgent", "a", "c", "b"]
    assert move(config, "c", to, plan=False)["order"] == order
    assert move(config, "c", to, plan=False)["order"] == order
    assert names(config) == order


def test_one_that_has_begun_or_ended_is_not_moved(config: Config) -> None:
    for name in ("a", "b", "c"):
        ask(config, name)
    end(config, "a")
    queue(config).begin("b")
    for name in ("a", "b", "none"):
        with pytest.raises(UserError, match=f"{name} does not wait in the queue; those that wait: c"):
            move(config, name, "first", plan=False)
    with pytest.raises(UserError, match="--before c: expected another run that waits"):
        move(config, "c", "before:c", plan=False)


def test_one_that_waits_is_taken_out_and_one_that_trains_only_with_stop(config: Config) -> None:
    for name in ("a", "b", "c"):
        ask(config, name)
    queue(config).begin("a")
    assert remove(config, "b", "bob", stop=False, plan=False)["outcome"] == "done"
    assert remove(config, "b", "bob", stop=False, plan=False)["outcome"] == "not there"
    assert remove(config, "none", "bob", stop=False, plan=False)["outcome"] == "not there"
    with pytest.raises(UserError, match="a has begun: with --stop it is saved and ended"):
        remove(config, "a", "bob", stop=False, plan=False)
    assert queue(config).why_to_end("a") is None
    remove(config, "a", "bob", stop=True, plan=False)
    assert queue(config).why_to_end("a") == "taken out of the queue by bob"
    assert present(config) == "c"
    end(config, "c")
    assert queue(config).present() is None
    ask(config, "b")
    assert present(config) == "b"


def test_one_without_a_name_of_its_remover_was_taken_out_by_an_unknown_user(config: Config) -> None:
    ask(config, "a")
    entry = queue(config).entry_of("a")
    assert entry is not None
    unsigned = {**entry.record, "removed": {"time": 1.0}}
    other = Queue.from_entries([QueueEntry.from_record(unsigned, config.shared_dir)], config.shared_dir)
    assert other.why_to_end("a") == "taken out of the queue by an unknown user"
    settings = Path(config.shared_dir) / "run.json"
    write_record(settings, config.as_dict())
    assert main(["queue", "remove", "--name", "a", "--settings", str(settings)], {}) == FINISHED
    assert queue(config).why_to_end("a") == "taken out of the queue by an unknown user"


def test_two_who_add_at_once_both_do(config: Config) -> None:
    threads = [threading.Thread(target=ask, args=(config, f"r{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(config)) == [f"r{number}" for number in range(8)]


def spend(config: Config, run: str, seconds: float) -> None:
    write_record(RunDirectory(config.shared_dir, run).status, {"ledger": {"elapsed": seconds}})


def test_a_limit_counts_what_the_cluster_worked_on_it_since_it_began(config: Config) -> None:
    spend(config, "a", 1000)  # in an earlier life
    ask(config, "a", seconds=60)
    queue(config).begin("a")
    spend(config, "a", 1059)
    assert queue(config).why_to_end("a") is None
    queue(config).begin("a")  # the next process
    spend(config, "a", 1060)
    assert queue(config).why_to_end("a") == "its limit of 1 min is used up"


def test_the_limit_of_a_sweep_is_that_of_its_points_together(config: Config) -> None:
    ask(config, **SWEEP, seconds=60)
    ask(config, "next")
    for run, seconds in (("s-1", 40), ("s-2", 20)):
        queue(config).begin(run)
        spend(config, run, seconds)
    assert queue(config).why_to_end("s-2") == "its limit of 1 min is used up"
    end(config, "s-1", RunState.STOPPED)
    assert present(config) == "next"


def train_past_the_limit(config: Config, monkeypatch: pytest.MonkeyPatch, coordinate: Callable[..., int]) -> int:
    """Train a, which may take a minute, with b behind it, with this coordinator once a's minute is used up."""
    ask(config, "a", seconds=60)
    ask(config, "b")

    def run_coordinator(*_: Any, **more: Any) -> int:
        return coordinate(more["stopping"])

    monkeypatch.setattr(sweep, "YIELD_POLL_SECONDS", 0.01)
    monkeypatch.setattr(sweep, "run_coordinator", run_coordinator)
    return train_point(apply_selection(config), CHIEF, Notifier())


@pytest.mark.parametrize(("code", "state"), [(STOPPED, "stopped"), (FINISHED, "finished")])
def test_a_run_whose_limit_is_used_up_is_stopped_and_the_next_begins(
    config: Config, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    """Also where it is at its last step by then."""

    def coordinate(stopping: Any) -> int:
        stopping.listen()
        spend(config, "a", 61)
        until(stopping)
        return code

    assert train_past_the_limit(config, monkeypatch, coordinate) == TRY_AGAIN
    end_of_a = queue(config).ends()["a"]
    assert (end_of_a["state"], end_of_a["message"]) == (state, "its limit of 1 min is used up" if code else "")
    assert present(config) == "b"


def test_a_stop_in_the_last_save_of_a_run_whose_limit_is_used_up_is_heard(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coordinate(stopping: Any) -> int:
        stopping.listen()
        spend(config, "a", 61)
        until(stopping)
        os.kill(os.getpid(), signal.SIGTERM)
        return STOPPED

    assert train_past_the_limit(config, monkeypatch, coordinate) == STOPPED
    assert queue(config).ends()["a"]["message"] == "its limit of 1 min is used up"
    assert present(config) == "b"


def test_a_limit_that_is_used_up_while_a_strategy_is_made_ends_no_process(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coordinate(_: Any) -> int:
        end_when_asked()
        spend(config, "a", 61)
        until(lambda: False)
        return FINISHED

    assert train_past_the_limit(config, monkeypatch, coordinate) == TRY_AGAIN
    assert queue(config).ends()["a"]["message"] == "its limit of 1 min is used up"


def test_a_stop_while_an_end_is_written_does_not_break_it_off(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run left before it had built its model, at once, and so no other handler of signals was set."""
    write = Queue.end_point

    def end_point(self: Queue, *end: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(self, *end)

    def coordinate(_: Any) -> int:
        spend(config, "a", 61)
        until(lambda: False)
        raise AssertionError("it was not asked to make room")

    monkeypatch.setattr(Queue, "end_point", end_point)
    assert train_past_the_limit(config, monkeypatch, coordinate) == STOPPED
    assert queue(config).ends()["a"]["message"] == "its limit of 1 min is used up"
    assert present(config) == "b"


def test_a_stop_by_an_operator_ends_no_run_of_the_queue(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(config, "a")

    def coordinate(*_: Any, **more: Any) -> int:
        more["stopping"].listen()
        os.kill(os.getpid(), signal.SIGTERM)
        raise Stopped

    monkeypatch.setattr(sweep, "run_coordinator", coordinate)
    assert train_point(apply_selection(config), CHIEF, Notifier()) == STOPPED
    assert queue(config).ends() == {}
    assert queue(config).has_begun(queue(config).entries[0])


@pytest.mark.parametrize(("code", "state"), [(FINISHED, "finished"), (USER_ERROR, "failed")])
def test_a_run_that_began_before_the_queue_ends_into_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    kept: list[bool] = []

    def coordinate(*_: Any, **more: Any) -> int:
        RunDirectory(config.shared_dir, "main").set_state(RunState.TRAINING, 5)
        kept.append(more["keeps_servers"]())
        ask(config, "next")
        kept.append(more["keeps_servers"]())
        return code

    monkeypatch.setattr(sweep, "run_coordinator", coordinate)
    assert train_point(apply_selection(config), CHIEF, Notifier()) == TRY_AGAIN
    assert kept == [False, True]
    assert queue(config).ends()["main"]["state"] == state
    assert present(config) == "next"


def test_servers_outlive_the_runs_and_end_with_the_queue(config: Config) -> None:
    def ending() -> tuple[int | None, str]:
        return server.ending("ps-0", "localhost:1", lambda: apply_selection(config))

    ask(config, "a")
    ask(config, "b")
    RunDirectory(config.shared_dir, "a").set_state(RunState.FINISHED, 10, asked=10)
    assert ending() == (None, "")
    end(config, "a")
    end(config, "b", RunState.FAILED)
    assert ending() == (FINISHED, "the queue is over")
    ask(config, "c")
    assert ending() == (None, "")


def test_who_evaluates_is_behind_and_skips_what_waits_or_was_taken_out(config: Config) -> None:
    for name in ("a", "b", "c"):
        ask(config, name)
    save(config, "a", 10)
    end(config, "a")
    save(config, "b", 10)
    queue(config).begin("b")
    remove(config, "b", "bob", stop=True, plan=False)
    assert (present(config), present(config, evaluates=True)) == ("c", "a")
    write_record(RunDirectory(config.shared_dir, "a").evaluation, {"step": 10, "metrics": {}})
    assert present(config, evaluates=True) == "c"


def test_a_run_that_waits_is_not_deleted(config: Config) -> None:
    ask(config, "a")
    ask(config, "b")
    for name in ("a", "b"):
        RunDirectory(config.shared_dir, name).set_state(RunState.STOPPED, 5)
    with pytest.raises(UserError, match="run b is not removed: it is selected"):
        delete_run(config, "b", plan=False)
    end(config, "a")
    assert delete_run(config, "a", plan=False)["outcome"] == "done"


@pytest.mark.parametrize("how", ["finished", "removed"])
def test_a_point_of_a_sweep_that_has_ended_may_be_added_by_itself(config: Config, how: str) -> None:
    ask(config, **SWEEP)
    for run in ("s-1", "s-2"):
        queue(config).begin(run)
        if how == "finished":
            end(config, run)
    if how == "removed":
        remove(config, "s", "bob", stop=True, plan=False)
    assert ask(config, "s-1", program="mine:One")["ahead"] == []
    found = apply_selection(config)
    assert (found.run, found.program, queue(config).is_over()) == ("s-1", "mine:One", False)
    end(config, "s-1")
    assert queue(config).is_over()
    ask(config, **SWEEP)
    assert names(config) == ["s"]
    assert present(config) == "s-1"


def test_a_run_of_ones_own_is_adopted_beside_an_ended_sweep_and_never_beside_one_that_waits(config: Config) -> None:
    ask(config, **SWEEP)
    ask(config, "b")
    write_record(Path(config.shared_dir) / "selection.json", {"run": "s-1"})
    RunDirectory(config.shared_dir, "s-1").set_state(RunState.TRAINING, 3)
    ask(config, "c")
    assert names(config) == ["s", "b", "c"]
    for run in ("s-1", "s-2", "b", "c"):
        end(config, run)
    write_record(Path(config.shared_dir) / "selection.json", {"run": "s-1"})
    ask(config, "d")
    assert (names(config), present(config)) == (["b", "c", "s-1", "d"], "s-1")


def test_another_run_that_is_selected_leaves_the_queue_as_it_is(config: Config) -> None:
    ask(config, "a")
    write_record(Path(config.shared_dir) / "selection.json", {"run": "mine"})
    assert present(config) == "mine"
    assert selected_sweep(apply_selection(config)) is None
    assert "another run is selected, and the queue waits" in describe_queue(read_queue(config))


def test_the_table_says_how_each_is_and_why_one_failed(config: Config) -> None:
    assert describe_queue(read_queue(config)) == "the queue is empty: nothing was added yet"
    ask(config, "a", reason="a first look")
    ask(config, **SWEEP, seconds=600)
    ask(config, "b", priority=-1)
    queue(config).begin("a")
    spend(config, "a", 5.6)
    end(config, "a", RunState.FAILED)
    lines = describe_queue(read_queue(config)).splitlines()
    assert lines[0] == "queue: 1 of 3 have ended, 1 failed"
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["a", "anna", "0", "failed"],
        ["s", "anna", "0", "queued"],
        ["b", "anna", "-1", "queued"],
    ]
    assert lines[2].split()[6:8] == ["0.1", time.strftime("%Y-%m-%d")]
    assert "0 of 2 points" in lines[3]
    assert "- of 10 " in lines[3]
    assert lines[5] == "a failed: why"
    for run in ("s-1", "s-2", "b"):
        end(config, run)
    assert describe_queue(read_queue(config)).startswith("queue: over, 1 failed; nothing is left to train\n")


def test_the_command_answers_in_json_and_names_a_mistake(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Path(config.shared_dir) / "run.json"
    write_record(settings, config.as_dict())

    def command(*words: str) -> int:
        return main(["queue", *words, "--json", "--settings", str(settings)], {})

    assert command("add", "--entry", json.dumps({"name": "a"})) == FINISHED
    assert json.loads(capsys.readouterr().out) == {
        "outcome": "done", "name": "a", "ahead": [], "busy": None, "followed": True,
    }  # fmt: skip
    assert command("list") == FINISHED
    assert json.loads(capsys.readouterr().out)["entries"][0]["state"] == "queued"
    assert command("move", "--name", "b", "--to", "first") == USER_ERROR
    assert capsys.readouterr().err == "error: b does not wait in the queue; those that wait: a\n"


def test_a_queue_that_is_damaged_is_named(config: Config) -> None:
    ask(config, "a")
    (Path(config.shared_dir) / "queue.json").write_text('{"entries": [{"name": 5}]}')
    with pytest.raises(ConfigError, match=r"queue\.json is no queue"):
        apply_selection(config)


def test_only_the_last_entries_that_have_ended_are_kept(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.selections.queue_changes.MAX_ENDED", 2)
    for name in ("a", "b", "c"):
        ask(config, name)
        end(config, name)
    ask(config, "d")
    assert names(config) == ["b", "c", "d"]
    end(config, "d")
    assert queue(config).ends().keys() == {"b", "c", "d"}


def test_a_long_queue_is_looked_through_once_and_not_for_each_end(config: Config) -> None:
    """Every task does so each second."""
    for name in ("s", "t", "u"):
        ask(config, **{**SWEEP, "name": name, "points": [{"rate": 0.1}] * 20})
    for name in ("s", "t"):
        for number in range(1, 21):
            end(config, f"{name}-{number}")
    looks = 0

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__iter__()

    entries = [QueueEntry(entry.record, Counted(entry.points)) for entry in queue(config).entries]
    assert len(Queue.from_entries(entries, config.shared_dir).ends()) == 40
    assert looks <= 10 * len(entries)


def test_a_run_that_ends_while_the_queue_is_put_in_order(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the queue reads once what has ended."""
    for name in ("a", "b"):
        ask(config, name)
    entries, kept = queue(config).entries, Queue.ends
    looks = 0

    def ends(self: Queue) -> dict[str, dict[str, Any]]:
        nonlocal looks
        looks += 1
        found = kept(self)
        if looks == 1:
            end(config, "a")
        return found

    monkeypatch.setattr(Queue, "ends", ends)
    assert [each.name for each in Queue.from_entries(entries, config.shared_dir).entries] == ["a", "b"]
    assert kept(queue(config)).keys() == {"a"}
