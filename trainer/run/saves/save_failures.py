"""Saves that have failed: by what, for how long, and when that ends the training."""

from __future__ import annotations

import errno
import os
import time

from trainer.core.failures import Infrastructure, StalePath, UserError, is_infrastructure
from trainer.run.directory import RunDirectory

# A save that fails by what the program has made of TensorFlow or of its model would fail so for ever.
MAX_REFUSALS = 3
# A ps that is just being replaced may refuse several in a row.
REFUSED_SECONDS = 30.0
# TensorFlow's file system says "<path>; <what the system says>", often as an error of no particular kind.
STORAGE = tuple(f"; {os.strerror(number)}" for number in errno.errorcode)


class SaveFailed(Infrastructure):
    """A checkpoint that was asked for is not on disk: the storage has failed it, or a server."""

    def __init__(
        self, prefix: str, why: str, *, of_storage: bool = True, stale: bool = False, of_program: bool = False
    ) -> None:
        super().__init__(f"cannot save {prefix}: {why}")
        self.why = why
        self.of_storage = of_storage
        self.of_program = of_program
        self.stale = stale
        self.at = time.monotonic()


class SaveFailures:
    """How the saves of a run have failed since one was last written."""

    def __init__(self, directory: RunDirectory, limit_seconds: float) -> None:
        """`limit_seconds` is how long saves may fail by the storage until the training ends."""
        self._directory = directory
        self._limit = limit_seconds
        self.last: SaveFailed | None = None
        """The last failure; None once a save is written."""
        self._refused = 0
        self._refused_since = 0.0
        self._beyond_limit = False

    def written(self) -> None:
        """A save is on disk."""
        self.last, self._directory.failing_since = None, None
        self._refused = 0

    def add(self, began: float, failure: SaveFailed) -> None:
        """A save that began then (of time.monotonic) has failed."""
        self._refused = self._refused + 1 if failure.of_program else 0
        self._refused_since = self._refused_since if self._refused > 1 else failure.at
        self.last = failure
        if failure.of_storage:
            self._directory.failing_since = self._directory.failing_since or began
            self._beyond_limit = failure.at - self._directory.failing_since > self._limit

    def check(self) -> None:
        """Raise UserError where saves have failed for too long, or would fail for ever; StalePath for a lost mount."""
        lasts = self.last is not None and self.last.at - self._refused_since >= REFUSED_SECONDS
        if self._refused >= MAX_REFUSALS and lasts:
            raise UserError(f"{self.last}; {self._refused} saves failed so, and not by the storage")
        if self.last is not None and self.last.stale:
            raise StalePath(f"{self.trouble()}; the path must be mounted again")
        if self._directory.failing_since is not None and self._beyond_limit:
            raise UserError(f"{self.trouble()}; that is longer than storage_timeout_seconds, {self._limit:g}")

    def trouble(self) -> str | None:
        """Say why and since when checkpoints can't be saved, or nothing."""
        if self._directory.failing_since is None:
            return None
        seconds = time.monotonic() - self._directory.failing_since
        why = self.last.why if self.last else "nor could it in the generation before"
        return f"no checkpoint could be saved in {self._directory.catalogue.path} for {seconds:.0f} s: {why}"


def is_of_a_server(error: Exception) -> bool:
    """Return whether a save failed with a ps, which training does without, rather than with the storage."""
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError) or not is_infrastructure(error):
        return False
    return not any(text in str(error) for text in STORAGE)


def is_of_the_program(error: Exception) -> bool:
    """Return whether a save failed by what the program has made of TensorFlow or of its model."""
    import tensorflow as tf

    kinds = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, TypeError, ValueError)
    if not isinstance(error, (*kinds, NotImplementedError)) or is_infrastructure(error):
        return False
    return not any(text in str(error) for text in STORAGE)
