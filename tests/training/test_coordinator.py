"""What a coordinator leaves behind when it ends by itself; no step is trained here."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer.cluster.deadlines import Phases
from trainer.cluster.members.formation import MembershipChanged
from trainer.cluster.members.membership import Membership
from trainer.cluster.spec import ClusterConfig
from trainer.core import own_frames
from trainer.core.failures import (
    FINISHED,
    TRY_AGAIN,
    USER_ERROR,
    CheckpointMismatch,
    EmptyPart,
    Infrastructure,
    UserError,
    is_device,
    is_infrastructure,
)
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.lease import LostLease
from trainer.run.records import read_record, write_record
from trainer.tasks import coordinator
from trainer.tasks import training as training_module
from trainer.tasks.coordinator import run_coordinator
from trainer.tasks.generation import Generation, finish_run
from trainer.tasks.training import Training
from trainer.telemetry.events import read_events
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress
from trainer.telemetry.status import read_status
from trainer.training import release_resources as freeing
from trainer.training.run_context import RunContext

pytestmark = pytest.mark.timeout(120)
MEMBERS = {"worker-0": "w0", "ps-0": "p0"}
# Nothing listens there.
CLUSTER = ClusterConfig({"chief": ["127.0.0.1:9"], "worker": ["127.0.0.1:9"], "ps": ["127.0.0.1:9"]}, "chief", 0)


def training_of(config: Config, program: Any, directory: RunDirectory, progress: Progress, members: Any) -> Training:
    return Training(RunContext(config, program, directory, progress, Phases({}), members, None, StopRequest()), CLUSTER)


def stand_in(is_recovering: bool = False, close: Callable[[], object] = lambda: None) -> Any:
    """Return a runner of a generation that has trained nothing."""
    return SimpleNamespace(is_recovering=is_recovering, is_failing_alike=lambda error: False, close=close)


class Formed(Membership):
    """Has its members already."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for task, process in MEMBERS.items():
            self.heartbeat.change(lambda member, process=process: member.answered(0, 0, process).taken(0), task)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(program="mine:One", run="mine", steps=10, shared_dir=str(tmp_path))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, "mine")


