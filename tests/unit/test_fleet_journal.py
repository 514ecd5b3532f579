"""Which lines of the journals `fab logs` asks for, with a journalctl that is only pretended."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.journal import JournalQuery, parse, read_time, script
from fleet.hosts.ssh import PREAMBLE, Answer
from fleet.site.topology import Task
from fleet.verbs.logs import clock, show_logs
from tests.unit import fake_hosts
from tests.unit.stand_ins import put_program

TASK = Task("worker", 0, "store", "192.0.2.20", 2400, server=True)
NOW = datetime(2026, 3, 2, 15, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 min", NOW - 600),
        ("10m ago", NOW - 600),
        ("2 h", NOW - 7200),
        ("1 day", NOW - 86400),
        ("90s", NOW - 90),
        ("14:30", NOW - 1800),
        ("14:30:10", NOW - 1790),
        ("2026-03-02", NOW - 15 * 3600),
        ("2026-03-02 14:30", NOW - 1800),
        ("2026-03-02T14:30:00+00:00", datetime.fromisoformat("2026-03-02T14:30:00+00:00").timestamp()),
    ],
)
def test_a_time_is_the_operators(text: str, seconds: float) -> None:
    assert read_time(text, NOW) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "10", "25:00", "2026-13-01", "$(reboot)", "-1 h", "9" * 5000 + "s", "\u0663 min", "999999999999 d",
        "0001-01-01", "14:30:99",
    ],
)  # fmt: skip
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(OperatorMistake, match=r"--since is .*: expected a time such as '10 min'"):
        read_time(text, NOW)


@pytest.mark.parametrize("text", ["2099-01-01", "9999-12-31 23:59", "15:02"])
def test_a_time_that_is_still_to_come_is_refused(text: str) -> None:
    with pytest.raises(OperatorMistake, match=r"expected a time that has passed, and here it is 2026-03-02 15:00"):
        read_time(text, NOW)


@pytest.fixture
def journalctl(tmp_path: Path) -> Path:
    """A journalctl that writes down its arguments, and has a run's first and last line."""
    program = put_program(
        tmp_path / "journalctl",
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\ncase "$*" in\n'
        "*run=none*|*RUN=none*) ;;\n*short-unix*--lines=1*) printf '90.5 head x: last\\nof two\\n' ;;\n"
        "*short-unix*) printf '10.25 head x: first\\n20.5 head x: second\\n' ;;\nesac\n",
    )
    return program


