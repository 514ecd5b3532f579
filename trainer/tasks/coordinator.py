"""What runs the training program: makes the strategy, trains, saves, exports.

It is the coordinator (TensorFlow's job `chief`), and under multi_worker_mirrored every member.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from trainer.cluster.commands import COMING_SECONDS, shut_down_servers
from trainer.cluster.deadlines import Phases
from trainer.cluster.formation import MembershipChanged, names
from trainer.cluster.leaving import names as leaving_names
from trainer.cluster.membership import Membership, say_last
from trainer.cluster.probe import SERVICE_METHODS, silent
from trainer.cluster.rendezvous import gather
from trainer.cluster.spec import Cluster
from trainer.config import Config
from trainer.failures import (
    FINISHED,
    STOPPED,
    TRY_AGAIN,
    USER_ERROR,
    EmptyPart,
    Infrastructure,
    Misfit,
    StalePath,
    Stopped,
    UserError,
    explain,
    first_line,
    is_device,
    is_infrastructure,
    is_stale,
)
from trainer.memory_limit import check_room
from trainer.program import load_program, program_file
from trainer.repeated_failures import RepeatedFailures
from trainer.reporting.logs import load_tensorflow
from trainer.reporting.metrics import Told
from trainer.reporting.notifications import Notifications
from trainer.reporting.notify import Notifier
from trainer.reporting.progress import Progress
from trainer.reporting.resources import record_resources
from trainer.reporting.status import numbers, read_status
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease, check_lease
from trainer.run.release import own_release
from trainer.run.restart_budget import begin_attempt, end_attempt
from trainer.signals import StopRequest, on_sigterm, raise_stopped
from trainer.states import Phase, RunState
from trainer.variables import bytes_of, flatten

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
REMIND_SECONDS = 30.0
END_SECONDS = 600.0
FLUSH_SECONDS = 10.0
SETTLE_SECONDS = 10.0
FREED_SECONDS = THREADS_SECONDS = 5.0
STORAGE_PAUSE_SECONDS = 5.0
HEAR_SECONDS = 3.0  # TensorFlow is faster than the heartbeat
ENDS = (RunState.FINISHED, RunState.FAILED)
GENERATIONS_IN_VAIN = 3  # generations in a row that trained nothing, after which a new process may do better
# A process keeps each generation's functions, and gives them to each worker that is taken in (keep_function).
MOST_GENERATIONS = 50


def run_coordinator(
    config: Config,
    cluster: Cluster,
    notifier: Notifier,
    in_process: bool = False,
    keeps_servers: bool = False,
    stopping: StopRequest | None = None,
    told: Told | None = None,
    notifications: Notifications | None = None,
) -> int:
    """Train the run to its end; returns the exit code.

    Under multi_worker_mirrored the workers run this too; only the chief writes to the run directory. `in_process` says
    that the servers live in this process, where nobody can lose them, `keeps_servers` that another run needs them next.
    `stopping` is told of a SIGTERM that came too late for this run to stop, `told` what to say to who scrapes.
    """
    cluster.check_strategy(config.strategy)
    cluster.check_input(config.input)
    leads = cluster.job == "chief"
    directory = RunDirectory(config.shared_dir, config.run)
    progress: Progress | None = None
    lease: Lease | None = None
    file: Path | None = None
    begun = trouble = broken = False
    message = ""
    membership: Membership | None = None
    on_sigterm(raise_stopped)
    try:
        finished = directory.finished(config.steps)
        if finished is not None:
            log.info("run %s finished at step %d; start a new one with --run NAME", config.run, finished)
            notifier.ready(f"run {config.run} finished at step {finished}")
            if leads:
                write_finished(directory, config, finished)
                finish_export(directory, config, finished, notifier)
            if config.local_run_dir and not in_process and not keeps_servers:
                notifier.watch(lambda: True)
                load_tensorflow()
                shut_down_servers(cluster.servers, COMING_SECONDS)
            return FINISHED
        # A coordinator that is refused must not say of the run what it is doing itself.
        progress = Progress(config, directory, notifier, leads, waits=leads, notifications=notifications)
        if told is not None and leads:
            told.of(config.run, progress.tally, progress)
        progress.enter(RunState.WAITING, "loading TensorFlow and the program")
        phases = Phases.of(config, progress.phase)
        notifier.ready(progress.status.line())
        notifier.watch(phases.in_time)
        if leads:
            lease = Lease.acquire(directory, config.lease_seconds, partial(progress.enter, RunState.WAITING))
            directory.set_damaged_records_aside()
            directory.claim(config)
            progress.begin()
            record_resources(cluster.task, lambda: directory)
            if lease.taken_from:
                progress.events.write("lease-taken", message=f"from {lease.taken_from}")
            pause = begin_attempt(directory, directory.catalogue.newest(), config.restarts_without_step)
            begun = True
            if pause:
                progress.enter(
                    RunState.WAITING, f"started again and again without a new checkpoint: going on in {pause:.0f} s"
                )
                time.sleep(pause)
        if config.strategy == "parameter_server" and not in_process:
            membership = Membership(config, cluster, directory, progress, phases, own_release(Path.cwd()))
        load_tensorflow()
        program = load_program(config.program, config.program_args)
        file = program_file(program)
        Training(config, cluster, program, directory, progress, phases, membership, lease, stopping).run()
        if membership is not None and not keeps_servers:
            membership.shut_down_servers()
        return FINISHED
    except Stopped:
        enter(progress, RunState.STOPPED, "")
        log.info("stopped at step %s on request", progress.status.step if progress else None)
        return STOPPED
    except (Exception, SystemExit) as error:  # a program may say sys.exit
        message = str(error) if isinstance(error, UserError | Infrastructure) else explain(error, file)
        if is_infrastructure(error, file):
            broken = is_device(error)  # which may be so for ever
            trouble = not broken
            log.error("trouble with the cluster, trying again: %s", message)
            enter(progress, RunState.WAITING, message)
            if isinstance(error, StalePath) or is_stale(error):
                notifier.restart_unit()
            elif leads and not begun and isinstance(error, OSError):  # as a full path: the next would fail at once
                return pause_unless_stopped(STORAGE_PAUSE_SECONDS)
            return TRY_AGAIN
        log.error("run %s failed: %s", config.run, message, exc_info=not isinstance(error, UserError))
        enter(progress, RunState.FAILED, message)
        return USER_ERROR
    finally:
        # Who gets here has ended by itself, and knew why.
        def leave() -> None:
            if membership is not None:
                membership.leave(past_using=broken)
            if begun:
                end_attempt(directory, broken, trouble, message if broken else "")

        say_last(leave)
        if progress is not None:
            progress.close(FLUSH_SECONDS)
        if lease is not None:
            lease.release()
        if notifications is not None and progress is not None and progress.status.state in ENDS:
            with contextlib.suppress(Stopped):  # who stops this process need not wait, either
                notifications.close()


def pause_unless_stopped(seconds: float) -> int:
    """Hold the next process back, which no budget does yet; returns this one's exit code."""
    try:
        time.sleep(seconds)
    except Stopped:
        return STOPPED
    return TRY_AGAIN


