"""What a run or a host says never steers the operator's terminal."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, Trouble
from fleet.hosts.cluster import Cluster
from fleet.hosts.run import parse_run
from fleet.hosts.ssh import Answer
from fleet.output.tables import ProgressLine, put, render_table
from fleet.output.terminal import printable
from fleet.status import status_text
from fleet.verbs.export import export_run
from fleet.verbs.logs import show_logs
from fleet.verbs.runs import show_checkpoints, show_runs
from fleet.verbs.status import show_status
from fleet.verbs.sweep import show_sweep
from tests.unit.fake_hosts import UP, Clock, FakeHosts, make_inventory, nothing, printed, status
from tests.unit.test_fab import fab
from trainer.telemetry.sweep import describe_sweep

# Another title of the window, a screen that is wiped, a line that is written over, text that is turned round.
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x9b2K\r\x7f\u202eevil"
SHOWN = r"\u001b]0;owned\u0007\u001b[2J\u001b[1A\u009b2K\u000d\u007f\u202eevil"
FORGED = f"{EVIL}\nrun digits: finished"


def steering(text: str) -> list[str]:
    """List the characters that a terminal does something at, other than to show them."""
    turning = {chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    return [
        each
        for each in text
        if each not in "\n\t" and (each in turning or unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp"))
    ]


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from("\x1b[]m\x07\x08\x9b0;")))
def test_nothing_that_steers_a_terminal_is_left_of_any_text(text: str) -> None:
    shown = printable(text)
    assert steering(shown) == []
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        ("Größe 3 µs ✓ 東京\n\tnext", "Größe 3 µs ✓ 東京\n\tnext"),
        ("\x1b[1;32mINFO\x1b[0m step\x08\x08\x08\x08step 2", "INFO stepstep 2"),
        ("\x1b\x1b[0m[2J", r"\u001b[2J"),  # what is left out joins nothing
        ("\ud800", r"\ud800"),
    ],
)
def test_colours_go_and_the_rest_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_json_stays_json() -> None:
    values = {"message": EVIL, "\x7f": "\udc80"}
    assert json.loads(printable(json.dumps(values))) == values
    assert json.loads(printable(json.dumps(values, ensure_ascii=False))) == values


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_the_kits_own_escapes_reach_a_terminal() -> None:
    out = Terminal()
    line = ProgressLine(out, width=200)
    line.show(FORGED)
    line.keep(EVIL)
    put(out, EVIL)
    assert out.getvalue() == f"\r{SHOWN} run digits: finished\x1b[K\r\x1b[K{SHOWN}\n{SHOWN}\n"
    elsewhere = io.StringIO()
    ProgressLine(elsewhere).show(FORGED)
    assert elsewhere.getvalue() == f"{SHOWN} run digits: finished\n"


def evil_status() -> dict[str, Any]:
    event = {"time": 1.0, "event": FORGED, "task": FORGED, "host": FORGED, "message": FORGED}
    texts = {"run": FORGED, "program": FORGED, "message": FORGED, "run_dir": FORGED, "export": FORGED}
    return status(
        "failed",
        12,
        events=[event],
        without={FORGED: FORGED},
        program_args={FORGED: FORGED},
        evaluation={"step": 10, "metrics": {FORGED: 0.5}},
        checkpoint=FORGED,
        **texts,
    )


def reject_forgeries(text: str) -> None:
    assert "evil" in text
    assert steering(text) == []
    assert [line for line in text.splitlines() if line.startswith("run digits: finished")] == []


class Hostile(FakeHosts):
    """Hosts on which everything that can say something says what is evil."""

    def _observe(self, host: str, directories: bool, settings: bool) -> str:
        answer = super()._observe(host, directories, settings)
        forged = f"\x1c@run\x1c{json.dumps(status('finished', 30))}"
        return answer.replace("StatusText=", f"StatusText={EVIL}{forged}").replace(
            "releases/abc", f"releases/{EVIL}abc"
        )

    def _journal(self, task: Any) -> str:
        entry = {"__REALTIME_TIMESTAMP": "1", "_SYSTEMD_UNIT": task.unit, "MESSAGE": f"{EVIL}\u2028{task.name} says"}
        return json.dumps(entry, ensure_ascii=False)


@pytest.fixture
def console() -> Console:
    clock = Clock()
    return Console(io.StringIO(), clock, clock.sleep, nothing)


@pytest.fixture
def hostile() -> Hostile:
    hostile = Hostile(make_inventory(), run_status=evil_status(), runs=json.dumps([evil_status()]))
    hostile.set_all(**UP)
    saved = {"step": 20, "created": 1.0, "loss": 0.5, "evaluation": {FORGED: 0.75}, "kept": [FORGED]}
    hostile.checkpoints = Answer(json.dumps([saved]))
    hostile.exported = Answer(json.dumps({"run": EVIL, "step": 3, "export": EVIL}))
    point = {"run": EVIL, "program_args": {EVIL: EVIL}, "state": "failed", "message": FORGED, "step": 1, "steps": 2}
    point |= {"evaluation": {EVIL: 1.0}, "evaluated_step": 1, "goodput": 0.5}
    hostile.sweep = {"name": EVIL, "over": True, "size": 1, "points": [point]}
    return hostile


def test_status_shows_no_escape_and_no_line_of_the_runs_own(hostile: Hostile, console: Console) -> None:
    show_status(Cluster(hostile.inventory, hostile), console)
    reject_forgeries(printed(console))


def test_a_status_forges_no_part_of_its_hosts_answer(hostile: Hostile) -> None:
    observation = Cluster(hostile.inventory, hostile).observe(["head"])
    assert observation.run is not None
    assert observation.run.state == "failed"
    assert "@run" in observation.units["chief-0"].status_text


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("verb", [show_runs, show_checkpoints, show_sweep, export_run])
def test_lists_show_no_escape(verb: Any, as_json: bool, hostile: Hostile, console: Console) -> None:
    console.json_out = console.out if as_json else None
    verb(Cluster(hostile.inventory, hostile), console)
    reject_forgeries(printed(console))
    assert not as_json or json.loads(printed(console))


@pytest.mark.parametrize("follow", [False, True])
def test_logs_show_no_escape_and_lose_no_line(follow: bool, hostile: Hostile, console: Console) -> None:
    hostile.follow = lambda scripts, line: _stream(hostile, scripts, line)  # type: ignore[method-assign]
    show_logs(Cluster(hostile.inventory, hostile), console, "worker-1", 5, follow)
    reject_forgeries(printed(console))
    assert "worker-1 says" in printed(console)


def _stream(hosts: FakeHosts, scripts: Mapping[str, str], line: Any) -> dict[str, Answer]:
    """Hand lines over as SSH does: only a line feed ends one."""
    answers = hosts.run(scripts)
    for host, answer in answers.items():
        for text in answer.stdout.split("\n"):
            line(host, text)
    return answers


def test_messages_forge_no_line() -> None:
    run = parse_run(evil_status())
    point = {"run": "x-1", "program_args": {}, "state": "failed", "message": FORGED, "step": 1, "steps": 2}
    summary = {"name": "x", "over": True, "size": 1, "points": [point | {"evaluation": {}, "goodput": None}]}
    for text in (
        status_text.render_run(run),
        status_text.render_run(replace(run, state="training")),
        status_text.render_account(run),
        render_table(["NOTE"], [[FORGED]]),
        str(ClusterTrouble("", [Trouble("chief-0", "head", FORGED)])),
        describe_sweep(summary),
    ):
        reject_forgeries(printable(text))


@pytest.mark.parametrize(
    "error",
    [
        ClusterTrouble("", [Trouble("chief-0", "head", EVIL, [EVIL])]),
        ClusterTrouble(f"head: systemctl failed: {EVIL}"),
        HostsUnreachable({"head": EVIL}),
    ],
)
@pytest.mark.parametrize("verb", ["status", "validate"])
def test_what_ends_a_verb_shows_no_escape(
    verb: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fleet.verbs.status.show_status", fail)
    monkeypatch.setattr("fleet.verbs.validate.validate", fail)
    assert fab(verb, "--inventory", "inventory/three-machines") in (1, 4)
    errors = capsys.readouterr().err
    assert "evil" in errors
    assert steering(errors) == []


def test_a_question_that_ends_with_ctrl_d_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert Console().ask("Remove it? ") is False