@pytest.fixture(autouse=True)
def others_left_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests' trainings in this process left on servers that have ended is no generation's of these."""
    monkeypatch.setattr(freeing, "freed", lambda seconds: True)


@pytest.fixture
def ends_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What sets how the loading of the program ends."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(coordinator, "Membership", Formed)
    yield lambda load: monkeypatch.setattr(coordinator, "load_program", load)
    signal.signal(signal.SIGTERM, handler)


def test_a_path_that_hangs_keeps_no_coordinator_that_has_failed(
    config: Config, directory: RunDirectory, ends_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "FLUSH_SECONDS", 1.0)

    def load(name: str, arguments: object, *_: object, **__: object) -> Any:
        for path in (directory.state, directory.attempts):
            path.unlink(missing_ok=True)
            os.mkfifo(path)  # its readers wait for ever
        raise UserError("the user's limit is over")

    ends_with(load)
    assert run_coordinator(config, CLUSTER, Notifier()) == USER_ERROR
    assert not directory.lease_epoch() or (read_record(directory.lease(1)) or {})["released"]


BROKEN = "failed to copy memory: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


def test_a_broken_device_is_tried_again_within_the_budget_by_new_processes(
    config: Config, directory: RunDirectory, ends_with: Any
) -> None:
    def load(name: str, arguments: object, *_: object, **__: object) -> Any:
        raise tf.errors.InternalError(None, None, BROKEN)

    ends_with(load)
    config = config.replace(max_restarts_without_step=1)
    assert [run_coordinator(config, CLUSTER, Notifier()) for _ in range(2)] == [TRY_AGAIN] * 2
    assert (read_record(directory.state) or {})["restart"] == MEMBERS
    assert run_coordinator(config, CLUSTER, Notifier()) == USER_ERROR
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in (read_record(directory.status) or {})["message"]


def test_a_coordinator_whose_memory_ran_out_is_named_among_the_runs_events(
    config: Config, directory: RunDirectory, ends_with: Any
) -> None:
    def load(name: str, arguments: object, *_: object, **__: object) -> Any:
        raise UserError("it ends here")

    ends_with(load)
    lack = "out of memory, limit 2.0 GiB: take smaller batches"
    run_coordinator(config, CLUSTER, Notifier(restarts=1, lack=lack))
    [found] = [event for event in read_events(directory.event_log) if event["event"] == "out-of-memory"]
    assert (found["task"], found["message"]) == ("chief-0", lack)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (tf.errors.InternalError(None, None, BROKEN), True),
        (tf.errors.InternalError(None, None, "failed to query event: CUDA_ERROR_LAUNCH_FAILED: unspecified"), True),
        (tf.errors.InternalError(None, None, "CUDA error: unspecified launch failure"), True),
        (tf.errors.InternalError(None, None, "Failed copying input tensor from CPU to GPU: out of memory"), False),
        (tf.errors.InvalidArgumentError(None, None, BROKEN), False),
        (ValueError(BROKEN), False),
    ],
)
def test_what_is_a_broken_devices_error(error: Exception, device: bool) -> None:
    assert (is_device(error), is_infrastructure(error)) == (device, device)


@pytest.mark.parametrize("held", [[False], [True, False]])
def test_a_run_is_not_finished_by_a_coordinator_that_has_lost_it(
    config: Config, directory: RunDirectory, held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.exports.export.export_model", lambda *arguments: "export")
    looks = iter(held)
    lease: Any = SimpleNamespace(held=lambda: next(looks))
    progress = Progress(config, directory, Notifier())
    context = RunContext(config, None, directory, progress, Phases({}), None, lease, StopRequest())
    controller, runner, none = SimpleNamespace(step=10, values={}), SimpleNamespace(element_spec=None), None
    with pytest.raises(LostLease):
        finish_run(Generation(context, runner, controller, [], none), 10, 1.0, "", 0.0)  # type: ignore[arg-type]
    assert directory.finished(10) is None
    assert next(looks, "asked") == "asked"


LOST = tf.errors.UnavailableError(None, None, "ps-0 is gone")
EMPTY = EmptyPart("a worker's part of the training data is empty")
HURT = EmptyPart("the same, and a member's process has ended meanwhile")


@pytest.mark.parametrize(
    ("generations", "recovering", "ends", "taken"),
    [
        ([EMPTY, EMPTY], False, EmptyPart, 2),
        ([EMPTY, LOST, EMPTY, EMPTY], False, Infrastructure, 3),  # the most generations in vain
        ([EMPTY, MembershipChanged("worker-0 is back"), EMPTY, EMPTY], False, EmptyPart, 4),
        ([EMPTY], True, Infrastructure, 1),  # TensorFlow is taking in a worker: the next process goes on
        ([HURT, HURT, HURT], False, Infrastructure, 3),
        ([EMPTY, HURT, EMPTY, EMPTY], False, Infrastructure, 3),
    ],
)
def test_an_empty_part_is_the_users_only_if_two_generations_in_a_row_end_so(
    config: Config,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    generations: Any,
    recovering: bool,
    ends: Any,
    taken: int,
) -> None:
    monkeypatch.setattr(training_module, "HEAR_SECONDS", 0)
    handler = signal.getsignal(signal.SIGTERM)
    lost: list[str] = []
    member: Any = SimpleNamespace(form=lambda: CLUSTER, generation_over=lost.append, began=0, hurt=False)
    progress = Progress(config, directory, Notifier())
    training = training_of(config, None, directory, progress, member)

    def train_generation(*arguments: Any) -> None:
        training._runner = stand_in(recovering)
        training._controller = SimpleNamespace(
            has_trained=False, every_worker_has_trained=False, settle=lambda seconds: True
        )
        member.hurt = generations[len(lost)] is HURT
        raise generations[len(lost)]

    monkeypatch.setattr(training, "_train_generation", train_generation)
    try:
        with pytest.raises(ends) as ended:
            training.run()
        assert type(ended.value) is ends
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(lost) == taken - 1


def run_generations(
    config: Config,
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    generation: Callable[[Training], None],
    freed: bool = True,
    **member: Any,
) -> None:
    """Run a training whose generations do what `generation` does, with what servers free and a membership made up."""
    known = {"form": lambda: CLUSTER, "generation_over": lambda message: None, "began": 0, "hurt": False}
    membership: Any = SimpleNamespace(**{**known, **member})
    progress = Progress(config, directory, Notifier())
    training = training_of(config, None, directory, progress, membership)

    def train_generation(*arguments: Any) -> None:
        training._runner = stand_in()
        generation(training)

    monkeypatch.setattr(training, "_train_generation", train_generation)
    monkeypatch.setattr(freeing, "freed", lambda seconds: freed)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        training.run()
    finally:
        signal.signal(signal.SIGTERM, handler)


def changed(training: Training) -> None:
    raise MembershipChanged("worker-1 answers again")


def test_a_checkpoint_that_fits_no_model_of_this_process_is_left_to_the_next(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot's name may have a number that TensorFlow counts in each process."""
    ends = iter([MembershipChanged("worker-0 is back"), CheckpointMismatch("the checkpoint does not fit the model")])

    def generation(training: Training) -> None:
        raise next(ends)

    with pytest.raises(Infrastructure, match="does not fit the model; it may fit in a new process"):
        run_generations(config, directory, monkeypatch, generation)


