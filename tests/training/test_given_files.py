"""Files that are given out one by one: each example is trained once a pass, by whichever worker is free."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from counting import counts
from processes import MINUTE, Process, Runs, kill, run_check, until

from trainer.core.failures import Infrastructure, UserError, is_infrastructure, is_stale
from trainer.run.directory import RunDirectory
from trainer.telemetry.status import read_status
from trainer.training.data.context import InputContext
from trainer.training.data.file_names import matching

pytestmark = pytest.mark.timeout(600)
SIZE = 8  # examples of a file of given_files_check.py
IN_FLIGHT, CALL, BATCH, FAULTS = 4, 2, 2, 6
FILES, FILE, PROGRAMS_BATCH = 60, 16, 4  # of the program `given`


@pytest.fixture(scope="module")
def found() -> Any:
    return run_check("given_files_check.py", deadline=500)


class Counted:
    """What a position says of each file, beside how often its examples were trained."""

    def __init__(self, record: Any, seen: np.ndarray, size: int) -> None:
        """`seen` has how often each example was trained, file by file; `size` is the number of a file's examples."""
        self.seen = seen.reshape(-1, size)
        files = range(len(self.seen))
        done = {number_in(name) for names in record["done"].values() for name in names}
        way = [(turn, number_in(name), taken) for turn, name, taken in record["open"]]
        earlier = [file for turn, file, _ in way if turn < record["turn"]]
        self.passes = np.array([record["turn"] + (file in done) - earlier.count(file) for file in files])
        self.open = np.array([sum(file == one for _, one, _ in way) for file in files])
        """How often each file is under way."""
        self.expected = self.passes * size + [sum(taken for _, one, taken in way if one == file) for file in files]

    def lost(self) -> int:
        """Return how many examples were trained less often than their file was done."""
        return int((self.seen < self.passes[:, None]).sum())

    def repeated(self) -> int:
        """Return how many examples were trained more often than counted."""
        return int(self.seen.sum() - self.expected.sum())

    def is_exact(self) -> bool:
        most = self.seen.max(axis=1) <= self.passes + self.open
        return bool(most.all()) and not self.lost() and bool((self.seen.sum(axis=1) == self.expected).all())


def number_in(name: str) -> int:
    return int(name.rpartition("-")[2])


@pytest.mark.parametrize("how", ["workers", "fit", "Keras 3"])
def test_each_example_is_trained_once_a_pass(found: Any, how: str) -> None:
    """Over restarts with 2, 1, 3 and 2 workers, under `fit`, and with Keras 3."""
    counted = Counted(found[how], np.array(found[how]["seen"]), SIZE)
    assert counted.is_exact()
    assert counted.seen.sum() > 0.7 * counted.seen.size


def test_calls_in_flight_at_a_save_are_trained_twice_at_most(found: Any) -> None:
    counted = Counted(found["in flight"], np.array(found["in flight"]["seen"]), SIZE)
    assert not counted.lost()
    assert 0 <= counted.repeated() <= (FAULTS + 1) * IN_FLIGHT * CALL * BATCH
    assert counted.passes.max() > 0


@pytest.mark.parametrize("strategy", ["parameter_server", "one_device"])
def test_a_program_that_names_its_files_trains_without_the_setting(found: Any, strategy: str) -> None:
    seen = np.array(found["shards"][strategy])
    assert seen.sum() == len(seen) / 2
    assert seen.max() == 1


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("NoFiles", "NoFiles.train_dataset asks for no files, and input_sharding: dynamic gives them out"),
        ("Twice", "context.files is asked twice in one train_dataset"),
        ("Endless", "Endless: train_dataset gives data without end."),
        ("Missing", "missing-*'; expected files that the coordinator's host sees"),
        ("Empty", "1,000 files of '"),
    ],
)
def test_what_can_not_be_given_out_is_refused(found: Any, program: str, why: str) -> None:
    assert why in found["refused"][program]


def position(runs: Runs, run: str) -> Any:
    newest = runs.directory(run) / "checkpoints" / f"ckpt-{runs.checkpoints(run)[-1]}.manifest.json"
    return json.loads(newest.read_text(encoding="utf-8"))["input"]["files"]


def write(place: Path, numbers: Iterable[int]) -> None:
    """Write files of the program under hidden names, and rename each when it is whole."""
    for number in numbers:
        lines = "".join(f"{example}\n" for example in range(number * FILE, number * FILE + FILE))
        hidden = place / f".part-{number:02}"
        hidden.write_text(lines, encoding="ascii")
        hidden.rename(place / f"part-{number:02}")


def start(runs: Runs, run: str, place: Path, *more: str, slow: int = 200_000) -> Process:
    for worker, microseconds in ((0, 20_000), (1, slow)):
        (place / f"worker-{worker}").write_text(str(microseconds), encoding="ascii")
    options = ["--input-sharding", "dynamic", "--no-evaluator", "--export", "false", "--evaluation", "none"]
    options += ["--steps-per-execution", str(CALL), "--checkpoint-seconds", "2", "--log-seconds", "0.5"]
    steps = FILES * FILE // PROGRAMS_BATCH * 2
    return runs.local("given:Given", run, steps, *options, *more, FILES=f"{place}/part-*", PACE=str(place))


def trained(runs: Runs, run: str) -> int:
    return read_status(RunDirectory(runs.shared, run)).step or 0


