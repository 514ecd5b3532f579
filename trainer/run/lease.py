"""The lease on the shared path: one process at a time, on any host, coordinates a run or keeps a journal.

Each holder has a file of its own, lease-<epoch>.json, that it alone writes. To take the lease is to create the file of
the next epoch, which the file system grants to one process only (docs/decisions/0040).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.core.failures import TRY_AGAIN, Infrastructure
from trainer.run.directory import LeasedDirectory
from trainer.run.records import make_directory, readable, write_record

log = logging.getLogger(__name__)
RENEWALS = 4
LOOKS = 20
RELEASE_SECONDS = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class LeaseHeld(Infrastructure):
    """Another process has the lease, and lives."""


class LostLease(Infrastructure):
    """The directory is another process's by now."""


class Lease:
    """The right to write a directory, renewed by a thread until it is released."""

    def __init__(self, directory: LeasedDirectory, epoch: int, seconds: float, taken_from: str = "") -> None:
        """Hold the epoch that `acquire` has claimed; `taken_from` says whose lease was not released."""
        self.epoch = epoch
        self.taken_from = taken_from
        self.on_lost: Callable[[str], None] = end_process
        self._directory = directory
        self._seconds = seconds
        self._record = {"epoch": epoch, "holder": uuid.uuid4().hex, **this_process(), "renewed": 0, "released": False}
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    @classmethod
    def acquire(cls, directory: LeasedDirectory, seconds: float, waiting: Callable[[str], None]) -> Lease:
        """Take the lease; raises LeaseHeld as soon as its holder is seen to renew it.

        A holder that was a process of this host and is gone is followed at once, any other after no renewal was seen
        for so many seconds by this process's own clock. `waiting` is told meanwhile for whom.
        """
        watched: tuple[Any, ...] | None = None
        since = looked = time.monotonic()
        while True:
            began = time.monotonic()
            epoch = directory.lease_epoch()
            record = read_lease(directory, epoch)
            seen = (epoch, record.get("holder"), touched(directory, epoch))
            now = time.monotonic()
            since += now - began  # while a look hangs with the storage, no holder can renew its lease
            free = is_free(epoch, record)
            if watched is not None and seen != watched and not free:
                raise LeaseHeld(
                    f"{directory.leased} has a {directory.role} already: {holder(record)} "
                    f"has renewed its lease within the last {now - looked:.1f} s"
                )
            if watched is None:
                watched, since = seen, now
            if free or now - since > seconds:
                taken_from = holder(record) if epoch and not record.get("released") else ""
                # Beyond every checkpoint's as well: one of another run may have been put there.
                lease = cls(directory, max(epoch, directory.written_epoch()) + 1, seconds, taken_from)
                if lease._claim():
                    lease._begin()
                    return lease
                watched = None  # another was faster, which will be seen to renew it
                continue
            left = seconds - now + since
            waiting(
                f"{holder(record)} may still be the {directory.role} of {directory.leased}: looking for {left:.0f} s"
            )
            looked = now
            time.sleep(min(1.0, seconds / LOOKS))

    def held(self) -> bool:
        """Renew the lease; returns whether it is still this process's. Raises OSError when the storage fails."""
        with self._writing:
            if self._ended.is_set():
                return False
            self._write()
            return self._is_newest()

    def release(self) -> None:
        """Give the lease back, in a few seconds even if the storage hangs."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(RELEASE_SECONDS)

    def _claim(self) -> bool:
        """Create this epoch's file; returns False when another process has this epoch or a later one."""
        path = self._directory.lease(self.epoch)
        make_directory(path.parent)
        try:
            path.open("x").close()
        except FileExistsError:
            return False
        try:
            write_record(path, self._record)
        except OSError:
            path.unlink(missing_ok=True)  # or the present holder would take it for its successor's
            raise
        if self._is_newest():
            return True
        # Decided long ago: meanwhile others took the lease, and removed the file that stood in the way.
        path.unlink(missing_ok=True)
        return False

    def _begin(self) -> None:
        self._thread.start()
        if self.taken_from:
            log.warning("took over the lease of %s from %s", self._directory.leased, self.taken_from)
        try:
            self._directory.clear_up(self.epoch)
        except OSError:
            self.release()
            raise

    def _write(self) -> None:
        path = self._directory.lease(self.epoch)
        self._record["renewed"] += 1
        try:
            write_record(path, self._record)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(FileNotFoundError):  # a later holder has removed it
                os.utime(path)  # which needs no room

    def _is_newest(self) -> bool:
        # On NFS it is the writing before that brings what the client knows of the directory up to date.
        return self._directory.lease_epoch() == self.epoch

    def _keep(self) -> None:
        while not self._ended.wait(self._seconds / RENEWALS):
            try:
                held = self.held()
            except OSError as error:
                log.error("cannot renew the lease of %s, trying again: %s", self._directory.leased, error)
                continue
            if not held and not self._ended.is_set():
                try:
                    other = holder(read_lease(self._directory, self._directory.lease_epoch()))
                except OSError:
                    other = f"another {self._directory.role}"
                self.on_lost(f"lost the lease of {self._directory.leased}: {other} has it")
                return
        self._record["released"] = True
        try:
            with self._writing:  # a renewal in flight would take it back
                self._write()
        except OSError as error:
            log.warning("cannot release the lease of %s: %s", self._directory.leased, error)


def check_lease(lease: Lease | None) -> None:
    """Raise LostLease when the run has become another coordinator's, as while this process was frozen."""
    if lease is not None and not lease.held():
        raise LostLease("lost the lease: another coordinator has this run")


def end_process(message: str) -> None:
    """End this process at once, which must not write any more."""
    log.error("%s", message)
    os._exit(TRY_AGAIN)


def read_lease(directory: LeasedDirectory, epoch: int) -> dict[str, Any]:
    """Return a lease's record; nothing when there is none, or none that can be understood."""
    return readable(directory.lease(epoch))


def touched(directory: LeasedDirectory, epoch: int) -> int:
    """Return when a lease was renewed, by a clock that only tells one time from another."""
    try:
        return directory.lease(epoch).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def holder(record: dict[str, Any]) -> str:
    return f"process {record.get('pid', '?')} on {record.get('host', 'an unknown host')}"


def this_process() -> dict[str, Any]:
    """Name this process so that another one of the same host can tell whether it is gone."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot(), "pid": pid, "started": started(pid)}


def is_gone(record: dict[str, Any]) -> bool:
    """Return whether a lease's holder was a process of this host, since its last start, and exists no more."""
    if (record.get("host"), record.get("boot")) != (socket.gethostname(), boot()):
        return False
    since = started(record["pid"])
    return since != record["started"] and not (since is None and is_hidden(int(record["pid"])))


def is_hidden(pid: int) -> bool:
    """Return whether a process of this user's is there that /proc does not show: one of another unit (ProtectProc=)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return not Path(f"/proc/{pid}").exists()


def is_free(epoch: int, record: dict[str, Any]) -> bool:
    """Return whether a run with this lease is known to have no coordinator; one that died elsewhere may still live."""
    return not epoch or bool(record.get("released")) or is_gone(record)


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def started(pid: int) -> int | None:
    """Return when a process was started (clock ticks since the boot), or None when there is none that could run."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(rest[18])
