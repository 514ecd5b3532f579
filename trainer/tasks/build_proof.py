"""Prove that a program's model can be built, beside a training that runs: in a process of its own, which is watched.

It builds as the coordinator does, in a strategy's scope, with servers of its own in the same process. A model may be
made for far more memory or time than a proof has. So only an error of the program's refuses it; a build that does not
fit is given up, and said to be unproven.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainer.cluster.spec import ClusterConfig
from trainer.core.contracts import Program, Strategy
from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR, UserError, explain, is_the_programs
from trainer.core.own_frames import own_lines
from trainer.core.program import program_file
from trainer.core.settings.config import Config
from trainer.process.children import end_orphans
from trainer.process.fork_server import Forked, ForkServer
from trainer.process.warm_start import adopt_orphans
from trainer.telemetry.logs import file_in_memory, load_tensorflow

# A mistake shows at once, or when the model compiles; a start must not wait for what a large model takes.
BUILD_SECONDS = 300.0
# So much of the machine's memory is left alone, for what runs there and for the cache of its files.
FREE = 0.1
POLL_SECONDS = 0.1
PIPE_SECONDS = 5.0
IMPORT_SECONDS = 30.0  # for a supervisor that has just begun
# TensorFlow splits variables over two ps as it does over many.
MAX_PS = 2
PROVEN = "proven: "
UNPROVEN = "not proven: "
BUILDING = "building: "
SWITCH = "If only the cluster can build it, say release_build_proof: false in the inventory"


def run_build(command: Sequence[str], forks: ForkServer | None) -> int:
    """Be the process that watches a build; returns its exit code. No process is left that the program has started."""
    adopt_orphans()
    code = watch_build(command, forks=forks)
    end_orphans(())
    return code


def watch_build(
    command: Sequence[str],
    seconds: float = BUILD_SECONDS,
    free: Callable[[], float] | None = None,
    forks: ForkServer | None = None,
) -> int:
    """Run a check that goes on to build the model once it has said what else is proven; returns its exit code.

    `free` tells which part of the machine's memory is free. A build that takes too much of it, or more than `seconds`,
    is ended; what was proven before counts. All points of a sweep share these seconds. `forks` has imported TensorFlow.
    What it has forked ends with it, as when a run ends meanwhile: then a new process does the check.
    """
    free = free or free_memory
    if forks is not None and "-" in command:
        keep_input()
    process = start_build(command, forks)
    heard, given_up = Heard(), ""
    reader = threading.Thread(target=heard.pass_on, args=(process.stdout,), name="build", daemon=True)
    reader.start()
    try:
        while process.poll() is None and not given_up:
            time.sleep(POLL_SECONDS)
            if heard.proven_at is not None:
                given_up = heard.why_end(free(), time.monotonic() - heard.proven_at, seconds)
    finally:
        # What the program has started is of its group, and ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    reader.join(PIPE_SECONDS)  # a process in a session of its own may keep the pipe
    if code == -signal.SIGKILL and isinstance(process, Forked) and not given_up:
        return watch_build(command, seconds, free)
    return judge(code, heard, given_up)


def judge(code: int, heard: Heard, given_up: str) -> int:
    """Say how a build ended, where it did not itself; returns the exit code."""
    if code == -signal.SIGKILL and heard.proven_at is not None:
        print(f"{UNPROVEN}{heard.what}: {given_up or 'the kernel ended it, for its memory'}")
        return FINISHED
    if code < 0:
        name = signal.Signals(-code).name
        if heard.proven_at is not None:
            say_error(f"{heard.what}: the process of the proof ended with {name}. {SWITCH}")
            return USER_ERROR
        say_error(f"the process of the proof ended with {name}")
        return TRY_AGAIN
    return code


def start_build(command: Sequence[str], forks: ForkServer | None) -> Forked | subprocess.Popen[str]:
    """Start a build with this process's input and errors; forked, where a server has the same kit and environment."""
    reading, writing = os.pipe()
    try:
        if forks is not None and forks.comes(IMPORT_SECONDS):
            forked = forks.start(command[1:], os.environ, Path.cwd(), 0, writing, 2)
            if forked is not None:
                forked.stdout = open(reading, errors="replace")  # noqa: SIM115, PTH123 - closed by its reader
                return forked
    finally:
        os.close(writing)
    os.close(reading)
    if "-" in command:
        with contextlib.suppress(OSError):  # a pipe is read once
            os.lseek(0, 0, os.SEEK_SET)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True)


