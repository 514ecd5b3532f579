"""A new run that begins from a checkpoint of another: step, weights and optimizer. Needs no TensorFlow.

The checkpoint's files are linked, or copied where the file system has no links, so that the new run has one of its own
to restore even if the other run is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.settings.config import ConfigError
from trainer.core.settings.formats import SOURCE
from trainer.run.directory import RunDirectory, run_directories
from trainer.run.records import write_record


def begin_from(
    shared_dir: Path, run: str, source: str, program: str | None = None, program_args: Mapping[str, Any] | None = None
) -> bool:
    """Make the run `run` with the checkpoint that `source`, RUN@STEP, names; returns False when that was done before.

    The new run keeps the program of the other, or gets `program`. It keeps the other's parameters where it has its
    program, and gets `program_args` over them. The other stays as it is. Raises ConfigError.
    """
    found = SOURCE.fullmatch(source)
    if found is None:
        raise ConfigError(f"--from {source!r}: expected RUN@STEP, such as digits-1@2000; `checkpoints` lists them")
    old, new, step = RunDirectory(shared_dir, found["run"]), RunDirectory(shared_dir, run), int(found["step"])
    try:
        there, record = new.read_settings(), old.read_settings()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if there is not None and there.get("from") == source:
        return False
    if there is not None or [each for each in new.catalogue.steps() if each != step]:
        raise ConfigError(f"run {run} exists already and did not begin from {source}: choose another --run NAME")
    if record is None:
        names = ", ".join(each.run for each in run_directories(shared_dir)) or "none"
        raise ConfigError(f"--from {source}: there is no run {old.run} in {shared_dir}; the runs are {names}")
    check_checkpoint(old, step, source)
    try:
        new.catalogue.adopt(old.catalogue, step)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--from {source}: run {old.run} has removed or replaced that checkpoint meanwhile ({error}): "
            "choose one again; `checkpoints` lists them"
        ) from error
    # Last: a run without this record is begun again.
    kept = record.get("program_args", {}) if program in (None, record["program"]) else {}
    began = {"program": program or record["program"], "program_args": {**kept, **(program_args or {})}}
    write_record(new.settings, {**began, "created": time.time(), "from": source})
    return True


def check_checkpoint(old: RunDirectory, step: int, source: str) -> None:
    """Raise ConfigError unless a run has a good checkpoint of this step."""
    steps = old.catalogue.steps()
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--from {source}: run {old.run} has no checkpoint of step {step}; it has {listed}")
    if wrong := old.catalogue.check(step):
        raise ConfigError(f"--from {source}: that checkpoint is bad, {wrong}: choose another one")
