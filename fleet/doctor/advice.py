"""What a training waits for most, from looks at its tasks and hosts: pure functions, so that tests need no host.

A worker says how long its steps wait for their batches. Nothing says how long they wait for messages: that is what is
left where neither processors nor links are busy, and no step waits for its batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.doctor.falling_memory import ALIKE, falling_memory
from fleet.doctor.uneven_load import uneven_data, why_hot
from fleet.site.schema.problems import name_some

# From this share on a processor, or a link, counts as busy: above, more work mostly waits.
BUSY = 0.85
LINK_BUSY = 0.7
SLOW = 0.6  # of the median of the others' pace
HOT = 2.0  # times the median of the other ps
SHORT_SECONDS = 0.005  # a step of less is mostly messages
LONG_SECONDS = 0.02  # a step of more is not explained by messages within a house
WAITS = 0.5  # from this share of the time on, a worker waits for its input
STORAGE = 0.1  # share of time in which a host's processors waited for storage
MORE_INPUT = "Read and prepare more at once (`num_parallel_calls`, `prefetch`), or on other hosts (`input: service`)"


@dataclass(frozen=True)
class Measurement:
    """What hosts and run said at one moment; seconds and bytes are since some beginning."""

    time: float
    workers: Mapping[str, int]
    """Steps that each worker gave."""
    seconds: Mapping[str, float]
    """Processor time by task, of those that say it."""
    hosts: Mapping[str, HostUsage]
    places: Mapping[str, str]
    """Each task's host."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """For how many seconds each worker's steps have waited for their batches, of those that say it."""
    lookups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What steps ask of tables, as the run's status has it."""
    dynamic: Collection[str] = ()
    """The tables among these that are dynamic."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """How large the files of the data are, as the run's status has it."""


@dataclass(frozen=True)
class HostUsage:
    cores: float
    busy: float
    """Seconds of all processors."""
    storage: float
    """Seconds in which they waited for storage."""
    sent: float
    received: float
    link: float | None = None
    """Bytes a second, where the link says it."""
    available: float | None = None
    """Bytes of memory that are left, where they are known."""
    boot: str = ""
    """The boot of the kernel, which containers of one machine share."""


@dataclass(frozen=True)
class Advice:
    part: str
    """worker, ps, coordinator, network, input, batch, other, nothing; memory; data; scale: of what one more gives."""
    text: str
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rates:
    """What happened between two looks, a second."""

    seconds: float
    pace: Mapping[str, float]
    use: Mapping[str, float]
    """Processors in use by task."""
    waits: Mapping[str, float]
    """The share of the time that each worker's steps wait for their batches."""
    first: Measurement
    last: Measurement

    @classmethod
    def between(cls, first: Measurement, last: Measurement) -> Rates:
        """Compare two looks; a task that began again between them is left out."""
        seconds = last.time - first.time
        pace = {task: (steps - first.workers.get(task, 0)) / seconds for task, steps in last.workers.items()}
        use = {
            task: (used - first.seconds[task]) / seconds
            for task, used in last.seconds.items()
            if task in first.seconds and used >= first.seconds[task]
        }
        waits = {
            task: min(1.0, (waited - first.waits[task]) / seconds)
            for task, waited in last.waits.items()
            if waited >= first.waits.get(task, math.inf)
        }
        return cls(seconds, {task: each for task, each in pace.items() if each >= 0}, use, waits, first, last)

    def by_job(self, job: str) -> dict[str, float]:
        """Return the processors that the tasks of a job use."""
        return {task: use for task, use in self.use.items() if task.rpartition("-")[0] == job}

    def share(self, host: str, what: str) -> float:
        """Return the share of a host's processor time that was `busy`, or waited for `storage`."""
        last = self.last.hosts[host]
        return (getattr(last, what) - getattr(self.first.hosts[host], what)) / (self.seconds * last.cores)

    def link_use(self, host: str) -> float:
        """Return the bytes a second of a host's link, in the direction that has more."""
        first, last = self.first.hosts[host], self.last.hosts[host]
        return max(last.sent - first.sent, last.received - first.received) / self.seconds


