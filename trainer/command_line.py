"""The options of `python -m trainer`: a task's flags, and the commands."""

from __future__ import annotations

import argparse
import dataclasses

from trainer.core.settings.setting import unknown_key
from trainer.keep_queue import add_queue_options
from trainer.keep_run import add_upkeep_options
from trainer.tasks.flags import add_task_flags, with_hyphens

# The commands that read or change one run, with their help.
OF_A_RUN = {
    "status": "say what a run is doing",
    "runs": "list the runs on the shared path",
    "checkpoints": "list a run's checkpoints",
    "begin": "make a new run that begins from a checkpoint of another",
    "sweep": "say how far a sweep is",
    "export": "export a run's newest checkpoint as a SavedModel",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options; ends the process where they are wrong, or ask for help."""
    from trainer.tasks.local import add_set_option

    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        formatter_class=wide_help,
        usage="%(prog)s [--settings FILE] [--run NAME] [--program MODULE:NAME] [a task's flags]\n"
        "       %(prog)s COMMAND ... (its own help: %(prog)s COMMAND --help)",
        description="Without a command: become the task that TF_CONFIG names (worker, ps, chief, evaluator, "
        "dispatcher or data). Flags can say the same.",
        epilog="Exit codes: 0 finished, 75 try again (infrastructure), 78 your error, 143 stopped after a checkpoint.",
    )
    add_run_options(parser)
    add_set_option(parser)
    add_task_flags(parser)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    add_commands(parser.add_subparsers(dest="command", metavar="COMMAND", prog=parser.prog))
    options, unknown = parser.parse_known_args([with_hyphens(argument) for argument in argv])
    if unknown and options.command == "local":
        parser.error(describe_unknown(unknown))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def describe_unknown(words: list[str]) -> str:
    """Say what `local` does not know, and which setting or option was probably meant."""
    from trainer.core.settings.config import Config
    from trainer.tasks.local import OPTIONS

    name = words[0].partition("=")[0]
    key = name.removeprefix("--").replace("-", "_")
    if name == key:
        return f"local: {name!r} belongs to no option; a setting is written as --steps 1000"
    if key == "program_args":
        return f"local: {name} is no option: write each parameter of the program as --set learning_rate=0.01"
    return f"local: {unknown_key(key, [*(field.name for field in dataclasses.fields(Config)), *OPTIONS, 'set'])}"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add all commands, in the order of the help."""
    from trainer.check import add_check_options
    from trainer.tasks.local import add_local_options

    local = commands.add_parser(
        "local",
        help="run a whole cluster as processes of this machine",
        usage="%(prog)s --program MODULE:NAME [--workers N] [--ps N] [any setting, as --steps 1000]",
        formatter_class=wide_help,
        allow_abbrev=False,
    )
    add_local_options(local)
    for name, text in OF_A_RUN.items():
        add_command_of_a_run(commands.add_parser(name, help=text), name)
    add_upkeep_options(commands, add_settings_options)
    add_queue_options(commands, add_settings_options)
    report = commands.add_parser("report", help="print the page of a run, or of several side by side, as HTML")
    add_settings_options(report)
    report.add_argument(
        "--run", dest="runs", metavar="NAME", action="append", default=[], help="the run; more of them side by side"
    )
    report.add_argument("--json", action="store_true", help="print JSON, with the page's HTML in it")
    ways = commands.add_parser("ways", help="try the ways from this host to members, with a large packet")
    ways.add_argument("--source", default="", help="who is to have them")
    ways.add_argument("members", nargs="+", metavar="TASK=HOST:PORT", help="the others")
    ways.add_argument("--json", action="store_true", help="print JSON")
    check = commands.add_parser("check", help="prove this release, beside whatever runs; it writes nothing")
    add_check_options(check)


def add_command_of_a_run(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options of one of OF_A_RUN."""
    from trainer.tasks.local import add_set_option

    add_run_options(command)
    if name == "begin":
        command.add_argument("--from", required=True, dest="source", metavar="RUN@STEP", help="the checkpoint")
        add_set_option(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--shared-dir", help="the shared path, instead of the settings'")
    if name == "export":
        command.add_argument("--changes", action="store_true", help="what has changed since the newest in exports/")
    if name == "sweep":
        command.add_argument("--name", help="the sweep, instead of the selected one, or else the last one")


def wide_help(prog: str) -> argparse.HelpFormatter:
    """Leave room for the longest option, so that each begins its line of help beside it."""
    return argparse.HelpFormatter(prog, max_help_position=34)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    # A command's own defaults would overwrite what stands before the command.
    unset = argparse.SUPPRESS
    parser.add_argument(
        "--settings", metavar="FILE", default=unset, help="the run settings (default: TRAINER_SETTINGS)"
    )
    parser.add_argument("--run", metavar="NAME", default=unset, help="the run, instead of the selected one")
    parser.add_argument("--program", metavar="MODULE:NAME", default=unset, help="the program, likewise")


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", metavar="FILE", default=argparse.SUPPRESS, help="the run settings (default: TRAINER_SETTINGS)"
    )
    parser.add_argument("--shared-dir", help="the shared path, instead of the settings'")