def write_finished(directory: RunDirectory, config: Config, step: int) -> None:
    """Say in the status that the run is finished, where the process that finished it could not any more."""
    status = read_status(directory, config)
    if status.state is not RunState.FINISHED:
        status.state, status.phase, status.message, status.step = RunState.FINISHED, None, "", step
        try:
            status.write(directory)
        except OSError as error:
            log.warning("cannot write down that the run is finished: %s", error)


def finish_export(directory: RunDirectory, config: Config, step: int, notifier: Notifier) -> None:
    """Export the model where the process that finished the run could not any more; raises Infrastructure."""
    if not config.export or not directory.is_export_left():
        return
    phases = Phases({Phase.SAVING: config.saving_timeout_seconds})
    notifier.watch(phases.in_time)
    lease = Lease.acquire(directory, config.lease_seconds, notifier.status)
    try:
        if not directory.is_export_left():  # the holder before has made it
            return
        phases.enter(Phase.SAVING)
        load_tensorflow()
        from trainer.training.export import export_what_is_due, not_exported

        wrong = export_what_is_due(lambda: load_program(config.program, config.program_args), directory, step)
        check_lease(lease)
        status = read_status(directory, config)
        status.export, status.message = None if wrong else str(directory.export), not_exported(config.run, wrong)
        status.write(directory)
    finally:
        lease.release()


def enter(progress: Progress | None, state: RunState, message: str) -> None:
    if progress is not None:
        progress.enter(state, message)


