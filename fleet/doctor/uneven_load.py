"""Where a training's load is uneven: rows of tables among the ps, and files among the workers. Pure functions.

A row that is in each batch costs its ps nothing that was measured: a worker asks for it once a step. A ps is hot where
more of a step's rows are its own, as with ids that are sorted by how often they come. Where each id is sent, as with
clipping, one key can do it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

HOT_ROWS = 1.25  # times a ps's fair share of the rows that steps ask for
HOT_KEY = 0.05  # of a table's ids, from which on a key that is sent each time counts
UNEVEN = 1.5  # times as many bytes


def why_hot(task: str, servers: int, lookups: Mapping[str, Mapping[str, Any]], dynamic: Collection[str]) -> str:
    """Say which rows make a ps hot, and what to do; nothing where it has no more of them than the others.

    `lookups` are those of a run's status, and `dynamic` names the dynamic tables.
    """
    rows = sum(asked["rows_per_step"] for asked in lookups.values())
    own = {name: asked["rows_per_step"] * asked["by_ps"].get(task, 0.0) for name, asked in lookups.items()}
    if not rows or servers < 2 or sum(own.values()) < HOT_ROWS * rows / servers:
        return ""
    name = max(own, key=lambda one: own[one] - lookups[one]["rows_per_step"] / servers)
    asked = lookups[name]
    text = (
        f"Of a step's {rows:,.0f} rows it has {sum(own.values()) / rows:.0%}, most of table {name} "
        f"({asked['by_ps'].get(task, 0.0):.0%} of its rows)"
    )
    sends_each = asked["rows_per_step"] >= asked["ids_per_step"]
    keys = [(key, share) for key, share, owner in asked["hot"] if owner == task and share >= HOT_KEY]
    if sends_each and keys:
        key, share = keys[0]
        return (
            f"{text}. Its key {key} is {share:.0%} of the ids, and each id is sent: without clipping, in tf_keras's "
            "own train_step, a row is asked for once a step (docs/large-tables.md)"
        )
    if name in dynamic:
        return f"{text}: its keys are few, or come unevenly"
    return (
        f"{text}. Ids that come often lie together there, as in a vocabulary sorted by frequency. In a new run mix "
        "them in the program (id * 2654435761 % rows), or name the layer in `dynamic_tables`"
    )


def uneven_data(data: Mapping[str, Any], workers: int) -> Iterator[tuple[str, list[str]]]:
    """Say which worker's files, or which file, hold much more than others, each with its name."""
    if parts := data.get("parts"):
        most, least = max(parts, key=parts.__getitem__), min(parts, key=parts.__getitem__)
        if parts[most] > UNEVEN * parts[least]:
            yield (
                f"the files of {most} hold {amount(parts[most])}, those of {least} {amount(parts[least])}. Each worker "
                f"reads its own again and again, so examples of {least} are trained "
                f"{times(parts[most], parts[least])} as often. Write files of one size, a multiple of the workers, "
                "or give them out one by one (`input_sharding: dynamic`)",
                [most],
            )
    elif workers > 1 and data.get("files", 0) > 1:
        largest, others = data["largest_bytes"], data["bytes"] - data["largest_bytes"]
        if largest > UNEVEN * data["bytes"] / workers and largest > UNEVEN * others / (data["files"] - 1):
            yield (
                f"{data['largest']} holds {amount(largest)} of the {amount(data['bytes'])} of {data['files']} files, "
                f"more than one of {workers} workers reads in a pass. One worker is at it while the others are passes "
                "ahead, and where the data end, they wait. Split it into files of the others' size",
                [data["largest"]],
            )


def amount(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def times(most: int, least: int) -> str:
    return f"{most / least:.2g} times" if least else "many times"
