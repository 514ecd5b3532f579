"""Saves under parameter_server: what they hold, what the training waits for, and what happens when they fail."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer import testing  # before TensorFlow: it chooses the Keras
from trainer.core.failures import Infrastructure, UserError
from trainer.core.settings.config import Config
from trainer.run.data_position import Position
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.run.saves import checkpoints as module
from trainer.run.saves import save_failures
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoint_writer import Order
from trainer.run.saves.checkpoints import Checkpoints
from trainer.run.saves.save_failures import SaveFailed

pytestmark = pytest.mark.timeout(120)


class Trained:
    """A table on two ps, a dense variable with Adam's slots, and the step: no training, only values."""

    def __init__(self) -> None:
        import tensorflow as tf

        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
        self.strategy = testing.in_process_cluster(1, 2, partitioner)
        with self.strategy.scope():
            self.model = tf.Module()
            self.model.metrics = ()
            self.model.table = tf.Variable(tf.zeros([64, 4]), name="table")
            self.model.optimizer = tf.keras.optimizers.Adam()
            self.model.optimizer.build(list(self.model.table.variables))
            self.step = tf.Variable(0, dtype=tf.int64)

    def set(self, step: int) -> None:
        """Give everything values that tell the step."""
        self.step.assign(step)
        for variable in (*self.model.table.variables, *self.model.optimizer.variables):
            variable.assign(np.full(variable.shape, step, variable.dtype.as_numpy_dtype))

    def values(self) -> set[float]:
        """Return all the values that there are."""
        variables = (*self.model.table.variables, *self.model.optimizer.variables, self.step)
        return {float(value) for variable in variables for value in np.ravel(variable.numpy())}


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "mine")


class Saves(Checkpoints):
    """Remembers what it reported, and writes when the test lets it."""

    def __init__(self, directory: RunDirectory, trained: Trained, lease: Lease | None = None, **settings: Any) -> None:
        self.results: list[tuple[int, str | None]] = []
        self.may_write = threading.Event()
        self.may_write.set()
        config = Config(program="mine:One", **settings)
        state = CheckpointState(trained.model, trained.step, local_run_dir=config.local_run_dir)
        super().__init__(directory, state, config, lease=lease, saved=self._remember)
        save = self._writer.save

        def when_it_may(order: Order) -> int:
            assert self.may_write.wait(60)
            return save(order)

        self._writer.save = when_it_may  # type: ignore[method-assign]

    def _remember(self, step: int, seconds: float, error: str | None) -> None:
        assert seconds >= 0
        self.results.append((step, error))


@pytest.fixture
def slow_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.2)
    return None


def test_a_save_holds_the_values_of_its_moment_though_training_goes_on(
    directory: RunDirectory, trained: Trained
) -> None:
    saves = Saves(directory, trained)
    saves.may_write.clear()
    trained.set(7)
    saves.save()
    assert directory.catalogue.steps() == []
    trained.set(8)
    saves.may_write.set()
    saves.settle()
    assert saves.results == [(7, None)]
    assert directory.catalogue.steps() == [7]
    trained.set(9)
    assert Saves(directory, trained).restore() == 7
    assert trained.values() == {7.0}


