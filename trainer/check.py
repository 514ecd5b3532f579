"""`python -m trainer check`: prove a release before a task runs on it, beside whatever runs. It writes nothing."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.cluster.spec import Cluster
from trainer.config import Config, ConfigError
from trainer.failures import FINISHED, TRY_AGAIN, USER_ERROR, UserError, explain
from trainer.program import load_program
from trainer.run.directory import RunDirectory
from trainer.run.selection import apply_selection
from trainer.runtime import prepare_tensorflow

PARTS = ("release", "program", "run")
# What a task imports before it does anything.
MODULES = ("tensorflow", "trainer.supervisor", "trainer.tasks.server", "trainer.tasks.coordinator")


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "part",
        choices=PARTS,
        help="how far: the release imports; also the settings are valid and their program has its methods; "
        "also the run that is selected, with its program",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the run settings, - for standard input (default: TRAINER_SETTINGS)",
    )
    parser.add_argument(
        "--selection", metavar="JSON", help="what is to be selected, such as {}, instead of selection.json"
    )


def run_check(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Check what `options.part` names and print what was proven; returns the exit code, 78 for the user's error."""
    try:
        config = None if options.part == "release" else read_settings(options, environment)
        if config and environment.get("TF_CONFIG"):
            Cluster.from_tf_config(environment["TF_CONFIG"]).check_strategy(config.strategy)
        if config and options.part == "run":
            RunDirectory(config.shared_dir, config.run).read_claim(config)
        prepare_tensorflow()
        for module in MODULES:
            importlib.import_module(module)
        if config:
            load_program(config.program, config.program_args)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except Exception as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return TRY_AGAIN
    told = config and f", program {config.program}" + (f", run {config.run}" if options.part == "run" else "")
    print(f"proven: release {Path.cwd().name}{told or ''}")
    return FINISHED


def read_settings(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Read the run settings, `-` from standard input; of a run, what is selected is laid over them."""
    path = getattr(options, "settings", None) or environment.get("TRAINER_SETTINGS")
    if not path:
        raise ConfigError("no run settings: pass --settings FILE, or --settings - for standard input")
    if path == "-":
        config = Config.from_dict(read_json(sys.stdin.read(), "the run settings"))
    else:
        config = Config.from_file(Path(path))
    if options.part != "run":
        return config
    selection = None if options.selection is None else read_json(options.selection, "--selection")
    return apply_selection(config, selection)


def read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} must be JSON: {error}") from error