@pytest.mark.parametrize("left_out", [["ps-1"], []])
def test_a_checkpoint_that_fits_on_all_ps_alone_has_the_run_wait_for_them(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, left_out: list[str]
) -> None:
    over: list[str] = []

    def generation(training: Training) -> None:
        training._controller = SimpleNamespace(has_trained=False, settle=lambda seconds: True)
        if not over:
            raise CheckpointMismatch("the checkpoint does not fit the model")

    member = {"generation_over": over.append, "needs_every_ps": lambda: left_out}
    with contextlib.nullcontext() if left_out else pytest.raises(CheckpointMismatch):
        run_generations(config, directory, monkeypatch, generation, **member)
    fits = "the checkpoint does not fit the model; it may fit on all ps, and ps-1 is left out: waiting for it"
    assert over == ([fits] if left_out else [])


WELL, NOTHING, NO_MODEL = True, False, None


@pytest.mark.parametrize(
    "generations",
    [
        [NOTHING, NOTHING, NOTHING],
        [NO_MODEL, NO_MODEL, NO_MODEL],
        [WELL, WELL, WELL, WELL, NOTHING, NO_MODEL, WELL, NOTHING, NOTHING, NOTHING],
    ],
)
def test_only_generations_that_trained_nothing_end_the_process(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, generations: list[bool | None]
) -> None:
    """None of them saves anything: a checkpoint may be due rarely, and ps be lost often."""
    left = iter(generations)
    member: Any = SimpleNamespace(
        form=lambda: CLUSTER, generation_over=lambda message: None, lost_ps=lambda: ["ps-0"], began=0, hurt=True
    )
    progress = Progress(config, directory, Notifier())
    training = training_of(config, None, directory, progress, member)

    def train_generation(*arguments: Any) -> None:
        training._runner = stand_in()
        if (trained := next(left)) is not NO_MODEL:
            training._controller = SimpleNamespace(has_trained=trained, settle=lambda seconds: True)
        raise LOST

    monkeypatch.setattr(training, "_train_generation", train_generation)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Infrastructure, match="ps-0 is gone"):
            training.run()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not list(left)


def test_what_the_servers_do_not_free_takes_a_new_process(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Infrastructure, match="worker-1 answers again; and the servers do not free"):
        run_generations(config, directory, monkeypatch, changed, freed=False)


