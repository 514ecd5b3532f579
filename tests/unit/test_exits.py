"""How a coordinator ends after an error."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer.__main__ import train_or_evaluate
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import (
    ENDS_PYTHON,
    STOPPED,
    TRY_AGAIN,
    USER_ERROR,
    Infrastructure,
    StalePath,
    Stopped,
    UserError,
)
from trainer.core.states import RunState
from trainer.run.records import write_record
from trainer.tasks import exits
from trainer.tasks.exits import Exit, decide_exit
from trainer.telemetry.metrics import MetricsCollector
from trainer.telemetry.outlets.systemd import RESTART_UNIT, Notifier


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


FULL, STALE = os_error(errno.ENOSPC), os_error(errno.ESTALE)
FULL_MESSAGE = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "leads", "begun", "expected"),
    [
        (Stopped(), True, True, Exit(STOPPED, RunState.STOPPED)),
        (UserError("a setting is wrong"), True, True, Exit(USER_ERROR, RunState.FAILED, "a setting is wrong")),
        (ValueError("of the program"), True, True, Exit(USER_ERROR, RunState.FAILED, "ValueError: of the program")),
        (SystemExit(0), True, True, Exit(USER_ERROR, RunState.FAILED, f"SystemExit: 0: {ENDS_PYTHON}")),
        (Infrastructure("ps-0 is gone"), True, False, Exit(TRY_AGAIN, RunState.WAITING, "ps-0 is gone")),
        (StalePath("mount it"), True, False, Exit(TRY_AGAIN, RunState.WAITING, "mount it", restarts_unit=True)),
        (FULL, True, False, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE, pauses=True)),
        (FULL, True, True, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE)),
        (FULL, False, False, Exit(TRY_AGAIN, RunState.WAITING, FULL_MESSAGE)),
    ],
)
def test_each_error_has_its_exit(error: BaseException, leads: bool, begun: bool, expected: Exit) -> None:
    assert decide_exit(error, None, leads=leads, begun=begun) == expected


def test_a_stale_handle_restarts_the_unit_and_does_not_pause() -> None:
    found = decide_exit(STALE, None, leads=True, begun=False)
    assert (found.code, found.restarts_unit, found.pauses) == (TRY_AGAIN, True, False)


TASK = ClusterConfig({"chief": ["h:1"], "worker": ["a:1"]}, "chief", 0)


def become(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None = None) -> tuple[int, list[bytes]]:
    """Be the coordinator of a cluster without ps, with this error of the path where the settings are read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    write_record(tmp_path / "run.json", {"program": "p:P", "shared_dir": str(tmp_path)})
    if error is not None:
        monkeypatch.setattr("trainer.__main__.read_selection", Mock(side_effect=error))
    environment = {"TRAINER_SETTINGS": str(tmp_path / "run.json")}
    collector = MetricsCollector((), 0, None)
    with ours, theirs:
        theirs.setblocking(False)
        notifier = Notifier(None, None, ours)
        code = train_or_evaluate(argparse.Namespace(), environment, TASK, notifier, collector, only_wait=False)
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(theirs.recv(4096))
    return code, said


def test_a_cluster_that_the_strategy_can_not_use_is_the_operators_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that is forked ends with what this returns: any other end has the next one begin, for ever."""
    code, _ = become(monkeypatch, tmp_path)
    assert code == USER_ERROR
    assert "error: strategy parameter_server needs at least one ps in the cluster" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "mounts"), [(STALE, True), (os_error(errno.EIO), False)])
def test_settings_that_the_path_does_not_give_are_read_again_and_a_lost_path_is_mounted_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError, mounts: bool
) -> None:
    code, said = become(monkeypatch, tmp_path, error)
    assert (code, RESTART_UNIT.encode() in said) == (TRY_AGAIN, mounts)


def test_a_broken_device_is_no_trouble_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "is_device", lambda error: True)
    broken = decide_exit(Infrastructure("a device"), None, leads=True, begun=True)
    assert (broken.code, broken.is_broken, broken.is_trouble) == (TRY_AGAIN, True, False)


def test_only_what_is_tried_again_is_trouble() -> None:
    found = {
        type(error): decide_exit(error, None, leads=True, begun=True).is_trouble
        for error in (Infrastructure("gone"), UserError("wrong"), Stopped())
    }
    assert found == {Infrastructure: True, UserError: False, Stopped: False}


def test_a_missing_file_of_the_programs_is_the_users(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text("def read():\n    open('/no/such/words.txt')\n")
    scope: dict[str, object] = {}
    exec(compile(program.read_text(), str(program), "exec"), scope)
    with pytest.raises(FileNotFoundError) as caught:
        scope["read"]()  # type: ignore[operator]
    assert decide_exit(caught.value, program, leads=True, begun=False).code == USER_ERROR
