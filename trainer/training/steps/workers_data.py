"""The training data as the workers of a cluster read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Dataset, ElementSpec, Program, Strategy
from trainer.core.failures import EmptyPart, UserError
from trainer.core.settings.config import Config
from trainer.training.data.arrivals import Arrivals
from trainer.training.data.data_service import DataService
from trainer.training.data.file_sizes import FileSizes
from trainer.training.data.given_files import GivenFiles, TicketQueue
from trainer.training.data.input import ReadingPlan, replica_element_spec, train_dataset_fn
from trainer.training.data.places import ENDLESS
from trainer.training.data.worker_files import UNWRITABLE, WorkerFiles, reject_unwritable
from trainer.training.steps.division import Division, part_of
from trainer.training.steps.draws import seed_for_step
from trainer.training.steps.file_order import FileOrder
from trainer.training.steps.read_order import ReadOrder
from trainer.training.tf_internals.datasets import elements_of, iterator_handles, iterator_type_spec, type_in
from trainer.training.tf_internals.joining import Newcomer, divide_again
from trainer.training.tf_internals.per_worker import extend


class WorkersData:
    """A dataset on each worker, and the iterators that calls read from."""

    step_examples: int | None = None
    """How many examples a step has, where that is known."""

    def __init__(
        self,
        config: Config,
        program: Program,
        strategy: Strategy,
        coordinator: Any,
        order: ReadOrder | FileOrder[TicketQueue],
        service: DataService | None,
        files: Callable[[Sequence[int]], WorkerFiles],
    ) -> None:
        """Trace the program's dataset for the workers, which `order` has begin; those that read write `files`."""
        self._config, self._program, self._service = config, program, service
        self.order = order
        if self.waits:
            reject_several_gpus(strategy.num_replicas_in_sync)
        given = GivenFiles(order.mailbox, order.named, order.waits) if isinstance(order, FileOrder) else None
        self._arrivals: Arrivals | None = None
        self._sizes = FileSizes()

        def count(batch: int | None) -> None:
            self.step_examples = None if batch is None else batch * strategy.num_replicas_in_sync

        def trace(readers: Sequence[int]) -> Dataset:
            self._sizes.begin()
            plan = ReadingPlan(
                order.beginning if isinstance(order, ReadOrder) else ReadingPlan.begins,
                order.seeded,
                order.exact,
                files(readers),
                self._sizes.found,
                partial(part_of, readers=readers),
            )
            make = train_dataset_fn(program, len(readers), strategy, plan, service=service, given=given, batches=count)
            return coordinator.create_per_worker_dataset(make)

        self._division = Division(order.workers, trace, partial(iterator_type_spec, strategy))
        self._iterator: Any = None  # made with the first call, at whose step the reading begins

    @property
    def iterator_spec(self) -> ElementSpec:
        """The type of a worker's iterator."""
        return self._division.spec

    @property
    def element_spec(self) -> ElementSpec:
        """What one replica gets of the program's data."""
        spec = replica_element_spec(self._division.dataset)
        if not self.order.exact:
            return spec
        return type_in(spec[1]) if self.waits else spec[1]

    @property
    def waits(self) -> bool:
        """Whether an iterator may have no batch for a while: then it gives each as an Optional."""
        return isinstance(self.order, FileOrder) and self.order.waits

    @property
    def file_sizes(self) -> dict[str, Any]:
        """How large the files are that the workers read, as FileSizes.sizes has it."""
        return self._sizes.sizes(0 if isinstance(self.order, FileOrder) else len(self._division.readers))

    @property
    def iterator(self) -> Any:
        """The workers' iterators; None until the reading has begun."""
        return self._iterator

    def begin(self, step: int) -> None:
        """Have each worker make its iterator, and begin to read at this step."""
        self.order.begin(step)
        if seed_for_step(self._config, step) and not self.order.exact:
            self._division.trace_again()
        if isinstance(self.order, FileOrder) and self.waits and self._arrivals is None:
            self._arrivals = Arrivals(self.order.patterns, self._config.input_new_files_seconds)
            self.order.come(*self._arrivals.poll(self.order.known()))
            self._arrivals.follow(self.order.known, self.order.come)
        elif isinstance(self.order, FileOrder) and not self.waits:
            self._sizes.begin()
            self._sizes.found(sorted(self.order.known()))
        self._iterator = iter(self._division.dataset)

    @property
    def is_given_out(self) -> bool:
        """Whether the workers have no parts of their own: a data service or the coordinator gives data out."""
        return self._service is not None or isinstance(self.order, FileOrder)

    def can_join(self, workers: Sequence[int]) -> bool:
        """Return whether calls can read the data when these read as well; traces them for `join`."""
        return self.is_given_out or self._division.can_be((*self._division.readers, *workers))

    def join(self, worker: Newcomer, others: list[Any]) -> None:
        """Have one more worker read, and the others parts of another division: `can_join` has traced it.

        It does so here where the readers are others than those that it knew, since one was drained meanwhile.
        """
        self.order.join()
        self.can_join([worker.worker_index])
        self._turn_to((*self._division.readers, worker.worker_index), others)
        if self._iterator is not None:
            extend(self._iterator, worker)

    def divide(self, readers: Sequence[int], workers: list[Any]) -> bool:
        """Have these of the workers read, each a part; returns False where that takes a generation of its own.

        With `input_position: exact` the places are those of so many parts.
        """
        if self.order.exact or not self._division.can_be(readers):
            return False
        self._turn_to(readers, [worker for worker in workers if worker.worker_index in readers])
        return True

    def _turn_to(self, readers: Sequence[int], workers: list[Any]) -> None:
        """Have these workers read the data as they were traced for the readers."""
        if (coming := self._division.coming(readers)) is None:
            return
        if self._iterator is None:
            self._division.dataset = coming
        else:
            divide_again(self._division.dataset, coming, self._iterator, workers)

    def close(self) -> tuple[list[Any], list[tf.DType], list[tf.TensorShape]]:
        """Let go of the iterators; returns their handles, and types and shapes of what they give."""
        if self._arrivals is not None:
            self._arrivals.close()
        handles = [] if self._iterator is None else iterator_handles(self._iterator)
        elements = elements_of(self.iterator_spec)
        del self._iterator, self._division
        return handles, *elements

    @contextlib.contextmanager
    def naming_bad_data(self) -> Iterator[None]:
        """Say what is wrong with the program's data where that makes a call fail; raises UserError, and EmptyPart."""
        try:
            yield
        except tf.errors.OutOfRangeError as error:
            raise EmptyPart(
                f"a worker's part of the training data is empty: {len(self._division.readers)} workers share it. Have "
                "it have a batch for each, also behind filter() and drop_remainder, which may leave nothing at all"
            ) from error
        except tf.errors.InvalidArgumentError as error:
            if ENDLESS in str(error):
                raise UserError(f"{type(self._program).__name__}: {ENDLESS}") from error
            raise
        except UNWRITABLE as error:
            reject_unwritable(self._program, error)
            raise


def reject_several_gpus(gpus: int) -> None:
    """Raise UserError where a worker has several GPUs, and files come while a run trains."""
    if gpus > 1:
        raise UserError(
            f"input_new_files_seconds: a worker has {gpus} GPUs, and files that come while a run trains are for one: "
            "give each worker one GPU (worker_tasks), or leave it out"
        )
