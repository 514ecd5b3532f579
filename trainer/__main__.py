"""The one entry point: `python -m trainer` becomes the task that TF_CONFIG names.

Only this module reads the command line and the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from trainer.cluster.member import MemberState
from trainer.cluster.members.growth import present
from trainer.cluster.spec import ADDRESS, SERVICE_JOBS, ClusterConfig
from trainer.command_line import parse
from trainer.core.failures import TRY_AGAIN, USER_ERROR, Infrastructure, UserError, explain, is_stale
from trainer.core.proxies import bypass_proxies
from trainer.core.runtime import prepare_tensorflow
from trainer.core.settings.config import Config, ConfigError, absolute_path, read_assignments
from trainer.keep_queue import run_queue
from trainer.keep_run import HELP as UPKEEP
from trainer.keep_run import run_upkeep
from trainer.process.gpus import find_missing
from trainer.process.server_library import is_loaded
from trainer.process.warm_start import die_with_parent, end
from trainer.report.html import render
from trainer.report.summary import read_summary
from trainer.run.begin_from import begin_from
from trainer.run.directory import RunDirectory
from trainer.run.records import to_json
from trainer.run.release import StaysOut, own_release, reject_missed_release
from trainer.run.replaced import reject_replaced
from trainer.run.selections.selection import apply_selection, read_selection
from trainer.tasks.flags import read_cluster, reject_task_flags
from trainer.telemetry.checkpoints import describe_checkpoints, read_checkpoints
from trainer.telemetry.logs import set_up_logging
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.journald import about
from trainer.telemetry.outlets.prometheus import listen, serve
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.status import describe, describe_runs, read_all, read_status
from trainer.telemetry.sweep import describe_sweep, read_sweep

log = logging.getLogger("trainer")
RELEASE_SECONDS = 10.0
NO_RUN = "there is no run {} yet: `fab start-cluster` begins what is chosen, `fab runs` lists all"


def main(argv: list[str], environment: Mapping[str, str]) -> int:
    """Run one command; returns the exit code."""
    options = parse(argv)
    try:
        if options.command:
            reject_task_flags(options)
        if options.command == "local":
            from trainer.tasks.local import run_local

            return run_local(options, environment)
        of_files = {
            "status": show_status,
            "runs": show_runs,
            "checkpoints": show_checkpoints,
            "begin": begin,
            "sweep": show_sweep,
            "report": make_report,
        }
        if options.command in of_files:
            return of_files[options.command](options, environment)
        if options.command == "export":
            from trainer.export_run import run_export

            return run_export(options, directory_of(options, environment))
        if options.command in UPKEEP:
            return run_upkeep(options, read_settings(options, environment))
        if options.command == "queue":
            return run_queue(options, read_settings(options, environment))
        if options.command == "ways":
            return try_ways(options)
        if options.command == "check":
            from trainer.check import run_check

            return run_check(options, environment)
        return run_task(options, environment)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


def read_settings(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Read the settings, as the inventory has them."""
    path = getattr(options, "settings", None) or environment.get("TRAINER_SETTINGS")
    if not path:
        raise ConfigError("no run settings: set TRAINER_SETTINGS to the path of run.json, or pass --settings FILE")
    config = Config.from_file(Path(path))
    if getattr(options, "shared_dir", None):
        config = config.replace(shared_dir=absolute_path(options.shared_dir))
    return config


def read_config(options: argparse.Namespace, environment: Mapping[str, str], evaluates: bool = False) -> Config:
    """Read the settings, then what the operator selected, then the command line; the last one counts.

    In a sweep that is the current point, or, with `evaluates`, the first that is not evaluated to its end.
    """
    config = read_settings(options, environment)
    chosen = {key: getattr(options, key) for key in ("run", "program") if hasattr(options, key)}
    if hasattr(options, "program_args"):
        chosen["program_args"] = read_assignments(options.program_args)
    return apply_selection(config, chosen if "run" in chosen else {**read_selection(config), **chosen}, evaluates)


