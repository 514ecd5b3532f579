"""`fab status` on a terminal, once and with `--watch`."""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.actions.watch_status import watch_status
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.run import parse_run
from fleet.hosts.ssh import Answer
from fleet.output.terminal import is_read, is_terminal
from fleet.site.topology import Task
from fleet.status.status_text import render_account
from fleet.status.status_view import draw, screen_of
from fleet.verbs.status import show_status
from tests.unit import fake_hosts
from tests.unit.test_status_text import Terminal

EVIL = "\x1b]0;evil\x07\u202e"
RUN: dict[str, Any] = {
    "run": "digits",
    "state": "training",
    "step": 1200,
    "steps": 3000,
    "steps_per_second": 350.2,
    "eta_seconds": 5.2,
    "loss": 0.12,
    "metrics": {"accuracy": 0.97},
    "workers": {
        "worker-0": {"steps": 900, "steps_per_second": 300.5},
        "worker-1": {"steps": 300, "steps_per_second": 49.5},
    },
    "without": {"worker-1": "silent"},
    "faults": 2,
    "events": [{"time": 1.0, "event": "member-lost", "task": "worker-1", "host": "x", "message": EVIL}],
}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def hosts() -> fake_hosts.FakeHosts:
    return up(fake_hosts.FakeHosts(fake_hosts.make_inventory()))


def up(hosts: Any) -> Any:
    fake_hosts.run_up(hosts)
    hosts.run_status = RUN
    return hosts


def seen(hosts: fake_hosts.FakeHosts) -> Observation:
    return Cluster(hosts.inventory, hosts).observe(running=True)


def drawn(hosts: fake_hosts.FakeHosts, lines: int = 0, quiet: Mapping[str, float] | None = None) -> str:
    out = Terminal()
    screen_of(out).print(draw(hosts.inventory, seen(hosts), quiet, lines))
    return out.getvalue()


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_a_terminal_shows_how_far_it_is_and_who_is_slow(hosts: fake_hosts.FakeHosts) -> None:
    hosts.set("worker-1", restarts=3)
    text = drawn(hosts)
    lines = [line.rstrip() for line in plain(text).splitlines()]
    assert lines[0] == "run digits training"
    assert re.fullmatch(r"━+[╸╺]?━*  40 %  step 1200/3000  350.2 steps/s  5 s left", lines[1])
    assert lines[2:4] == ["loss 0.12, accuracy 0.97  2 faults", "without worker-1 (silent)"]
    rows = {line.split()[0]: line.split() for line in lines if re.match(r"[a-z]+-\d ", line)}
    assert rows["worker-0"][-2:] == ["300.5", "900"]
    assert rows["worker-1"][-3:] == ["3", "49.5", "300"]
    assert re.search("\x1b\\[33m *49.5", text)  # less than half of the median's
    assert "\x1b[32mactive (running)" in text


def test_a_narrow_terminal_shows_each_task_and_how_far_it_is(
    hosts: fake_hosts.FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line.rstrip() for line in plain(drawn(hosts)).splitlines()]
    assert re.fullmatch(r"[━╸╺]{4,}  40 %  step 1200/3000  350.2 steps/s  5 s left", lines[1])
    assert max(map(len, lines)) <= 60
    assert {task.name for task in hosts.inventory.tasks} <= {line.split()[0] for line in lines if line}


