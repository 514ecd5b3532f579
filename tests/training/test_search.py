"""A search chooses its points by the results so far, with Optuna: the same from the same records, whichever asks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, Process, Runs, kill, last_json, until

from trainer.cluster.spec import free_addresses
from trainer.core.settings.search_space import SearchSpace
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import to_json, write_record
from trainer.run.selections.search import Search
from trainer.run.selections.study import Trial, choose, frozen, is_behind, optuna

pytestmark = pytest.mark.timeout(400)
RATE = {"rate": {"low": 1e-5, "high": 1e-1, "log": True}}
SEARCH = {"search": "optuna", "trials": 4, "metric": "loss", "parameters": RATE, "n_startup_trials": 1}
SPACE = SearchSpace.from_record({key: value for key, value in SEARCH.items() if key != "search"})


def search(shared: Path, attempt: int = 1, **more: Any) -> Search:
    asked = {**SEARCH, **more}
    asked.pop("search")
    return Search.from_selection(
        {"program_args": {"units": 2}, "sweep": {"name": "s", "attempt": attempt, "search": asked}}, shared
    )


def evaluate(shared: Path, run: str, *losses: float, metric: str = "loss") -> None:
    """Have a run evaluated at the steps 10, 20 and so on."""
    directory = RunDirectory(shared, run)
    directory.path.mkdir(parents=True, exist_ok=True)
    steps = [(10 * number, {metric: loss}) for number, loss in enumerate(losses, start=1)]
    lines = [to_json({"step": step, "values": metrics}) for step, metrics in steps]
    directory.evaluations.write_text("\n".join(lines) + "\n{", encoding="utf-8")  # one is being written
    write_record(directory.evaluation, {"step": steps[-1][0], "metrics": steps[-1][1]})


def end(shared: Path, run: str, *losses: float, state: RunState = RunState.FINISHED, **more: Any) -> None:
    if losses:
        evaluate(shared, run, *losses)
    search(shared, **more).end_point(run, state)


def test_the_same_records_choose_the_same_point_and_one_that_is_written_stays(tmp_path: Path) -> None:
    shared, other = tmp_path / "one", tmp_path / "other"
    first = search(shared)
    assert [(point.run, point.program_args) for point in first.points] == [("s-1", {"units": 2, "rate": 0.001})]
    first.begin("s-1")
    end(shared, "s-1", 0.5)
    shutil.copytree(shared, other)  # as if the coordinator died before it wrote its choice
    chosen = search(shared).choose()
    assert chosen is not None
    assert chosen.run == "s-2"
    assert chosen.program_args["units"] == 2
    assert 1e-5 <= chosen.program_args["rate"] <= 1e-1
    assert search(other).choose() == chosen
    assert search(shared).present() == chosen  # as if it died after that
    assert search(shared).choose() is None
    assert len(search(shared).points) == 2


def test_points_come_nearer_to_the_best_and_end_with_the_last_trial(tmp_path: Path) -> None:
    search(tmp_path).begin("s-1")
    chosen = []
    while (point := search(tmp_path, trials=30).present()) is not None:
        rate = point.program_args["rate"]
        chosen.append(rate)
        end(tmp_path, point.run, abs(rate - 0.05), trials=30)
        search(tmp_path, trials=30).choose()
    assert len(chosen) == len(set(chosen)) == 30
    near = [0.02 < rate < 0.1 for rate in chosen]
    assert sum(near[10:20]) + sum(near[20:]) >= 12 > 4 >= sum(near[:10])
    over = search(tmp_path, trials=30)
    assert (over.is_over(), over.unevaluated()) == (True, None)
    longer = search(tmp_path, trials=31)
    assert not longer.is_over()
    assert longer.choose() is not None


def test_kinds_of_parameters_and_failures_are_what_optuna_takes() -> None:
    parameters = {
        "units": {"low": 8, "high": 64, "step": 8},
        "depth": {"low": 1, "high": 100, "log": True},
        "dropout": {"low": 0.0, "high": 0.5, "step": 0.1},
        "layers": {"choices": [[64], [64, 64], None]},
    }
    space = SearchSpace.from_record({"trials": 20, "metric": "loss", "direction": "maximize", "parameters": parameters})
    trials = [Trial(space.first()), Trial(space.first(), float("nan"), 5), Trial(space.first(), 0.5, 5, pruned=True)]
    states = [frozen(optuna(), space, trial).state.name for trial in trials]
    assert states == ["FAIL", "FAIL", "PRUNED"]
    seen = []
    for number in range(12):
        point = choose(space, trials)
        assert space.holds(point), point
        assert isinstance(point["units"], int)
        seen.append(json.dumps(point["layers"]))
        trials.append(Trial(point, float(number), 10))
    assert set(seen) == {"[64]", "[64, 64]", "null"}


@pytest.mark.parametrize(
    ("losses", "more", "is_stopped"),
    [
        ({10: 0.9}, {}, True),
        ({10: 0.4}, {}, False),
        ({5: 0.9}, {}, False),  # none of the others had been evaluated by then
        ({15: 0.6}, {}, True),  # the others were 0.5 at 10, and better later
        ({15: 0.45}, {}, False),
        ({10: 0.4, 20: 0.9}, {}, False),  # its best counts
        ({10: 0.9}, {"direction": "maximize"}, False),
        ({10: 0.9}, {"n_startup_trials": 2}, False),
        ({10: 0.9}, {"n_warmup_steps": 11}, False),
        ({10: float("nan")}, {}, True),
    ],
)
def test_the_median_pruner_stops_what_is_behind_at_the_same_step(
    losses: dict[int, float], more: dict[str, Any], is_stopped: bool
) -> None:
    space = SearchSpace.from_record({**SPACE.__dict__, **more})
    others = [Trial({"rate": 0.01}, 0.45, 20, evaluations={10: 0.5, 20: 0.45}), Trial({"rate": 0.02})]
    assert is_behind(space, others, Trial({"rate": 0.03}, evaluations=losses)) is is_stopped


def test_a_point_that_is_behind_is_pruned_and_stays_so(tmp_path: Path) -> None:
    search(tmp_path).begin("s-1")
    end(tmp_path, "s-1", 0.5, 0.4)
    assert search(tmp_path).choose() is not None
    assert search(tmp_path).why_to_end("s-2") is None  # before its first evaluation
    evaluate(tmp_path, "s-2", 0.9)
    why = search(tmp_path).why_to_end("s-2")
    assert why == "stopped early: loss 0.9 at step 10 is behind the median of the others"
    assert search(tmp_path, pruner="none", n_warmup_steps=1).why_to_end("s-2") == why  # once decided
    end(tmp_path, "s-2", 0.9, state=RunState.STOPPED)
    record = search(tmp_path, attempt=2).ends()["s-2"]
    assert (record["state"], record["step"], record["value"]) == ("pruned", 10, 0.9)


def test_a_metric_that_the_evaluation_lacks_ends_the_search_until_it_is_asked_for_again(tmp_path: Path) -> None:
    search(tmp_path).begin("s-1")
    evaluate(tmp_path, "s-1", 0.5, metric="accuracy")
    why = search(tmp_path).why_to_end("s-1")
    assert why == "metric is 'loss', which the evaluation does not have: name one of its metrics, accuracy"
    end(tmp_path, "s-1", state=RunState.STOPPED)
    over = search(tmp_path)
    assert (over.ends()["s-1"]["state"], over.ends()["s-1"]["message"]) == ("failed", why)
    assert (over.is_over(), over.choose()) == (True, None)
    again = search(tmp_path, attempt=2, metric="accuracy")
    assert again.present() == again.points[0]
    end(tmp_path, "s-1", attempt=2, metric="accuracy")
    assert search(tmp_path, attempt=2, metric="accuracy").choose() is not None


def test_a_search_trains_to_its_end_past_a_coordinator_that_dies_and_finds_a_better_point(runs: Runs) -> None:
    addresses = free_addresses(4)
    jobs = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    shared, settings = runs.shared / "searched", runs.shared / "search-settings.json"
    own = {"program": "searched:Searched", "steps": 160, "shared_dir": str(shared), "seed": 1, "export": False}
    settings.write_text(json.dumps({**own, "epoch_steps": 20, "evaluation": "inline"}))
    # The rates that this seed leads to: 0.001, 0.00005, 0.004, 0.0009.
    asked = {key: value for key, value in SEARCH.items() if key != "search"} | {"seed": 2}
    write_record(shared / "selection.json", {"sweep": {"name": "s", "attempt": 1, "points": [], "search": asked}})

    def environment(job: str, index: int = 0) -> dict[str, str]:
        cluster = {"cluster": jobs, "task": {"type": job, "index": index}}
        return {"TF_CONFIG": json.dumps(cluster), "TRAINER_SETTINGS": str(settings)}

    servers = [runs.task(**environment("ps"))]
    servers += [runs.task(**environment("worker", index)) for index in range(2)]
    chief = runs.script("-m", "trainer", **environment("chief"))
    until(lambda: chief.children, "the process of the first point")
    first = chief.children[-1]
    chief.search("sweep s goes on with s-2", 3 * MINUTE)
    kill(until(lambda: [pid for pid in chief.children if pid != first], "the process of the second point")[-1])
    assert chief.wait(5 * MINUTE) == 0, chief.output
    for process in servers:
        assert process.wait(MINUTE) == 0, process.output

    sweep = Process(["-m", "trainer", "sweep", "--json", "--settings", str(settings)])
    assert sweep.wait() == 0, sweep.output
    answer = last_json(sweep.output)
    assert (answer["over"], answer["evaluated"], answer["size"]) == (True, True, 4)
    points = {point["run"]: point for point in answer["points"]}
    assert {run: point["state"] for run, point in points.items()} == {
        "s-1": "finished",
        "s-2": "pruned",
        "s-3": "finished",
        "s-4": "pruned",
    }
    assert points["s-3"]["evaluation"]["loss"] < 0.1 * points["s-1"]["evaluation"]["loss"]
    for run in ("s-2", "s-4"):
        assert points[run]["message"].startswith("stopped early: loss ")
        assert 0 < points[run]["step"] < 160
        assert RunDirectory(shared, run).catalogue.newest() == points[run]["step"]
    assert points["s-1"]["evaluated_step"] == points["s-3"]["evaluated_step"] == 160
