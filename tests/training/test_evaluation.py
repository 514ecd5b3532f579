"""Every way to evaluate gives what `Model.evaluate` gives in one process, also though a worker dies in the middle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from processes import MINUTE, Process, Runs, fork_server, kill, run_check, until

pytestmark = pytest.mark.timeout(900)
EXAMPLES = 105
READ = "reads an example to evaluate"


def check(*arguments: str) -> Any:
    return run_check("evaluation_check.py", *arguments, deadline=10 * MINUTE)


@pytest.fixture(scope="module")
def ways() -> dict[str, Any]:
    return check("ways")


@pytest.mark.parametrize(
    ("way", "program"),
    [
        ("mirrored", "Uneven"),
        ("mirrored", "OwnTestStep"),
        ("mirrored", "Stray"),
        ("mirrored", "OwnLoss"),
        ("inline", "Uneven"),
        ("inline", "OwnTestStep"),
        ("inline", "Stray"),
        ("inline", "OwnLoss"),
        ("inline", "NotAdding"),
        ("inline", "Generated"),
        ("distributed", "Uneven"),
        ("distributed", "TwoOutputs"),
        ("distributed", "Regularized"),
        ("distributed", "OwnTestStep"),
        ("distributed", "Stray"),
        ("distributed", "OwnLoss"),
        ("distributed", "NotAdding"),
        ("distributed", "Files"),
        ("exact", "Numbered"),
        ("exact", "Files"),
        ("exact", "OneBatch"),
    ],
)
def test_gives_what_one_process_gives_each_time(ways: dict[str, Any], way: str, program: str) -> None:
    result = ways["right"][way][program]
    first, second = result["found"]
    assert first == pytest.approx(result["alone"], rel=1e-5)
    assert second == pytest.approx(result["alone"], rel=1e-5)
    assert result["left"] == (1 if program == "NotAdding" else 0), "the model's metrics are reset"


def test_the_metric_sees_every_example(ways: dict[str, Any]) -> None:
    labels = sum(example * example % 3 for example in range(EXAMPLES))
    assert ways["right"]["inline"]["Uneven"]["alone"]["label_sum"] == labels


@pytest.mark.parametrize(
    ("way", "program", "reason"),
    [
        ("mirrored", "Labels", "returns labels, which is no metric's and no number"),
        ("mirrored", "Endless", "never ends"),
        ("mirrored", "Nothing", "Nothing.eval_dataset is empty"),
        ("inline", "Labels", "returns labels, which is no metric's and no number"),
        ("inline", "Endless", "never ends"),
        ("inline", "Nothing", "Nothing.eval_dataset is empty"),
        ("distributed", "WholeData", "does not use its context"),
        ("distributed", "NotMerging", "'fading'"),
        ("distributed", "KeepingTheLast", "'newest'"),
        ("distributed", "Generated", "Python in its pipeline"),
        ("distributed", "Nothing", "Nothing.eval_dataset is empty"),
        ("exact", "Uneven", "lookup table"),
        ("exact", "OwnTestStep", "own test_step"),
        ("exact", "OwnTestFunction", "own make_test_function, which the trainer does not call"),
        ("distributed", "OwnTestFunction", "put what it does into test_step, or set evaluation to sidecar"),
        ("inline", "OwnTestFunction", "own make_test_function, which the trainer does not call"),
        ("mirrored", "OwnTestFunction", "own make_test_function, which the trainer does not call"),
        ("exact", "Regularized", "regularization"),
        ("exact", "Weighted", "exact evaluation gives"),
        ("exact", "TwoOutputs", "can't be evaluated exactly"),
        ("exact", "Generated", "Python in its pipeline"),
    ],
)
def test_refuses_what_it_would_be_wrong_about(ways: dict[str, Any], way: str, program: str, reason: str) -> None:
    message = ways["refused"][way][program]
    assert reason in message
    assert "not refused" not in message
    assert "in user code" not in message


class Killed:
    """A run whose first evaluation is left alone, and in whose second one a worker is killed."""

    def __init__(self, runs: Runs, evaluation: str) -> None:
        self.run = f"evaluated-{evaluation}"
        options = ["--evaluation", evaluation, "--epoch-steps", "20", "--checkpoint-steps", "20", "--export", "false"]
        self.process = process = runs.local("uneven:Slow", self.run, 40, *options)
        process.search(r"evaluated step 20 in")
        self.undisturbed = count(process.output, "worker")
        begun = count(process.output, "worker-0") + 12

        def is_in_the_middle() -> bool:
            return count(process.output, "worker-0") >= begun

        until(is_in_the_middle, "the middle of the second evaluation", say=lambda: process.output)
        kill(process.pids("worker-0")[-1])
        self.in_the_middle = "evaluated step 40" not in process.output
        assert process.wait() == 0, process.output
        self.disturbed = count(process.output, "worker") - self.undisturbed
        self.metrics = json.loads((runs.directory(self.run) / "evaluation.json").read_text())["metrics"]


def count(output: str, task: str) -> int:
    """Count the examples that a task, or all tasks of a job, read to evaluate."""
    # TensorFlow prints a line and its end apart: what another thread logs meanwhile stands in the same line.
    return sum(line.count(READ) for line in output.splitlines() if line.startswith(task))


def evaluated_in_step(runs: Runs) -> Process:
    options = [
        "--strategy",
        "multi_worker_mirrored",
        "--workers",
        "1",
        "--evaluation",
        "distributed",
        "--export",
        "false",
    ]
    process = runs.local("uneven:Slow", "evaluated-in-step", 20, *options)
    assert process.wait() == 0, process.output
    return process


@pytest.fixture(scope="module")
def trained(runs: Runs) -> tuple[dict[str, Killed], Process]:
    """The runs in which a worker is killed, by the way that they evaluate, and one whose members train in step."""
    ways = ("distributed", "exact")
    fork_server()  # which all use
    with ThreadPoolExecutor() as pool:  # they wait more than they compute
        in_step = pool.submit(evaluated_in_step, runs)
        return dict(zip(ways, pool.map(partial(Killed, runs), ways), strict=True)), in_step.result()


@pytest.fixture(scope="module")
def killed(trained: tuple[dict[str, Killed], Process]) -> dict[str, Killed]:
    return trained[0]


@pytest.fixture(scope="module")
def in_step(trained: tuple[dict[str, Killed], Process]) -> Process:
    return trained[1]


@pytest.fixture(scope="module")
def alone(runs: Runs, killed: dict[str, Killed], in_step: Process) -> dict[tuple[str, int], dict[str, float]]:
    """Return what one process gives of the checkpoints that were evaluated."""
    wanted = [(run.run, step) for run in killed.values() for step in (20, 40)] + [("evaluated-in-step", 20)]
    results = check("alone", str(runs.shared), *(str(item) for pair in wanted for item in pair))
    return dict(zip(wanted, results, strict=True))


# Exact evaluation divides what each worker has read.
@pytest.mark.parametrize(("evaluation", "reads"), [("distributed", EXAMPLES), ("exact", 2 * EXAMPLES)])
def test_counts_each_example_once_though_a_worker_dies(
    killed: dict[str, Killed], alone: dict[tuple[str, int], dict[str, float]], evaluation: str, reads: int
) -> None:
    run = killed[evaluation]
    assert run.in_the_middle
    assert len(run.process.pids("worker-0")) == 2
    # What the dead worker had begun was read again.
    assert run.disturbed > reads
    assert run.metrics == pytest.approx(alone[run.run, 40], rel=1e-5)


@pytest.mark.parametrize("evaluation", ["distributed", "exact"])
def test_evaluates_at_an_epochs_end(
    killed: dict[str, Killed], alone: dict[tuple[str, int], dict[str, float]], evaluation: str
) -> None:
    run = killed[evaluation]
    line = run.process.search(r"evaluated step 20 in \S+ s: loss (\S+), accuracy (\S+), label_sum (\S+)")
    assert [float(number) for number in line.groups()] == pytest.approx(list(alone[run.run, 20].values()), rel=1e-3)


def test_a_worker_reads_its_own_part_alone(killed: dict[str, Killed]) -> None:
    assert killed["distributed"].undisturbed == EXAMPLES


def test_members_that_train_in_step_evaluate_in_step(
    runs: Runs, in_step: Process, alone: dict[tuple[str, int], dict[str, float]]
) -> None:
    read = [count(in_step.output, task) for task in ("chief", "worker")]
    assert sum(read) == EXAMPLES
    assert min(read) > 0
    metrics = json.loads((runs.directory("evaluated-in-step") / "evaluation.json").read_text())["metrics"]
    assert metrics == pytest.approx(alone["evaluated-in-step", 20], rel=1e-5)