def advise(first: Measurement, last: Measurement, between: Sequence[Measurement] = ()) -> list[Advice]:
    """Say what holds the training up, the most likely first, or `nothing`; and what one more worker or ps gives.

    From looks `between` the two it is known whether memory falls steadily.
    """
    rates = Rates.between(first, last)
    if not sum(rates.pace.values()):
        text = f"no step was trained in {rates.seconds:.0f} s. See why: fab status"
        return [Advice("nothing", text)]
    found = [each for adviser in (slow_workers, coordinator, processors, network) for each in adviser(rates)]
    found += [*memory([first, *between, last]), *data(rates)]
    if not [each for each in found if each.part not in ("worker", "memory", "data") or "processors" in each.text]:
        found += waits(rates)
    return [*found, *one_more(rates)]


def slow_workers(rates: Rates) -> Iterator[Advice]:
    for task, pace in sorted(rates.pace.items()):
        others = [each for other, each in rates.pace.items() if other != task]
        if others and pace < SLOW * (usual := statistics.median(others)):
            host = rates.last.places.get(task, "")
            why = (
                f", and its host's processors are busy for {rates.share(host, 'busy'):.0%}"
                if _known(rates, host)
                else ""
            )
            yield Advice(
                "worker",
                f"{task} is slow: {pace:.3g} steps/s, where the median of the others is {usual:.3g}{why}. It holds up "
                "no other worker, but gives less than it could",
                [task],
            )


def coordinator(rates: Rates) -> Iterator[Advice]:
    for task, use in rates.by_job("chief").items():
        if use >= BUSY and rates.by_job("worker"):
            yield Advice(
                "coordinator",
                f"{task} uses {use:.2f} processors, and Python has little more than one. It hands out "
                f"{sum(rates.pace.values()):.3g} steps/s: make batches larger, so that there are fewer steps",
                [task],
            )


def processors(rates: Rates) -> Iterator[Advice]:
    """Name who uses most of each machine whose processors are busy."""
    named: list[str] = []
    for hosts in machines(rates):
        if (busy := rates.share(hosts[0], "busy")) < BUSY:
            continue
        cores = rates.last.hosts[hosts[0]].cores
        here = {task: use for task, use in rates.use.items() if rates.last.places.get(task, "") in hosts}
        others = busy * cores - sum(here.values())
        most = max(here, key=here.__getitem__, default="")
        text = f"the processors of {name_some(hosts)} are busy for {busy:.0%}"
        if not here and not set(hosts).isdisjoint(rates.last.places.values()):
            yield Advice("other", f"{text}, and systemd does not count there what each task uses", hosts)
        elif not here or others > here[most]:
            yield Advice("other", f"{text}, most of it by other work: {others:.2f} of {cores:.0f}", hosts)
        else:
            job = most.rpartition("-")[0]
            fix = {
                "ps": "another ps takes a part of its variables",
                "worker": "its program computes: another worker takes a part of the steps, or a GPU",
            }.get(job, "give it a host of its own")
            fix = why_it_is_hot(rates, most) if is_hot(rates, most) else fix
            named.append(most)
            part = {"ps": "ps", "worker": "worker", "chief": "coordinator"}.get(job, "other")
            yield Advice(part, f"{text}, most of it by {most}: {here[most]:.2f} of {cores:.3g}. {fix}", [most])
    yield from (each for each in hot_ps(rates) if each.names[0] not in named)


def machines(rates: Rates) -> list[list[str]]:
    """Return the hosts; those together that are containers of one machine, and each count the time of all."""

    def alike(one: str, other: str) -> bool:
        pairs = [(look.hosts[one], look.hosts[other]) for look in (rates.first, rates.last)]
        return all(a.boot and a.boot == b.boot and math.isclose(a.busy, b.busy, rel_tol=ALIKE) for a, b in pairs)

    together: dict[str, list[str]] = {}
    for host in [host for host in rates.last.hosts if _known(rates, host)]:
        together.setdefault(next((other for other in together if alike(host, other)), host), []).append(host)
    return [*together.values()]


