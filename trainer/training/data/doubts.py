"""What is doubtful in a program's training data: said once in a process, since it may be meant."""

from __future__ import annotations

import functools
import logging

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