def run_task(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Supervise the process that becomes the server, the coordinator or the evaluator; or become it."""
    if options.parent:
        die_with_parent(options.parent)
    set_up_logging(journal=is_journal(environment))
    cluster = read_cluster(options, environment)
    about(task=cluster.task)
    notifier = Notifier.from_environment(environment)
    listener = listen(environment)
    if options.parent:
        return notifier.ends(become_task(options, environment, cluster, listener, notifier))
    if not is_server(cluster):
        read_config(options, environment)  # what is wrong with it is said before TensorFlow's import
    from trainer.process.supervisor import SupervisedTask, Supervisor

    release, park_file = (
        Path(path) if (path := environment.get(name)) else None for name in ("TRAINER_RELEASE", "TRAINER_PARK_FILE")
    )
    leads = release is not None and cluster.job == "chief"
    become = partial(become_task, options, environment, cluster, listener)
    task = SupervisedTask(
        cluster.task,
        become,
        fresh=[sys.executable, "-u", "-m", "trainer", *sys.argv[1:]],
        wait=partial(become, only_wait=True) if cluster.job == "evaluator" else None,
        listener=listener,
        serves=is_server(cluster) and cluster.job not in SERVICE_JOBS,
    )
    directory = environment.get("RUNTIME_DIRECTORY") if leads else None
    return Supervisor(task, notifier, release, park_file, Path(directory, "forks") if directory else None).run()


def serve_members(cluster: ClusterConfig, notifier: Notifier, selected: Callable[[], Config]) -> int:
    """Be a server of the cluster or of the data service; returns the exit code, when another process must follow."""
    from trainer.tasks.data_service import run_service
    from trainer.tasks.server import run_server

    try:
        (run_service if cluster.job in SERVICE_JOBS else run_server)(cluster, notifier, selected)
    except Exception as error:
        why = str(error) if isinstance(error, Infrastructure) else explain(error)
        say_why(notifier, f"{cluster.task} cannot serve: {why}")
    return TRY_AGAIN


def say_why(notifier: Notifier, why: str) -> None:
    """Say why this process ends, and another must follow; `fab status` has it too, where it happens again and again."""
    log.error("%s", why)
    notifier.status(why)


def prepare_process(environment: Mapping[str, str], cluster: ClusterConfig) -> str | None:
    """Prepare this process for TensorFlow, as a member of the cluster; returns which GPUs it lacks."""
    prepare_tensorflow()
    bypass_proxies(cluster.addresses)
    # Also where flags said it: TensorFlow and the user's program may look there.
    os.environ["TF_CONFIG"] = dataclasses.replace(cluster, service={}).as_tf_config()
    return find_missing(environment)


def read_present_config(
    options: argparse.Namespace, environment: Mapping[str, str], cluster: ClusterConfig, own: Path
) -> Config:
    """Read the settings as `read_config` does; raises StaysOut where this task must not join.

    That is where `own` is no longer the hosts' release, or another machine has its place.
    """
    config = read_config(options, environment, cluster.job == "evaluator")
    about(run=config.run)  # a server asks again and again, and serves one run after the other
    link = environment.get("TRAINER_RELEASE")
    if link:
        address = None if cluster.job == "evaluator" else cluster.address
        reject_replaced(config, cluster.task, address, environment.get("TRAINER_HOST"))
    reject_missed_release(config, Path(link) if link else None, own)
    return config


def train_or_evaluate(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    cluster: ClusterConfig,
    notifier: Notifier,
    collector: MetricsCollector,
    *,
    only_wait: bool,
) -> int:
    """Be the coordinator or the evaluator; returns the exit code."""
    evaluates = cluster.job == "evaluator"
    try:
        config = read_config(options, environment, evaluates)
        if evaluates:
            from trainer.tasks.evaluator import run_evaluator

            again = partial(read_config, options, environment, True)
            return run_evaluator(config, notifier, again, only_wait=only_wait, collector=collector)
        from trainer.tasks.sweep import train_point
        from trainer.telemetry.outlets.webhook import Notifications

        notifications = Notifications(config, environment.get("CREDENTIALS_DIRECTORY"))
        return train_point(config, cluster, notifier, collector, notifications)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        say_why(notifier, f"{cluster.task} cannot go on: {explain(error)}")
        if is_stale(error):
            notifier.restart_unit()
        return TRY_AGAIN


def become_task(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    cluster: ClusterConfig,
    listener: socket.socket | None,
    notifier: Notifier,
    *,
    only_wait: bool = False,
) -> int:
    """Become the server, the coordinator or the evaluator; `only_wait` is for an evaluator without TensorFlow.

    Where there is a `listener`, it is scraped there.
    """
    cluster = present(cluster)
    collector = MetricsCollector(
        tuple(state.value for state in MemberState), notifier.restarts, own_release(Path.cwd())
    )
    if listener is not None:
        serve(listener, collector)
    selected = partial(read_present_config, options, environment, cluster, Path.cwd())
    if why := prepare_process(environment, cluster) or why_out(selected):
        say_why(notifier, why)
        return TRY_AGAIN
    if is_server(cluster):
        return serve_members(cluster, notifier, selected)
    return train_or_evaluate(options, environment, cluster, notifier, collector, only_wait=only_wait)


def why_out(selected: Callable[[], Config]) -> str | None:
    """Return why this host's tasks must not take part, or None.

    It looks for a while: a network file system may show the release before once more.
    """
    end = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            selected()
        except StaysOut as error:
            if time.monotonic() > end:
                return str(error)
        except (ConfigError, OSError):
            return None  # said where the settings are needed
        else:
            return None
        time.sleep(1)


def is_server(cluster: ClusterConfig) -> bool:
    """Return whether this task only serves: a ps, a worker beside ps, or one of the data service."""
    return cluster.job != "evaluator" and not cluster.trains


def is_journal(environment: Mapping[str, str]) -> bool:
    """Return whether standard error goes to the journal, which adds the time itself."""
    stream = os.fstat(2)
    return environment.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def show_status(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if options.shared_dir and not environment.get("TRAINER_SETTINGS") and not hasattr(options, "settings"):
        shared_dir = Path(absolute_path(options.shared_dir))
        if hasattr(options, "run"):
            status = read_status(RunDirectory(shared_dir, options.run))
        else:
            found = read_all(shared_dir)
            if not found:
                raise ConfigError(f"there is no run in {shared_dir}")
            status = found[-1]
    else:
        config = read_config(options, environment)
        status = read_status(RunDirectory(config.shared_dir, config.run), config)
    print(to_json(dataclasses.asdict(status)) if options.json else describe(status))
    return 0


def directory_of(options: argparse.Namespace, environment: Mapping[str, str]) -> RunDirectory:
    """Return the directory of the run that the options name, else of the selected one."""
    if options.shared_dir and hasattr(options, "run"):
        return RunDirectory(absolute_path(options.shared_dir), options.run)
    config = read_config(options, environment)
    return RunDirectory(config.shared_dir, config.run)


def show_checkpoints(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    directory = directory_of(options, environment)
    if not directory.path.is_dir():
        raise ConfigError(NO_RUN.format(directory.run))
    found = read_checkpoints(directory)
    print(to_json(found) if options.json else describe_checkpoints(found))
    return 0


def begin(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if not hasattr(options, "run"):
        raise ConfigError("begin: name the new run with --run NAME")
    shared_dir = options.shared_dir or read_config(options, environment).shared_dir
    program = getattr(options, "program", None)
    given = read_assignments(getattr(options, "program_args", []))
    place = Path(absolute_path(shared_dir))
    there = RunDirectory(place, options.run).path.exists()
    begun = begin_from(place, options.run, options.source, program, given)
    answer = {"run": options.run, "from": options.source, "begun": begun, "made": not there}
    print(to_json(answer) if options.json else f"run {options.run} begins from {options.source}")
    return 0


def show_runs(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    shared_dir = options.shared_dir or read_config(options, environment).shared_dir
    statuses = read_all(Path(absolute_path(shared_dir)))
    records = [dataclasses.asdict(status) for status in statuses]
    print(to_json(records) if options.json else describe_runs(records))
    return 0


def try_ways(options: argparse.Namespace) -> int:
    """Try the ways to the members that are named; each takes some seconds where no answer comes."""
    from trainer.cluster.reach.way_probe import try_all
    from trainer.cluster.reach.ways import cell

    others = {}
    for word in options.members:
        task, _, address = word.partition("=")
        if not ADDRESS.fullmatch(address):
            raise ConfigError(f"{word!r} names no member: expected TASK=HOST:PORT, as ps-0=10.0.0.3:2300")
        others[task] = address
    found = try_all(others)
    if options.json:
        print(to_json({"source": options.source, "ways": {task: way.as_record() for task, way in found.items()}}))
    else:
        print("\n".join(f"{task:<11} {way.address:<24} {cell(way)}" for task, way in found.items()))
    return 0 if all(way.works for way in found.values()) else TRY_AGAIN


def make_report(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    names = options.runs or ([options.run] if hasattr(options, "run") else [])
    if options.shared_dir and names:
        shared_dir = absolute_path(options.shared_dir)
    else:
        config = read_config(options, environment)
        shared_dir, names = config.shared_dir, names or [config.run]
    directories = [RunDirectory(shared_dir, name) for name in dict.fromkeys(names)]
    for directory in directories:
        if Path(directory.run).name != directory.run or not directory.path.is_dir():
            raise ConfigError(NO_RUN.format(directory.run))
    page = render([read_summary(directory) for directory in directories])
    print(to_json({"runs": [each.run for each in directories], "html": page}) if options.json else page)
    return 0


def show_sweep(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    summary = read_sweep(read_config(options, environment), options.name)
    print(to_json(summary) if options.json else describe_sweep(summary))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    if is_loaded():
        end(code)
    sys.exit(code)
