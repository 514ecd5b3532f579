"""Where a supervisor's children work: in the release that is current, as long as this process's own kit is in it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.process.warm_start import import_from
from trainer.run.release import same_kit

log = logging.getLogger(__name__)
STDERR = 2


class Workplace:
    """The directory of the next child."""

    def __init__(self, release: Path | None) -> None:
        """`release` is the link to the current release, and this process works in a release too; None elsewhere."""
        self._release = release
        self._home = self._place = Path.cwd()  # where this process's own modules come from, and where children work
        self._is_read = not is_shut(STDERR)
        self._temporary = [] if release is None else [place for place in temporary_places() if not is_removed(place)]

    @property
    def is_release(self) -> bool:
        """Whether this is a host's release, and no directory of a user's own."""
        return self._release is not None

    def follow(self, task: str) -> bool:
        """Have the next child work in the release that is current; returns whether this process can have one there."""
        if self._release is None:
            return True
        if removed := list(filter(is_removed, self._temporary)):
            log.warning("%s: %s of this unit was removed: leaving it to systemd, which makes another", task, removed[0])
            return False
        if self._is_read and is_shut(STDERR):
            log.warning("%s: nothing reads what it prints: leaving it to systemd, which asks the journal again", task)
            return False
        current = self._release.resolve()
        if current != self._home and not same_kit(self._home, current):
            log.info("%s needs another kit or environment: leaving it to systemd", task)
            return False
        if current != self._place:
            log.info("%s goes on with release %s", task, current.name)
        self._place = current
        return True

    def enter(self) -> None:
        """Work there, in a process that was forked."""
        if self._release is not None:
            os.chdir(self._place)
            import_from([str(self._place) if each == str(self._home) else each for each in sys.path])

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be there for a moment, so that a process that is started has it as its own directory."""
        os.chdir(self._place)
        try:
            yield
        finally:
            os.chdir(self._home)


def temporary_places() -> set[str]:
    """Return where this process's children put temporary files."""
    return {"/tmp", os.environ.get("TMPDIR", "/tmp")}


def is_removed(place: str) -> bool:
    """Whether a directory takes no file since it was removed, as by `rm -r /tmp/*` below the unit's own /tmp.

    One that is full is there.
    """
    try:
        tempfile.TemporaryFile(dir=place).close()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def is_shut(descriptor: int) -> bool:
    """Whether nothing reads what is written there any more, as after a stop of the journal."""
    looks = select.poll()
    looks.register(descriptor, 0)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in looks.poll(0))