def test_a_process_trains_so_many_generations_alone(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what each has traced."""
    over: list[str] = []
    monkeypatch.setattr(training_module, "MAX_GENERATIONS", 3)
    with pytest.raises(Infrastructure, match="worker-1 answers again; and this process keeps what 3 generations"):
        run_generations(config, directory, monkeypatch, changed, generation_over=over.append)
    assert len(over) == 3


@pytest.mark.parametrize("ends", [False, True])
def test_the_next_generation_waits_for_the_threads_of_the_one_before(
    config: Config, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """They are still at work on a worker, where they make its iterator for example."""
    member: Any = SimpleNamespace(form=lambda: CLUSTER, generation_over=lambda message: None, began=0, hurt=False)
    progress = Progress(config, directory, Notifier())
    training = training_of(config, None, directory, progress, member)
    closed, released, seen = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        closed.wait(60)
        released.wait(0.5 if ends else 60)

    def close() -> freeing.Iterators:
        closed.set()
        return freeing.Iterators([], [], [], [thread])

    thread = threading.Thread(target=work, daemon=True)

    def train_generation(*arguments: Any) -> None:
        if thread.ident is not None:
            seen.append(thread.is_alive())
            raise UserError("the next generation")
        thread.start()
        training._runner = stand_in(close=close)
        raise MembershipChanged("worker-1 answers again")

    monkeypatch.setattr(training, "_train_generation", train_generation)
    monkeypatch.setattr(training_module, "THREADS_SECONDS", 60.0 if ends else 0.1)
    monkeypatch.setattr(freeing, "release_iterators", lambda iterators: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(UserError if ends else Infrastructure) as ended:
            training.run()
    finally:
        signal.signal(signal.SIGTERM, handler)
        released.set()
        thread.join(60)
    assert seen == ([False] if ends else [])
    assert ends or str(ended.value) == "worker-1 answers again; and a worker does not end what it was given"


def test_a_file_that_an_installed_program_misses_is_the_users_error_at_once(
    config: Config, directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_frames, "LIBRARIES", (tmp_path, Path(__file__).parent))
    (tmp_path / "installed.py").write_text("class One:\n    def read(self):\n        open('/no/such/words.txt')\n")
    monkeypatch.syspath_prepend(tmp_path)
    program = importlib.import_module("installed").One()
    handler = signal.getsignal(signal.SIGTERM)
    member: Any = SimpleNamespace(form=lambda: CLUSTER, generation_over=lambda message: None, began=0)
    progress = Progress(config, directory, Notifier())
    training = training_of(config, program, directory, progress, member)
    generations: list[int] = []

    def train_generation(*arguments: Any) -> None:
        generations.append(len(generations))
        training._runner = stand_in()
        program.read()

    monkeypatch.setattr(training, "_train_generation", train_generation)
    try:
        with pytest.raises(FileNotFoundError):
            training.run()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert generations == [0]


def test_a_finished_run_whose_last_status_was_lost_is_shown_as_finished(
    config: Config, directory: RunDirectory
) -> None:
    directory.set_state(RunState.FINISHED, 10, asked=10)
    write_record(directory.status, {"run": "mine", "run_dir": "", "state": "training", "step": 8})
    assert run_coordinator(config, CLUSTER, Notifier()) == FINISHED
    found = read_status(directory)
    assert (found.state, found.step) == ("finished", 10)


@pytest.mark.parametrize("code", [0, 1])
def test_a_program_that_says_exit_is_the_users_error(
    config: Config, directory: RunDirectory, ends_with: Any, code: int
) -> None:
    ends_with(lambda *_, **__: sys.exit(code))
    assert run_coordinator(config, CLUSTER, Notifier()) == USER_ERROR
    assert (read_record(directory.status) or {})["state"] == "failed"


def test_a_program_that_raises_an_interrupt_is_the_users_error(
    config: Config, directory: RunDirectory, ends_with: Any
) -> None:
    def load(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    ends_with(load)
    assert run_coordinator(config, CLUSTER, Notifier()) == USER_ERROR
    status = read_record(directory.status) or {}
    assert (status["state"], "model.stop_training" in status["message"]) == ("failed", True)


def test_an_interrupt_by_a_signal_is_no_error_of_the_programs(
    config: Config, directory: RunDirectory, ends_with: Any
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ends_with(lambda *_, **__: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_coordinator(config, CLUSTER, Notifier())
    finally:
        signal.signal(signal.SIGINT, before)
    assert (read_record(directory.status) or {}).get("state") != "failed"


def test_a_process_that_can_not_say_how_it_ends_counts_as_a_crash(
    config: Config, directory: RunDirectory, ends_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be started again for ever."""
    ends_with(lambda *_, **__: sys.exit(1))

    def silent(*_: object) -> int:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(coordinator, "leave", silent)
    for crashes in (1, 2):
        with pytest.raises(ValueError, match="closed file"):
            run_coordinator(config, CLUSTER, Notifier())
        assert (read_record(directory.attempts) or {})["crashes"] == crashes


class Wordless(Exception):
    """An error that can't be put into words."""

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_can_not_be_put_into_words_counts_as_a_crash(
    config: Config, directory: RunDirectory, ends_with: Any
) -> None:
    def load(*_: object, **__: object) -> Any:
        raise Wordless

    ends_with(load)
    with pytest.raises(ValueError, match="no words"):
        run_coordinator(config, CLUSTER, Notifier())
    assert (read_record(directory.attempts) or {})["crashes"] == 1
