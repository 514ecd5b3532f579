"""Who gets a run's lease: one process, and after its death or silence another."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.run import records
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease, LeaseHeld, is_gone, read_lease, this_process, touched
from trainer.run.records import write_record

pytestmark = pytest.mark.timeout(30)
SECONDS = 1.0


@pytest.fixture(autouse=True)
def _outlives_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is lost must not end the tests' own process, as it would the coordinator's."""
    monkeypatch.setattr("trainer.run.lease.end_process", lambda message: None)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "mine")


def take(directory: RunDirectory, messages: list[str] | None = None) -> Lease:
    return Lease.acquire(directory, SECONDS, (messages if messages is not None else []).append)


def hold(directory: RunDirectory, epoch: int = 1, **changes: object) -> None:
    """Leave the lease of a process that renews it no more."""
    record = {"epoch": epoch, "holder": "x", "renewed": 3, "released": False, **this_process(), **changes}
    write_record(directory.lease(epoch), record)


def test_a_released_lease_is_free_at_once_and_its_epoch_is_gone(directory: RunDirectory) -> None:
    epochs = []
    for _ in range(3):
        messages: list[str] = []
        lease = take(directory, messages)
        assert lease.held()
        lease.release()
        epochs.append(lease.epoch)
        assert (messages, lease.taken_from, lease.held()) == ([], "", False)
    assert epochs == [1, 2, 3]


