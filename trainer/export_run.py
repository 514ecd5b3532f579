"""`python -m trainer export`: export the newest checkpoint of a run that has ended, on its own or after a mend."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from trainer.core.config import Config, ConfigError
from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR, Infrastructure, UserError, explain
from trainer.core.program import load_program
from trainer.core.runtime import prepare_tensorflow
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import is_free, read_lease
from trainer.run.records import read_record
from trainer.telemetry.status import read_status


def run_export(options: argparse.Namespace, config: Config) -> int:
    """Export the run's newest checkpoint and print where the SavedModel is; returns the exit code."""
    directory = RunDirectory(config.shared_dir, config.run)
    try:
        step, program, arguments = find(directory)
        prepare_tensorflow()
        from trainer.training.export import export_now

        error = export_now(lambda: load_program(program, arguments), directory, step)
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
    record = {"run": config.run, "step": step, "export": str(directory.export)}
    print(json.dumps(record) if options.json else f"exported step {step} of {config.run} to {directory.export}")
    return FINISHED


def find(directory: RunDirectory) -> tuple[int, str, dict[str, Any]]:
    """Return the newest checkpoint's step, the run's program and its arguments; raises ConfigError."""
    claim = read_record(directory.settings)
    if claim is None:
        raise ConfigError(f"there is no run {directory.run} in {directory.path.parent}: fab runs lists them")
    state, epoch = read_status(directory).state, directory.lease_epoch()
    # A coordinator that was killed, as one whose export hung, could not say that it is gone.
    if state in (RunState.TRAINING, RunState.WAITING) and not is_free(epoch, read_lease(directory, epoch)):
        raise ConfigError(f"run {directory.run} is {state}: it exports its model at its end; or stop it first")
    step = directory.catalogue.newest()
    if step is None:
        raise ConfigError(f"run {directory.run} has no checkpoint in {directory.checkpoints}")
    return step, str(claim["program"]), dict(claim.get("program_args", {}))
