"""`python -m trainer backup`, `restore-run`, `clone-run`, `delete-run`, `prune`: the upkeep of whole runs.

Each prints how far it is, a JSON object on a line, and at last its answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR, UserError, explain
from trainer.core.settings.config import Config, ConfigError
from trainer.run import upkeep
from trainer.run.copies import OnBytes
from trainer.run.records import to_json

EVERY_SECONDS = 0.5
HELP = {
    "backup": "copy a run to a folder of this host, also one that trains",
    "restore-run": "make a run of a copy",
    "clone-run": "make a second run that goes on where a first one is now",
    "delete-run": "remove a run that no task trains and that is not selected",
    "prune": "remove all runs but the newest",
}


def add_upkeep_options(commands: Any, settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands; `settings` adds the flags that say where the shared path is."""
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text)
        settings(command)
        command.add_argument("--json", action="store_true", help="print JSON, which it does in any case")
        command.add_argument("--plan", action="store_true", help="say what would be done, and do nothing")
        if name in ("backup", "clone-run", "delete-run"):
            command.add_argument("name", metavar="RUN")
        if name == "backup":
            command.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="where the copy goes")
        if name == "clone-run":
            command.add_argument("new", metavar="NEW", help="the new run's name")
        if name == "restore-run":
            command.add_argument("copy", type=Path, metavar="COPY", help="the copy's folder, RUN@STEP")
            command.add_argument("--as", dest="new", metavar="NAME", help="the run's name, instead of the copy's")
        if name == "prune":
            command.add_argument("--keep", required=True, type=int, metavar="N", help="how many of the newest stay")
            command.add_argument("--agreed", nargs="*", metavar="RUN", help="remove no other run than these")


def run_upkeep(options: argparse.Namespace, config: Config) -> int:
    """Do what is asked, and print the answer; returns the exit code."""
    return answered(lambda: to_json(do(options, config)))


def answered(work: Callable[[], str]) -> int:
    """Print what a command answers, or what is wrong; returns the exit code."""
    try:
        print(work())
    except (ConfigError, UserError, ValueError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return USER_ERROR
    except OSError as wrong:
        print(explain(wrong), file=sys.stderr)
        return TRY_AGAIN
    return FINISHED


def do(options: argparse.Namespace, config: Config) -> dict[str, Any]:
    on_bytes = _progress()
    for path in (getattr(options, name, None) for name in ("to", "copy")):
        if path is not None and not path.is_absolute():
            raise UserError(f"{path}: expected a whole path of this host, such as /srv/backup")
    if options.command == "backup":
        return upkeep.back_up(config, options.name, options.to, on_bytes, options.plan)
    if options.command == "restore-run":
        return upkeep.restore(config, options.copy, options.new, on_bytes, options.plan)
    if options.command == "clone-run":
        return upkeep.clone(config, options.name, options.new, on_bytes, options.plan)
    if options.command == "delete-run":
        return upkeep.delete_run(config, options.name, options.plan)
    return upkeep.prune_runs(config, options.keep, options.plan, options.agreed)


def _progress() -> OnBytes:
    last = time.monotonic()

    def on_bytes(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY_SECONDS:
            last = time.monotonic()
            print(to_json({"done": done}), flush=True)

    return on_bytes
