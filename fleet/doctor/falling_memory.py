"""Whether the memory that hosts have left falls steadily, and for how long it lasts. Pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from fleet.doctor.uneven_load import amount
from fleet.site.schema.problems import name_some

FULL_SECONDS = 10_800  # memory that is taken up sooner will not last
SHRINKS = 64 * 2**20  # bytes less than this in all are chance
STEADY = 0.5  # of the mean fall, which each part of the time has: a start's falls fade, and a save is in one part alone
ALIKE = 0.01  # hosts with so nearly the same memory are named together: they may be containers of one machine


def falling_memory(left: Mapping[str, Sequence[float]], seconds: float) -> Iterator[tuple[str, list[str]]]:
    """Say of which hosts the memory will not last three hours, with their names.

    `left` has by host the bytes at several moments, evenly spread over so many seconds.
    """
    together: dict[str, list[str]] = {}
    for host in [host for host in left if falls_steadily(left[host])]:
        alike = (other for other in together if all(map(partial(math.isclose, rel_tol=ALIKE), left[host], left[other])))
        together.setdefault(next(alike, host), []).append(host)
    for host, names in together.items():
        last, pace = left[host][-1], (left[host][0] - left[host][-1]) / seconds
        if last / pace < FULL_SECONDS:
            yield (
                f"memory of {name_some(names)} falls by {amount(60 * pace)} a minute: the {amount(last)} that are left "
                f"last about {last / pace / 3600:.2g} hours. See whose it is: fab hosts, and the run's page",
                names,
            )


def falls_steadily(left: Sequence[float]) -> bool:
    """Whether what is left falls in each part of the time, and not in one alone."""
    falls = [before - after for before, after in itertools.pairwise(left)]
    return sum(falls) >= SHRINKS and min(falls) >= STEADY * statistics.mean(falls)