def test_a_save_is_named_by_the_step_that_was_copied_with_it(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when calls in flight go on counting."""
    saves = Saves(directory, trained)
    trained.set(7)
    saves.save_and_wait()
    trained.set(8)
    snapshot = saves._state._snapshot
    take = snapshot.copy_variables

    def take_later() -> int:
        trained.set(9)
        step: int = take()
        trained.set(10)
        return step

    monkeypatch.setattr(snapshot, "copy_variables", take_later)
    end = saves.save()
    assert end.result(60) == 9
    assert saves.has(9)
    assert directory.catalogue.steps() == [7, 9]
    assert Saves(directory, trained).restore() == 9
    assert trained.values() == {9.0}


def test_the_future_of_a_save_says_how_it_ended(directory: RunDirectory, trained: Trained) -> None:
    saves = Saves(directory, trained)
    saves.may_write.clear()
    trained.set(7)
    end = saves.save()
    assert not end.done()
    saves.may_write.set()
    assert end.result(60) == 7
    assert saves.save().result(0) == 7
    directory.checkpoints.rename(directory.path / "moved")
    directory.checkpoints.write_text("a file where a directory should be")
    trained.set(8)
    with pytest.raises(SaveFailed, match=r"cannot save \S+/ckpt-8: "):
        saves.save().result(60)


def test_the_step_is_copied_before_all_others(directory: RunDirectory, trained: Trained) -> None:
    """So that each copy has at least what the calls in flight did that the checkpoint's step counts."""
    saves = Saves(directory, trained)
    trained.set(5)
    saves.save_and_wait()
    copy = saves._state._snapshot._copy
    names = {id(capture): placeholder.op.name for capture, placeholder in copy.graph.captures}
    reads = {read.inputs[0].op.name: read for read in copy.graph.get_operations() if read.type == "ReadVariableOp"}
    step = reads.pop(names[id(trained.step.handle)])
    assert len(reads) == len(saves._state._snapshot._pairs) - 1 > 0
    for read in reads.values():
        before = [
            each for control in read.control_inputs for each in (control, *(source.op for source in control.inputs))
        ]
        assert step in before


def test_with_no_shared_path_the_coordinator_writes_all_files(directory: RunDirectory, trained: Trained) -> None:
    def writers(**settings: Any) -> set[str]:
        saves = Saves(directory, trained, **settings)
        saves.save_and_wait()
        operations = saves._state._snapshot._write.graph.get_operations()
        return {each.device for each in operations if each.type in ("SaveV2", "MergeV2Checkpoints")}

    trained.set(7)
    assert writers(local_run_dir=True) == {"/job:chief/replica:0/task:0/device:CPU:0"}
    trained.set(9)
    assert Saves(directory, trained, local_run_dir=True).restore() == 7
    assert trained.values() == {7.0}
    assert {device[:10] for device in writers()} >= {"/job:ps/re"}


def test_saves_are_traced_once_and_their_copies_freed(directory: RunDirectory, trained: Trained) -> None:
    saves = Saves(directory, trained)
    snapshots = []
    for step in (1, 2, 3):
        trained.set(step)
        saves.save_and_wait()
        snapshots.append(saves._state._snapshot)
    assert len(set(map(id, snapshots))) == 1
    copies = [copy for _, copy in snapshots[0]._pairs]
    # Two shards of the table, as many of each moment, and the step, at least.
    assert len(copies) >= 7
    assert {tuple(copy.value().shape) for copy in copies} == {(0,)}
    assert directory.catalogue.steps() == [1, 2, 3]


def test_what_saves_is_traced_before_any_call_is_given(directory: RunDirectory, trained: Trained) -> None:
    from tensorflow.python.eager import context

    saves = Saves(directory, trained)
    saves.prepare()
    before = set(context.context().list_function_names())
    trained.set(5)
    saves.save_and_wait()
    assert directory.catalogue.steps() == [5]
    assert set(context.context().list_function_names()) <= before


def test_a_step_is_saved_once_unless_its_values_have_changed(directory: RunDirectory, trained: Trained) -> None:
    saves = Saves(directory, trained)
    trained.set(5)
    saves.save()
    saves.save_and_wait()
    saves.save()
    assert saves.results == [(5, None)]
    trained.model.table.variables[0].assign(np.full([32, 4], 6.0, np.float32))
    assert not saves.is_final(5)
    saves.save_and_wait(again=True)
    assert saves.results == [(5, None)] * 2
    trained.set(0)
    later = Saves(directory, trained)
    assert later.restore() == 5
    assert trained.values() == {5.0, 6.0}
    assert later.is_final(5)
    assert not later.is_final(4)


def test_a_step_whose_model_has_changed_while_it_was_written_is_saved_again(
    directory: RunDirectory, trained: Trained
) -> None:
    saves = Saves(directory, trained)
    saves.may_write.clear()
    trained.set(5)
    saves.save()
    assert saves.outdate(5)
    assert not saves.outdate(4)
    trained.model.table.variables[0].assign(np.full([32, 4], 6.0, np.float32))
    saves.may_write.set()
    saves.save_and_wait()
    saves.save_and_wait()
    assert saves.results == [(5, None)] * 2
    assert not saves.is_final(5)
    trained.set(0)
    Saves(directory, trained).restore()
    assert trained.values() == {5.0, 6.0}


def test_a_step_is_saved_again_where_its_last_call_was_not_counted_yet(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples are counted when the call's report has come: after its weights were copied with calls in flight."""
    saves, examples = Saves(directory, trained), [72]
    monkeypatch.setattr(saves, "_position", lambda: Position(1, ((0, examples[0]),)))
    trained.set(10)
    saves.save_and_wait()
    examples[0] = 80
    assert saves.has(10)
    assert not saves.has_all(10)
    saves.save_and_wait()
    saves.save_and_wait()
    assert saves.results == [(10, None)] * 2
    assert saves.position(10) == Position(1, ((0, 80),))


@pytest.mark.parametrize("fails", ["write", "write_manifest"])
def test_a_step_that_cannot_be_saved_again_keeps_the_checkpoint_that_it_has(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    saves = Saves(directory, trained)
    trained.set(5)
    saves.save_and_wait()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    trained.model.table.variables[0].assign(np.full([32, 4], 6.0, np.float32))
    with monkeypatch.context() as patched:
        patched.setattr(saves._state._snapshot if fails == "write" else directory.catalogue, fails, full)
        with pytest.raises(Infrastructure, match="No space left"):
            saves.save_and_wait(again=True)
    assert not list(directory.checkpoints.glob("*_new*"))
    trained.set(0)
    assert Saves(directory, trained).restore() == 5
    assert trained.values() == {5.0}


def test_a_save_waits_for_the_one_before(directory: RunDirectory, trained: Trained) -> None:
    saves = Saves(directory, trained)
    for step in (1, 2, 3):
        trained.set(step)
        saves.save()
    saves.settle()
    assert saves.results == [(1, None), (2, None), (3, None)]
    assert [directory.catalogue.check(step) for step in directory.catalogue.steps()] == ["", "", ""]


@pytest.mark.usefixtures("slow_storage")
def test_storage_that_hangs_holds_nothing_up_until_the_users_limit(
    directory: RunDirectory, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    saves = Saves(directory, trained, storage_timeout_seconds=3.0)
    saves.may_write.clear()

    def train() -> None:
        for step in range(1, 1000):
            trained.set(step)
            saves.save()
            time.sleep(0.1)

    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"no checkpoint could be saved in \S+ for \d+ s: \S+/ckpt-1 is not writ"
    ) as end:
        train()
    assert 3.0 < time.monotonic() - began < 30
    assert "storage_timeout_seconds, 3" in str(end.value)
    assert 3 <= len(saves.results) < 100
    assert all("ckpt-1 is not written after" in str(error) for _, error in saves.results)
    assert caplog.text.count("leaving out the checkpoint of step") == len(saves.results)
    saves.may_write.set()
    saves.settle()
    assert directory.catalogue.steps() == [1]
    assert saves.trouble() is None


def test_saves_that_fail_by_the_program_end_the_training(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    saves = Saves(directory, trained, storage_timeout_seconds=900.0)
    monkeypatch.setattr(save_failures, "REFUSED_SECONDS", 0.0)
    refused = tf.errors.InvalidArgumentError(None, None, "Matched devices are 2, must match exactly one device")
    for step, fails in enumerate((True, True, False, True, True, True), 1):
        trained.set(step)
        with monkeypatch.context() as broken:
            if fails:
                broken.setattr(directory.catalogue, "check_room", lambda _: raises(refused))
            saves.save()
            saves.settle()
    assert directory.catalogue.steps() == [3]
    with pytest.raises(UserError, match=r"Matched devices are 2.*3 saves failed so, and not by the storage"):
        saves.save()


def raises(error: Exception) -> None:
    raise error


def test_storage_that_fails_is_complained_about_every_time_until_the_users_limit(
    directory: RunDirectory, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    directory.path.mkdir(parents=True)
    directory.checkpoints.write_text("a file where a directory should be")
    saves = Saves(directory, trained, storage_timeout_seconds=60.0)
    for step in (1, 2):
        trained.set(step)
        saves.save()
        saves.settle()
    assert [step for step, error in saves.results if error] == [1, 2]
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert [message.split(": ")[0] for message in errors] == [
        f"cannot save {directory.catalogue.prefix(1)}",
        f"cannot save {directory.catalogue.prefix(2)}",
    ]
    assert "no checkpoint could be saved in" in str(saves.trouble())
    with pytest.raises(Infrastructure, match="cannot save"):
        saves.save_and_wait()
    directory.checkpoints.unlink()
    saves.save_and_wait()
    assert saves.trouble() is None
    assert directory.catalogue.steps() == [2]


def test_without_patience_the_first_failure_is_the_last(directory: RunDirectory, trained: Trained) -> None:
    directory.path.mkdir(parents=True)
    directory.checkpoints.write_text("a file where a directory should be")
    saves = Saves(directory, trained, storage_timeout_seconds=0)
    trained.set(1)
    saves.save()
    saves.settle()
    trained.set(2)
    with pytest.raises(UserError, match=r"no checkpoint could be saved in \S+/checkpoints for \d+ s"):
        saves.save()


def test_the_users_limit_counts_over_the_turns_of_a_process(directory: RunDirectory, trained: Trained) -> None:
    directory.path.mkdir(parents=True)
    directory.checkpoints.write_text("a file where a directory should be")
    saves = Saves(directory, trained)
    trained.set(1)
    saves.save()
    saves.settle()
    assert directory.failing_since is not None
    directory.failing_since -= 1000.0
    later = Saves(directory, trained, storage_timeout_seconds=900.0)
    with pytest.raises(UserError, match=r"no checkpoint could be saved in \S+ for 1\d\d\d s"):
        later.save_and_wait()
    directory.checkpoints.unlink()
    saves.save_and_wait()
    assert later.trouble() is None


def test_a_save_that_a_ps_ends_says_nothing_of_the_storage(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorflow import errors

    saves = Saves(directory, trained, storage_timeout_seconds=0)
    trained.set(1)
    saves.save_and_wait()
    message = "Socket closed"

    def fail(*arguments: Any) -> None:
        raise errors.UnavailableError(None, None, message)

    monkeypatch.setattr(saves._state._snapshot, "write", fail)
    trained.set(2)
    with pytest.raises(Infrastructure, match="ckpt-2: Socket closed"):
        saves.save_and_wait()
    assert saves.trouble() is None
    # TensorFlow's file system has errors of this kind as well.
    message = f"{directory.catalogue.prefix(2)}.index; No locks available"
    with pytest.raises(UserError, match=r"for \d+ s: .*No locks available"):
        saves.save_and_wait()


def test_a_full_disk_gets_its_room_back(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(directory, trained)
    trained.set(1)
    saves.save_and_wait()
    trained.set(2)

    def full(*arguments: Any, **options: Any) -> None:
        assert list(directory.checkpoints.glob("ckpt-2.data-*"))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(directory.catalogue, "write_manifest", full)
        with pytest.raises(Infrastructure, match=r"ckpt-2: \[Errno 28\] No space left on device"):
            saves.save_and_wait()
    assert not list(directory.checkpoints.glob("*ckpt-2*"))
    assert directory.catalogue.steps() == [1]


def test_the_first_save_is_not_begun_without_room_for_it(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow would break it off half-way, and the calls in flight with it."""
    saves = Saves(directory, trained)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_frsize=1, f_files=0))
    trained.set(1)
    with pytest.raises(Infrastructure, match=r"100 bytes are free, and a checkpoint takes \d{4,}"):
        saves.save_and_wait()
    assert not list(directory.checkpoints.iterdir())


def taken_over(directory: RunDirectory, trained: Trained) -> Saves:
    """Save step 1 with a first lease and step 2 with the next; returns the saves of the first."""
    found = []
    for number in (1, 2):
        lease = Lease(directory, number, 60)
        assert lease._claim()
        found.append(Saves(directory, trained, lease))
        trained.set(number)
        found[-1].save_and_wait()
    return found[0]


def test_who_has_lost_the_lease_saves_nothing_and_removes_nothing(directory: RunDirectory, trained: Trained) -> None:
    saves = taken_over(directory, trained)
    with pytest.raises(Infrastructure, match="lost the lease"):
        saves.save_and_wait()
    assert directory.catalogue.steps() == [1, 2]
    assert [directory.catalogue.check(step) for step in (1, 2)] == ["", ""]


def test_who_can_not_look_after_the_lease_removes_nothing_of_the_next_one(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = taken_over(directory, trained)

    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.run.lease.write_record", fail)
        with pytest.raises(Infrastructure, match="Input/output error"):
            saves.save_and_wait()
    assert directory.catalogue.steps() == [1, 2]
    assert directory.catalogue.check(2) == ""


def test_a_stale_path_is_left_for_the_next_start_to_mount(
    directory: RunDirectory, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real stale handle needs NFS: tests/vms has it."""

    def stale(*arguments: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(directory.path))

    saves = Saves(directory, trained)
    monkeypatch.setattr(directory.catalogue, "check_room", stale)
    trained.set(1)
    saves.save()
    saves.settle()
    trained.set(2)
    with pytest.raises(Infrastructure, match=r"Stale file handle.* must be mounted again"):
        saves.save()
    monkeypatch.undo()
    later = Saves(directory, trained)
    later.save_and_wait()
    assert directory.catalogue.steps() == [2]