def keep_input() -> None:
    """Put what comes on standard input into a file, which a second process can read from its beginning."""
    with file_in_memory() as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.seek(0)
        os.dup2(kept.fileno(), 0)


def free_memory() -> float:
    """Return which part of the machine's memory is free or can be freed."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available, total = (int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    return available / total


def go_first() -> None:
    """Have the kernel end this process before any other, when the machine's memory is short."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


class Heard:
    """What a proof has printed so far: since when all but the build is proven, and what is built."""

    def __init__(self) -> None:
        self.proven_at: float | None = None
        self.what = "build_model"
        self._taking = "it"

    def pass_on(self, lines: Iterable[str] | None) -> None:
        """Print the lines as they come, and take note of them."""
        for line in lines or ():
            print(line, end="", flush=True)
            if line.startswith(PROVEN) and self.proven_at is None:
                self.proven_at = time.monotonic()
            if line.startswith(BUILDING):
                self.what = f"build_model of {line.removeprefix(BUILDING).strip()}"
                self._taking = "the points together"

    def why_end(self, free: float, took: float, limit: float) -> str:
        """Say why a build must be ended that has taken so long, and leaves so much memory free; nothing for none."""
        if free < FREE:
            return f"it would leave less than {FREE:.0%} of this machine's memory free"
        return f"{self._taking} took more than {limit:.0f} s" if took > limit else ""


def build(config: Config, program: Program, cluster: ClusterConfig | None, point: str = "") -> int | None:
    """Build the model as a coordinator would, and say what is wrong, naming a sweep's point.

    Returns the exit code, None where the build was given up.
    """
    tf = load_tensorflow()
    from trainer.training.data.input import element_spec_of
    from trainer.training.keras.adapters import keras_of
    from trainer.training.steps.model import make_model
    from trainer.training.tables.declared_tables import name_declared_tables

    of = f" of {point}" if point else ""
    if point:
        print(f"{BUILDING}{point}", flush=True)
    if config.traits.in_step:
        config = config.replace(strategy="mirrored")  # which makes variables alike, without the other members
    try:
        strategy = strategy_of(config, cluster)
    except Exception as error:  # no fault of the program's
        print(f"{UNPROVEN}build_model{of}: there is no strategy to build it in: {explain(error)}")
        return None
    if config.seed is not None:
        tf.keras.utils.set_random_seed(config.seed)
    methods = ["build_model"]  # the last one is under way
    try:
        config = name_declared_tables(config, program)
        model, _ = make_model(program, strategy)
        keras = keras_of(model)
        keras.check_settings(config)
        methods.append("train_dataset")
        spec = None if keras.is_built else element_spec_of(program, strategy)
        methods.append("the model's call")
        with strategy.scope():
            keras.build(spec)
    except (Exception, SystemExit) as error:
        return say_failure(config, program, of, methods[-1], error)
    print("its model is built")
    return FINISHED


def strategy_of(config: Config, cluster: ClusterConfig | None) -> Strategy:
    """Return the strategy, on servers in this process."""
    from trainer.tasks.in_process import start_cluster
    from trainer.training.strategies import make_strategy

    os.environ.pop("TF_CONFIG", None)
    servers = len(cluster.jobs.get("ps", ())) if cluster else MAX_PS
    return make_strategy(config, start_cluster(config.strategy, 1, min(servers, MAX_PS)))


def say_failure(config: Config, program: Program, of: str, method: str, error: BaseException) -> int | None:
    """Say why a method of the program's failed; returns the exit code, None where the build was given up."""
    import tensorflow as tf

    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        print(f"{UNPROVEN}{method}{of}: it needs more memory than there is: {explain(error)}")
        return None
    if isinstance(error, UserError):
        say_error(f"program {config.program}{of}: {error}")
        return USER_ERROR
    mine = is_the_programs(error)
    file = program_file(program)
    message = f"program {config.program}{of}: {method} failed: {explain(error, file)}"
    say_error(message, *own_lines(error, file))
    if mine:
        say_error(SWITCH)
    return USER_ERROR if mine else TRY_AGAIN


def say_error(*lines: str) -> None:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
