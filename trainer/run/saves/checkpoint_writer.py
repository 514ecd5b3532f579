"""Writes a checkpoint with its manifest, so that it counts as a whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core.failures import first_line, is_stale
from trainer.run.catalogue import Catalogue
from trainer.run.lease import Lease, LostLease, check_lease
from trainer.run.records import make_directory
from trainer.run.retention import Retention, is_sound
from trainer.run.saves.save_failures import SaveFailed, is_of_a_server, is_of_the_program

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Order:
    """A save to be written: of which step, by what, and what its manifest says beside the files."""

    step: int
    write: Callable[[str], object]
    """Writes the files of a checkpoint with this prefix."""
    began: float
    """When the save began (of time.monotonic)."""
    replaces: bool
    """Whether there is a good checkpoint of this step, which stays until the new one is complete."""
    final: bool
    """Whether it is what the training's end has made of the weights."""
    first_bytes: int
    """What the run's first save takes; 0 of a later one."""
    numbers: Mapping[str, float]
    """What the training told last, by name."""
    position: dict[str, Any] | None
    """How far the data are read, as a record."""


class CheckpointWriter:
    """Writes checkpoints into a catalogue, as the lease's holder; its methods may be called by a thread."""

    def __init__(
        self,
        catalogue: Catalogue,
        lease: Lease | None,
        kept: Retention,
        on_saved: Callable[[int, float, str | None], None],
    ) -> None:
        """`on_saved` is called for each save that ends: its step, how long it took, and what went wrong."""
        self._catalogue = catalogue
        self._lease = lease
        self._kept = kept
        self.on_saved = on_saved

    def save(self, order: Order) -> int:
        """Write ckpt-<step> with its manifest, and tell how that ended; returns the step, raises SaveFailed."""
        catalogue, step = self._catalogue, order.step
        prefix = catalogue.prefix(step)
        try:
            self._write(order)
        except Exception as error:
            why = first_line(error)
            log.error("cannot save %s: %s", prefix, why)
            if not isinstance(error, LostLease):
                # What there is of it would only make a full disk fuller. What failed may have hidden who has the run.
                with contextlib.suppress(OSError, LostLease):
                    check_lease(self._lease)
                    catalogue.finish_replacements() if order.replaces else catalogue.remove(step)
            self.on_saved(step, time.monotonic() - order.began, why)
            of_program = is_of_the_program(error)
            of_storage = not is_of_a_server(error) and not of_program
            raise SaveFailed(
                prefix, why, of_storage=of_storage, stale=is_stale(error), of_program=of_program
            ) from error
        log.info("saved %s in %.2f s", prefix, time.monotonic() - order.began)
        self.on_saved(step, time.monotonic() - order.began, None)
        self._prune()
        return step

    def _write(self, order: Order) -> None:
        import tensorflow as tf

        catalogue, step = self._catalogue, order.step
        check_lease(self._lease)
        make_directory(catalogue.path)
        catalogue.finish_replacements()
        catalogue.check_room(order.first_bytes)
        if not order.replaces:
            catalogue.remove(step)
        order.write(catalogue.prefix(step, replacement=order.replaces))
        check_lease(self._lease)
        catalogue.write_manifest(
            step,
            self._lease.epoch if self._lease else 0,
            tf.__version__,
            replacement=order.replaces,
            final=order.final,
            loss=order.numbers.get("loss"),
            sound=is_sound(order.numbers),
            position=order.position,
        )
        catalogue.finish_replacements()

    def _prune(self) -> None:
        try:
            check_lease(self._lease)  # the files may have taken long to come to the disk
            self._catalogue.prune(self._kept)
            self._catalogue.list_for_tensorflow()
        except (LostLease, OSError, ValueError) as error:
            log.error("cannot remove old checkpoints: %s", error)
