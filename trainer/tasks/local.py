"""A whole cluster as processes of this machine, kept as systemd keeps them on hosts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.cluster.spec import SERVICE_JOBS, ClusterConfig, free_addresses
from trainer.core.program import reject_missing_package
from trainer.core.runtime import NO_GPU, PS_ENVIRONMENT
from trainer.core.settings.config import DECLARED, KINDS, Config, ConfigError, absolute_path, read_assignments
from trainer.core.settings.strategies import STRATEGIES
from trainer.process.fork_server import PARENT, ForkServer
from trainer.process.gpus import list_gpus, share_gpus
from trainer.run.directory import RunDirectory
from trainer.run.selections.selection import apply_selection, sweep_or_none
from trainer.tasks.local_supervisor import LocalSupervisor, LocalTask, say
from trainer.telemetry.outlets.prometheus import ADDRESS
from trainer.telemetry.status import describe, read_status

LIBRARIES = ("grpc", "tensorflow", "tf_keras")
# Beside the run settings and --set.
OPTIONS: dict[str, dict[str, Any]] = {
    "workers": {"type": int, "metavar": "N", "help": "workers (default: 2)"},
    "ps": {"type": int, "metavar": "N", "help": "parameter servers (default: 1)"},
    "data": {"type": int, "metavar": "N", "help": "data workers, with --input service (default: 1)"},
    "evaluator": {
        "action": argparse.BooleanOptionalAction,
        "help": "evaluate each checkpoint beside it (default: with --evaluation sidecar)",
    },
    "in_process": {
        "action": "store_true",
        "help": "serve the workers and ps in the coordinator's own process, for a debugger; evaluate at the end",
    },
    "metrics_port": {
        "type": int,
        "metavar": "N",
        "help": "show Prometheus metrics at 127.0.0.1: the coordinator's at port N, the other tasks' at those after it",
    },
}
FORK_SERVER = "TRAINER_FORK_SERVER"  # the socket of one that another process has started
SCRAPED = ("chief", "ps", "worker", "evaluator", *SERVICE_JOBS)  # the order of the metrics' ports, as on hosts


def add_local_options(parser: argparse.ArgumentParser) -> None:
    """Add the size of the cluster and one option for every run setting."""
    for name, how in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    settings = parser.add_argument_group("run settings", "docs/run-settings.md says what each of them means.")
    add_set_option(settings)
    for field in dataclasses.fields(Config):
        if field.name == "program_args":
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = "./psfleet-runs" if field.name == "shared_dir" else "{}" if made else field.default
        required = default is dataclasses.MISSING
        choices = DECLARED[field.name].choices
        one_of = f"{', '.join(choices)}; " if choices else ""
        settings.add_argument(
            "--" + field.name.replace("_", "-"),
            required=required,
            default=argparse.SUPPRESS if field.name != "shared_dir" else default,
            type=lambda text, key=field.name: setting(key, text),  # type: ignore[misc]
            metavar="MODULE:NAME" if required else "VALUE",
            help="the program to train (required)" if required else f"{one_of}default: {default}",
        )


def add_set_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--set",
        dest="program_args",
        metavar="NAME=VALUE",
        action="append",
        default=argparse.SUPPRESS,
        help="a parameter of the program's constructor, as learning_rate=0.01 or layers='[64, 64]'; may be repeated",
    )


def setting(key: str, text: str) -> Any:
    """Turn an option's text into the setting's type; Config checks the rest."""
    kinds = KINDS[key]
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if Mapping in kinds:
        with contextlib.suppress(ValueError):
            return json.loads(text)
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def reject_missing_libraries() -> None:
    """Raise ConfigError where this Python lacks what each task imports: they would be started again for ever."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise ConfigError(
            f"{sys.executable} has no {', '.join(missing)}, which training takes: pip install '.[trainer]' with it, in "
            "a checkout of psfleet"
        )


