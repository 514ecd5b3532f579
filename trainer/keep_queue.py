"""`python -m trainer queue list|add|move|remove`: the queue, as `fab` changes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from trainer.core.settings.config import Config
from trainer.keep_run import answered
from trainer.run.records import to_json
from trainer.run.selections import queue_changes
from trainer.telemetry.queue import describe_queue, read_queue

ACTIONS = ("list", "add", "move", "remove")


def add_queue_options(commands: Any, settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command; `settings` adds the flags that say where the shared path is."""
    command = commands.add_parser("queue", help="show or change the queue: runs and sweeps, one after the other")
    settings(command)
    command.add_argument("action", choices=ACTIONS)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--plan", action="store_true", help="say what would be done, and do nothing")
    command.add_argument("--entry", metavar="JSON", help="add: the entry")
    command.add_argument("--name", help="move, remove: which entry")
    command.add_argument("--to", help="move: first, last, before:NAME or priority:N")
    command.add_argument("--who", default="an unknown user", help="remove: by whom")
    command.add_argument("--stop", action="store_true", help="remove: also the run that is trained now")


def run_queue(options: argparse.Namespace, config: Config) -> int:
    """Do what is asked, and print the answer; returns the exit code."""
    shown = describe_queue if options.action == "list" and not options.json else to_json
    return answered(lambda: shown(do(options, config)))


def do(options: argparse.Namespace, config: Config) -> dict[str, Any]:
    if options.action == "add":
        return queue_changes.add(config, json.loads(options.entry), options.plan)
    if options.action == "move":
        return queue_changes.move(config, options.name, options.to, options.plan)
    if options.action == "remove":
        return queue_changes.remove(config, options.name, options.who, options.stop, options.plan)
    return read_queue(config)
