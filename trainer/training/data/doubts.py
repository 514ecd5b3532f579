"""What is doubtful in a program's training data: said once in a process, since it may be meant."""

from __future__ import annotations

import functools
import logging

from trainer.core.contracts import Dataset
from trainer.core.memory_limit import GIB, memory_limit
from trainer.training.tf_internals.buffers import Buffer, buffers

log = logging.getLogger(__name__)


@functools.cache
def warn_of_one_order(name: str) -> None:
    """Say that a program shuffles nothing."""
    log.warning(
        "%s.train_dataset shuffles nothing: each start and each fault reads the head of a part again, and its tail may "
        "never be trained. Shuffle the names of the files, and examples; or set input_position: exact, which "
        "parameter_server has (docs/input.md)",
        name,
    )


@functools.cache
def warn_of_whole_data(name: str, parts: int) -> None:
    """Say that a program gives all its data to each of those that train."""
    log.warning(
        "%s.train_dataset does not use its context: each of %d workers reads all the data. To have each read its own "
        "part, begin with context.files(PATTERN), or before shuffle() and batch() "
        "dataset.shard(context.num_input_pipelines, context.input_pipeline_id) (docs/input.md)",
        name,
        parts,
    )


def warn_of_buffers(name: str, dataset: Dataset) -> None:
    """Say that a program's data would keep more in memory than this host has."""
    for buffer in buffers(dataset):
        if buffer.size > (limit := memory_limit()):
            _warn_of_buffer(name, buffer, limit)


@functools.cache
def _warn_of_buffer(name: str, buffer: Buffer, limit: int) -> None:
    log.warning(
        "%s.train_dataset keeps up to %d elements of %d bytes in %s(): that is %.1f GiB, and this host lets a process "
        "take %.1f GiB. %s (docs/input.md)",
        name,
        buffer.elements,
        buffer.element_bytes,
        buffer.method,
        buffer.size / GIB,
        limit / GIB,
        "Shuffle fewer, and the names of the files as well; or shuffle before they are decoded"
        if buffer.method == "shuffle"
        else "Give cache() the name of a file, or cache before they are decoded",
    )
