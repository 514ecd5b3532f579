"""What `fab advise` makes of two looks, for each cause that it knows, and how hosts are asked."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.doctor.advice import HostUsage, Measurement, advise
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.verbs.advise import advise as advise_verb
from fleet.verbs.advise import read, script
from tests.unit import fake_hosts
from tests.unit import test_second_day as day
from tests.unit.stand_ins import put_program

TASKS = ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2")
CALM = HostUsage(cores=4, busy=0, storage=0, sent=0, received=0, link=125e6)
FIRST = Measurement(
    0.0,
    dict.fromkeys(TASKS[3:], 0),
    dict.fromkeys(TASKS, 0.0),
    dict.fromkeys(TASKS, CALM),
    dict(zip(TASKS, TASKS, strict=True)),
    dict.fromkeys(TASKS[3:], 0.0),
)


def later(pace: float = 10.0, **more: Any) -> Measurement:
    """A hundred seconds later: all workers at this pace, each task with a tenth of a processor."""
    hosts = {name: replace(CALM, busy=10.0) for name in TASKS}
    hosts |= more.pop("hosts", {})
    seconds = {**dict.fromkeys(TASKS, 10.0), **more.pop("seconds", {})}
    workers = {**dict.fromkeys(TASKS[3:], int(100 * pace)), **more.pop("workers", {})}
    waits = dict.fromkeys(TASKS[3:], 100 * more["waits"]) if "waits" in more else {}
    return Measurement(100.0, workers, seconds, hosts, FIRST.places, waits)


def busy(task: str, cores: float) -> dict[str, Any]:
    return {"seconds": {task: 100 * cores}, "hosts": {task: replace(CALM, busy=100 * cores)}}


@pytest.mark.parametrize(
    ("last", "part", "expected"),
    [
        (later(workers={"worker-1": 300}), "worker", "worker-1 is slow: 3 steps/s, where the median"),
        (later(**busy("chief-0", 0.95)), "coordinator", "chief-0 uses 0.95 processors"),
        (later(**busy("ps-0", 3.8)), "ps", "most of it by ps-0: 3.80 of 4. The median of the other ps is 0.10. `part"),
        (later(seconds={"ps-0": 350.0, "ps-1": 300.0}, hosts={"ps-0": replace(CALM, busy=360)}), "ps",
         "90%, most of it by ps-0: 3.50 of 4. another ps takes a part"),
        (later(**busy("ps-1", 2.5)), "ps", "ps-1 is hot: it uses 2.50 processors"),
        (later(**busy("worker-0", 3.8)), "worker", "most of it by worker-0: 3.80 of 4. its program computes"),
        (later(hosts={"worker-2": replace(CALM, busy=390)}), "other", "98%, most of it by other work: 3.80 of 4"),
        (later(hosts={"ps-0": replace(CALM, sent=100 * 100e6)}), "network", "ps-0 carries 95.4 MiB/s of 119"),
        (later(hosts={"worker-0": replace(CALM, storage=80)}), "input", "waits for storage for 20% of the time"),
        (later(waits=0.9), "input", "and a step takes 100 ms. It waits for its batch for 90% of the time. Read"),
        (later(waits=0.1), "network", "It waits for its batch for 10% of the time alone, so the rest is messages"),
        (later(100, waits=0.1), "nothing", "a step takes 10 ms. It waits for its batch for 10% of the time"),
        (later(), "nothing", "a step takes 100 ms. Whether it waits for input or for messages is not measured"),
        (later(100), "nothing", "a step takes 10 ms. Whether it waits for input or for messages is not measured"),
        (later(1000), "batch", "a step takes 1 ms: mostly messages"),
        (later(0), "nothing", "no step was trained in 100 s. See why: fab status"),
    ],
)  # fmt: skip
def test_each_cause_is_named_with_its_figures(last: Measurement, part: str, expected: str) -> None:
    found = advise(FIRST, last)
    assert found[0].part == part
    assert expected in found[0].text


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (later(), "gives about 33% more steps/s; with about 25 workers chief-0 is busy. One more ps gives nothing yet"),
        (later(**busy("ps-0", 1.7)), "33% more steps/s; with about 6 workers ps-0 is busy"),
        (later(**busy("ps-0", 3.2)), "gives about 6% more steps/s; with about 4 workers ps-0 is busy"),
        (later(hosts={"ps-1": replace(CALM, sent=100 * 50e6)}), "with about 5 workers the link of ps-1 is busy"),
        (replace(later(seconds={"ps-0": 170.0, "ps-1": 160.0}), places={**FIRST.places, "ps-1": "ps-0"}),
         "about 3% more steps/s; with about 4 workers the host of ps-0 and ps-1 is busy"),
        (later(seconds={"ps-0": 380.0, "ps-1": 370.0}), "more workers give nothing: ps-0 is busy. One more ps takes "
         "its part of the variables, which gives about 20% more steps/s, and up to 50% with more workers"),
        (later(seconds={"ps-0": 380.0, "ps-1": 370.0, "chief-0": 68.0}),
         "gives about 20% more steps/s, and up to 25% with more workers"),
        (later(seconds={"ps-0": 380.0, "ps-1": 370.0, "chief-0": 80.0}),
         "gives about 6% more steps/s, and up to 6% with more workers"),
        (later(**busy("ps-0", 3.8)), "more workers or ps give nothing: ps-0 is busy, and the other ps are not"),
        (later(**busy("chief-0", 0.95)), "more workers or ps give nothing: chief-0 is busy"),
        # One ps is hot beside another one on its host, or by what its link carries.
        (replace(later(seconds={"ps-0": 380.0, "ps-1": 20.0}), places={**FIRST.places, "ps-1": "ps-0"}),
         "more workers or ps give nothing: the host of ps-0 and ps-1 is busy with ps-0, and the other ps are not"),
        (later(hosts={"ps-1": replace(CALM, sent=100 * 100e6)}),
         "more workers or ps give nothing: the link of ps-1 is busy, and those of the other ps are not"),
        (later(hosts={f"ps-{number}": replace(CALM, sent=100 * 100e6) for number in (0, 1)}),
         "more workers give nothing: the link of ps-0 is busy. One more ps takes its part"),
    ],
)  # fmt: skip
def test_what_one_more_gives_follows_from_what_all_share(last: Measurement, expected: str) -> None:
    found = advise(FIRST, last)[-1]
    assert found.part == "scale"
    assert expected in found.text


def asked(ids: float, rows: float, first: float, *hot: tuple[int, float]) -> dict[str, Any]:
    """What steps ask of a table, of whose rows ps-0 has so much."""
    by_ps = {"ps-0": first, "ps-1": 1 - first}
    return {"ids_per_step": ids, "rows_per_step": rows, "by_ps": by_ps, "hot": [[*each, "ps-0"] for each in hot]}


EVEN = asked(1000, 800, 0.5, (3, 0.4))
ELSEWHERE = {**asked(1000, 1000, 0.8), "hot": [[7, 0.52, "ps-1"]]}


@pytest.mark.parametrize(
    ("lookups", "expected"),
    [
        ({"words": asked(1000, 800, 0.9, (3, 0.06)), "users": EVEN},
         "Of a step's 1,600 rows it has 70%, most of table words (90% of its rows). Ids that come often lie together "
         "there, as in a vocabulary sorted by frequency. In a new run mix them in the program"),
        ({"items": asked(1000, 1000, 0.8, (7, 0.52))},
         "(80% of its rows). Its key 7 is 52% of the ids, and each id is sent: without clipping"),
        ({"items": asked(1000, 9, 0.8, (7, 0.52))}, "most of table items (80% of its rows): its keys are few"),
        ({"words": ELSEWHERE}, "(80% of its rows). Ids that come often lie together there"),
        ({"words": asked(1000, 800, 0.1)}, "takes its part"),
        ({"words": EVEN}, "takes its part"),  # its hot key is asked for once a step
        ({}, "takes its part"),
    ],
)  # fmt: skip
def test_rows_that_make_a_ps_hot_are_named_with_what_to_do(lookups: dict[str, Any], expected: str) -> None:
    uneven = expected != "takes its part"
    for cores in (3.8, 2.5):
        last = replace(later(**busy("ps-0", cores)), lookups=lookups, dynamic=("items",))
        found = [each for each in advise(FIRST, last) if each.part == "ps"]
        assert [each.names for each in found] == [["ps-0"]]
        assert (expected in found[0].text) == uneven
        assert ("`partitioner` splits" in found[0].text) != uneven


def test_rows_are_no_matter_where_no_ps_is_busy() -> None:
    last = replace(later(), lookups={"words": asked(1000, 800, 0.95, (3, 0.5))})
    assert [each.part for each in advise(FIRST, last)] == ["nothing", "scale"]


GIB = 2**30


def sizes(files: int, size: int, largest: int, **parts: int) -> dict[str, Any]:
    data = {"files": files, "bytes": size, "largest": "/data/big", "largest_bytes": largest}
    return {**data, "parts": {name.replace("_", "-"): each for name, each in parts.items()}} if parts else data


@pytest.mark.parametrize(
    ("data", "names", "expected"),
    [
        (sizes(4, 6 * GIB, 3 * GIB, worker_0=4 * GIB, worker_1=GIB, worker_2=GIB), ["worker-0"],
         "the files of worker-0 hold 4 GiB, those of worker-1 1 GiB. Each worker reads its own again and "
         "again, so examples of worker-1 are trained 4 times as often"),
        (sizes(3, 4 * GIB, 2 * GIB, worker_0=4 * GIB, worker_1=0), ["worker-0"], "are trained many times as often"),
        (sizes(10, 10 * GIB, GIB, worker_0=4 * GIB, worker_1=3 * GIB, worker_2=3 * GIB), [], ""),  # ten files for three
        (sizes(12, 6 * GIB, 4 * GIB), ["/data/big"], "/data/big holds 4 GiB of the 6 GiB of 12 files"),
        (sizes(40, 40 * GIB, 3 * GIB), [], ""),  # three times as large, and still a small part of a worker's share
        (sizes(2, 2 * GIB, GIB), [], ""),
        (sizes(1, GIB, GIB), [], ""),
        ({}, [], ""),
    ],
)  # fmt: skip
def test_uneven_data_are_named_beside_the_cause(data: dict[str, Any], names: list[str], expected: str) -> None:
    found = advise(FIRST, replace(later(waits=0.9), data=data))
    assert [each.part for each in found] == [*(["data"] if names else []), "input", "scale"]
    assert found[0].names == names
    assert expected in found[0].text


def with_memory(**left: float) -> dict[str, HostUsage]:
    """All hosts with 4 GiB of free memory, or so many."""
    left = {name.replace("_", "-"): each for name, each in left.items()}
    return {name: replace(CALM, busy=10.0, available=left.get(name, 4.0) * GIB) for name in TASKS}


def test_memory_that_will_not_last_is_named_beside_the_cause() -> None:
    last = later(waits=0.9, hosts=with_memory(ps_1=3, worker_0=3.999))
    found = advise(replace(FIRST, hosts=with_memory()), last)
    assert [each.part for each in found] == ["memory", "input", "scale"]
    assert "memory of ps-1 falls by 614 MiB a minute: the 3 GiB that are left last about 0.083 hours" in found[0].text


@pytest.mark.parametrize(
    ("shape", "falls"),
    [
        ((4.0, 3.8, 3.55, 3.3, 3.0), True),
        ((4.0, 3.2, 3.1, 3.05, 3.0), False),  # what begins takes its memory
        ((4.0, 4.0, 4.0, 4.0, 3.0), False),  # a save
        ((4.0, 3.0, 4.0, 3.9, 3.0), False),
        ((4.0, 3.99, 3.98, 3.97, 3.96), False),
    ],
)
def test_memory_falls_where_it_does_so_steadily(shape: tuple[float, ...], falls: bool) -> None:
    looks = [replace(FIRST, hosts=with_memory(ps_1=each)) for each in shape]
    last = replace(later(), hosts=looks[-1].hosts)
    assert ("memory" in [each.part for each in advise(looks[0], last, looks[1:-1])]) == falls
    gone = replace(looks[2], hosts={name: each for name, each in looks[2].hosts.items() if name != "ps-1"})
    assert "memory" not in [each.part for each in advise(looks[0], last, [looks[1], gone, looks[3]])]


def test_containers_of_one_machine_are_named_once() -> None:
    shapes = ((4.0, 3.8, 3.6, 3.4), (4.02, 3.81, 3.6, 3.38), (8.0, 7.8, 7.6, 7.4))
    looks = [
        replace(FIRST, hosts=with_memory(ps_0=here, ps_1=too, worker_0=other))
        for here, too, other in zip(*shapes, strict=True)
    ]
    found = advise(looks[0], replace(later(), hosts=looks[-1].hosts), looks[1:-1])
    assert [each.names for each in found if each.part == "memory"] == [["ps-0", "ps-1"], ["worker-0"]]
    assert found[0].text.startswith("memory of ps-0, ps-1 falls by 369 MiB a minute")


def test_a_busy_host_whose_tasks_are_not_counted_blames_nobody() -> None:
    last = later(hosts={"worker-2": replace(CALM, busy=390)})
    counted = {task: used for task, used in last.seconds.items() if task != "worker-2"}
    found = advise(FIRST, replace(last, seconds=counted))[0]
    assert found.text.endswith("are busy for 98%, and systemd does not count there what each task uses")


@pytest.mark.parametrize(
    ("boots", "busy_seconds", "names"),
    [
        (("a", "a", "a"), (3900.0, 3901.0, 3902.0), [["ps-0", "worker-0", "worker-1"]]),
        (("a", "b", "a"), (3900.0, 3901.0, 3902.0), [["ps-0", "worker-1"], ["worker-0"]]),  # alike by chance
        (("a", "a", "a"), (3900.0, 3700.0, 3902.0), [["ps-0", "worker-1"], ["worker-0"]]),  # which count their own time
        (("", "", ""), (3900.0, 3900.0, 3900.0), [["ps-0"], ["worker-0"], ["worker-1"]]),
    ],
)
def test_other_work_is_said_once_for_all_containers_of_a_machine(
    boots: tuple[str, ...], busy_seconds: tuple[float, ...], names: list[list[str]]
) -> None:
    members = ("ps-0", "worker-0", "worker-1")
    hosts = [
        {
            name: replace(CALM, cores=40, busy=each, boot=boot)
            for name, each, boot in zip(members, times, boots, strict=True)
        }
        for times in ((0.0, 0.0, 0.0), busy_seconds)
    ]
    found = advise(replace(FIRST, hosts={**FIRST.hosts, **hosts[0]}), later(hosts=hosts[1]))
    assert [each.names for each in found if each.part == "other"] == names
    assert found[0].text.startswith(
        f"the processors of {', '.join(names[0])} are busy for 98%, most of it by other work"
    )


def test_what_containers_use_is_no_other_work_of_their_machine() -> None:
    hosts = {name: replace(CALM, boot="a") for name in TASKS}
    last = later(
        seconds={"ps-0": 150.0, "worker-0": 120.0},
        hosts={name: replace(each, busy=390.0) for name, each in hosts.items()},
    )
    assert [(each.part, each.names) for each in advise(replace(FIRST, hosts=hosts), last)[:1]] == [("ps", ["ps-0"])]


def test_what_is_not_known_is_said() -> None:
    last = later()
    silent = {task: used for task, used in last.seconds.items() if not task.startswith("worker")}
    found, _ = advise(FIRST, replace(last, seconds=silent))
    assert found.text == "no worker says what it uses of its processors: what it waits for is not known"


def test_one_more_worker_is_known_of_the_coordinator_alone() -> None:
    last = later()
    chief = {"chief-0": last.seconds["chief-0"]}
    assert "33% more steps/s; with about 25 workers chief-0" in advise(FIRST, replace(last, seconds=chief))[-1].text


def test_a_task_that_began_again_is_left_out() -> None:
    first = replace(FIRST, seconds={**FIRST.seconds, "ps-0": 5000.0})
    assert advise(first, later(**busy("ps-0", 3.8)))[0].part == "other"


def test_a_host_says_its_figures() -> None:
    done = subprocess.run(["sh", "-c", script([])], capture_output=True, text=True, check=False)
    host, _ = read(Answer(done.stdout))
    assert host.cores >= 1
    assert host.busy > 0
    assert host.available
    assert host.boot


def test_each_unit_has_its_own_time_in_the_order_that_systemd_prints() -> None:
    lines = [
        "cores=4",
        "boot=c0ffee",
        "stat=100 0 100 999 50 0 0 0",
        "sent=5",
        "received=6",
        "speed=1000",
        "available=2048",
        "",
    ]
    lines += ["CPUUsageNSec=2000000000", "Id=a", "", f"CPUUsageNSec={2**64 - 1}", "Id=b", ""]
    lines += ["CPUUsageNSec=[not set]", "Id=c", "", "CPUUsageNSec=3000000000", "Id=d"]
    host, used = read(Answer("\n".join(lines)))
    assert host == HostUsage(4, 2.0, 0.5, 5, 6, 125e6, 2**21, "c0ffee")
    assert used == {"a": 2.0, "d": 3.0}


@pytest.mark.parametrize("version", ["", "/systemd", "/unified"])
def test_processes_are_counted_where_systemd_counts_nothing(tmp_path: Path, version: str) -> None:
    """Two processes of a unit, one with an ended child; a name with a bracket; one that has just gone."""
    group = tmp_path / f"sys/fs/cgroup{version}/system.slice/a.service"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("7\n8\n9\n")
    for pid, name, times in ((7, "python) 3 (x", "100 20 3 1"), (8, "worker", "1000 0 0 0")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        before = " ".join(["S", *["5"] * 10])
        (tmp_path / f"proc/{pid}/stat").write_text(f"{pid} ({name}) {before} {times} 20 0\n")
    put_program(
        tmp_path / "systemctl",
        '#!/bin/sh\ncase "$*" in\n*--value*a.service) echo /system.slice/a.service ;;\n*--value*) echo ;;\n'
        "*) printf 'CPUUsageNSec=[not set]\\nId=a.service\\n\\nCPUUsageNSec=[not set]\\nId=b.service\\n\\n"
        "CPUUsageNSec=5000000000\\nId=c.service\\n' ;;\nesac\n",
    )
    asked = script(["a.service", "b.service", "c.service"], f"{tmp_path}/sys", f"{tmp_path}/proc")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", asked], capture_output=True, text=True, check=False, env=path)
    host, used = read(Answer(done.stdout))
    assert used == {"a.service": 11.24, "c.service": 5.0}
    assert host.available


class Hosts(day.Hosts):
    """Hosts that say the figures of `looks`, one after the other."""

    def _answer(self, host: str, script: str) -> Answer:
        if "CPUUsageNSec" not in script:
            return super()._answer(host, script)
        used = int(self.now * 1e9 * 0.1)
        units = "\n\n".join(f"CPUUsageNSec={used}\nId={task.unit}" for task in self.inventory.tasks_on(host))
        figures = f"cores=4\nstat={int(self.now * 100)} 0 0 0 0 0 0 0\nsent=0\nreceived=0\nspeed="
        return Answer(f"{figures}\navailable={self.free(self.now - 1000):.0f}\n\n{units}")

    def free(self, seconds: float) -> float:
        """KiB of memory."""
        return 8 * 2**20 - 2**20 * seconds / 60


def trains(hosts: fake_hosts.FakeHosts) -> None:
    steps = int(hosts.now) * 5
    workers = {
        "worker-0": {"steps": steps, "steps_per_second": 5.0},
        "worker-1": {"steps": steps // 10, "steps_per_second": 0.5},
    }
    hosts.run_status = fake_hosts.status("training", steps, hosts.now, workers=workers)


def make_hosts() -> Hosts:
    """Hosts on which worker-1 trains at a tenth of the pace of worker-0."""
    made = day.make_hosts()
    return Hosts(made.inventory, units=made.units, tick=trains)


def test_the_verb_looks_twice_and_changes_nothing() -> None:
    hosts = make_hosts()
    console = fake_hosts.console_of(hosts)
    advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert hosts.done == []
    assert console.clock() == 120
    assert "worker: worker-1 is slow: 0.5 steps/s, where the median of the others is 5" in fake_hosts.printed(console)
    assert "memory of head, ps-a, ps-b and 2 more falls by 1 GiB a minute: the 6 GiB" in fake_hosts.printed(console)


def test_memory_that_a_start_takes_up_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hosts, "free", lambda _, seconds: (6 + 2 * 0.97**seconds) * 2**20)
    hosts = make_hosts()
    console = fake_hosts.console_of(hosts)
    advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert "memory" not in fake_hosts.printed(console)


def test_a_training_that_ends_meanwhile_is_advised_on_as_far_as_it_went() -> None:
    def ends(hosts: fake_hosts.FakeHosts, at: float = 100.0) -> None:
        trains(hosts)
        if hosts.now - 1000 > at:
            hosts.run_status = fake_hosts.status("finished", 30)

    hosts = make_hosts()
    hosts.tick = ends
    console = fake_hosts.console_of(hosts)
    advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    said = fake_hosts.printed(console)
    assert "nothing trains (the run is finished): start it, and ask again while it trains. This is of the 90 s" in said
    assert "worker: worker-1 is slow" in said
    hosts = make_hosts()
    hosts.tick = lambda hosts: ends(hosts, 20.0)
    with pytest.raises(OperatorMistake, match=r"nothing trains \(the run is finished\)"):
        advise_verb(Cluster(hosts.inventory, hosts), fake_hosts.console_of(hosts), 120)


def test_a_host_that_did_not_answer_is_named_after_the_advice() -> None:
    hosts = make_hosts()
    hosts.unreachable = {"ps-b": "no route"}
    console = fake_hosts.console_of(hosts)
    with pytest.raises(HostsUnreachable, match="ps-b is unreachable: no route"):
        advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert "worker: worker-1 is slow" in fake_hosts.printed(console)
    hosts.recorded = {"ps-b": '{"host": "ps-b"}'}
    advise_verb(Cluster(hosts.inventory, hosts), console, 120)


@pytest.mark.parametrize(("silent", "code_is_4"), [((25, 65), False), ((95, 125), True), ((5, 125), True)])
def test_a_chief_that_is_silent_for_a_moment_ends_no_look(silent: tuple[int, int], code_is_4: bool) -> None:
    def falls_silent(hosts: fake_hosts.FakeHosts) -> None:
        trains(hosts)
        first, last = silent
        hosts.unreachable = {"head": "no answer in 10 s"} if first < hosts.now - 1000 < last else {}

    hosts = make_hosts()
    hosts.tick = falls_silent
    console = fake_hosts.console_of(hosts)
    with pytest.raises(HostsUnreachable, match="head is unreachable") if code_is_4 else contextlib.nullcontext():
        advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert console.clock() == 120
    assert ("worker: worker-1 is slow" in fake_hosts.printed(console)) == (silent[0] > 30 or not code_is_4)


def test_a_run_that_has_just_begun_is_waited_for() -> None:
    looks = itertools.count()

    def begins(hosts: fake_hosts.FakeHosts) -> None:
        trains(hosts)
        if next(looks) < 3:
            hosts.run_status = fake_hosts.status("training", 1, hosts.now, workers={})

    made = day.make_hosts()
    hosts = Hosts(made.inventory, units=made.units, tick=begins)
    console = fake_hosts.console_of(hosts)
    advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert console.clock() == 126
    assert "worker: worker-1 is slow" in fake_hosts.printed(console)


def test_without_a_training_there_is_nothing_to_measure() -> None:
    hosts = day.make_hosts()
    hosts.run_status = fake_hosts.status("stopped", 20)
    with pytest.raises(OperatorMistake, match=r"nothing trains \(the run is stopped\)"):
        advise_verb(Cluster(hosts.inventory, hosts), fake_hosts.console_of(hosts), 120)


def test_a_cluster_without_ps_is_refused_at_once() -> None:
    made = day.make_hosts()
    tasks = tuple(task for task in made.inventory.tasks if task.job != "ps")
    hosts = Hosts(dataclasses.replace(made.inventory, tasks=tasks), units=made.units)
    hosts.run_status = fake_hosts.status("training", 1, 0, workers={})
    console = fake_hosts.console_of(hosts)
    with pytest.raises(OperatorMistake, match="advise is for strategy parameter_server"):
        advise_verb(Cluster(hosts.inventory, hosts), console, 120)
    assert console.clock() == 0
