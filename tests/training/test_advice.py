"""What `fab advise` says of trainings whose bottleneck is known, on real processes: a slow worker, input, messages."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Runs, until

from bench import parts
from bench.advise import CAUSES, PART, look, train
from bench.ahead import DelayedCluster
from bench.parts import NoControlGroup
from bench.tasks import write_settings
from fleet.doctor.advice import HostUsage, Measurement, advise
from fleet.doctor.uneven_load import uneven_data
from trainer import testing
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.telemetry import lookups

# isort: split
import tensorflow as tf

from trainer.training.data.file_sizes import FileSizes

pytestmark = pytest.mark.timeout(300)
TASKS = ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1")
OPTIONS = ["--steps-per-execution", "1", "--no-evaluator", "--log-seconds", "0.5"]
SECONDS = 8.0
SLOW = 0.2
IDS, BATCH, WORDS = 8, 64, 20_000
HOT, HOT_KEY = 0.4, 987_654_321
EMPTY = HostUsage(2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("slow", "part", "names"),
    [
        pytest.param(("worker-1",), "worker", ["worker-1"], marks=pytest.mark.matrix),
        (("worker-0", "worker-1"), "input", []),
    ],
)
def test_a_known_bottleneck_is_named(
    runs: Runs, tmp_path: Path, slow: tuple[str, ...], part: str, names: list[str]
) -> None:
    run = f"advice-{part}"
    for name in ("worker-0", "worker-1", "evaluation", "dataset-0", "dataset-1"):
        (tmp_path / name).write_text(str(int(SLOW * 1e6)) if name in slow else "0")
    process = runs.local("paced:Paced", run, 10_000_000, *OPTIONS, PACE=str(tmp_path))
    status = runs.directory(run) / "status.json"

    found = advice(status, lambda: {task: process.pids(task)[-1] for task in TASKS}, lambda: process.output[-6000:])
    assert (found[0].part, found[0].names) == (part, names), found


@pytest.mark.matrix
def test_slow_messages_are_told_from_a_slow_input(tmp_path: Path) -> None:
    """What the tasks send each other comes 20 ms later, in user space."""
    settings = {"steps": 10_000_000, "steps_per_execution": 1, "evaluation": "none", "log_seconds": 0.5}
    write_settings(tmp_path, "advice-late", "bench.programs:Tiny", **settings)
    status = RunDirectory(tmp_path, "advice-late").path / "status.json"
    with DelayedCluster(tmp_path, 20.0).delayed() as cluster:
        chief = cluster.start("chief", 0, settings=str(tmp_path / "advice-late.json"))
        found = advice(status, lambda: {task.name: task.pids[0] for task in cluster.tasks}, chief.output)
    assert found[0].part == "network", found
    assert "waits for its batch for 0% of the time" in found[0].text


def test_where_no_control_group_can_be_made_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROOT", tmp_path / "none")
    with (
        pytest.raises(NoControlGroup, match=r"no control group can be made, which takes root .*No such file.*none"),
        parts.part_of_a_processor(0.5, []),
    ):
        pass


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "busy", "fix", "ps"),
    [
        ("few-ps", "ps-0", "another ps takes a part of its variables", 1 / 3),
        ("hot-ps", "ps-1", "`partitioner` splits large variables", 0.0),
    ],
)
def test_ps_that_are_few_or_hot_are_named(tmp_path: Path, name: str, busy: str, fix: str, ps: float) -> None:
    """Each ps has a part of a processor."""
    cause = CAUSES[name]
    try:
        found, promised, _ = train(cause, 2, cause.servers, PART, 2 * SECONDS, tmp_path / name)
    except NoControlGroup as error:
        pytest.skip(str(error))
    print(*found, sep="\n")
    assert [(each.part, each.names) for each in found[:-1]] == [("ps", [busy])]
    assert fix in found[0].text
    assert promised is not None
    assert (promised.worker, promised.ps) == (0.0, pytest.approx(ps))


class Skewed:
    """Words by how often they come, of which ps-0 has the first half; items by any key, of which one comes often.

    The files of worker-1 have four times as much.
    """

    keras = tf.keras

    def __init__(self, folder: Path) -> None:
        self.pattern = f"{folder}/lines-*"
        for number, count in enumerate((400, 1600, 400, 1600)):
            lines = "".join(f"{line:07}\n" for line in range(count))
            (folder / f"lines-{number}").write_text(lines, encoding="ascii")

    def build_model(self) -> Any:
        layers = self.keras.layers
        ids = [self.keras.Input([IDS], dtype="int64") for _ in range(2)]
        words, items = (
            layers.Embedding(WORDS, 16, name=name)(each) for name, each in zip(("words", "items"), ids, strict=True)
        )
        mean = layers.GlobalAveragePooling1D()(layers.Concatenate()([words, items]))
        model = self.keras.Model(ids, layers.Dense(1)(mean))
        model.compile(optimizer=self.keras.optimizers.Adagrad(0.1), loss="mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        lines = context.files(self.pattern).interleave(tf.data.TextLineDataset)

        def parsed(line: Any) -> Any:
            number = tf.strings.to_number(line, tf.int64)
            drawn = tf.random.stateless_uniform([2, IDS], tf.stack([number, 1]))
            words = tf.cast(WORDS ** drawn[0], tf.int64) - 1  # evenly on a scale of logarithms
            items = tf.where(drawn[1] < HOT, tf.constant(HOT_KEY, tf.int64), tf.cast(drawn[1] * 1e9, tf.int64))
            return (words, items), 1.0

        return lines.map(parsed).batch(BATCH)

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(1)


@pytest.mark.parametrize("three", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_hot_rows_and_uneven_files_are_known(tmp_path: Path, three: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "TAKE_SECONDS", 0.0)
    program = Skewed(tmp_path)
    if three:
        import keras

        program.keras = keras
    tables = {"items": {"capacity": 100_000}}
    settings = {"evaluation": "none", "export": False, "steps_per_execution": 1, "log_seconds": 1.0}
    testing.train(program, 80, ps=2, directory=tmp_path, dynamic_tables=tables, **settings)
    status = read_record(RunDirectory(tmp_path, "test").status) or {}

    words, items = status["lookups"]["words"], status["lookups"]["items"]
    chance = np.diff(np.log(np.arange(1, WORDS + 2))) / math.log(WORDS)
    asked = chance if three else 1 - (1 - chance) ** (IDS * BATCH)  # Keras 3 asks a fixed table for each id
    assert words["by_ps"]["ps-0"] == pytest.approx(sum(asked[: WORDS // 2]) / sum(asked), abs=0.04)
    assert words["hot"][0] == [0, pytest.approx(math.log(2, WORDS), abs=0.03), "ps-0"]
    assert items["hot"][0][:2] == [HOT_KEY, pytest.approx(HOT, abs=0.06)]
    assert words["ids_per_step"] == items["ids_per_step"] == pytest.approx(IDS * BATCH, rel=0.1)
    assert (words["rows_per_step"] == words["ids_per_step"]) == three
    assert items["rows_per_step"] < 0.8 * items["ids_per_step"]
    assert items["by_ps"]["ps-0"] == pytest.approx(0.5, abs=0.1)

    used = {"ps-0": 2 * SECONDS, "ps-1": 0.1 * SECONDS}
    first = Measurement(
        0, {"worker-0": 0, "worker-1": 0}, dict.fromkeys(used, 0), {"here": EMPTY}, dict.fromkeys(TASKS, "here")
    )
    known = {"lookups": status["lookups"], "dynamic": tuple(status["tables"]), "data": status["data"]}
    later = {"time": SECONDS, "workers": {"worker-0": 100, "worker-1": 100}, "seconds": used}
    found = {each.part: each for each in advise(first, dataclasses.replace(first, **later, **known))}
    print(*found.values(), sep="\n")
    assert ("each id is sent" if three else "Ids that come often lie together") in found["ps"].text
    assert found["data"].names == ["worker-1"]
    assert "examples of worker-0 are trained 4 times as often" in found["data"].text


@pytest.mark.parametrize("sizes", [(10, 40, 10, 40), (40, 10, 20, 30)])
def test_the_files_of_each_worker_are_looked_at(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    names = [str(tmp_path / f"part-{number}") for number in range(4)]
    for name, size in zip(names, sizes, strict=True):
        Path(name).write_text("x" * size, encoding="ascii")
    looked = FileSizes()
    looked.begin()
    looked.found(names)
    known = until(lambda: looked.sizes(2), "the sizes")
    assert known["parts"] == [sizes[0] + sizes[2], sizes[1] + sizes[3]]
    named = dict(zip(("worker-0", "worker-1"), known["parts"], strict=True))
    assert bool(list(uneven_data({**known, "parts": named}, 2))) == (sizes[0] == 10)


def advice(status: Path, pids: Callable[[], Mapping[str, int]], say: Callable[[], str]) -> Any:
    """Return what is advised once both workers have trained for a while."""

    def both_train() -> bool:
        workers = (read_record(status) or {}).get("workers", {})
        return len(workers) == 2 and all(each["steps"] > 5 for each in workers.values())

    until(both_train, "steps of both workers", say=say)
    first = look(status, pids())
    time.sleep(SECONDS)
    found = advise(first, look(status, pids()))
    print(*found, sep="\n")
    return found