def hot_ps(rates: Rates) -> Iterator[Advice]:
    for task, use in rates.by_job("ps").items():
        host = rates.last.places.get(task, "")
        if not is_hot(rates, task) or not _known(rates, host) or use < 0.5 * BUSY * rates.last.hosts[host].cores:
            continue
        yield Advice("ps", f"{task} is hot: it uses {use:.2f} processors. {why_it_is_hot(rates, task)}", [task])


def is_hot(rates: Rates, task: str) -> bool:
    """Whether a task is a ps that uses far more than the others."""
    used = rates.by_job("ps")
    return task in used and len(used) > 1 and used[task] > HOT * others_use(rates, task)


def others_use(rates: Rates, task: str) -> float:
    return statistics.median(use for other, use in rates.by_job("ps").items() if other != task)


def why_it_is_hot(rates: Rates, task: str) -> str:
    """Compare a ps with the others, and say which rows make it hot, or what else to do."""
    rows = why_hot(task, len(rates.by_job("ps")), rates.last.lookups, rates.last.dynamic)
    fix = rows or "`partitioner` splits large variables (docs/large-tables.md)"
    return f"The median of the other ps is {others_use(rates, task):.2f}. {fix}"


def network(rates: Rates) -> Iterator[Advice]:
    for host, last in rates.last.hosts.items():
        if host not in rates.first.hosts or not last.link:
            continue
        most = rates.link_use(host)
        if most >= LINK_BUSY * last.link:
            yield Advice(
                "network",
                f"the link of {host} carries {most / 2**20:.3g} MiB/s of {last.link / 2**20:.3g}: larger batches ask "
                "less often for the weights, and more ps share the load",
                [host],
            )


def memory(looks: Sequence[Measurement]) -> Iterator[Advice]:
    hosts = {
        host: [look.hosts[host].available or 0.0 for look in looks if host in look.hosts] for host in looks[-1].hosts
    }
    known = {host: left for host, left in hosts.items() if len(left) == len(looks) and all(left)}
    for text, names in falling_memory(known, looks[-1].time - looks[0].time):
        yield Advice("memory", text, names)


def data(rates: Rates) -> Iterator[Advice]:
    for text, names in uneven_data(rates.last.data, sum(pace > 0 for pace in rates.pace.values())):
        yield Advice("data", text, names)


def waits(rates: Rates) -> Iterator[Advice]:
    """Say for what is waited where nothing is busy."""
    active = {task: pace for task, pace in rates.pace.items() if pace}
    step = 1 / statistics.median(active.values())
    used = rates.by_job("worker")
    if not used:
        yield Advice("nothing", "no worker says what it uses of its processors: what it waits for is not known")
        return
    share = statistics.median(
        use / rates.last.hosts[rates.last.places[task]].cores
        for task, use in used.items()
        if _known(rates, rates.last.places.get(task, ""))
    )
    text = f"nothing is busy: workers use {share:.0%} of their processors, and a step takes {1000 * step:.3g} ms"
    stored = {host: rates.share(host, "storage") for host in {rates.last.places.get(task, "") for task in used}
              if _known(rates, host)}  # fmt: skip
    waited = [rates.waits[task] for task in active if task in rates.waits]
    input_wait = statistics.median(waited) if waited else None
    if stored and max(stored.values()) >= STORAGE:
        host = max(stored, key=stored.__getitem__)
        yield Advice("input", f"{text}. {host} waits for storage for {stored[host]:.0%} of the time: its input", [host])
    elif input_wait is not None and input_wait >= WAITS:
        yield Advice("input", f"{text}. It waits for its batch for {input_wait:.0%} of the time. {MORE_INPUT}")
    elif step <= SHORT_SECONDS:
        yield Advice("batch", f"{text}: mostly messages. Larger batches have fewer of them")
    elif input_wait is None:
        yield Advice("nothing", f"{text}. Whether it waits for input or for messages is not measured")
    elif step >= LONG_SECONDS:
        yield Advice(
            "network",
            f"{text}. It waits for its batch for {input_wait:.0%} of the time alone, so the rest is messages to the "
            "ps, whose way is slow, or a wait in the program. Try the ways: fab doctor. Larger batches, and "
            "`weights_ahead` for large tables, wait less often",
        )
    else:
        yield Advice("nothing", f"{text}. It waits for its batch for {input_wait:.0%} of the time")


