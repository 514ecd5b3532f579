"""Who is notified of a run's end and of members that are away, by a real server and a real command."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.stand_ins import put_program
from tests.waiting import until
from trainer.core.settings.config import Config, ConfigError
from trainer.core.states import RunState
from trainer.run.selections.selection import apply_selection
from trainer.telemetry.outlets import webhook as notifications
from trainer.telemetry.outlets.webhook import Absences, Notifications, Undelivered, Webhook
from trainer.telemetry.status import Status

SECRET = "s3cr3t-token"


class Server(http.server.ThreadingHTTPServer):
    """Answers each POST with the next of these codes, the last one for ever; `hangs` answers none."""

    daemon_threads = True

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.codes = list(codes)
        self.hangs = False
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/{SECRET}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.paths.append(self.path)
        if self.server.hangs:
            self.server.released.wait(30)
            return
        code = self.server.codes.pop(0) if len(self.server.codes) > 1 else self.server.codes[0]
        self.send_response(code)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(*codes: int) -> Server:
        server = Server(*codes)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def status(state: RunState = RunState.TRAINING, **more: Any) -> Status:
    return Status(run="digits", run_dir="", state=state, step=30, steps=30, program="mine:One", **more)


def notifications_of(pause: float = 0.01, **settings: Any) -> Notifications:
    return Notifications(Config(program="mine:One", **settings), pause=pause)


def test_a_server_that_fails_twice_is_told_in_the_end(
    serve: Callable[..., Server], log: pytest.LogCaptureFixture
) -> None:
    server = serve(503, 500, 204)
    notifier = notifications_of(notify_webhook=server.url)
    notifier.state(status(RunState.FINISHED, loss=0.07, metrics={"accuracy": 0.98}))
    notifier.close(10)
    assert len(server.got) == 3
    assert server.got[0] == server.got[2]
    assert server.got[0] | {"id": "", "time": 0, "host": ""} == {
        "version": 1,
        "id": "",
        "text": "psfleet: run digits: finished at step 30 of 30: loss 0.07, accuracy 0.98",
        "event": "finished",
        "run": "digits",
        "program": "mine:One",
        "task": None,
        "message": "",
        "step": 30,
        "steps": 30,
        "loss": 0.07,
        "metrics": {"accuracy": 0.98},
        "goodput": None,
        "host": "",
        "time": 0,
    }
    assert [line.split(":")[-1].strip() for line in log.messages[:2]] == ["it answered 503", "it answered 500"]
    assert log.messages[-1] == "the webhook at 127.0.0.1 is notified of finished"


def test_a_server_that_hangs_holds_nobody_up(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Webhook.__init__, "__defaults__", (0.2,))
    server = serve(200)
    server.hangs = True
    notifier = notifications_of(notify_webhook=server.url)
    began = time.monotonic()
    notifier.state(status(RunState.FAILED, message="no data"))
    assert time.monotonic() - began < 0.1
    notifier.close(0.5)
    assert time.monotonic() - began < 2
    assert "1 notifications were not delivered in time" in log.text
    assert "no answer in 0.2 s" in log.text or "timed out" in log.text
    assert server.got[0]["text"] == "psfleet: run digits: failed at step 30 of 30: no data"


@pytest.mark.parametrize("code", [301, 401, 404])
def test_what_another_try_would_not_fix_is_given_up(
    code: int, serve: Callable[..., Server], log: pytest.LogCaptureFixture
) -> None:
    server = serve(code)
    notifier = notifications_of(notify_webhook=server.url)
    notifier.state(status(RunState.FINISHED))
    notifier.close(10)
    assert len(server.got) == 1
    assert log.messages[-1] == f"the webhook at 127.0.0.1 is not notified of finished: it answered {code}"


def test_it_ends_some_time(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifications, "PATIENCE_SECONDS", 0.1)
    server = serve(500)
    notifier = notifications_of(notify_webhook=server.url)
    notifier.state(status(RunState.FINISHED))
    notifier.close(10)
    assert 2 <= len(server.got) < 20
    assert "is not notified of finished" in log.messages[-1]


def test_a_secret_address_is_in_no_line_of_the_log(
    serve: Callable[..., Server], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    server = serve(500, 404)
    (tmp_path / "hook").write_text(f"{server.url}\n")
    (tmp_path / "odd").write_text(f"http://127.0.0.1:{server.server_port}/{SECRET} x\ny")
    for name in ("hook", "odd", "absent"):
        config = Config(program="mine:One", notify_webhook_secret=name)
        notifier = Notifications(config, str(tmp_path), pause=0.01)
        notifier.state(status(RunState.FINISHED))
        notifier.close(10)
    assert server.paths == [f"/hooks/{SECRET}"] * 2
    assert SECRET not in log.text
    assert "127.0.0.1" not in log.text
    assert "the webhook of the secret hook is not notified of finished: it answered 404" in log.text
    assert "the webhook of the secret odd is not notified of finished" in log.text
    assert "no webhook is notified: the secret absent is missing" in log.text


def test_a_closed_port_is_said_in_words(log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Undelivered, match="Connection refused"):
        Webhook("http://127.0.0.1:9/x")({"id": "1"})


def test_a_member_that_is_away_for_long_is_told_once_and_so_is_its_return(serve: Callable[..., Server]) -> None:
    server, times = serve(200), [0.0]
    config = Config(program="mine:One", notify_webhook=server.url, notify_absent_seconds=60)
    notifier = Notifications(config, clock=lambda: times[-1])
    for at, without in (
        (0, {"worker-1": "silent", "worker-2": "closed"}),
        (30, {"worker-1": "away"}),
        (59, {"worker-1": "away"}),
        (61, {"worker-1": "away"}),
        (90, {"worker-1": "away"}),
        (91, {"worker-2": "closed"}),
        (95, {}),
    ):
        times.append(at)
        notifier.without(status(without=without))
    notifier.close(10)
    assert [(each["event"], each["task"], each["message"]) for each in server.got] == [
        ("member-away", "worker-1", "worker-1 takes no part for 61 s: away"),
        ("member-back", "worker-1", "worker-1 takes part again"),
    ]


def test_absences_are_told_once_when_they_are_long_and_returns_of_those_alone() -> None:
    absences = Absences(60.0)
    assert absences.update(["worker-0", "ps-0"], 100.0) == ([], {})
    assert absences.update(["worker-0"], 159.0) == ([], {})  # ps-0 is back soon enough
    assert absences.update(["worker-0", "ps-0"], 160.0) == ([], {"worker-0": 60.0})
    assert absences.update(["worker-0", "ps-0"], 170.0) == ([], {})
    assert absences.update(["ps-0"], 180.0) == (["worker-0"], {})
    assert absences.update(["worker-0"], 190.0) == ([], {})  # counted again


def test_what_an_operator_has_drained_is_not_told_to_be_away() -> None:
    absences = Absences(60.0)
    assert absences.update(["worker-0"], 100.0, ["worker-0"]) == ([], {})
    assert absences.update(["worker-0"], 900.0, ["worker-0"]) == ([], {})
    assert absences.update(["worker-0"], 950.0) == ([], {})  # undrained, and not back yet
    assert absences.update(["worker-0"], 960.0) == ([], {"worker-0": 60.0})
    assert absences.update(["worker-0"], 970.0, ["worker-0"]) == ([], {})
    assert absences.update([], 980.0) == (["worker-0"], {})


def test_only_what_ends_a_run_for_good_is_told(serve: Callable[..., Server]) -> None:
    server = serve(200)
    notifier = notifications_of(notify_webhook=server.url)
    for state in (RunState.WAITING, RunState.TRAINING, RunState.STOPPED):
        notifier.state(status(state))
    notifier.close(10)
    assert server.got == []


def test_a_command_gets_it_on_standard_input(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    script, out = tmp_path / "page", tmp_path / "got"
    put_program(
        script, f"#!/bin/sh\n[ -e {tmp_path}/second ] || {{ touch {tmp_path}/second; exit 7; }}\ncat >{out}.$1\n"
    )
    notifier = notifications_of(notify_command=f"{script} 'team a'")
    notifier.state(status(RunState.FINISHED))
    notifier.close(10)
    assert json.loads((tmp_path / "got.team a").read_text())["event"] == "finished"
    assert "it ended with 7" in log.text


def test_a_command_that_hangs_is_ended_with_what_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifications.Command.__init__, "__defaults__", (0.5,))
    monkeypatch.setattr(notifications, "PATIENCE_SECONDS", 0.0)
    script, pid = tmp_path / "page", tmp_path / "pid"
    put_program(script, f"#!/bin/sh\nsleep 100 &\necho $! >{pid}\nwait\n")
    notifier = notifications_of(notify_command=str(script))
    notifier.state(status(RunState.FINISHED))
    notifier.close(10)
    assert log.messages[-1] == f"{script} is not notified of finished: it did not end in 0.5 s"
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    until(lambda: not state.exists() or ") Z " in state.read_text())


@pytest.mark.parametrize(
    "settings",
    [
        {"notify_webhook": "ftp://x/y"},
        {"notify_webhook": "hooks.example.org"},
        {"notify_webhook": "https://user:pass@example.org/"},
        {"notify_webhook": "https://example.org/a b"},
        {"notify_webhook": "http://example.org:99999/"},
        {"notify_webhook_secret": "../x"},
        {"notify_command": "page-me"},
        {"notify_command": "/bin/page 'half"},
        {"notify_absent_seconds": 0},
    ],
)
def test_what_can_tell_nobody_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}: must be"):
        Config(program="mine:One", **settings)


def test_no_file_on_the_shared_path_names_a_command(tmp_path: Path) -> None:
    config = Config(program="mine:One", shared_dir=str(tmp_path), notify_command="/bin/page")
    sweep = {
        "name": "s",
        "attempt": 1,
        "points": [{"rate": 1}],
        "settings": {"notify_command": "/bin/evil", "steps": 7},
    }
    chosen = apply_selection(config, {"program": "mine:One", "sweep": sweep})
    assert (chosen.notify_command, chosen.steps) == ("/bin/page", 7)
