"""What `fab advise` says of one more worker or ps, and what comes of it when there is one.

Some workers train, are looked at twice and advised; then a worker, or a ps, more does the same. Of `few-ps` and
`hot-ps` each ps has a part of a processor as its host, and that is what the training waits for. The two ps of `hot-ps`
share a model that is one weight, which is not split. Steps of `waiting` wait 50 ms each. Only ratios say something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.interleaved import ALONE
from bench.options import add_names, parser_of, scratch_directory
from bench.parts import part_of_a_processor
from bench.tables import print_row
from bench.tasks import LocalCluster, processor_seconds, write_settings
from fleet.doctor import advice
from fleet.doctor.advice import Gains, HostUsage, Measurement, Rates
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record


@dataclasses.dataclass(frozen=True)
class Cause:
    """A bottleneck: what is trained, on how many ps, whether these have a part of a processor each, run settings."""

    program: str
    servers: int = 1
    is_limited: bool = True
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CAUSES = {
    "few-ps": Cause("bench.programs:Even"),
    "hot-ps": Cause("bench.programs:OneLarge", servers=2, settings={"partitioner": "none"}),
    "waiting": Cause("bench.programs:Waiting", is_limited=False),
}
PART = 0.1
WARM_STEPS = 5
WARM_SECONDS = 5.0
HERE = "here"


def look(status: Path, pids: Mapping[str, int], part: float | None = None) -> Measurement:
    """Look at local processes as `fab advise` looks at hosts; what else this machine does is left out.

    With `part`, each ps is on a host of its own that has so much of a processor.
    """
    record = read_record(status) or {}
    used = {task: spent(pid) for task, pid in pids.items()}
    places = {task: task if part and task.startswith("ps-") else HERE for task in pids}
    hosts = {
        host: HostUsage(
            part if part and host != HERE else os.cpu_count() or 1,
            sum(used[task] for task, place in places.items() if place == host),
            0.0,
            0.0,
            0.0,
        )
        for host in set(places.values())
    }
    steps = {task: int(each["steps"]) for task, each in record["workers"].items()}
    waits = {task: each["input_wait_seconds"] for task, each in record["workers"].items()}
    return Measurement(record["updated"], steps, used, hosts, places, waits)


def spent(pid: int) -> float:
    """Return the processor time of a process, and of those that it has forked."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return processor_seconds(pid) + sum(spent(int(child)) for child in children)


def train(
    cause: Cause, workers: int, servers: int, part: float, seconds: float, directory: Path
) -> tuple[list[advice.Advice], Gains | None, float]:
    """Train with so many, look twice, and return the advice, the gains that it says, and the steps a second."""
    directory.mkdir()
    settings = write_settings(
        directory, "advised", cause.program, steps=10**9, log_seconds=0.5, **ALONE, **cause.settings
    )
    status = RunDirectory(directory, "advised").path / "status.json"
    with LocalCluster(workers, servers, directory).serving() as cluster, contextlib.ExitStack() as limits:
        chief = cluster.start("chief", 0, settings=settings)
        chief.until(lambda: all_train(status, workers), "steps of all workers")
        for task in cluster.tasks:
            own = part if cause.is_limited and task.name.startswith("ps-") else None
            limits.enter_context(part_of_a_processor(own, task.pids))
        pids = {task.name: task.process.pid for task in cluster.tasks}
        first, last = two_looks(lambda: look(status, pids, part if cause.is_limited else None), seconds)
        rates = Rates.between(first, last)
        return advice.advise(first, last), advice.gains(rates), sum(rates.pace.values())


def all_train(status: Path, workers: int) -> bool:
    known: dict[str, Any] = (read_record(status) or {}).get("workers", {})
    return len(known) == workers and all(each["steps"] > WARM_STEPS for each in known.values())


def two_looks(take: Callable[[], Measurement], seconds: float) -> tuple[Measurement, Measurement]:
    time.sleep(WARM_SECONDS)
    first = take()
    time.sleep(seconds)
    return first, take()


def compare(name: str, workers: int, part: float, seconds: float, directory: Path) -> None:
    """Print a row of a cause: what is said of one more of each, and what it gave."""
    cause = CAUSES[name]
    found, promised, before = train(cause, workers, cause.servers, part, seconds, directory / name)
    more = ((workers + 1, cause.servers), (workers, cause.servers + 1))
    came = [
        train(cause, *each, part, seconds, directory / f"{name}-{each[0]}-{each[1]}")[2] / before - 1 for each in more
    ]
    said = (promised.worker, promised.ps) if promised else (0.0, 0.0)
    cells = [f"{each:+.0%}" for pair in zip(said, came, strict=True) for each in pair]
    print_row(f"{name}, {workers} workers, {cause.servers} ps", found[0].part, *cells, found[0].text, found[-1].text)


def main(arguments: list[str]) -> None:
    parser = parser_of("advise", __doc__)
    add_names(parser, "cause", tuple(CAUSES))
    parser.add_argument("--workers", type=int, default=2, help="at first (default: 2)")
    parser.add_argument("--part", type=float, default=PART, help=f"of a processor, for each ps (default: {PART})")
    parser.add_argument("--seconds", type=float, default=30, help="between two looks (default: 30)")
    options = parser.parse_args(arguments)
    heads = ("a worker more: said", "came", "a ps more: said", "came", "its sentence", "its last one")
    print_row("cause", "named first", *heads, head=True)
    with scratch_directory() as directory:
        for cause in options.cause or CAUSES:
            compare(cause, options.workers, options.part, options.seconds, directory)


if __name__ == "__main__":
    main(sys.argv[1:])