def test_nothing_that_a_run_says_steers_the_terminal(hosts: fake_hosts.FakeHosts) -> None:
    hosts.run_status = {**RUN, "message": f"first{EVIL}\nsecond", "program": EVIL, "run": f"a{EVIL}"}
    text = drawn(hosts)
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f\u202e](?!\[[0-9;]*m)", text) == []
    assert "\\u001b]0;evil\\u0007\\u202e" in text


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_where_the_operator_wants_none(
    name: str, value: str, hosts: fake_hosts.FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert re.search("\x1b\\[[0-9;]*3[0-7]m", drawn(hosts)) is None
    assert is_terminal(Terminal()) is (name == "NO_COLOR")


def test_elsewhere_it_is_plain_text_with_each_workers_pace(hosts: fake_hosts.FakeHosts) -> None:
    out = io.StringIO()
    show_status(Cluster(hosts.inventory, hosts), Console(out))
    assert "\x1b" not in out.getvalue()
    assert "\nsteps/s: worker-0 300.5, worker-1 49.5\n" in out.getvalue()
    terminal = Terminal()
    show_status(Cluster(hosts.inventory, hosts), Console(terminal))
    assert "━" in terminal.getvalue()


def test_of_many_workers_the_slowest_are_named() -> None:
    paces = {f"worker-{number}": {"steps": 1, "steps_per_second": 10.0 - number / 10} for number in range(20)}
    text = render_account(parse_run({"run": "a", "state": "training", "workers": paces}))
    assert text.startswith("steps/s: slowest of 20 workers, of which the fastest has 10: worker-19 8.1, worker-18 8.2")
    assert text.count("worker-") == 8


def test_on_a_small_terminal_those_in_trouble_come_first() -> None:
    tasks = [Task("chief", 0, "head", "192.0.2.1", 2222, server=False)]
    tasks += [Task("worker", number, f"w{number}", "192.0.2.2", 2400, server=True) for number in range(50)]
    many = up(fake_hosts.FakeHosts(fake_hosts.make_inventory(tasks)))
    many.set("worker-40", active="failed", sub="failed", result="signal", exit_status=9)
    many.unreachable["w7"] = "no route to host"
    text = plain(drawn(many, lines=24))
    assert len(text.splitlines()) <= 24
    assert "worker-40" in text
    assert "failed (signal 9)" in text
    assert re.search(r"worker-7 +w7 +unreachable.*no route to host", text)
    assert "and 43 more tasks" in text
    assert "w7 can't be reached" in text


def test_a_host_that_is_quiet_is_named_and_its_tasks_are_as_they_were(hosts: fake_hosts.FakeHosts) -> None:
    text = plain(drawn(hosts, quiet={"far": 12.0}))
    assert re.search(r"worker-1 +far +no answer for 12 s", text)
    assert "far can't be reached" in text
    assert "does not answer: the run is shown as it was" not in text
    assert "head does not answer: the run is shown as it was" in plain(drawn(hosts, quiet={"head": 12.0}))


class Hanging(fake_hosts.FakeHosts):
    """Hosts of which one stops answering; each is asked from a thread of its own."""

    hung: str = ""
    released: threading.Event = threading.Event()

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        if self.hung in scripts:
            self.released.wait(30)
        return super().run(scripts, timeout)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    for name, value in (
        ("QUIET_SECONDS", 0.2),
        ("RUN_SECONDS", 0.02),
        ("UNITS_SECONDS", 0.02),
        ("LOOKS_PER_SECOND", 1000),
    ):
        monkeypatch.setattr(f"fleet.actions.watch_status.{name}", value)
    hosts: Hanging = up(Hanging(fake_hosts.make_inventory()))
    hosts.released = threading.Event()
    return hosts


def until(stream: io.StringIO, text: str, seconds: float = 10.0) -> Callable[[], bool]:
    """Look on until the stream has a text."""
    deadline = time.monotonic() + seconds

    def there() -> bool:
        assert time.monotonic() < deadline, plain(stream.getvalue())[-2000:]
        return text in plain(stream.getvalue())

    return there


def test_a_host_that_vanishes_is_named_and_the_others_are_looked_at(hanging: Hanging) -> None:
    out = Terminal()
    gone = until(out, "far can't be reached")

    def looked() -> bool:
        if "step 1200/3000" in plain(out.getvalue()) and not hanging.hung:
            hanging.hung, hanging.run_status = "far", {**RUN, "step": 1500}
        return gone()

    watch_status(Cluster(hanging.inventory, hanging), Console(out), until=looked)
    hanging.released.set()
    last = plain(out.getvalue()).rpartition("TASK")[2]
    assert "step 1500/3000" in plain(out.getvalue())
    assert re.search(r"worker-1 +far +no answer for \d+ s", last)
    assert re.search(r"worker-0 +store +active \(running\)", last)


def test_a_host_is_not_asked_twice_at_a_time_and_others_go_on(hanging: Hanging) -> None:
    hanging.hung = "far"
    out = io.StringIO()
    console = Console(out, json_out=out)
    watch_status(Cluster(hanging.inventory, hanging), console, until=until(out, '"far": "no answer for'))
    hanging.released.set()
    looks = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all((look["version"], look["verb"]) == (1, "status") for look in looks)
    asked = [asked for asked in hanging.asked if asked != ["far"]]
    assert len(asked) > 3


def test_elsewhere_it_is_a_line_where_it_changes(hanging: Hanging) -> None:
    hanging.set("worker-1", active="failed", sub="failed", result="signal", exit_status=9)
    out = io.StringIO()
    watch_status(Cluster(hanging.inventory, hanging), Console(out), until=until(out, "\n"))
    assert out.getvalue().startswith("run digits: training, step 1200/3000  350.2 steps/s  loss 0.12")
    assert out.getvalue().rstrip().endswith("worker-1 failed (signal 9)")
    assert "\x1b" not in out.getvalue()


def test_it_ends_when_nobody_reads_any_more(hanging: Hanging) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        assert is_read(stream)
        os.close(reader)
        assert not is_read(stream)
        watch_status(Cluster(hanging.inventory, hanging), Console(stream))
