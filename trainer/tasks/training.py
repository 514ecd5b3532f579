"""The generations that one process trains, and what follows when one ends before the run does."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

from trainer.cluster.deadlines import Phases
from trainer.cluster.members.formation import MembershipChanged
from trainer.cluster.members.membership import Membership
from trainer.cluster.spec import ClusterConfig
from trainer.core.contracts import Program
from trainer.core.failures import (
    CheckpointMismatch,
    EmptyPart,
    Infrastructure,
    Stopped,
    UserError,
    explain,
    first_line,
    is_device,
    is_infrastructure,
    is_stale,
)
from trainer.core.program import program_file
from trainer.core.repeated_failures import RepeatedFailures, failed_alike
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest, leave_when_asked
from trainer.core.states import Phase, RunState
from trainer.run.directory import RunDirectory
from trainer.tasks.waits import wait_for_members, wait_for_the_end
from trainer.telemetry.progress import Progress
from trainer.training.run_context import RunContext

log = logging.getLogger(__name__)
SETTLE_SECONDS = 10.0
FREED_SECONDS = THREADS_SECONDS = 5.0
HEAR_SECONDS = 3.0  # TensorFlow is faster than the heartbeat
GENERATIONS_IN_VAIN = 3  # generations in a row that trained nothing, after which a new process may do better
# A process keeps each generation's functions, and gives them to each worker that is taken in (keep_function).
MAX_GENERATIONS = 50


def train(
    config: Config, cluster: ClusterConfig, program: Program, directory: RunDirectory, progress: Progress
) -> None:
    """Train to the end on members that live as long as this process does; raises Stopped when asked to stop."""
    phases = Phases.from_config(config, progress.phase)
    Training(RunContext(config, program, directory, progress, phases, None, None, StopRequest()), cluster).run()


class Training:
    """One process's part of a run: the generations that it trains, each on the members that are present."""

    def __init__(self, context: RunContext, cluster: ClusterConfig) -> None:
        self._context = context
        self._cluster = cluster
        self._store: Any = None
        self._began = time.monotonic()
        self._runner: Any = None
        self._controller: Any = None
        self._handover: Any = None
        self._in_vain = RepeatedFailures(GENERATIONS_IN_VAIN)
        self._generations = 0
        self._doubted = False  # whether the generation before ended at a part without data, and not at a fault

    def run(self) -> None:
        """Train generations until the run is finished; raises what another process must fix, and Stopped."""
        membership, in_vain = self._context.membership, 0
        if membership is None and self._cluster.servers:
            wait_for_members(self._context.config, self._cluster, self._context.directory, self._context.progress)
        while True:
            if membership is not None:
                # A request that came in the generation before would be forgotten: the signal has been handled.
                leave_when_asked()
                if self._context.stopping():
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
                    raise failed_alike(error) from error
                if membership is None or not (lacks_ps or self._is_fixable_here(error)):
                    raise
                # One that trained well shows that this process can: it is not its fault that nothing was saved.
                in_vain = 0 if self._controller is not None and self._controller.has_trained else in_vain + 1
                if in_vain == 0 or membership.hurt:
                    self._in_vain.clear()
                message = lacks_ps or explain(error)
                if isinstance(error, EmptyPart):
                    message = "a worker's data ended in the middle of a call, as a fault leaves it"
                if self._fails_alike(error):
                    raise failed_alike(error) from error
                if in_vain == GENERATIONS_IN_VAIN:
                    raise Infrastructure(message) from error
            if why := self._end_generation(message):
                raise Infrastructure(f"{message}; and {why}")

    def _is_failing_alike(self, error: Exception, membership: Membership) -> bool:
        """Return whether every worker of this generation has failed with this error, and none has trained."""
        if isinstance(error, UserError | Infrastructure) or self._controller is None or self._controller.has_trained:
            return False
        return self._runner.is_failing_alike(error) and not membership.hurt

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
        if not isinstance(error, CheckpointMismatch) or self._context.membership is None:
            return ""
        if self._generations > 1:
            raise Infrastructure(f"{error}; it may fit in a new process, which numbers its variables from the start")
        if not (lacking := self._context.membership.needs_every_ps()):
            return ""
        return f"{error}; it may fit on all ps, and {', '.join(lacking)} is left out: waiting for it"

    def _is_fixable_here(self, error: Exception) -> bool:
        """Return whether the next generation can train in this process."""
        if isinstance(error, EmptyPart):
            # An empty part ends each generation at its worker's first call; a call that a fault broke off, hardly two.
            doubted, self._doubted = self._doubted and not self._controller.every_worker_has_trained, True
            time.sleep(HEAR_SECONDS)
            if self._context.membership is not None and self._context.membership.hurt:
                self._doubted = doubted = False  # a fault of this generation's own has broken it off
            return not doubted
        self._doubted = False
        if isinstance(error, UserError | Infrastructure) or is_device(error) or is_stale(error):
            return False
        if not is_infrastructure(error, program_file(self._context.program)):
            return False
        # Without a runner, TensorFlow's own threads can't be asked how far they are.
        return self._runner is not None and not self._runner.is_recovering

    def _set_aside(self, membership: Membership) -> None:
        """Keep the variables for the next generation, which else goes back to the newest checkpoint."""
        from tensorflow import errors

        servers, in_part = membership.servers, self._context.config.ps_recovery == "lost"
        while not (lost := membership.lost_ps()) or (in_part and len(lost) < len(servers)):
            try:
                numbers = {servers.index(task) for task in lost}
                self._handover.set_aside(self._runner.copy, numbers, self._controller.step if self._controller else 0)
            except errors.OpError as error:
                if in_part and hears_of_lost_ps(membership, len(lost)):
                    continue
                log.warning("cannot keep the variables: %s", first_line(error))
            return

    def _end_generation(self, message: str) -> str:
        """Keep of a generation what the next one needs, and let go of the rest; returns why that can't be done."""
        if self._controller is not None and not self._controller.settle(SETTLE_SECONDS):
            return "the save in flight does not end"
        if (membership := self._context.membership) is not None:
            if self._runner.is_recovering:
                return "TensorFlow is taking in a worker"
            if self._handover is not None:
                self._set_aside(membership)
            membership.generation_over(message)
        return self._let_go()

    def _let_go(self) -> str:
        """Free what lies on the servers, where the next generation makes it again; returns why that can't be done."""
        from trainer.training.release_resources import freed, release_iterators

        if self._generations >= MAX_GENERATIONS:
            return f"this process keeps what {self._generations} generations have traced"
        iterators = self._runner.close()
        if iterators is not None and not iterators.are_unused(THREADS_SECONDS):
            return "a worker does not end what it was given"
        if self._handover is not None:
            self._handover.release()
        self._runner = self._controller = self._handover = None
        self._context.progress.counters.forget_data()
        gc.collect()
        if not freed(FREED_SECONDS):
            return "the servers do not free what this generation left there"
        if iterators is not None:
            release_iterators(iterators)
        return ""

    def _train_generation(self, cluster: ClusterConfig, began: float) -> None:
        """Make the strategy and the model, restore, train, and finish the run."""
        # They import TensorFlow, which a process has loaded by now, and not before.
        from trainer.run.callback_store import CallbackStore
        from trainer.tasks import generation as wiring

        strategy, service = wiring.form_strategy(self._context, cluster)
        if self._store is None:
            self._context = wiring.with_declared_tables(self._context)
        context = self._context
        directory, progress, phases = context.directory, context.progress, context.phases
        self._store = self._store or CallbackStore(directory, progress.post, progress.leads)
        self._handover = wiring.make_handover(context, cluster)
        runner = wiring.make_runner(context, cluster, strategy, service, self._handover)
        model_bytes = wiring.measure_model(context, cluster, runner)
        self._runner = runner  # from here on an error may be fixed in this process
        generation = wiring.build_generation(context, cluster, strategy, runner, self._handover, self._store, began)
        self._controller = controller = generation.controller
        generation.restore(model_bytes)
        first, trained_from = controller.step, time.monotonic()
        ended = generation.train()
        seconds = time.monotonic() - trained_from
        phases.enter(Phase.SAVING)
        if progress.leads:
            wiring.finish_run(generation, controller.step - first, seconds, ended, self._began)
        else:
            wait_for_the_end(directory, context.config, controller.step, self._context.stopping)
            progress.enter(RunState.FINISHED)


def hears_of_lost_ps(membership: Membership, known: int) -> bool:
    """Wait for the news that more ps than the known ones have ended; returns whether it came."""
    end = time.monotonic() + HEAR_SECONDS
    while len(membership.lost_ps()) <= known and time.monotonic() < end:
        time.sleep(0.1)
    return len(membership.lost_ps()) > known