def run_local(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Start the tasks, keep them alive and return the coordinator's exit code."""
    reject_missing_libraries()
    keys = {field.name for field in dataclasses.fields(Config)}
    settings = {key: value for key, value in vars(options).items() if key in keys}
    settings["shared_dir"] = absolute_path(settings["shared_dir"])
    settings["program_args"] = read_assignments(settings.get("program_args", []))
    config = Config.from_dict(settings)
    reject_missing_package(config.program)
    config = apply_selection(config, {key: getattr(config, key) for key in ("run", "program", "program_args")})
    before = RunDirectory(config.shared_dir, config.run)
    with contextlib.suppress(ValueError):  # a damaged record is the coordinator's to judge
        before.read_claim(config)
    finished = before.finished(config.steps)
    workers, servers = cluster_size(config.strategy, options.workers, options.ps)
    data = data_workers(config, options.data)
    evaluator = config.evaluation == "sidecar" if options.evaluator is None else options.evaluator
    ports = metrics_port(options.metrics_port)
    if options.in_process:
        from trainer.tasks.in_process import run_in_process

        os.environ.setdefault("DATA_DIR", data_dir(config))
        code = run_in_process(config, workers, servers, evaluator, data, metrics_at(ports, 0))
    else:
        code = run_supervised(config, local_cluster(workers, servers, data), evaluator, environment, ports)
    print(describe(read_status(before, config)))
    print(where_to_look(before))
    if finished is not None:
        print(f"nothing was trained: run {config.run} had finished at step {finished}; start a new one with --run NAME")
    return code


def where_to_look(directory: RunDirectory) -> str:
    """Say what shows more of a run than its status."""
    page = f"page        {directory.report}, for a browser\n" if directory.report.exists() else ""
    return f"{page}curves      tensorboard --logdir {shlex.quote(str(directory.path.parent))}"


def run_supervised(
    config: Config,
    jobs: dict[str, list[str]],
    evaluator: bool,
    environment: Mapping[str, str],
    metrics_port: int | None,
) -> int:
    """Run every task as a process, all forked from one that has imported TensorFlow; returns the coordinator's code."""
    with tempfile.TemporaryDirectory(prefix="psfleet-") as directory:
        path = Path(directory) / "run.json"
        path.write_text(json.dumps(config.as_dict()), encoding="utf-8")
        started = environment.get(FORK_SERVER)
        forks = ForkServer(started) if started else ForkServer(Path(directory) / "forks", environment)
        try:
            tasks = make_tasks(config, path, jobs, evaluator, forks, metrics_port)
            return LocalSupervisor(tasks, forks, partial(is_done, config)).run()
        finally:
            forks.end()


def is_done(config: Config) -> bool:
    """Return whether the run is finished; of a sweep the coordinator alone knows."""
    finished = RunDirectory(config.shared_dir, config.run).finished(config.steps)
    return finished is not None or sweep_or_none(config) is not None


def cluster_size(strategy: str, workers: int | None, servers: int | None) -> tuple[int, int]:
    """Return the number of workers and of ps that the strategy uses; says which of the given ones it does not."""
    used = STRATEGIES[strategy].jobs
    lacks = {job: f"strategy {strategy} has no {job}" for job in ("worker", "ps") if job not in used}
    return size_of("--workers", workers, 2, lacks.get("worker")), size_of("--ps", servers, 1, lacks.get("ps"))


def data_workers(config: Config, given: int | None) -> int:
    """Return the number of data workers that the run uses; says when the given ones are not used."""
    return size_of("--data", given, 1, None if config.input == "service" else f"input is {config.input}")


def size_of(option: str, given: int | None, default: int, unused: str | None) -> int:
    """Return how many members a job has; `unused` says why it has none, where that is so."""
    if given is not None and given < 1:
        raise ConfigError(f"{option} must be at least 1, not {given}")
    if given is not None and unused:
        say("local", f"{option} {given} is not used: {unused}")
    return 0 if unused else given or default


def metrics_port(given: int | None) -> int | None:
    """Return the first port of the metrics, where they are wanted."""
    if given is not None and not 1 <= given <= 65535:
        raise ConfigError(f"--metrics-port must be a number from 1 to 65535, such as 2700, not {given}")
    return given


def metrics_at(first: int | None, slot: int) -> dict[str, str]:
    """Return the environment of a task that is scraped, by its place among the tasks."""
    return {} if first is None else {ADDRESS: f"127.0.0.1:{first + slot}"}


def local_cluster(workers: int, servers: int, data: int = 0) -> dict[str, list[str]]:
    """Return a cluster on free ports of the loopback interface; a job without members is left out."""
    sizes = {"chief": 1, "worker": workers, "ps": servers, "dispatcher": min(data, 1), "data": data}
    addresses = iter(free_addresses(sum(sizes.values())))
    return {job: [next(addresses) for _ in range(size)] for job, size in sizes.items() if size}


def data_dir(config: Config) -> str:
    """Return where programs look for their data, as on hosts."""
    return f"{config.shared_dir}/data"


def make_tasks(
    config: Config,
    settings: Path,
    jobs: dict[str, list[str]],
    evaluator: bool,
    forks: ForkServer | None = None,
    metrics_port: int | None = None,
) -> list[LocalTask]:
    """Return the tasks with the same environment that Ansible renders for hosts; the coordinator is the last."""
    names = [(job, index) for job in (*SERVICE_JOBS, "ps", "worker") for index in range(len(jobs.get(job, [])))]
    names += [("evaluator", 0)] if evaluator else []
    names.append(("chief", 0))
    scraped = sorted(names, key=lambda name: (SCRAPED.index(name[0]), name[1]))
    command = ["-m", "trainer", "--parent", PARENT]
    # Said on the command line, so that a selection made on a shared path of real hosts does not count here.
    command += ["--run", config.run, "--program", config.program]
    for name, value in config.program_args.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    gpus = gpus_of(names, config.strategy)
    tasks = []
    for job, index in names:
        cluster = ClusterConfig.checked(jobs, job, index)
        environment = {**os.environ, "TF_CONFIG": cluster.as_tf_config(), "TRAINER_SETTINGS": str(settings)}
        environment.setdefault("DATA_DIR", data_dir(config))
        if job == "ps":
            environment = {**PS_ENVIRONMENT, **environment}
        environment |= metrics_at(metrics_port, scraped.index((job, index))) | gpus.get((job, index), {})
        for inherited in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
            environment.pop(inherited, None)
        tasks.append(LocalTask(cluster.task, command, environment, cluster.trains, forks))
    return tasks


def gpus_of(names: Sequence[tuple[str, int]], strategy: str) -> dict[tuple[str, int], dict[str, str]]:
    """Share this machine's GPUs out as on hosts: to the tasks that train, and none to the others."""
    gpus = list_gpus(os.environ)
    if not gpus:
        return {}
    jobs = ("worker",) if STRATEGIES[strategy].remote else ("chief", "worker")
    training = sorted(name for name in names if name[0] in jobs)
    shares = dict(zip(training, share_gpus(gpus, len(training)), strict=True))
    return {name: {"CUDA_VISIBLE_DEVICES": shares.get(name, NO_GPU)} for name in names}