def train(config: Config, cluster: Cluster, program: Any, directory: RunDirectory, progress: Progress) -> None:
    """Train to the end on members that live as long as this process does; raises Stopped when asked to stop."""
    Training(config, cluster, program, directory, progress, Phases.of(config, progress.phase)).run()


class Training:
    """One process's part of a run: the generations that it trains, each on the members that are there."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        program: Any,
        directory: RunDirectory,
        progress: Progress,
        phases: Phases,
        membership: Membership | None = None,
        lease: Lease | None = None,
        stopping: StopRequest | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._program = program
        self._directory = directory
        self._progress = progress
        self._membership = membership
        self._lease = lease
        self._phases = phases
        self._memory: Any = None
        self._stopping = stopping or StopRequest()
        self._began = time.monotonic()
        self._runner: Any = None
        self._controller: Any = None
        self._handover: Any = None
        self._in_vain = RepeatedFailures(GENERATIONS_IN_VAIN)
        self._generations = 0
        self._doubted = False  # whether the generation before ended at a part without data, and not at a fault

    def run(self) -> None:
        """Train generations until the run is finished; raises what another process must mend, and Stopped."""
        membership, in_vain = self._membership, 0
        if membership is None and self._cluster.servers:
            wait_for_members(self._config, self._cluster, self._directory, self._progress)
        while True:
            if membership is not None:
                # A request that came in the generation before would be forgotten: the signal has been handled.
                on_sigterm(raise_stopped)
                if self._stopping():
                    raise Stopped
            cluster = membership.form() if membership else self._cluster
            self._generations += 1
            try:
                self._train_generation(cluster, membership.began if membership else self._began)
                return
            except MembershipChanged as reform:
                message, self._doubted = str(reform), False
            except Exception as error:
                lacks_ps = self._lacks_ps(error)
                if membership is not None and self._is_failing_alike(error, membership):
                    raise membership.failed_alike(error) from error
                if membership is None or not (lacks_ps or self._is_mendable_here(error)):
                    raise
                # One that trained well shows that this process can: it is not its fault that nothing was saved.
                in_vain = 0 if self._controller is not None and self._controller.has_trained else in_vain + 1
                if in_vain == 0 or membership.hurt:
                    self._in_vain.clear()
                message = lacks_ps or explain(error)
                if isinstance(error, EmptyPart):
                    message = "a worker's data ended in the middle of a call, as a fault leaves it"
                if self._fails_alike(error):
                    raise membership.failed_alike(error) from error
                if in_vain == GENERATIONS_IN_VAIN:
                    raise Infrastructure(message) from error
            if self._controller is not None and not self._controller.settle(SETTLE_SECONDS):
                raise Infrastructure(f"{message}; and the save in flight does not end")
            if membership is not None and self._runner.is_recovering:
                raise Infrastructure(f"{message}; and TensorFlow is taking in a worker")
            if membership is not None:
                if self._handover is not None and not membership.lost_ps():
                    self._set_aside()
                membership.generation_over(message)
            if why := self._let_go():
                raise Infrastructure(f"{message}; and {why}")

    def _is_failing_alike(self, error: Exception, membership: Membership) -> bool:
        """Return whether every worker of this generation has failed with this error, and none has trained."""
        if isinstance(error, UserError | Infrastructure) or self._controller is None or self._controller.has_trained:
            return False
        failing = getattr(self._runner, "is_failing_alike", None)
        return failing is not None and failing(error) and not membership.hurt

    def _fails_alike(self, error: Exception) -> bool:
        """Return whether each generation has failed with this error, while no member's process ended."""
        classes = [kind.__name__ for kind in type(error).__mro__]
        self._in_vain.add("generation", None, classes, str(error))
        return self._in_vain.are_the_programs(str(error), [("generation", None)])

    def _lacks_ps(self, error: Exception) -> str:
        """Say which ps must be waited for, where the checkpoint does not fit a model on fewer of them.

        An optimizer of the program's own may name what it keeps by the shards of a table, or by numbers that TensorFlow
        counts in each process. Raises Infrastructure where this process has trained a generation: another may fit.
        """
        if not isinstance(error, Misfit) or self._membership is None:
            return ""
        if self._generations > 1:
            raise Infrastructure(f"{error}; it may fit in a new process, which numbers its variables from the start")
        if not (lacking := self._membership.needs_every_ps()):
            return ""
        return f"{error}; it may fit on all ps, and {', '.join(lacking)} is left out: waiting for it"

    def _is_mendable_here(self, error: Exception) -> bool:
        """Return whether the next generation can train in this process."""
        if isinstance(error, EmptyPart):
            # An empty part ends each generation at its worker's first call; a call that a fault broke off, hardly two.
            doubted, self._doubted = self._doubted and not self._controller.every_worker_has_trained, True
            time.sleep(HEAR_SECONDS)
            if self._membership is not None and self._membership.hurt:
                self._doubted = doubted = False  # a fault of this generation's own has broken it off
            return not doubted
        self._doubted = False
        if isinstance(error, UserError | Infrastructure) or not is_infrastructure(error, program_file(self._program)):
            return False
        if is_device(error) or is_stale(error):
            return False
        # Without a runner, TensorFlow's own threads can't be asked how far they are.
        return self._runner is not None and not self._runner.is_recovering

    def _set_aside(self) -> None:
        """Keep the variables for the next generation, which else goes back to the newest checkpoint."""
        from tensorflow import errors

        try:
            self._handover.set_aside(self._runner.copy)
        except errors.OpError as error:
            log.warning("cannot keep the variables: %s", first_line(error))

    def _let_go(self) -> str:
        """Free what lies on the servers, where the next generation makes it anew; returns why that can't be done."""
        from trainer.training.release_resources import freed, release_iterators

        if self._generations >= MOST_GENERATIONS:
            return f"this process keeps what {self._generations} generations have traced"
        iterators = self._runner.close()
        if iterators is not None and not iterators.are_unused(THREADS_SECONDS):
            return "a worker does not end what it was given"
        if self._handover is not None:
            self._handover.release()
        self._runner = self._controller = self._handover = None
        gc.collect()
        if not freed(FREED_SECONDS):
            return "the servers do not free what this generation left there"
        if iterators is not None:
            release_iterators(iterators)
        return ""

    def _train_generation(self, cluster: Cluster, began: float) -> None:
        """Make the strategy and the model, restore, train, and finish the run."""
        import tensorflow as tf

        from trainer.run.memory import Memory
        from trainer.training.callbacks import callbacks_of
        from trainer.training.controller import Controller
        from trainer.training.data_service import DataService
        from trainer.training.evaluation import make_evaluation, refuse_best_metric
        from trainer.training.export_trial import try_export
        from trainer.training.handover import Handover
        from trainer.training.initial_weights import read_initial_weights
        from trainer.training.keras3 import raw
        from trainer.training.placement import report_placement
        from trainer.training.step_runner import LocalStepRunner, RemoteStepRunner, StepRunner
        from trainer.training.strategies import make_strategy

        config, program, directory, progress = self._config, self._program, self._directory, self._progress
        self._memory = self._memory or Memory(directory, progress.post, progress.leads)
        service = DataService.of(config, cluster)
        if service is not None:
            wait_for_data_service(config, cluster, self._stopping, progress)
        self._phases.enter(Phase.COMPILING)
        if config.seed is not None:
            tf.keras.utils.set_random_seed(config.seed)
        strategy = make_strategy(config, cluster, self._membership.processes if self._membership else None)
        self._stopping.listen(lambda: self._phases.phase in (Phase.COMPILING, Phase.RESTORING))
        progress.enter(RunState.WAITING, "building the model")
        progress.tally.workers = self._workers(cluster)
        whole = None  # where the model lies in this process, it fits into one
        if config.strategy == "parameter_server":
            if self._membership is not None:
                addresses = list(cluster.servers.values())
                check = partial(check_lease, self._lease)
                self._handover = Handover(config.run, config.program, len(cluster.jobs["ps"]), addresses, check)
            runner: StepRunner = RemoteStepRunner(config, program, strategy, cluster.workers, self._membership, service)
            held = report_placement(config, runner.trained, len(cluster.jobs["ps"]))
            servers = self._membership.servers if self._membership else [f"ps-{index}" for index in range(len(held))]
            progress.history.placed(dict(zip(servers, held, strict=True)))
            whole = sum(bytes_of(variable) for variable in flatten(raw(runner.model.variables)))
            if config.export and progress.leads:
                check_room(whole, "the export at the end", "set export: false, and export it on a larger host")
        else:
            member = cluster.index + (cluster.job == "worker")
            runner = LocalStepRunner(config, program, strategy, service, directory.catalogue.newest() or 0, member)
        self._runner = runner
        progress.tally.step_examples = runner.step_examples
        with strategy.scope():
            callbacks = callbacks_of(config, program, runner.model, leads=progress.leads)
        if config.export and progress.leads:
            try_export(program, directory, runner.element_spec)
        evaluate = make_evaluation(config, program, runner.model, strategy, cluster.workers)
        refuse_best_metric(config, evaluate, runner.model, runner.tells)
        read_weights = partial(read_initial_weights, config, program, runner)
        controller = Controller(
            config,
            runner,
            directory,
            progress,
            self._stopping,
            evaluate,
            self._phases,
            workers=cluster.workers,
            members=self._membership,
            began=began,
            lease=self._lease,
            handover=self._handover,
            read_initial_weights=read_weights if config.initial_weights else None,
            tells_epochs=config.api == "fit" or bool(callbacks),
        )
        self._controller = controller
        restoring = time.monotonic()
        with self._phases.during(Phase.RESTORING):
            controller.restore()
        if progress.leads:
            try:
                epoch = self._lease.epoch if self._lease else None
                directory.set_state(RunState.TRAINING, controller.step, epoch=epoch, model_bytes=whole)
            except OSError as error:  # training goes on where it can
                log.warning("cannot write down the state: %s", error)
        first, trained_from = controller.step, time.monotonic()
        if first:
            progress.tally.restore_seconds = trained_from - restoring
        self._phases.enter(Phase.TRAINING)
        ended = ""
        try:
            if not self._train(callbacks):
                controller.save_the_end()
                ended = ", where a callback ended it"
        except Stopped:
            if progress.leads:
                directory.set_state(RunState.STOPPED, controller.step)
            raise
        controller.evaluate()
        seconds = time.monotonic() - trained_from
        self._phases.enter(Phase.SAVING)
        if progress.leads:
            self._finish(controller.step - first, seconds, ended)
        else:
            wait_for_the_end(directory, config, controller.step, self._stopping)
            progress.enter(RunState.FINISHED)

    def _workers(self, cluster: Cluster) -> list[str]:
        """Name who trains, in the order in which calls tell their worker."""
        if self._config.strategy != "parameter_server":
            return [cluster.task]
        return self._membership.workers if self._membership else [f"worker-{n}" for n in range(cluster.workers)]

    def _train(self, callbacks: list[Any]) -> bool:
        """Train with the API of the settings; returns False when a callback ended the training before its last step."""
        from trainer.training.epochs import Epochs, averaged
        from trainer.training.fit import train_with_fit
        from trainer.training.loop import train_in_epochs, train_with_loop

        config, controller, model = self._config, self._controller, self._runner.model
        with_fit = config.api == "fit"
        # At the end averages are taken for weights, and callbacks may put back the best ones.
        has_end = bool(callbacks or averaged(model))
        epochs = Epochs(config, callbacks, self._runner, controller, self._memory) if with_fit or callbacks else None
        is_over = controller.done if epochs is None else epochs.are_over
        if is_over and (not has_end or controller.final):
            return bool(controller.done)
        if is_over:
            log.warning("the end of the training at step %d was cut off: it is made up for", controller.step)
        if epochs is None:
            train_with_loop(model, controller)
        elif with_fit:
            train_with_fit(model, epochs, controller)
        else:
            train_in_epochs(model, epochs)
        if has_end:
            controller.save_the_end(again=True)
        return bool(controller.done)

    def _finish(self, steps: int, seconds: float, ended: str) -> None:
        """Say that the run is finished, and export the model: whatever becomes of that, the run stays finished."""
        from trainer.training.export import export_what_is_due, make_export_due, not_exported

        config, directory, progress, controller = self._config, self._directory, self._progress, self._controller
        check_lease(self._lease)
        in_step, error, element_spec = config.traits.in_step, "", self._runner.element_spec
        progress.enter(RunState.TRAINING, "exporting the model" if config.export else "")

        def export() -> str:
            return export_what_is_due(lambda: self._program, directory, controller.step, element_spec)

        if config.export:
            make_export_due(directory, controller.step)
            if in_step:  # the others leave when the run is finished, and may not leave the chief alone before its end
                error = export()
        check_lease(self._lease)
        if self._membership is not None:
            self._membership.release()  # servers end with the run
        directory.set_state(RunState.FINISHED, controller.step, asked=config.steps)
        if config.export and not in_step:
            error = export()
        if config.export and not error:
            progress.exported(str(directory.export))
        progress.enter(
            RunState.FINISHED, ". ".join(filter(None, (ended.lstrip(", "), not_exported(config.run, error))))
        )
        if in_step:
            # The others look for this; one that still looks when the chief is gone would report its loss as an error.
            time.sleep(2 * POLL_SECONDS)
        log.info(
            "run %s finished: %s trained to step %d%s; %d steps in %.1f s (%.4g steps/s), %.1f s in all; "
            "%s; checkpoint %s; model %s",
            config.run, config.program, controller.step, ended, steps, seconds, steps / seconds,
            time.monotonic() - self._began, numbers(controller.values), progress.status.checkpoint,
            directory.export if config.export and not error else "not exported",
        )  # fmt: skip


