"""What callbacks remember, as it was at an epoch's end: <run>/callbacks/<step>.json, and their arrays beside it.

The numbers of an epoch whose callbacks have not heard its end yet are in numbers.json.

A record is read where a checkpoint, or what a coordinator left on the ps, takes the run back to that step or a later
one. Arrays (the best weights) are named by their content, so that one that doesn't change is written once.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.run.directory import RunDirectory
from trainer.run.records import make_directory, names_in, numbers_of, read_record, readable, sync, write_record

log = logging.getLogger(__name__)
RECORD = re.compile(r"(\d+)\.json")
ARRAY = re.compile(r"\.?[0-9a-f]{64}\.npy")  # also what a process leaves that is killed while it writes
NUMBERS = "numbers.json"
WRITTEN_SECONDS = 30.0


class NotStorable(TypeError):
    """A value is none that a record can hold."""


class CallbackStore:
    """The records of one run. Only the member that leads writes them."""

    def __init__(self, directory: RunDirectory, post: Callable[[Callable[[], None]], object], leads: bool) -> None:
        """`post` says on which thread they are written."""
        self._path = directory.callbacks
        self._catalogue = directory.catalogue
        self._post = post
        self._leads = leads
        self._written = threading.Event()
        self._written.set()

    def newest(self, step: int) -> int:
        """Return the step of the newest record that is not of a later one, -1 without any; the later ones go."""
        if not self._leads:
            return -1
        if not self._written.wait(WRITTEN_SECONDS):
            log.warning("%s is slow: what callbacks remembered last may be lost", self._path)
        steps = self._steps()
        for later in (one for one in steps if one > step):
            self._record(later).unlink(missing_ok=True)
        return max((one for one in steps if one <= step), default=-1)

    def read(self, step: int) -> dict[str, Any] | None:
        """Return the record of exactly this step; None, and a warning, when it can't be read."""
        try:
            record = read_record(self._record(step))
            if record is not None:
                record["callbacks"] = {
                    key: {name: self._decode(value) for name, value in values.items()}
                    for key, values in record["callbacks"].items()
                }
            return record
        except (OSError, EOFError, ValueError, KeyError) as error:  # an empty array is the end of a file
            log.warning("what the callbacks remembered is lost: %s", error)
            return None

    def write(
        self,
        step: int,
        ended: int,
        callbacks: dict[str, dict[str, Any]],
        arrays: dict[str, Any],
        rates: Sequence[float] = (),
    ) -> None:
        """Keep encoded values by callback and attribute, and the arrays that they name.

        `ended` is the number of steps that were asked for when a callback has ended the training, else 0. `rates` are
        the learning rates that the next epoch's beginning finds.
        """
        if self._leads:
            self._written.clear()
            record = {"step": step, "ended": ended, "rates": list(rates), "callbacks": callbacks}
            self._post(partial(self._write, record, arrays))

    def note(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the training's numbers of an epoch that ends at this step, for a process that tells callbacks again."""
        if self._leads:
            self._post(partial(self._write_numbers, {"step": step, "numbers": numbers}))

    def noted(self, step: int) -> dict[str, float]:
        """Return the numbers of the epoch that ends at this step; none where they are lost."""
        record = readable(self._path / NUMBERS)
        return numbers_of(record["numbers"]) if record.get("step") == step else {}

    def _write_numbers(self, record: dict[str, Any]) -> None:
        try:
            write_record(self._path / NUMBERS, record)
        except OSError as error:
            log.error("cannot keep the numbers of an epoch: %s", error)

    def _write(self, record: dict[str, Any], arrays: dict[str, Any]) -> None:
        try:
            make_directory(self._path)
            new = [name for name in arrays if not (self._path / name).exists()]
            for name in new:
                write_array(self._path / name, arrays[name])
            if new:
                sync(self._path)  # before a record names them
            write_record(self._record(record["step"]), record)
            self._prune()
        except OSError as error:
            log.error("cannot keep what the callbacks remember: %s", error)
        finally:
            self._written.set()

    def _prune(self) -> None:
        """Remove the records that no checkpoint needs, and the arrays that no record names."""
        steps = self._steps()
        oldest = min(self._catalogue.steps(), default=0)
        needed = max((one for one in steps if one <= oldest), default=0)
        for step in (one for one in steps if one < needed):
            self._record(step).unlink(missing_ok=True)
        kept = "".join(self._record(one).read_text(encoding="utf-8") for one in self._steps())
        for name in names_in(self._path):
            if ARRAY.fullmatch(name) and name not in kept:
                (self._path / name).unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        return sorted(int(match[1]) for name in names_in(self._path) if (match := RECORD.fullmatch(name)))

    def _record(self, step: int) -> Path:
        return self._path / f"{step}.json"

    def _decode(self, value: object) -> Any:
        if isinstance(value, list):
            return [self._decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((kind, held),) = value.items()
        if kind == "array":
            return np.load(self._path / held, allow_pickle=False)
        if kind == "float":
            return float(held)
        if kind == "scalar":
            return np.dtype(held[0]).type(held[1])
        if kind == "dict":
            return {self._decode(key): self._decode(one) for key, one in held}
        return {"tuple": tuple, "set": set}[kind](self._decode(held))


def encode(value: Any, arrays: dict[str, Any]) -> Any:
    """Return a value as JSON can say it, and put the arrays that it names into `arrays`; raises NotStorable."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}  # for which JSON has no word
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": [value.dtype.str, value.item()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        content = np.array(value, order="C")  # a copy: it is written later, when the callback may have changed its own
        text = f"{content.dtype.str} {value.shape} ".encode()
        name = f"{hashlib.sha256(text + content.tobytes()).hexdigest()}.npy"
        arrays[name] = content
        return {"array": name}
    if type(value) is list:
        return [encode(one, arrays) for one in value]
    if type(value) in (tuple, set):
        return {type(value).__name__: [encode(one, arrays) for one in value]}
    if type(value) is dict:
        return {"dict": [[encode(key, arrays), encode(one, arrays)] for key, one in value.items()]}
    raise NotStorable(f"{type(value).__name__} is no number, text, list or array")


def write_array(path: Path, array: Any) -> None:
    """Write an array in one step."""
    new = path.with_name(f".{path.name}")
    try:
        with new.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)  # which a full disk needs
