"""How many bytes of variables lie on each parameter server: a line at the start, and a warning when one holds too much.

Needs no TensorFlow: it looks at the variables that it is given.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from trainer.core.contracts import Model, Variable
from trainer.core.settings.config import Config
from trainer.core.sizes import size
from trainer.core.variables import bytes_of, variables_of

log = logging.getLogger(__name__)
SERVER = re.compile(r"/job:ps/(?:.*/)?task:(\d+)/")
UNEVEN = 2  # times the mean
LARGEST = 5  # variables of each ps that the run's page names
SMALL = 1024 * 1024  # bytes; no step waits for a ps that holds less


def report_placement(config: Config, model: Model, servers: int) -> list[dict[str, Any]]:
    """Log the bytes on each of so many ps; warn, with the setting that fixes it, when one holds over twice the mean.

    Returns what each of them holds, for the run's page.

    Call it when the model and its optimizer have all their variables, that is after the first trace.
    """
    placed: list[list[Any]] = [[] for _ in range(servers)]
    for variable in variables_of(model):
        server = server_of(variable)
        if server is not None:
            placed[server].append(variable)
    held = [sum(map(bytes_of, variables)) for variables in placed]
    log.info("%s", describe_placement(held))
    if is_uneven(held):
        largest = max(placed[held.index(max(held))], key=bytes_of)
        log.warning("%s %s", describe_uneven(held, largest), splitting_setting(config, servers, largest))
    return [summary(variables) for variables in placed]


def summary(variables: list[Variable]) -> dict[str, Any]:
    """Return what a ps holds: bytes, the number of variables, and the largest of them."""
    largest = sorted(variables, key=bytes_of, reverse=True)[:LARGEST]
    described = [[name_of(each), list(each.shape), bytes_of(each)] for each in largest]
    return {"bytes": sum(map(bytes_of, variables)), "variables": len(variables), "largest": described}


def name_of(variable: Variable) -> str:
    """Return "table/embeddings" for "table/embeddings/part_0:0"."""
    return re.sub(r"(/part_\d+)?(:\d+)?$", "", variable.name)


def server_of(variable: Variable) -> int | None:
    """Return the ps's task index, or None for a variable that lies elsewhere."""
    found = SERVER.search(f"{variable.device}/")
    return int(found[1]) if found else None


def is_uneven(held: list[int]) -> bool:
    """Return whether one ps holds more than twice the mean of all, and enough to matter."""
    return max(held) > UNEVEN * sum(held) / len(held) and max(held) >= SMALL


def describe_placement(held: list[int]) -> str:
    """Say what each ps holds, in bytes."""
    each = ", ".join(f"ps-{server} {size(held_by)}" for server, held_by in enumerate(held))
    return f"variables: {size(sum(held))} on {len(held)} ps ({each})"


def describe_uneven(held: list[int], largest: Variable) -> str:
    """Say which ps holds too much, and the largest variable (or shard) on it."""
    fullest = held.index(max(held))
    return (
        f"ps-{fullest} holds {size(held[fullest])} of the variables, more than twice the mean of "
        f"{size(sum(held) / len(held))}, and every worker waits for it; "
        f"the largest there is {name_of(largest)} {tuple(largest.shape)} with {size(bytes_of(largest))}:"
    )


def splitting_setting(config: Config, servers: int, largest: Variable) -> str:
    """Say which partitioner setting would split the largest variable of the fullest ps."""
    if not len(largest.shape) or int(largest.shape[0]) < 2:
        return "partitioners split the first axis only; turn it round, or use fewer ps"
    if config.partitioner == "min_size":
        return f"set partitioner_min_bytes to {max(1, bytes_of(largest) // servers)} or less"
    if config.partitioner == "max_size":
        return f"set partitioner_max_bytes to {max(1, bytes_of(largest) // servers)} or less"
    if config.partitioner == "fixed_shards" and config.partitioner_shards < servers:
        return f"set partitioner_shards to {servers}, the number of ps"
    return "set partitioner to min_size, which splits large variables over all ps"
