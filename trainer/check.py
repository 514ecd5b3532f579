"""`python -m trainer check`: prove a release before a task runs on it, beside whatever runs. It writes nothing."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR, UserError, explain
from trainer.core.program import load_program
from trainer.core.runtime import importing, prepare_tensorflow
from trainer.core.settings.config import Config, ConfigError
from trainer.process.fork_server import ForkServer
from trainer.process.server_library import import_server_library
from trainer.run.directory import RunDirectory
from trainer.run.proof_marks import BUILT, MARK, are_proven, marks_of
from trainer.run.selections.selection import apply_selection, of_the_run, read_selection, sweep_of
from trainer.tasks.build_proof import PROVEN, build, go_first, run_build

PARTS = ("release", "program", "run")
# What a task imports before it does anything, and what one does that runs the program.
MODULES = ("trainer.process.supervisor", "trainer.tasks.server")
PROGRAM_MODULES = ("tensorflow", "trainer.tasks.coordinator")


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
    parser.add_argument(
        "--build",
        action="store_true",
        help="also build the program's model, without a GPU, in a process that is given up when it takes too long or "
        "too much memory",
    )
    parser.add_argument("--build-here", action="store_true", help=argparse.SUPPRESS)


def run_check(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Check what `options.part` names and print what was proven; returns the exit code, 78 for the user's error."""
    if options.build and options.part != "release":
        return run_build(building_command(options), find_forks(environment))
    try:
        configs, cluster = check_settings(options, environment)
        marks = marks_of(configs, environment, Path.cwd())
        if are_proven(marks, options.build_here, environment, Path.cwd()):
            print(f"{PROVEN}release {Path.cwd().name}, before", flush=True)
            return FINISHED
        prepare_tensorflow()
        if options.build_here:
            go_first()
        with importing():
            import_modules(options.part)
        programs = load_programs(configs)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except Exception as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return TRY_AGAIN
    about = f", program {configs[0].program}" if configs else ""
    runs = ", ".join(config.run for config in configs)
    about += f", run {runs}" if options.part == "run" else ""
    print(f"{PROVEN}release {Path.cwd().name}{about}", flush=True)
    _print_marks(marks)
    built, whole, points = FINISHED, True, len(configs)
    if options.build_here:
        for number, (config, program) in enumerate(zip(configs, programs, strict=True), start=1):
            point = f"{config.run}, point {number} of {points}" if points > 1 else ""
            if built == FINISHED:
                ended = build(config, program, cluster, point)
                built, whole = ended or FINISHED, whole and ended is not None
        if built == FINISHED and whole:
            _print_marks([f"{mark}{BUILT}" for mark in marks])
    return built


def load_programs(configs: Sequence[Config]) -> list[Any]:
    """Make the program of each run; raises UserError."""
    found = []
    for config in configs:
        with naming(config.run, len(configs)):
            found.append(load_program(config.program, config.program_args, evaluates=config.evaluation != "none"))
    return found


def check_settings(
    options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[list[Config], ClusterConfig | None]:
    """Return the settings that a program is checked with, and the cluster that it is for; raises ConfigError."""
    cluster = None
    configs = [] if options.part == "release" else read_settings(options, environment)
    for config in configs:
        if environment.get("TF_CONFIG"):
            cluster = ClusterConfig.from_tf_config(environment["TF_CONFIG"])
            cluster.check_strategy(config.strategy)
        if options.part == "run":
            RunDirectory(config.shared_dir, config.run).read_claim(config)
    return configs, cluster


def _print_marks(marks: Sequence[str]) -> None:
    for mark in marks:
        print(f"{MARK}{mark}", flush=True)


def import_modules(part: str) -> None:
    """Import what the tasks of a host need; a release that no program is checked with is one for servers alone."""
    if part == "release":
        import_server_library()
    for module in (*MODULES, *(() if part == "release" else PROGRAM_MODULES)):
        importlib.import_module(module)


def find_forks(environment: Mapping[str, str]) -> ForkServer | None:
    """Return the server whose processes have this one's kit, where there may be one.

    It has other credentials. So a program that has secrets is built in a new process.
    """
    path = environment.get("TRAINER_FORKS")
    return ForkServer(path) if path and "CREDENTIALS_DIRECTORY" not in environment else None


def building_command(options: argparse.Namespace) -> list[str]:
    """Return the command of the process that also builds the model."""
    command = [sys.executable, "-m", "trainer", "check", options.part, "--build-here"]
    for name in ("settings", "selection"):
        if getattr(options, name, None) is not None:
            command += [f"--{name}", getattr(options, name)]
    return command


def read_settings(options: argparse.Namespace, environment: Mapping[str, str]) -> list[Config]:
    """Read the run settings, `-` from standard input; of a run, what is selected is laid over them.

    A sweep has as many as it has points, the queue as many as wait.
    """
    path = getattr(options, "settings", None) or environment.get("TRAINER_SETTINGS")
    if not path:
        raise ConfigError("no run settings: pass --settings FILE, or --settings - for standard input")
    if path == "-":
        config = Config.from_dict(read_json(sys.stdin.read(), "the run settings"))
    else:
        config = Config.from_file(Path(path))
    if options.part != "run":
        return [config]
    selection = read_json(options.selection, "--selection") if options.selection else read_selection(config)
    sweep = sweep_of(selection, config.shared_dir)
    if sweep is None:
        return [apply_selection(config, selection)]
    sweep.check_settings(config)
    found = []
    for point in (points := sweep.to_prove()):
        with naming(point.run, len(points)):
            found.append(apply_selection(config.replace(**of_the_run(point.settings)), point.selection))
    return found


@contextmanager
def naming(run: str, among: int) -> Iterator[None]:
    """Say of which run a mistake is, where there are several: in the queue they are of several people."""
    try:
        yield
    except (ConfigError, UserError) as error:
        if among < 2:
            raise
        raise type(error)(f"run {run}: {error}") from error


def read_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} must be JSON: {error}") from error