def asked(journalctl: Path, text: str) -> list[str]:
    """Have a shell run a script, and return how it called journalctl."""
    path = f"{journalctl.parent}:/usr/bin:/bin"
    preamble = PREAMBLE.replace("sudo -n ", "")
    done = subprocess.run(
        ["sh", "-c", preamble + text], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return (journalctl.parent / "asked").read_text().splitlines()


def test_a_pattern_and_a_time_reach_journalctl_as_they_are(journalctl: Path) -> None:
    (line,) = asked(journalctl, script([TASK], 50, JournalQuery(since=12.4, grep="a b'c; touch x")))
    assert "--lines=50" in line
    assert line.endswith("--unit=trainer@worker-0.service --grep=a b'c; touch x --since=@12")


def test_a_run_is_all_that_was_said_from_its_first_line_to_its_last(journalctl: Path) -> None:
    *_, line = asked(journalctl, script([TASK], 50, JournalQuery(run="digits")))
    assert line.endswith("--unit=trainer@worker-0.service --since=@10 --until=@95")
    assert "RUN=" not in line.replace("MESSAGE,UNIT,_SYSTEMD_UNIT,PRIORITY,RUN", "")


def test_a_run_that_said_nothing_asks_for_no_lines(journalctl: Path) -> None:
    assert len(asked(journalctl, script([TASK], 50, JournalQuery(run="none")))) == 2


def test_a_run_is_followed_from_its_first_line(journalctl: Path) -> None:
    *_, line = asked(journalctl, script([TASK], 50, JournalQuery(run="digits"), follow=True))
    assert line.endswith("--follow --since=@10")


def test_an_entry_has_its_run_and_step() -> None:
    entry = parse('{"__REALTIME_TIMESTAMP": "1500000", "_SYSTEMD_UNIT": "trainer@ps-0.service", "MESSAGE": "a\\nb", '
                  '"PRIORITY": "4", "RUN": "digits", "STEP": "40"}')  # fmt: skip
    assert entry is not None
    assert asdict(entry) == {
        "time": 1.5,
        "task": "ps-0",
        "message": "a\nb",
        "priority": 4,
        "run": "digits",
        "step": 40,
    }


class Journals(fake_hosts.FakeHosts):
    """Hosts whose journals have these lines, of (time, run, message)."""

    lines: ClassVar[list[tuple[int, str | None, str]]] = [
        (3, "digits", "third"),
        (1, None, "first"),
        (2, "other", "second"),
    ]
    failed: Answer | None = None

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        return dict.fromkeys(scripts, self.failed) if self.failed else super().run(scripts, timeout)

    def _journal(self, task: Any) -> str:
        entries = [
            {"__REALTIME_TIMESTAMP": str(at), "_SYSTEMD_UNIT": task.unit, "MESSAGE": message, "RUN": run}
            for at, run, message in self.lines
        ]
        return "\n".join(json.dumps(entry) for entry in entries)


@pytest.fixture
def hosts() -> Journals:
    return Journals(fake_hosts.make_inventory())


@pytest.mark.parametrize("follow", [False, True])
def test_lines_of_another_run_are_left_out(hosts: Journals, follow: bool) -> None:
    console = Console(io.StringIO())
    show_logs(Cluster(hosts.inventory, hosts), console, "ps-0", None, follow, JournalQuery(run="digits"))
    assert sorted(line.split()[-1] for line in fake_hosts.printed(console).splitlines()) == ["first", "third"]


def test_lines_without_a_choice_are_all_in_order(hosts: Journals) -> None:
    console = Console(io.StringIO())
    show_logs(Cluster(hosts.inventory, hosts), console, "ps-0", None, follow=False)
    assert [line.split()[-1] for line in fake_hosts.printed(console).splitlines()] == ["first", "second", "third"]


def test_a_line_has_its_time_here_and_its_date_where_it_is_another_days() -> None:
    now = datetime(2026, 3, 2, 14, 30, 5).timestamp()
    assert clock(now - 60, now) == "14:29:05"
    assert clock(now - 86400, now) == "2026-03-01 14:30:05"


def test_a_pattern_that_is_found_nowhere_is_no_trouble_and_a_bad_one_is_the_operators(hosts: Journals) -> None:
    cluster, console, chosen = Cluster(hosts.inventory, hosts), Console(io.StringIO()), JournalQuery(grep="(")
    hosts.failed = Answer("", "", 1)
    show_logs(cluster, console, None, None, follow=False, chosen=chosen)
    assert fake_hosts.printed(console) == ""
    hosts.failed = Answer("", 'Bad pattern "(": missing closing parenthesis', 1)
    with pytest.raises(OperatorMistake, match="--grep: expected a regular expression"):
        show_logs(cluster, console, None, None, follow=False, chosen=chosen)
    hosts.failed = Answer("", "sudo: a password is required", 1)
    with pytest.raises(ClusterTrouble, match="the journal can't be read"):
        show_logs(cluster, console, None, None, follow=False, chosen=chosen)


def test_what_was_cut_off_is_said_where_lines_were_chosen(
    hosts: Journals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fleet.verbs.logs.CHOSEN_LINES", 3)
    chosen = JournalQuery(since=time.time())
    show_logs(Cluster(hosts.inventory, hosts), Console(io.StringIO()), "ps-0", None, False, chosen)
    assert capsys.readouterr().err == "these are the last 3 lines of ps-0; for more: --lines 30\n"
