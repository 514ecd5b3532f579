"""Train a program in one process: for unit tests, notebooks and a debugger.

Import this before TensorFlow (in `conftest.py`, in the notebook's first cell): it chooses TensorFlow's Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.core.constructor import construct
from trainer.core.contracts import Program
from trainer.core.program import check_program, load_program
from trainer.core.runtime import prepare_tensorflow
from trainer.core.settings.config import Config
from trainer.report.html import PageWriter
from trainer.run.directory import RunDirectory
from trainer.run.selections.selection import apply_selection
from trainer.tasks.evaluator import Evaluator
from trainer.tasks.in_process import start_cluster
from trainer.tasks.training import train as coordinate
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress
from trainer.telemetry.status import read_status

prepare_tensorflow()
_temporary: list[tempfile.TemporaryDirectory[str]] = []


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training came to."""

    step: int
    """The last step, of which there is a checkpoint."""
    metrics: dict[str, float]
    """The loss and the metrics over the last training steps."""
    evaluation: dict[str, float]
    """The loss and the metrics over the evaluation data; nothing with `evaluation="none"`."""
    directory: Path
    """The run directory: checkpoints, events, and the SavedModel in `export`."""


def in_process_cluster(workers: int = 2, ps: int = 1, partitioner: Any = None) -> Any:
    """Return a tf.distribute.ParameterServerStrategy on workers and ps that this process serves itself.

    For tests of a custom loop, without a program. The strategy of an earlier call can't be used after a later one.
    """
    import tensorflow as tf

    from trainer.training.strategies import make_resolver

    cluster = start_cluster("parameter_server", workers, ps)
    return tf.distribute.ParameterServerStrategy(make_resolver(cluster), variable_partitioner=partitioner)


def train(
    program: Program,
    steps: int = 20,
    workers: int = 2,
    ps: int = 1,
    directory: str | Path | None = None,
    data: int = 1,
    **settings: Any,
) -> Result:
    """Train a program to its last step as the coordinator does, evaluate and export it; returns the result.

    `program` is an object, a class or a name (`package.module:Name`). `directory` is the shared path, by default one
    that is removed when Python ends; with the same `directory` and more steps, a run goes on from its checkpoint.
    `data` is the number of data workers with `input="service"`. `settings` are run settings, `strategy="mirrored"`,
    `checkpoint_steps=10` or `program_args={"learning_rate": 0.1}` (docs/run-settings.md). Errors of the
    program are raised as they are; ConfigError and UserError say what is wrong with the settings or the program.
    """
    prepare_tensorflow()
    name = name_of(program)
    config = config_of(name, steps, directory, settings)
    arguments = config.program_args
    evaluates = config.evaluation != "none"
    if isinstance(program, str):
        built = load_program(name, arguments, evaluates=evaluates)
    else:
        built = construct(program, name, arguments)
    run = RunDirectory(config.shared_dir, config.run)
    run.read_claim(config)
    if run.finished(config.steps) is None:
        check_program(built, name, evaluates)
        run.claim(config)
        cluster = start_cluster(config.strategy, workers, ps, data if config.input == "service" else 0)
        progress = Progress(config, run, Notifier(), page=PageWriter(run))
        with contextlib.closing(progress), kept_signals():
            coordinate(config, cluster, built, run, progress)
    step = run.catalogue.newest()
    if config.evaluation == "sidecar" and step is not None:
        Evaluator(built, run, config.best_metric).evaluate(step)
    return result_of(run, step)


def config_of(name: str, steps: int, directory: str | Path | None, settings: dict[str, Any]) -> Config:
    """Return the settings of a run in this directory, or in a temporary one."""
    if directory is None:
        _temporary.append(tempfile.TemporaryDirectory(prefix="psfleet-"))
        directory = _temporary[-1].name
    given = {"program": name, "run": "test", "shared_dir": str(Path(directory).absolute()), "steps": steps}
    config = Config.from_dict({**given, **settings})
    return apply_selection(config, {key: getattr(config, key) for key in ("run", "program", "program_args")})


def name_of(program: Program) -> str:
    """Return a program's name as the settings have it."""
    kind = program if inspect.isclass(program) else type(program)
    return program if isinstance(program, str) else f"{kind.__module__}:{kind.__name__}"


def result_of(run: RunDirectory, step: int | None) -> Result:
    """Return what a run has come to at this step."""
    status = read_status(run)
    metrics = {"loss": status.loss, **status.metrics} if status.loss is not None else dict(status.metrics)
    evaluation = status.evaluation["metrics"] if status.evaluation else {}
    return Result(step or 0, metrics, evaluation, run.path)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Give the process its handler of SIGTERM back, which the coordinator sets in the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
