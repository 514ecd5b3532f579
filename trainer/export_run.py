"""`python -m trainer export`: export a run's newest checkpoint, after its end to `export`, else to `exports/<step>`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR, Infrastructure, UserError, explain
from trainer.core.program import load_program
from trainer.core.runtime import prepare_tensorflow
from trainer.core.settings.config import ConfigError
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import is_free, read_lease
from trainer.telemetry.status import read_status

TRIES = 3
GONE = (
    "the checkpoint of step {} was removed while it was exported, as those before it: set a larger checkpoints_kept, "
    "or checkpoint_seconds"
)


def run_export(options: argparse.Namespace, directory: RunDirectory) -> int:
    """Export the run's newest checkpoint and print where the SavedModel is; returns the exit code."""
    try:
        step, program, arguments, trains = find(directory)
        os.environ.setdefault("DATA_DIR", str(directory.path.parents[1] / "data"))  # as a task has it
        prepare_tensorflow()
        from trainer.training.exports.export import export_now

        if trains or options.changes:
            return answer(options, directory.run, *export_beside(directory, step, program, arguments, options.changes))
        error = export_now(lambda: load_program(program, arguments, evaluates=False), directory, step)
        if error:
            raise UserError(error)
    except (ConfigError, UserError, ValueError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return USER_ERROR
    except (OSError, Infrastructure) as wrong:
        print(f"error: {explain(wrong)}", file=sys.stderr)
        return TRY_AGAIN
    status = read_status(directory)
    status.export = str(directory.export)
    if directory.read_state()["state"] == RunState.FINISHED:  # else the message says why the run failed
        status.state, status.phase, status.message = RunState.FINISHED, None, ""
    status.write(directory)
    return answer(options, directory.run, step, str(directory.export))


def export_beside(
    directory: RunDirectory, step: int, program: str, arguments: dict[str, Any], changes: bool
) -> tuple[int, str]:
    """Export to `exports`, and take the next checkpoint where this one is removed meanwhile; returns step and place."""
    from trainer.training.exports.export import export_version

    for _ in range(TRIES):
        try:
            loaded = load_program(program, arguments, evaluates=False)
            return step, export_version(loaded, directory, step, changes)
        except Exception:
            if step in directory.catalogue.steps():
                raise
        gone, step = step, directory.catalogue.newest() or step
    raise UserError(GONE.format(gone))


def answer(options: argparse.Namespace, run: str, step: int, place: str) -> int:
    """Say where the export is."""
    record = {"run": run, "step": step, "export": place}
    print(json.dumps(record) if options.json else f"exported step {step} of {run} to {place}")
    return FINISHED


def find(directory: RunDirectory) -> tuple[int, str, dict[str, Any], bool]:
    """Return the newest checkpoint's step, the run's program, its arguments, and whether it trains.

    Raises ConfigError.
    """
    claim = directory.read_settings()
    if claim is None:
        raise ConfigError(f"there is no run {directory.run} in {directory.path.parent}: fab runs lists them")
    state, epoch = read_status(directory).state, directory.lease_epoch()
    # A coordinator that was killed, as one whose export hung, could not say that it is gone.
    trains = state in (RunState.TRAINING, RunState.WAITING) and not is_free(epoch, read_lease(directory, epoch))
    step = directory.catalogue.newest()
    if step is None:
        raise ConfigError(f"run {directory.run} has no checkpoint in {directory.checkpoints}")
    return step, str(claim["program"]), dict(claim.get("program_args", {})), trains