def wait_for_members(config: Config, cluster: Cluster, directory: RunDirectory, progress: Progress) -> None:
    """Wait until every other member is there, naming those that aren't; a membership waits for its own.

    The constructors of strategies would wait as well, but for ever and without a word.
    """
    named: dict[str, str] = {}
    told = 0.0

    def tell(missing: dict[str, str]) -> None:
        nonlocal named, told
        if not progress.leads and directory.finished(config.steps) is not None:
            raise Infrastructure("the run has finished meanwhile")  # which this member finds at its next start
        if missing != named or time.monotonic() - told >= REMIND_SECONDS:
            message = f"no answer from {names(missing)}"
            log.info("waiting for members: %s", message)
            progress.enter(RunState.WAITING, message)
            named, told = missing, time.monotonic()

    if config.strategy == "multi_worker_mirrored":
        gather(cluster, config.as_dict(), tell)
    else:
        while missing := silent(cluster.servers):
            tell(missing)
            time.sleep(POLL_SECONDS)
    log.info("all %d other members are there", len(cluster.servers))
    # While the constructor waits, no Python handler could run.
    on_sigterm(signal.SIG_DFL)


def wait_for_data_service(config: Config, cluster: Cluster, stopping: StopRequest, progress: Progress) -> None:
    """Wait until the dispatcher and a data worker are there, naming who isn't: TensorFlow would wait without a word.

    Raises UserError when the user's limit to the waiting is over, in which a planned reboot does not count.
    """
    began, told, limit = time.monotonic(), "", config.member_wait_timeout_seconds
    while True:
        dispatcher, data = (
            silent({f"{job}-{index}": address for index, address in enumerate(cluster.service[job])}, method)
            for job, method in SERVICE_METHODS.items()
        )
        if not dispatcher and len(data) < len(cluster.service["data"]):
            if data:
                log.info("the data service begins without %s", names(data))
            return
        if (dispatcher | data).keys() & set(leaving_names()):
            began = time.monotonic()
        message = f"no answer from {names(dispatcher | data)}"
        if message != told:
            log.info("waiting for the data service: %s", message)
            progress.enter(RunState.WAITING, message)
            told = message
        if stopping():
            raise Stopped
        if 0 < limit < (seconds := time.monotonic() - began):
            raise UserError(
                f"waited {seconds:.0f} s (member_wait_timeout_seconds) for the data service, and {message}: the "
                "dispatcher and one data worker must be there. Start them, or set input: local"
            )
        time.sleep(POLL_SECONDS)


def wait_for_the_end(directory: RunDirectory, config: Config, step: int, stopping: StopRequest) -> None:
    """Wait until the chief has finished the run: it would take a member's end for a death."""
    limit = max(END_SECONDS, config.saving_timeout_seconds)  # the chief exports meanwhile
    deadline = time.monotonic() + limit
    while directory.finished(config.steps) is None:
        if stopping():
            raise Stopped
        if time.monotonic() > deadline:  # ending as if finished, the chief's next start would wait for this member
            raise Infrastructure(f"the chief has not finished the run {limit:.0f} s after its last step")
        time.sleep(POLL_SECONDS)
    log.info("run %s: trained to step %d", config.run, step)