def test_a_renewal_in_flight_does_not_take_a_release_back(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save looks after the lease as well, on a path that may be slow."""
    lease = take(directory)
    write_text, begun, goes_on = records.write_text, threading.Event(), threading.Event()

    def write(path: Path, text: str) -> None:
        if not begun.is_set():
            begun.set()
            goes_on.wait(10)
        write_text(path, text)

    monkeypatch.setattr(records, "write_text", write)
    save = threading.Thread(target=lease.held)
    save.start()
    assert begun.wait(10)
    threading.Timer(0.5, goes_on.set).start()
    lease.release()
    save.join(10)
    assert read_lease(directory, 1)["released"]


def test_a_second_one_is_refused_as_soon_as_the_first_renews(directory: RunDirectory) -> None:
    first = take(directory)
    with pytest.raises(LeaseHeld, match=r"mine has a coordinator already: process \d+ on \S+ has renewed .* last 0"):
        take(directory)
    assert first.held()
    first.release()


def test_a_silent_holder_is_followed_after_its_time(directory: RunDirectory) -> None:
    hold(directory, epoch=7, host="elsewhere", pid=4711)
    messages: list[str] = []
    began = time.monotonic()
    lease = take(directory, messages)
    assert SECONDS < time.monotonic() - began < 10 * SECONDS
    assert messages[0].startswith("process 4711 on elsewhere may still be the coordinator of run mine")
    assert (lease.epoch, lease.taken_from) == (8, "process 4711 on elsewhere")
    lease.release()


@pytest.mark.parametrize("slow", [1, 2])
def test_a_look_that_hangs_with_the_storage_tells_nothing_of_the_holder(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """Nor could the holder renew its lease meanwhile: it does so a moment after that."""
    hold(directory, host="elsewhere")
    looks: list[int] = []

    def look(where: RunDirectory, epoch: int) -> int:
        looks.append(touched(where, epoch))
        if len(looks) == slow:
            time.sleep(2 * SECONDS)
        if len(looks) == slow + 1:
            hold(directory, host="elsewhere", renewed=4)
        return looks[-1]

    monkeypatch.setattr("trainer.run.lease.touched", look)
    with pytest.raises(LeaseHeld):
        take(directory)


def test_a_holder_of_this_host_that_is_gone_is_followed_at_once(directory: RunDirectory) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    hold(directory, pid=gone.pid)
    messages: list[str] = []
    take(directory, messages).release()
    assert messages == []


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({}, False),
        ({"started": 1}, True),
        ({"host": "other", "started": 1}, False),
        ({"boot": "b", "started": 1}, False),
    ],
)
def test_only_a_process_of_this_host_and_boot_is_known_to_be_gone(changes: dict, gone: bool) -> None:
    assert is_gone({**this_process(), **changes}) is gone


def test_a_lease_that_was_cut_off_is_waited_for_and_followed(directory: RunDirectory) -> None:
    directory.path.mkdir(parents=True)
    directory.lease(4).touch()
    lease = take(directory)
    assert lease.epoch == 5
    lease.release()


def test_of_many_that_want_it_one_gets_it(directory: RunDirectory) -> None:
    hold(directory, host="elsewhere")
    got: list[Lease] = []
    refused: list[str] = []
    start = threading.Barrier(8)

    def want() -> None:
        start.wait()
        try:
            got.append(take(directory))
        except LeaseHeld as error:
            refused.append(str(error))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    assert got[0].held()
    got[0].release()


def test_a_thawed_holder_finds_out_and_changes_nothing(directory: RunDirectory) -> None:
    old = take(directory)
    lost = threading.Event()
    messages: list[str] = []
    old.on_lost = lambda message: (messages.append(message), lost.set())  # type: ignore[func-returns-value]
    with old._writing:  # frozen
        new = take(directory)
    assert lost.wait(5 * SECONDS)
    assert messages[0].startswith("lost the lease of run mine: process")
    assert not old.held()
    assert new.held()
    assert read_lease(directory, directory.lease_epoch())["holder"] == new._record["holder"]
    new.release()


def test_who_decided_long_ago_does_not_get_an_epoch_that_has_passed(directory: RunDirectory) -> None:
    hold(directory, epoch=3)
    late = Lease(directory, 2, SECONDS)
    assert not late._claim()
    assert directory.lease_epoch() == 3
    assert not directory.lease(2).exists()


def test_storage_that_fails_at_a_renewal_does_not_lose_the_lease(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = take(directory)
    failed = threading.Event()

    def fail(*arguments: object) -> None:
        failed.set()
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.run.lease.write_record", fail)
        assert failed.wait(5 * SECONDS)
        time.sleep(SECONDS / 4)
    assert "cannot renew the lease of run mine, trying again: [Errno 30] Read-only" in caplog.text
    assert lease.held()
    lease.release()


def test_a_full_disk_does_not_lose_the_lease(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    lease = take(directory)
    with monkeypatch.context() as patched:
        patched.setattr("trainer.run.lease.write_record", fail)
        with pytest.raises(LeaseHeld):
            take(directory)
        assert lease.held()
        hold(directory, epoch=5, started=1)
        with pytest.raises(OSError, match="No space left"):
            take(directory)
    assert directory.lease_epoch() == 5
    lease.release()


def test_taking_the_lease_removes_what_a_death_in_mid_save_left(directory: RunDirectory) -> None:
    hold(directory, started=1)
    directory.checkpoints.mkdir()
    (directory.checkpoints / "ckpt-60.index").touch()
    take(directory).release()
    assert list(directory.checkpoints.iterdir()) == []
    assert sorted(path.name for path in directory.path.glob("lease-*")) == ["lease-2.json"]


def test_a_lease_is_newer_than_every_checkpoint_that_lies_there(directory: RunDirectory) -> None:
    directory.checkpoints.mkdir(parents=True)
    (directory.checkpoints / "ckpt-3.index").write_text("from another run")
    directory.catalogue.write_manifest(3, 9, "2.21")
    lease = take(directory)
    assert lease.epoch == 10
    lease.release()


def test_who_lost_the_lease_learns_it_on_a_full_disk_too(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later holder has removed the file whose time would be renewed."""

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    old = Lease(directory, 1, SECONDS)
    assert old._claim()
    hold(directory, epoch=2)
    directory.clear_up(2)
    monkeypatch.setattr("trainer.run.lease.write_record", fail)
    assert not old.held()