def test_files_of_slow_and_dead_workers_go_to_the_others_and_none_is_lost(runs: Runs, tmp_path: Path) -> None:
    """Worker 1 takes ten times as long for a step; then worker 0 dies amid a file, and later the coordinator."""
    write(tmp_path, range(FILES))
    process = start(runs, "given", tmp_path)
    until(lambda: trained(runs, "given") > 100, "a hundred steps", say=lambda: process.output[-6000:])
    kill(process.pids("worker-0")[-1])
    process.search("TensorFlow has taken in worker-0")
    step = trained(runs, "given")
    until(lambda: trained(runs, "given") > step + 60, "more steps", say=lambda: process.output[-6000:])
    kill(process.pids("chief-0")[-1])
    assert process.wait(4 * MINUTE) == 0, process.output[-6000:]
    seen = counts(runs, "given")
    counted = Counted(position(runs, "given"), seen.sum(axis=0), FILE)
    assert not counted.lost()
    # What the call of worker 0 had done that its death broke, and what 2 s of both had when the coordinator died.
    assert counted.repeated() <= (CALL + 2 * 55 + 4 * CALL) * PROGRAMS_BATCH
    assert 0 < seen[1].sum() < 0.25 * seen[0].sum()


def test_files_that_come_are_trained_once_while_a_coordinator_dies_and_the_run_ends_when_told(
    runs: Runs, tmp_path: Path
) -> None:
    write(tmp_path, range(4))
    (tmp_path / "part-99.tmp").write_text("no number\n", encoding="ascii")
    process = start(runs, "coming", tmp_path, "--input-new-files-seconds", "1", slow=20_000)
    waits = "waiting for new files of .*: {} are trained"
    process.search(waits.format(4))
    process.search(f"step {4 * FILE // PROGRAMS_BATCH} of .* number ")
    write(tmp_path, range(10, 16))
    process.search(waits.format(10))
    step, run = 10 * FILE // PROGRAMS_BATCH, "coming"
    shown = process.search(f"step {step} of .* number ([0-9.]+)")
    assert float(shown[1]) >= 10 * FILE, "numbers are those since the last line, not since the run's beginning"
    until(lambda: runs.checkpoints(run)[-1:] == [step], "a checkpoint", say=lambda: process.output[-6000:])
    kill(process.pids("chief-0")[-1])
    write(tmp_path, range(4, 10))
    process.search(waits.format(16))
    last = 16 * FILE // PROGRAMS_BATCH
    until(lambda: runs.checkpoints(run)[-1:] == [last], "the last checkpoint", say=lambda: process.output[-6000:])
    (tmp_path / "_END").touch()
    assert process.wait(2 * MINUTE) == 0, process.output[-6000:]
    assert "where its data ended it" in process.output
    seen = counts(runs, run)
    assert seen.sum(axis=0).tolist() == [1.0] * 16 * FILE + [0.0] * (FILES - 16) * FILE
    assert (seen.sum(axis=1) > 0).all()
    assert runs.status(run)["step"] == last
    assert len(re.findall(rf"saved \S+/ckpt-{last} in", process.output)) == 1


@pytest.mark.parametrize("pattern", ["*/part-*", "far/part-*"])
def test_a_folder_that_can_not_be_read_is_an_error_and_no_smaller_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0").touch()
    list_folder, patterns = os.scandir, [f"{tmp_path}/near/part-*", f"{tmp_path}/{pattern}", f"{tmp_path}/gone/*"]
    assert matching(patterns) == [f"{tmp_path}/far/part-0", f"{tmp_path}/near/part-0"]

    def fail(path: str) -> Any:
        if path == str(tmp_path / "far"):
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        matching(patterns)
    for part in (0, 1):
        with pytest.raises(Infrastructure, match=f"can't list {tmp_path}/far; Stale file handle") as raised:
            InputContext(2, part).files(patterns)
        assert is_infrastructure(raised.value)
        assert is_stale(raised.value)  # so that it is mounted again


def test_files_are_named_as_tensorflow_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "near/part-0",
        "near/part-1",
        "near/.part-2",
        "near/a*b",
        "near/p[1]",
        "far/part-0",
        "far/deep/x",
        "x",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("near/part-3").symlink_to("gone")
    names = ["*", "near/*", "./near/part-*", "*/part-*", "**/part-?", "near/part-[01]", "near/part-[!0]", "far/d*/x"]
    names += ["near/part-[^0]", r"near/a\*b", r"near/p\[1]", "near/part-0", "near", "near/part-3", "gone/*", "x/*", ""]
    for name in (*names, *(f"{tmp_path}/{name}" for name in names)):
        assert matching([name]) == sorted(tf.io.gfile.glob(name)), name


def test_parts_have_each_file_once(tmp_path: Path) -> None:
    names = [str(tmp_path / f"part-{number}") for number in range(5)]
    for name in names:
        Path(name).touch()
    # The second pattern has again what the first has.
    patterns = [f"{tmp_path}/part-*", names[0]]
    parts = [list(InputContext(2, part).files(patterns).as_numpy_iterator()) for part in (0, 1)]
    assert sorted(map(len, parts)) == [2, 3]
    assert sorted(name.decode() for part in parts for name in part) == names
    with pytest.raises(UserError, match=r"no file matches '.*/missing-\*': write the files first"):
        InputContext(2, 0).files(f"{tmp_path}/missing-*")


def test_workers_list_what_the_coordinators_host_lacks(tmp_path: Path) -> None:
    @tf.function(autograph=False)
    def names(number: Any) -> Any:
        return InputContext(2, number).files(f"{tmp_path}/part-*").get_single_element()

    traced = names.get_concrete_function(tf.TensorSpec([], tf.int64))
    for number in (0, 1):
        (tmp_path / f"part-{number}").touch()
    found = [traced(tf.constant(number, tf.int64)).numpy().decode() for number in (0, 1)]
    assert found == [str(tmp_path / "part-0"), str(tmp_path / "part-1")]