@dataclass(frozen=True)
class SharedLoad:
    """What all workers share."""

    name: str
    use: float
    """As a share of what counts as busy."""
    hot: str = ""
    """Says that one ps has far more than the others, so that one more relieves others; empty where none has."""


@dataclass(frozen=True)
class Gains:
    """What one more gives, as a share of the steps a second, and what then holds it up."""

    worker: float
    ps: float
    """With as many workers: few do not have all ps busy at once."""
    ps_at_most: float
    """With any number of workers."""
    most: SharedLoad
    """What is nearest to being busy."""
    workers: int
    """How many workers have it busy."""


def gains(rates: Rates) -> Gains | None:
    """Return what one more worker or ps gives: all workers share the ps, their links and the coordinator.

    None where what these use is unknown.
    """
    workers = sum(pace > 0 for pace in rates.pace.values())
    loads = list(shared_loads(rates))
    if not any(load.use for load in loads):
        return None
    most = max(loads, key=lambda load: load.use)
    room = max(0.0, 1 / most.use - 1)
    chief = max(rates.by_job("chief").values(), default=0.0) / BUSY
    ps = at_most = 0.0
    if most.use >= 1 > chief and not most.hot:
        servers = len(rates.by_job("ps"))
        at_most = min(1 / servers, 1 / chief - 1 if chief else math.inf)
        ps = min(at_most, shared_by(workers, servers + 1) / shared_by(workers, servers) - 1)
    return Gains(min(1 / workers, room), ps, at_most, most, max(workers + 1, round(workers / most.use)))


def shared_by(workers: int, servers: int) -> float:
    """Return how many of so many equal ps are busy at once, where workers ask one after the other and wait for each.

    The throughput of a balanced closed queueing network (Lazowska et al., Quantitative System Performance, 1984, 5.4).
    """
    return servers * workers / (workers + servers - 1)


def one_more(rates: Rates) -> Iterator[Advice]:
    found = gains(rates)
    if found is None:
        return
    if found.worker:
        text = (
            f"one more worker, on a host of its own, gives about {found.worker:.0%} more steps/s; with about "
            f"{found.workers} workers {found.most.name} is busy. One more ps gives nothing yet"
        )
    elif found.ps:
        text = (
            f"more workers give nothing: {found.most.name} is busy. One more ps takes its part of the variables, which "
            f"gives about {found.ps:.0%} more steps/s, and up to {found.ps_at_most:.0%} with more workers"
        )
    else:
        text = f"more workers or ps give nothing: {found.most.name} is busy{found.most.hot}"
    yield Advice("scale", text)


def shared_loads(rates: Rates) -> Iterator[SharedLoad]:
    for task, use in rates.by_job("chief").items():
        yield SharedLoad(task, use / BUSY)
    used = rates.by_job("ps")
    hosts = {host: [task for task in used if rates.last.places.get(task) == host] for host in rates.last.hosts}
    hosts = {host: tasks for host, tasks in sorted(hosts.items()) if tasks and _known(rates, host)}
    carried = {host: rates.link_use(host) / len(tasks) for host, tasks in hosts.items()}
    for host, tasks in hosts.items():
        hot = " and ".join(task for task in tasks if is_hot(rates, task))
        alone = len(tasks) == 1
        yield SharedLoad(
            tasks[0] if alone else f"the host of {' and '.join(tasks)}",
            sum(used[task] for task in tasks) / (BUSY * rates.last.hosts[host].cores),
            f"{'' if alone else f' with {hot}'}, and the other ps are not" if hot else "",
        )
        if link := rates.last.hosts[host].link:
            others = [each for other, each in carried.items() if other != host]
            hot_link = others and carried[host] > HOT * statistics.median(others)
            yield SharedLoad(
                f"the link of {host}",
                rates.link_use(host) / (LINK_BUSY * link),
                ", and those of the other ps are not" if hot_link else "",
            )


def _known(rates: Rates, host: str) -> bool:
    return host in rates.last.hosts and host in rates.first.hosts
